"""How long verification takes inside a graph, against the byte floor and against two others that store probabilities.

One graph holds a verification of each of several rounds, which differ in nothing but where their logits lie; the time
is that of a replay divided by how many there are, so that starting a graph counts for next to nothing. "warm": a single
set of logits, small enough for the L2 cache to keep, as those are that a forward pass has just written. "cold": so many
sets that the cache has none left when it comes to them again. The drafts are accepted but for the last, so that all
rows are needed and one is drawn from again; what comes out is compared before anything is timed.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch

import fused_spec as fs
from check_models import Replayer
from check_report import NOT_MEANINGFUL, gpu
from check_run import Absent, Check, Finding, Setting
from fused_spec.cuda_graph import CudaRecorder

VOCAB = 151936
TARGETS = {6: 8.0, 21: 12.0}
"""Microseconds that verification of so many rows should take at most on a GPU of the size of an H100."""

REPLAYS, TURNS = 20, 9


class Logits(NamedTuple):
    """A round's logits, drafts and their statistics; B = 1."""

    target: torch.Tensor  # [1, R, V]
    draft: torch.Tensor  # [1, R-1, V]
    ids: torch.Tensor  # [1, R-1]
    statistics: tuple[torch.Tensor, ...]  # three of [1, R-1]
    uniforms: torch.Tensor  # [1, R-1], the last of which rejects
    seed: torch.Tensor  # [1]
    position: torch.Tensor  # [1]


Verifier = Callable[[Logits], Any]
"""Starts a verification and returns where its result will be."""


def logits(setting: Setting, rows: int) -> Logits:
    """Draft and verifier nearly agree."""
    vocab, device = (500 if setting.reduced else VOCAB), setting.device
    target = torch.randn(1, rows, vocab, device=device) * 3
    draft = (target[:, :-1] + 0.3 * torch.randn(1, rows - 1, vocab, device=device)).to(setting.dtypes[0])
    drawn = fs.sample(draft[0], seed=1, position=torch.arange(rows - 1, device=device) + 5)
    # The last draft is one that the verifier gives less weight than the drafter did, so that u just below 1 rejects it.
    uniforms = torch.zeros(1, rows - 1, device=device)
    uniforms[0, -1] = 1 - 2.0**-24
    target[0, rows - 2, drawn.token_ids[-1]] -= 2
    one = torch.ones(1, dtype=torch.int64, device=device)
    statistics = (drawn.lse[None], drawn.cutoff[None], drawn.logprob[None])
    return Logits(target.to(setting.dtypes[0]), draft, drawn.token_ids[None], statistics, uniforms, one, 5 * one)


def copies(round_: Logits, count: int) -> list[Logits]:
    """The same logits in several places."""
    others = (round_._replace(target=round_.target.clone(), draft=round_.draft.clone()) for _ in range(count - 1))
    return [round_, *others]


