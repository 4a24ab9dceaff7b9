"""`sample` and `verify` on the device against torch's path on copies of the same logits on the CPU.

Tokens, counts of accepted drafts and error bits are the same but where a draw lies within rounding of a boundary
(tools/check_margins.py), and prices agree to 1e-5. Every call is repeated, and gives the same bits: there are no races.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fused_spec as fs
from check_margins import ABSOLUTE, RELATIVE, Round, Row, draw_margin, kept_margin, per_request
from check_run import Check, Finding, Setting
from fused_spec.kernels.philox import STREAMS, sampling_uniform

RULES: dict[str, fs.Rule] = {
    "speculative": fs.SpeculativeSampling(),
    "cactus": fs.Cactus(0.001),
    "cactus exact": fs.Cactus(0.001, solver="exact"),
    "typical": fs.TypicalAcceptance(0.001, 0.3),
    "lenience": fs.Lenience(0.5),
    "ensemble": fs.Ensemble(0.7),
    "mentored": fs.MentoredDecoding(0.02),
    "cascade opt": fs.CascadeOpt(0.2),
    "cascade token": fs.CascadeToken(0.6),
}
SOME = ("speculative", "cactus", "cascade token")
FILTERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@dataclass(frozen=True)
class Kind:
    """What calls have in common.

    Attributes:
        rules: names of rules. options: temperature and filters; "many" stands for other ones in every request.
        drafts: what is known of the drafter: "statistics" of its rows, its "logits" only, or "none".
        masked: whether the verifier is under a mask. more: by how much the draft's vocabulary is larger.
    """

    rules: tuple[str, ...] = tuple(RULES)
    options: Any = None
    drafts: str = "statistics"
    masked: bool = False
    more: int = 0
    dtype: torch.dtype = torch.bfloat16

    def tested(self, setting: Setting) -> tuple[str, ...]:
        """The rules; one of them will do for whatever is special where kernels are interpreted."""
        return self.rules[:1] if setting.reduced and self != Kind() else self.rules


KINDS = {
    "plain": Kind(),
    "filters": Kind(options=FILTERS),
    "many": Kind(SOME, options="many"),
    "greedy": Kind(("speculative", "typical", "mentored"), options={"temperature": 0.0}),
    "mask": Kind(("speculative", "cactus exact", "typical", "mentored"), masked=True),
    "logits": Kind(("speculative", "mentored"), drafts="logits", more=128),
    "no-logits": Kind(SOME, drafts="none"),
    "float32": Kind(("speculative", "cactus exact"), dtype=torch.float32),
}


class Tally:
    """Counts of what was compared, and the largest errors, as shares of what rounding explains."""

    def __init__(self) -> None:
        self.requests = self.differing = 0
        self.margin = self.price = 0.0

    def excused(self, what: str, margin: float) -> None:
        """Raise unless a difference is explained."""
        self.differing += 1
        self.margin = max(self.margin, margin)
        if not margin <= 1:
            raise AssertionError(f"{what}: other than torch's path, {margin:.3g} times what rounding explains")

    def close(self, what: str, ours: torch.Tensor, theirs: torch.Tensor, absolute: float) -> None:
        """Raise unless numbers agree; NaN in the same places."""
        share = (ours - theirs).abs() / (RELATIVE * theirs.abs() + absolute)
        share = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, share)
        worst = share.nan_to_num(float("inf")).max().item() if share.numel() else 0.0
        self.price = max(self.price, worst)
        if not worst <= 1:
            raise AssertionError(f"{what}: off by {worst:.3g} times what rounding explains")

    def finding(self) -> Finding:
        """How many differed, and by how much prices did."""
        if not self.requests:
            raise AssertionError("nothing was compared")
        key = f"{self.requests} compared, {self.differing} differ at a boundary, prices {self.price:.2f} of their bound"
        return Finding(key, dict(vars(self)))


def logits(setting: Setting, kind: Kind, batch: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target [B, m+1, V] and draft [B, m, Vd] rows that resemble each other."""
    vocab = 600 if setting.reduced else 151936
    dtype = torch.float32 if setting.reduced else kind.dtype
    target = torch.randn(batch, m + 1, vocab + kind.more, device=setting.device) * 3
    draft = target[:, :m] + torch.randn(batch, m, vocab + kind.more, device=setting.device) / 2
    return target[..., :vocab].to(dtype), draft.to(dtype)


def options_of(setting: Setting, kind: Kind, batch: int) -> dict[str, Any]:
    """Temperature and filters as `sample` and `verify` take them."""
    if kind.options != "many":
        return dict(kind.options or {})
    row = torch.arange(batch, device=setting.device)
    choices = {"temperature": [0.0, 0.7, 1.0, 1.5], "top_k": [0, 50, 0, 3], "top_p": [1.0, 0.9, 0.8, 1.0]}
    columns = {name: torch.tensor(values, device=setting.device)[row % 4] for name, values in choices.items()}
    return {**columns, "min_p": torch.tensor([0.0, 0.0, 0.01], device=setting.device)[row % 3]}


