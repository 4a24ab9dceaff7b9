"""What the kernels promise on any device: launches, bytes, programs, digits, and no memory touched but their own."""

import math
from typing import Any

import pytest
import torch

import fused_spec as fs
from fused_spec.kernels import decide, processed_rows, row_statistics, sample_triton
from fused_spec.kernels.launch import recorded
from fused_spec.rules import Rule
from rounds import RULES, SPS, drafted, run
from traffic import traffic

V = 151_936
USUAL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def bf16_rows(m: int, size: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    """Target [1, m+1, V] and draft [1, m, V] whose first slot can reject."""
    target = (torch.randn(1, m + 1, size) * 3).bfloat16()
    return target, (target[:, :m] + torch.randn(1, m, size)).bfloat16()


@pytest.mark.parametrize(
    ("m", "options", "launches", "share"),
    [
        (5, {}, 3, 1.35),
        (20, {}, 3, 1.35),
        (5, USUAL, 4, 2.4),
        (20, USUAL, 4, 2.4),
        (5, {"top_p": 0.9}, 4, 2.4),
    ],
    ids=str,
)
def test_launches_and_bytes(m: int, options: dict[str, Any], launches: int, share: float) -> None:
    """A rejection in the last slot, with draft_stats: distinct bytes per launch against every row read once."""
    target, draft = bf16_rows(m)
    ids, stats = drafted(draft, torch.tensor([5]), 10, **options)
    uniforms = torch.zeros(1, m)
    uniforms[0, -1] = 1 - 2**-24
    target[0, m - 1, ids[0, -1]] -= 8
    with traffic(target=target, draft=draft) as seen:
        out = run(target, ids, draft, draft_stats=stats, uniforms=uniforms, backend="triton", seed=5, **options)
    assert out.num_accepted.item() == m - 1
    assert len(seen.launches) == launches
    floor = (m + 1) * V * 2
    assert sum(seen.loaded.values()) <= share * floor
    assert sum(seen.loaded.values()) > floor  # else nothing was counted
    assert sum(seen.stored.values()) == 0  # logits are never written
    assert seen.of_launch(0)["target"] == floor  # once, in their own dtype
    assert seen.of_launch(0)["draft"] == 0  # their statistics are known


@pytest.mark.parametrize(("options", "launches"), [({}, 2), (USUAL, 4)], ids=str)
def test_launches_of_sample(options: dict[str, Any], launches: int) -> None:
    size = 50_000
    logits = torch.randn(1, size).bfloat16()
    with traffic(logits=logits) as seen:
        fs.sample(logits, seed=1, position=2, backend="triton", **options)
    assert len(seen.launches) == launches
    assert seen.of_launch(0)["logits"] == 2 * size
    assert seen.loaded["logits"] <= 2 * size * (1.05 if launches == 2 else 2.4)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_launches_of_every_rule(rule: Rule) -> None:
    """Three, whatever the rule; the pair rules say in their docstrings what they need besides."""
    target, draft = bf16_rows(2, 3000)
    ids, stats = drafted(draft, torch.tensor([5]), 10)
    more = {fs.MentoredDecoding: 7, fs.CascadeOpt: 2, fs.CascadeToken: 2}.get(type(rule), 0)
    with recorded() as launches:
        run(target, ids, draft, rule=rule, draft_stats=stats, backend="triton")
    assert len(launches) == 3 + more


def test_many_programs_share_the_resampled_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    target, draft = bf16_rows(1)
    start, size = target.data_ptr(), V * 2
    readers: dict[int, set[int]] = {}
    load = InterpreterBuilder.create_masked_load

    def noting(self: Any, pointers: Any, mask: Any, *arguments: Any) -> Any:
        addresses = pointers.data[mask.data]
        if len(addresses) > 100 and ((addresses >= start) & (addresses < start + size)).any():
            readers.setdefault(len(launches), set()).add(self.grid_idx[0])
        return load(self, pointers, mask, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting)
    ids, stats = drafted(draft, torch.tensor([5]), 10)
    target[0, 0, ids[0, 0]] -= 20
    with recorded() as launches:
        out = run(target, ids, draft, draft_stats=stats, uniforms=torch.full((1, 1), 0.99), backend="triton")
    assert out.num_accepted.item() == 0
    assert len(readers[2]) >= 64  # the second launch
    assert len(readers[3]) == 1  # the one that draws


def test_digits_at_full_vocabulary() -> None:
    """lse to 1e-6 and residual mass to 1e-5 of float64, relative, from bfloat16 logits."""
    target, draft = bf16_rows(1)
    s = fs.sample(target[:, 0], seed=5, position=10, backend="triton")
    exact = target[0, 0].double().logsumexp(0)
    assert abs(s.lse.double() - exact) <= 1e-6 * exact
    d = fs.sample(draft[:, 0], seed=5, position=10, backend="triton")
    stats = (d.lse[:, None], d.cutoff[:, None], d.logprob[:, None])
    with recorded() as launches:
        out = run(target, d.token_ids[:, None], draft, draft_stats=stats, seed=5, backend="triton",
                  uniforms=torch.full((1, 1), 1 - 2**-24))  # fmt: skip
    assert out.num_accepted.item() == 0
    residual = (target[0, 0].double().softmax(0) - draft[0, 0].double().softmax(0)).clamp(min=0)
    residual[d.token_ids] = 0.0
    mass = launches[1].arguments["masses"][0, 0].double().sum()
    assert abs(mass - residual.sum()) <= 1e-5 * residual.sum()


@pytest.mark.parametrize(
    ("rule", "options"), [*((rule, {}) for rule in RULES), (SPS, USUAL), (SPS, {"top_p": 0.9})], ids=str
)
def test_tiles_and_splits_change_no_token(rule: Rule, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums may differ in their last bits, and so may prices; tokens, counts and errors do not."""
    batch, m, size = 2, 2, 2500
    target = (torch.randn(batch, m + 1, size) * 2).bfloat16()
    draft = (target[:, :m] + torch.randn(batch, m, size) / 2).bfloat16()
    seeds = torch.arange(batch)
    ids, stats = drafted(draft, seeds, 10, **options)
    outcomes = []
    for tile, chunk in ((1024, 8), (2048, 256), (4096, 16)):
        for module in (row_statistics, decide, sample_triton):
            monkeypatch.setattr(module, "TILE", tile)
        for module in (decide, sample_triton):
            monkeypatch.setattr(module, "chunk_of_groups", lambda rows, chunk=chunk: chunk)
        s = fs.sample(target[:, 0], seed=seeds, position=3, backend="triton", **options)
        out = run(target, ids, draft, rule=rule, seed=seeds, draft_stats=stats, backend="triton", **options)
        outcomes.append((s, out))
    assert processed_rows.chunk_of_groups(8) == 128  # the constant that was replaced above
    (first_sample, first), *others = outcomes
    for s, out in others:
        assert torch.equal(s.token_ids, first_sample.token_ids)
        for name in ("token_ids", "num_accepted", "error"):
            assert torch.equal(getattr(out, name), getattr(first, name)), name
        torch.testing.assert_close(out.accept_prob, first.accept_prob, rtol=1e-5, atol=1e-6, equal_nan=True)


class Bands:
    """Stands in for torch.empty: memory full of NaN or of a huge integer, between bands that nothing may touch."""

    width = 64

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, float | int]] = []

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        if str(device) == "meta":
            return torch.zeros(*shape, dtype=dtype, device=device)
        sizes = shape[0] if shape and not isinstance(shape[0], int) else shape
        poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max - 5
        buffer = torch.full((math.prod(sizes) + 2 * self.width,), poison, dtype=dtype)
        buffer[: self.width] = buffer[-self.width :] = -77
        self.buffers.append((buffer, -77))
        return buffer[self.width : -self.width].view(*sizes)

    def untouched(self) -> bool:
        return all(
            bool((band == value).all())
            for buffer, value in self.buffers
            for band in (buffer[: self.width], buffer[-self.width :])
        )


MIXED = {"min_p": 0.1, "temperature": torch.tensor([0.0, 1.0])}


@pytest.mark.parametrize(("rule", "options"), [*((rule, MIXED) for rule in RULES), (SPS, {}), (SPS, USUAL)], ids=str)
@pytest.mark.parametrize("statistics", [True, False])
def test_only_own_memory_is_written_and_nothing_is_read_before(
    rule: Rule, options: dict[str, Any], statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and scratch lie between bands and begin as NaN: the bands stay, the outcome is that of plain memory."""
    batch, m, size = 2, 3, 2100
    target = (torch.randn(batch, m + 1, size) * 2).bfloat16()
    draft = (target[:, :m, :2000] + torch.randn(batch, m, 2000) / 2).bfloat16()
    ids, stats = drafted(draft, torch.arange(batch), 10, **options)
    ids[1, 2] = -1
    arguments = {"rule": rule, "backend": "triton", "draft_stats": stats if statistics else None, **options}
    plain = run(target, ids, draft, **arguments)
    plain_sample = fs.sample(target[:, 0], seed=3, position=1, backend="triton", **options)
    bands = Bands()
    monkeypatch.setattr(torch, "empty", bands.empty)
    out = run(target, ids, draft, **arguments)
    sampled = fs.sample(target[:, 0], seed=3, position=1, backend="triton", **options)
    assert len(bands.buffers) > 10
    assert bands.untouched()
    for ours, theirs in ((out, plain), (sampled, plain_sample)):
        for name, value in vars(ours).items():
            assert torch.equal(value.nan_to_num(-1), getattr(theirs, name).nan_to_num(-1)), name


@pytest.mark.parametrize("rule", [SPS, fs.CascadeToken(0.5)], ids=str)
def test_rows_further_apart_than_32_bits_count(rule: Rule) -> None:
    """Logits stored [m+1, B, V] for a huge batch: 4.4 GB of addresses, of which a few pages are touched."""
    stride = 1_100_000_000
    target = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((1, 3, 64), (64, stride, 1))
    target.copy_(torch.randn(1, 3, 64))
    draft = target[:, :2] + torch.randn(1, 2, 64).bfloat16() / 2
    ids = draft.argmax(-1)
    arguments: dict[str, Any] = {"rule": rule, "top_p": 0.9, "seed": 4}
    ours = run(target, ids, draft, backend="triton", **arguments)
    assert torch.equal(ours.token_ids, run(target.contiguous(), ids, draft, **arguments).token_ids)


def test_a_write_outside_would_be_found() -> None:
    bands = Bands()
    memory = bands.empty(3, 4)
    assert bands.untouched()
    memory.as_strided((13,), (1,))[12] = 0.0
    assert not bands.untouched()


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_spec.kernels import launch

    monkeypatch.setattr(launch, "is_interpreted", lambda kernel: False)
    with pytest.raises(fs.InvalidInput, match="TRITON_INTERPRET=1"):
        run(torch.zeros(1, 1, 5), torch.empty(1, 0, dtype=torch.int64), rule=SPS, backend="triton")