def fused(round_: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours: (tokens [1, R], accepted [1])."""
    out = fs.verify(
        round_.target, round_.ids, round_.draft, rule=fs.SpeculativeSampling(), seed=round_.seed,
        position=round_.position, draft_stats=round_.statistics, uniforms=round_.uniforms,  # type: ignore[arg-type]
    )  # fmt: skip
    return out.token_ids, out.num_accepted


def materialised(round_: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    """A plain baseline in torch's operations: both distributions are stored in float32, for all rows.

    softmax of p and q; their entries at the drafts; u p < q; the first rejection; (q - p)+ of its row, summed up, and
    the token at which that exceeds a uniform number. Nothing is read on the host. As many uniforms as `fused` takes.
    """
    q, p = (torch.softmax(rows[0], -1, dtype=torch.float32) for rows in (round_.target, round_.draft))
    ids, drafts = round_.ids[0], len(round_.ids[0])
    at = ids[:, None]
    accepted = round_.uniforms[0] * p.gather(1, at)[:, 0] < q[:-1].gather(1, at)[:, 0]
    count = accepted.long().cumprod(0).sum(0, keepdim=True)
    rest = q.index_select(0, count) - p.index_select(0, count.clamp(max=drafts - 1)) * (count < drafts)
    steps = rest.clamp_(min=0).cumsum(1)
    token = torch.searchsorted(steps, 0.5 * steps[:, -1:]).clamp(max=q.shape[1] - 1)[:, 0]
    slots = torch.arange(drafts + 1, device=q.device)
    tokens = torch.where(slots < count, torch.nn.functional.pad(ids, (0, 1)), -1)
    return torch.where(slots == count, token, tokens)[None], count


def flashinfer_chain(round_: Logits) -> Any:
    """FlashInfer's way: softmax of both, then its chain of speculative sampling."""
    chain = import_module("flashinfer.sampling").chain_speculative_sampling
    target, draft = (torch.softmax(rows, -1, dtype=torch.float32) for rows in (round_.target, round_.draft))
    try:
        return chain(draft, round_.ids.int(), target, seed=0, offset=0)
    except TypeError:  # versions that take their random numbers from torch's generator only
        return chain(draft, round_.ids.int(), target)


class Times(NamedTuple):
    """Microseconds of one verification."""

    warm: float
    cold: float


def time_of(verify: Verifier, round_: Logits, setting: Setting) -> Times:
    """Time a verification with its logits in the L2 cache, and from memory."""
    if setting.reduced:
        verify(round_)
        return Times(0.0, 0.0)
    size = sum(part.numel() * part.element_size() for part in (round_.target, round_.draft))
    l2 = torch.cuda.get_device_properties(setting.device).L2_cache_size
    many = copies(round_, max(16, -(-4 * l2 // size)))
    return Times(_microseconds(verify, [round_] * 16, setting), _microseconds(verify, many, setting))


def _microseconds(verify: Verifier, rounds: list[Logits], setting: Setting) -> float:
    kept: list[Any] = []  # results stay alive as long as the graph that writes them

    def all_of_them() -> None:
        kept[:] = [verify(one) for one in rounds]

    replay = CudaRecorder(setting.device).record(all_of_them)
    taken = []
    for _ in range(TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / REPLAYS / len(rounds))
    return median(taken)


def check_verify(rows: int, setting: Setting) -> Finding:
    """Ours against the floor and the baseline: slower than that is a failure. What both accept is the same."""
    round_ = logits(setting, rows)
    for verify in (fused, materialised):
        tokens, count = verify(round_)
        if int(count) != rows - 2 or not torch.equal(tokens[0, : rows - 2], round_.ids[0, :-1]):
            raise AssertionError(f"{verify.__name__}: {int(count)} of {rows - 1} drafts accepted, expected {rows - 2}")
        if not 0 <= int(tokens[0, rows - 2]) < round_.target.shape[2] or int(tokens[0, -1]) != -1:
            raise AssertionError(f"{verify.__name__}: tokens {tokens[0].tolist()}")
    if not setting.reduced:
        _same_when_replayed(round_, setting)
    ours, baseline = (time_of(verify, round_, setting) for verify in (fused, materialised))
    if setting.reduced:
        return Finding(f"outcome right; {NOT_MEANINGFUL}", {"rows": rows})
    device, source = gpu(setting.device)
    floor = device.microseconds(rows * VOCAB * round_.target.element_size())
    numbers = {
        "rows": rows, "vocab": VOCAB, "microseconds": ours._asdict(), "materialised_microseconds": baseline._asdict(),
        "floor_microseconds": floor, "bandwidth_from": source, "target_microseconds": TARGETS.get(rows),
    }  # fmt: skip
    if not (ours.warm < baseline.warm and ours.cold < baseline.cold):
        raise AssertionError(f"{ours} us, and the plain baseline takes {baseline}")
    goal = f", target {TARGETS[rows]:g}" if rows in TARGETS else ""
    missed = " MISSED" if ours.warm > TARGETS.get(rows, ours.warm) else ""
    shown = f"{ours.warm:.1f} us warm{goal}{missed}, {ours.cold:.1f} cold, floor {floor:.2f}"
    return Finding(f"{shown}; torch {baseline.warm:.1f}, {baseline.cold:.1f}", numbers)


def _same_when_replayed(round_: Logits, setting: Setting) -> None:
    outcome: list[Any] = []
    recorder = CudaRecorder(setting.device) if setting.device.type == "cuda" else Replayer()
    replay = recorder.record(lambda: outcome.append(fused(round_)))
    eager = fused(round_)
    outcome[-1][0].fill_(-9)
    replay()
    tokens, count = outcome[-1]
    if not (torch.equal(tokens, eager[0]) and torch.equal(count, eager[1])):
        raise AssertionError(f"replayed {tokens.tolist()}, run {eager[0].tolist()}")


def check_flashinfer(setting: Setting) -> Finding:
    """For comparison only: whatever goes wrong there is no fault of ours."""
    try:
        import_module("flashinfer.sampling")
    except Exception as error:
        raise Absent(f"FlashInfer: {type(error).__name__}: {error}"[:100]) from None
    if setting.reduced:
        raise Absent("FlashInfer is for GPUs")
    found = {}
    for rows in (6, 11, 21):
        try:
            found[rows] = time_of(flashinfer_chain, logits(setting, rows), setting)
        except Exception as error:
            raise Absent(f"FlashInfer did not run in a graph: {type(error).__name__}: {error}"[:160]) from error
    shown = ", ".join(f"R={rows} {times.warm:.1f}" for rows, times in found.items())
    return Finding(f"us warm, softmax included: {shown}", {str(rows): times._asdict() for rows, times in found.items()})


CHECKS: dict[str, Check] = {
    **{f"times/verify-{rows}": partial(check_verify, rows) for rows in (6, 11, 21)},
    "peers/flashinfer": check_flashinfer,
}