def on_cpu(value: Any) -> Any:
    """Tensors on the CPU, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(map(on_cpu, value))
    return {name: on_cpu(item) for name, item in value.items()} if isinstance(value, dict) else value


def results(outcome: fs.Sample | fs.Verification) -> dict[str, torch.Tensor]:
    """The tensors of an outcome, on the CPU."""
    return {name: tensor.cpu() for name, tensor in vars(outcome).items()}


def repeated(setting: Setting, call: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """The results of a call, which several calls have to give to the bit."""
    first = results(call())
    for _ in range(1 if setting.reduced else 20):
        for name, again in results(call()).items():
            if not torch.equal(again.nan_to_num(-7), first[name].nan_to_num(-7)):
                raise AssertionError(f"{name} differs between calls with the same arguments")
    return first


def check_sample(kind: Kind, setting: Setting) -> Finding:
    """Draws of a batch of rows."""
    batch, tally = (4 if setting.reduced else 32), Tally()
    _, rows = logits(setting, kind, batch, 1)
    seeds, positions = torch.arange(batch, device=setting.device) + 7, torch.arange(batch, device=setting.device) * 3
    options = options_of(setting, kind, batch)
    if kind.masked:
        options["allowed"] = masks(setting, batch, rows.shape[2])
    arguments = {"seed": seeds, "position": positions, **options}
    for stream in ("draft", "resample"):
        ours = repeated(setting, partial(fs.sample, rows[:, 0], stream=stream, **arguments))
        theirs = results(fs.sample(rows[:, 0].cpu(), stream=stream, backend="torch", **on_cpu(arguments)))
        if not torch.equal(ours["error"], theirs["error"]):
            raise AssertionError("error bits differ from torch's path")
        same = ours["token_ids"] == theirs["token_ids"]
        for b in range(batch):
            row = Row(rows[b, 0].cpu(), per_request(options, b), on_cpu(options.get("allowed", [None] * batch)[b]))
            if not same[b]:
                uniform = sampling_uniform(int(seeds[b]), int(positions[b]), STREAMS[stream])
                tally.excused(f"the token of row {b}", draw_margin(row.law(), int(ours["token_ids"][b]), uniform))
            cuts = [float(result["cutoff"][b]) for result in (ours, theirs)]
            if cuts[0] != cuts[1]:
                tally.excused(f"the cutoff of row {b}", kept_margin(row, *cuts))
        tally.requests += batch
        tally.close("log-sum-exp", ours["lse"], theirs["lse"], 4 * ABSOLUTE)
        tally.close("ln p", ours["logprob"][same], theirs["logprob"][same], 4 * ABSOLUTE)
    return tally.finding()


def masks(setting: Setting, *shape: int) -> torch.Tensor:
    """Random bitmasks for rows [..., V]."""
    words = torch.randint(-(2**31), 2**31, (*shape[:-1], -(-shape[-1] // 32)), device=setting.device)
    return words.to(torch.int32)


def check_verify(kind: Kind, setting: Setting) -> Finding:
    """Rounds of a batch of requests, some of which have fewer drafts than others, under each of the rules."""
    batch, m, tally = (2, 2, Tally()) if setting.reduced else (16, 5, Tally())
    target, draft = logits(setting, kind, batch, m)
    seeds, positions = torch.arange(batch, device=setting.device) + 7, torch.arange(batch, device=setting.device) * 100
    options = options_of(setting, kind, batch)
    drawn = [fs.sample(draft[:, i], seed=seeds, position=positions + i, **options) for i in range(m)]
    ids = torch.stack([one.token_ids for one in drawn], 1)
    if kind.drafts == "none":
        ids = ids.clamp(max=target.shape[2] - 1)
    ids[::4, m - 1 :] = -1
    arguments: dict[str, Any] = {"seed": seeds, "position": positions, **options}
    if kind.drafts == "statistics":
        statistics = (torch.stack([getattr(one, name) for one in drawn], 1) for name in ("lse", "cutoff", "logprob"))
        arguments["draft_stats"] = tuple(statistics)
    if kind.masked:
        arguments["allowed"] = masks(setting, *target.shape)
    given = (target, ids, None if kind.drafts == "none" else draft)
    for name in kind.tested(setting):
        arguments["rule"] = RULES[name]
        ours = repeated(setting, partial(fs.verify, *given, **arguments))
        theirs = results(fs.verify(*on_cpu(given), backend="torch", **on_cpu(arguments)))
        compare(name, ours, theirs, partial(_round, on_cpu(given), on_cpu(arguments)), tally)
    return tally.finding()


def compare(
    rule: str,
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    request: Callable[[int], Round],
    tally: Tally,
) -> None:
    """Raise unless two outcomes agree, or differ only where a request's round explains it."""
    for b in range(len(ours["error"])):
        counts = [int(result["num_accepted"][b]) for result in (ours, theirs)]
        lasts = [int(result["token_ids"][b, count]) for result, count in zip((ours, theirs), counts, strict=True)]
        same = torch.equal(ours["token_ids"][b], theirs["token_ids"][b]) and counts[0] == counts[1]
        if not same:
            margin = request(b).excuse((counts[0], lasts[0]), (counts[1], lasts[1]))
            tally.excused(f"{rule}, request {b}", margin)
        elif int(ours["error"][b]) != int(theirs["error"][b]):
            raise AssertionError(f"{rule}, request {b}: error {int(ours['error'][b])}, not {int(theirs['error'][b])}")
        tested = slice(0, min(counts) + 1)
        for name, absolute in (("accept_prob", ABSOLUTE), ("tv_gain", 5 * ABSOLUTE)):
            what = f"{rule}, request {b}: {name}"
            tally.close(what, ours[name][b, tested], theirs[name][b, tested], absolute)
    tally.requests += len(ours["error"])


def _round(given: tuple[Any, ...], arguments: dict[str, Any], index: int) -> Round:
    """One request of a call, for a look at its margins."""
    target, ids, draft = given
    options, masks_of = per_request(arguments, index), arguments.get("allowed")
    drafts = ids[index].tolist()
    rows = [Row(row, options, None if masks_of is None else masks_of[index, i]) for i, row in enumerate(target[index])]
    return Round(
        target=rows,
        draft=None if draft is None else [Row(row, options) for row in draft[index]],
        drafts=drafts[: drafts.index(-1)] if -1 in drafts else drafts,
        rule=arguments["rule"],
        seed=int(arguments["seed"][index]),
        position=int(arguments["position"][index]),
    )


INF, NAN = float("inf"), float("nan")
FAULTS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = [
    lambda t, d, n: t[0].fill_(NAN),
    lambda t, d, n: t[0, 5:6].fill_(NAN),
    lambda t, d, n: t[0, -1:].fill_(INF),
    lambda t, d, n: t[0].fill_(-INF),
    lambda t, d, n: d[0].fill_(NAN),
    lambda t, d, n: d[0, 5:6].fill_(INF),
    lambda t, d, n: d[0].fill_(-INF),
    lambda t, d, n: n[0:1].fill_(10**6),
    lambda t, d, n: n[0:1].fill_(-7),
    lambda t, d, n: n[0:1].fill_(2**40),
    lambda t, d, n: d[0, n[0] : n[0] + 1].fill_(-INF),
    lambda t, d, n: t[-1].fill_(NAN),
    lambda t, d, n: (t[0].fill_(-INF), t[0, 7:8].fill_(0.0)),
]
"""What can be wrong with a request's target rows, draft rows and drafts."""


def check_faults(setting: Setting) -> Finding:
    """Rows without a law, drafts that cannot be, one-hot rows: the tokens and the error bits of torch's path."""
    faults, m, tally = FAULTS[:: 3 if setting.reduced else 1], 2, Tally()
    # Few tokens have weight then, so that no draw is close to a boundary.
    target, draft = (rows * 6 for rows in logits(setting, Kind(), len(faults), m))
    ids = draft.argmax(-1)
    for b, spoil in enumerate(faults):
        spoil(target[b], draft[b], ids[b])
    arguments: dict[str, Any] = {"seed": 11, "position": 5}
    given = (target, ids, draft)
    for name in ("speculative", "typical") if setting.reduced else RULES:
        arguments["rule"] = RULES[name]
        ours = repeated(setting, partial(fs.verify, *given, **arguments))
        theirs = results(fs.verify(*on_cpu(given), backend="torch", **arguments))
        for what in ("error", "num_accepted", "token_ids"):
            if not torch.equal(ours[what], theirs[what]):
                where = (ours[what] != theirs[what]).view(len(faults), -1).any(1).nonzero()[:, 0].tolist()
                raise AssertionError(f"{name}: {what} differs from torch's path for faults {where}")
        tally.requests += len(faults)
    return tally.finding()


SAMPLED = ("plain", "filters", "many", "mask", "float32")
CHECKS: dict[str, Check] = {
    **{f"sample/{name}": partial(check_sample, KINDS[name]) for name in SAMPLED},
    **{f"verify/{name}": partial(check_verify, kind) for name, kind in KINDS.items()},
    "verify/faults": check_faults,
}
