"""The Triton path of fs.verify, under Triton's interpreter, against the torch path: tokens, prices and errors."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_spec as fs
from fused_spec.kernels.acceptance import _cactus_exact
from fused_spec.kernels.acceptance_kernel import CACTUS_EXACT, threshold_and_scale
from fused_spec.kernels.commit import Sequences
from fused_spec.kernels.launch import launch
from fused_spec.rules import RULES as RULE_NAMES
from fused_spec.rules import Rule
from rounds import RULES, drafted, run

CASES = json.loads((Path(__file__).parent / "data" / "acceptance_cases.json").read_text())
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.7},
    {"temperature": 0.0},
]


def assert_same(ours: fs.Verification, reference: fs.Verification) -> None:
    """Tokens, counts and errors are equal, prices to 1e-5 of a probability: float32 holds ln p to 1e-6 here."""
    assert torch.equal(ours.token_ids, reference.token_ids)
    assert torch.equal(ours.num_accepted, reference.num_accepted)
    assert torch.equal(ours.error, reference.error)
    torch.testing.assert_close(ours.accept_prob, reference.accept_prob, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(ours.tv_gain, reference.tv_gain, rtol=1e-5, atol=5e-6, equal_nan=True)


def both(target: torch.Tensor, ids: Any, draft: torch.Tensor | None = None, **options: Any) -> fs.Verification:
    """The outcome of the Triton path, which has to be that of the torch path."""
    ours = run(target, ids, draft, backend="triton", **options)
    assert_same(ours, run(target, ids, draft, backend="torch", **options))
    return ours


def rows(batch: int, m: int, size: int, known: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Target [B, m+1, known] and draft [B, m, size] logits that resemble each other."""
    wide = torch.randn(batch, m + 1, max(size, known)) * 2
    draft = wide[:, :m, :size] + torch.randn(batch, m, size) / 2
    return wide[..., :known].to(dtype), draft.to(dtype)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of verify: any rule, shape, dtype, filter, mask, ragged drafts, statistics or none."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, m = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    known = draw(st.sampled_from([2, 3, 40, 1000, 1024, 1025, 2500]))
    size = draw(st.sampled_from([known, known, known + 70, max(2, known - 30)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    target, draft = rows(batch, m, size, known, dtype)
    options = dict(draw(st.sampled_from(FILTERS)))
    if draw(st.booleans()):
        options["temperature"] = torch.tensor([[0.0, 0.7, 1.3][i % 3] for i in range(batch)])
    seeds = torch.randint(0, 2**62, (batch,))
    ids, stats = drafted(draft, seeds, 10, **options) if m else (torch.empty(batch, 0, dtype=torch.int64), None)
    if draw(st.booleans()):
        ids = torch.where(torch.rand(ids.shape) < 0.15, -1, ids)
    if draw(st.booleans()):
        words = torch.randint(-(2**31), 2**31, (batch, m + 1, -(-known // 32)), dtype=torch.int64)
        options["allowed"] = words.to(torch.int32)
    kind = draw(st.sampled_from(["statistics", "logits", "one-hot"]))
    if kind == "statistics" and m:
        options["draft_stats"] = stats
    given = {"target": target, "ids": ids, "draft": None if kind == "one-hot" else draft, "seed": seeds}
    return given | {"rule": draw(st.sampled_from(RULES)), **options}


@settings(max_examples=150, deadline=None)
@given(calls())
def test_same_as_the_torch_path(arguments: dict[str, Any]) -> None:
    both(**arguments)


@pytest.mark.parametrize("size", [2, 3, 1000, 32000, 49152, 128256, 151936, 152064, 262144])
def test_vocabulary_sizes(size: int) -> None:
    """bfloat16 rows of every size, resampled and filtered: u = 1 - 2^-24 rejects wherever that is possible."""
    target, draft = rows(1, 2, size, size, torch.bfloat16)
    ids, stats = drafted(draft, torch.tensor([5]), 10)
    uniforms = torch.full((1, 2), 1 - 2**-24)
    both(target, ids, draft, rule=fs.Cactus(0.1), draft_stats=stats, uniforms=uniforms, seed=5)
    options = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    ids, stats = drafted(draft, torch.tensor([5]), 10, **options)
    both(target, ids, draft, draft_stats=stats, uniforms=uniforms, seed=5, **options)


def rule_of_many(name: str, parameters: list[dict[str, float]]) -> Rule:
    columns = {key: torch.tensor([row[key] for row in parameters], dtype=torch.float64) for key in parameters[0]}
    return fs.Cactus(**columns, solver="exact") if name == "cactus_exact" else RULE_NAMES[name](**columns)


@pytest.mark.parametrize("name", [*RULE_NAMES, "cactus_exact"])
def test_exact_cases(name: str) -> None:
    """Every drafted token of every case, one batch per rule and size; the torch path's test says where 2e-6 is from."""
    drawn = [
        (case, token, accept)
        for case in CASES
        if case["rule"] == name
        for token, accept in enumerate(case["accept"])
        if accept is not None
    ]
    for size in {len(case["p"]) for case, _, _ in drawn}:
        batch = [entry for entry in drawn if len(entry[0]["p"]) == size]
        p, q = (torch.tensor([case[law] for case, _, _ in batch], dtype=torch.float64) for law in "pq")
        tokens = torch.tensor([[token] for _, token, _ in batch])
        out = run(
            q.log().float()[:, None].expand(-1, 2, -1),
            tokens,
            p.log().float()[:, None],
            rule=rule_of_many(name, [case["params"] for case, _, _ in batch]),
            seed=torch.arange(len(batch)),
            backend="triton",
        )
        accept = torch.tensor([accept for _, _, accept in batch], dtype=torch.float64)
        torch.testing.assert_close(out.accept_prob[:, 0].double(), accept, rtol=0, atol=2e-6)
        plain = (q.gather(1, tokens) / p.gather(1, tokens)).clamp(max=1)[:, 0]
        torch.testing.assert_close(out.tv_gain[:, 0].double(), accept - plain, rtol=0, atol=2e-6)


def test_exact_roots() -> None:
    """The largest root of d(g||q) = delta against 2^-53-fine bisection, over all that q and delta can be."""
    import triton
    import triton.language as tl

    @triton.jit
    def roots(q, delta, g, scale, SIZE: tl.constexpr, RULE: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, SIZE)
        x = tl.load(q + i)
        found, s = threshold_and_scale(x, x, tl.load(delta + i), 0.0, x, x, x, x, x, x, RULE)
        tl.store(g + i, found)
        tl.store(scale + i, s)

    q = [0.0, 1e-300, 1e-30, 1e-9, 1e-4, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1 - 1e-6, 1 - 1e-9, 1.0]
    delta = [0.0, 1e-12, 1e-6, 1e-4, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 3.3, 5.0, 10.0, 100.0, 1e30]
    grid = torch.cartesian_prod(torch.tensor(q, dtype=torch.float64), torch.tensor(delta, dtype=torch.float64))
    x, d = grid[:, 0].contiguous(), grid[:, 1].contiguous()
    g, scale = torch.empty(256, dtype=torch.float64), torch.empty(256, dtype=torch.float64)
    launch(roots, (1,), q=x, delta=d, g=g, scale=scale, SIZE=256, RULE=CACTUS_EXACT.value)
    expected = [_cactus_exact(a, b) for a, b in zip(x.tolist(), d.tolist(), strict=True)]
    torch.testing.assert_close(g, torch.tensor([e.threshold for e in expected], dtype=torch.float64), rtol=1e-8, atol=0)
    scales = torch.tensor([e.residual_scale for e in expected], dtype=torch.float64)
    assert ((scale - scales).abs() <= 1e-12 + 1e-8 / (1 - x).clamp(min=1e-9)).all()  # s = (1 - g) / (1 - q)


@pytest.mark.parametrize("m", [1, 7, 8, 20, 64])
def test_numbers_of_drafts(m: int) -> None:
    """One block of slots of every padded size, up to the most that an engine drafts."""
    target, draft = rows(2, m, 50, 50, torch.float32)
    ids, stats = drafted(draft, torch.arange(2), 10)
    both(target, ids, draft, draft_stats=stats, uniforms=torch.zeros(2, m), rule=fs.TypicalAcceptance(0.0, 0.0))
    both(target, ids, draft, seed=torch.arange(2), rule=fs.Lenience(0.01))


def test_per_request_parameters() -> None:
    batch, m, size = 4, 2, 300
    target, draft = rows(batch, m, size, size, torch.float32)
    columns = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0]),
        "top_k": torch.tensor([0, 10, 0, 40]),
        "top_p": torch.tensor([1.0, 0.9, 0.8, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.01]),
    }
    ids, stats = drafted(draft, torch.arange(batch), 10, **columns)
    for rule in (
        fs.Cactus(torch.tensor([0.0, 0.1, 0.5, 2.0])),
        fs.MentoredDecoding(torch.tensor([0.0, 0.1, 0.5, 2.0])),
    ):
        together = both(target, ids, draft, rule=rule, draft_stats=stats, seed=torch.arange(batch), **columns)
        for b in range(batch):
            own = {name: column[b].item() for name, column in columns.items()}
            alone = run(target[b : b + 1], ids[b : b + 1], draft[b : b + 1], rule=rule.at(b, batch), seed=b,
                        draft_stats=tuple(s[b : b + 1] for s in stats), backend="triton", **own)  # fmt: skip
            assert torch.equal(alone.token_ids[0], together.token_ids[b])


def test_commit_within_the_launch() -> None:
    """Sequences are appended to as the torch path does: stop ids, limits, sequences that are done."""
    torch.manual_seed(3)
    batch, m, size = 24, 4, 6
    target, draft = rows(batch, m, size, size, torch.float32)
    ids, stats = drafted(draft, torch.arange(batch), 10)
    ids[::5, 2] = -1

    def sequences() -> Sequences:
        length = torch.where(torch.arange(batch) % 9 == 8, 18, torch.arange(batch) % 7 + 2)  # near the capacity
        done = torch.zeros(batch, dtype=torch.bool)
        done[::6] = True
        return Sequences(
            tokens=torch.arange(batch * 20).view(batch, 20) + 100,
            length=length,
            limit=length + torch.where(torch.arange(batch) % 9 == 8, 100, torch.arange(batch) % 8),
            done=done,
            stop_ids=torch.tensor([1, 4]),
            emitted=torch.full((batch,), -7),
            drafted=torch.full((batch,), -7),
        )

    ours, reference = sequences(), sequences()
    options: dict[str, Any] = {"draft_stats": stats, "seed": torch.arange(batch), "rule": fs.Cactus(0.5)}
    out = run(target, ids, draft, backend="triton", sequences=ours, **options)
    assert_same(out, run(target, ids, draft, sequences=reference, **options))
    for name, got, expected in zip(Sequences._fields, ours, reference, strict=True):
        assert torch.equal(got, expected), name
    assert (ours.length <= 20).all()
    assert {0, 1, 2, 3, 4} <= set(ours.emitted.tolist())
    assert (ours.drafted == torch.where(torch.arange(batch) % 5 == 0, 2, 4)).all()


SPOILS: list[Any] = [
    lambda t, d, n: None,
    lambda t, d, n: t[0].fill_(math.nan),
    lambda t, d, n: t[0, 5:6].fill_(math.nan),
    lambda t, d, n: t[0, 5:6].fill_(math.inf),
    lambda t, d, n: t[0].fill_(-math.inf),
    lambda t, d, n: d[0].fill_(math.nan),
    lambda t, d, n: d[0, 5:6].fill_(math.inf),
    lambda t, d, n: d[0].fill_(-math.inf),
    lambda t, d, n: n[0:1].fill_(60),
    lambda t, d, n: n[0:1].fill_(-7),
    lambda t, d, n: n[0:1].fill_(2**40),
    lambda t, d, n: d[0, n[0] : n[0] + 1].fill_(-math.inf),
    lambda t, d, n: t[2].fill_(math.nan),
    lambda t, d, n: t.fill_(1.5),
    lambda t, d, n: (t.fill_(1.5), d.fill_(-2.0)),
    lambda t, d, n: (t[0].fill_(-math.inf), t[0, 7:8].fill_(0.0)),
]


@pytest.mark.parametrize(
    ("rule", "options", "mask"),
    [
        *((rule, options, False) for rule in RULES for options in ({}, {"temperature": 0.0})),
        *((rule, {"top_k": 5, "top_p": 0.9}, False) for rule in RULES[:4]),
        *((rule, {}, True) for rule in RULES[:4]),
    ],
    ids=str,
)
def test_degenerate_rows(rule: Rule, options: dict[str, Any], mask: bool) -> None:
    """A batch of rows that have no law, drafts that cannot be, ties and one-hot rows: as the torch path has it."""
    batch, m, size = len(SPOILS), 2, 60
    target = torch.randn(batch, m + 1, size)
    draft = target[:, :m] + torch.randn(batch, m, size) / 4
    ids = draft.argmax(-1)
    for b, spoil in enumerate(SPOILS):
        spoil(target[b], draft[b], ids[b])
    if mask:  # only the lowest allowed id of a row without a law tells whether the mask was looked at
        words = torch.full((batch, m + 1, 2), -8, dtype=torch.int32)
        words[1::2] = -2
        options = {**options, "allowed": words}
    out = both(target, ids, draft, rule=rule, **options)
    assert len(set(out.error.tolist())) >= 5
    tokens = out.token_ids.gather(1, out.num_accepted[:, None])
    assert ((tokens >= 0) & (tokens < size)).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_statistics_of_rows_without_a_law(rule: Rule) -> None:
    """A drafter's faulty row has no p: the token comes from q alone, and never from the draft as if it had weight."""
    batch, size = 12, 60
    target, draft = torch.randn(batch, 2, size), torch.randn(batch, 1, size)
    draft[0:4], draft[4:8] = math.nan, -math.inf
    seeds = torch.arange(batch)
    ids, stats = drafted(draft, seeds, 10)
    out = both(target, ids, draft, rule=rule, seed=seeds, draft_stats=stats)
    assert out.error.tolist() == [2] * 4 + [4] * 4 + [0] * 4
    assert len(set(out.token_ids[:8, 0].tolist())) > 4
    impossible = (stats[0][8:], stats[1][8:], torch.full((4, 1), -math.inf))
    out = both(target[8:], ids[8:], draft[8:], rule=rule, seed=seeds[8:], draft_stats=impossible)
    assert (out.error == 16).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 4, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_equal_rows_leave_nothing_to_resample(options: dict[str, Any], known: bool) -> None:
    """p = q and a draft that p cannot have made: the residual is zero to the last bit, and q is drawn from."""
    batch = 40
    row = torch.randn(8)
    token = int(row.argmin()) if known else 9
    if known:
        row[token] = -math.inf
    out = both(row.expand(batch, 2, 8), torch.full((batch, 1), token), row.expand(batch, 1, 8),
               seed=torch.arange(batch), **options)  # fmt: skip
    assert (out.error == (48 if known else 40)).all()
    assert len(set(out.token_ids[:, 0].tolist())) > 1


def test_prices_of_the_rarest_drafts() -> None:
    """p_n below what a float64 inverse can be taken of."""
    draft, target = torch.zeros(3, 1, 10), torch.zeros(3, 2, 10)
    draft[:, 0, 3] = -720.0
    target[:, 0, 3] = torch.tensor([-math.inf, -735.0, -721.0])
    out = both(target, [[3]] * 3, draft, uniforms=torch.full((3, 1), 0.5))
    assert out.accept_prob[:, 0].tolist() == pytest.approx([0.0, math.exp(-15), math.exp(-1)], rel=1e-3)


def test_refusals() -> None:
    target, draft = rows(2, 1, 10, 10, torch.float32)
    three = fs.Cactus(torch.tensor([0.1, 0.2, 0.3]))
    with pytest.raises(fs.InvalidInput, match=r"delta has shape \(3,\), expected \(2,\)"):
        run(target, [[1], [2]], draft, rule=three, backend="triton")
    elsewhere = (torch.zeros(2, 1, device="meta"), torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(fs.InvalidInput, match="draft_stats lse: expected a tensor on cpu"):
        run(target, [[1], [2]], draft, draft_stats=elsewhere, backend="triton")
    out = replace(fs.Verification.empty(2, 1), num_accepted=torch.zeros(4, dtype=torch.int64)[::2])
    with pytest.raises(fs.InvalidInput, match="out num_accepted: expected unit stride"):
        run(target, [[1], [2]], draft, out=out, backend="triton")
    wide, mask = torch.zeros(2, 2, 40), torch.zeros(2, 2, 4, dtype=torch.int32)[..., ::2]
    with pytest.raises(fs.InvalidInput, match="allowed: expected unit stride"):
        run(wide, [[1], [2]], wide[:, :1], allowed=mask, backend="triton")
    with pytest.raises(fs.InvalidInput, match="temperature: expected unit stride"):
        run(target, [[1], [2]], draft, temperature=torch.ones(4)[::2], backend="triton")
    with pytest.raises(fs.InvalidInput, match="at most 65535"):
        run(torch.zeros(1, 1, 2).expand(70_000, 1, 2), torch.empty(70_000, 0, dtype=torch.int64), backend="triton")
    with pytest.raises(fs.InvalidInput, match="temperature must be 0"):
        run(target, [[1], [2]], draft, temperature=torch.tensor([1.0, -1.0]), backend="triton")
    with pytest.raises(fs.InvalidInput, match=r"position: expected a token index, 0 <= position < 2\^63"):
        run(target, [[1], [2]], draft, position=2**64, backend="triton")
    with pytest.raises(fs.InvalidInput, match="top_k must be an integer"):
        run(target, [[1], [2]], draft, top_k=2**70, backend="triton")
    with pytest.raises(fs.InvalidInput, match="seed: expected 0 <= seed"):
        run(target, [[1], [2]], draft, seed=-1, backend="triton")


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_batch_slot_strides_and_repetition_change_no_bit(rule: Rule) -> None:
    batch, m, size = 3, 2, 1100
    target, draft = rows(batch, m, size, size, torch.bfloat16)
    seeds, positions = torch.arange(batch) + 5, torch.arange(batch) * 100
    ids, _ = drafted(draft, seeds, 10)
    options: dict[str, Any] = {"rule": rule, "backend": "triton", "top_p": 0.9}
    first = run(target, ids, draft, seed=seeds, position=positions, **options)
    buffer = torch.full((m + 1, batch, size + 50), float("nan"), dtype=torch.bfloat16)
    buffer[:, :, 20 : 20 + size] = target.transpose(0, 1)
    strided = buffer[:, :, 20 : 20 + size].transpose(0, 1)
    for order in (torch.arange(batch), torch.tensor([2, 0, 1])):
        other = run(strided[order], ids[order], draft[order], seed=seeds[order], position=positions[order], **options)
        for name, value in vars(other).items():
            assert torch.equal(value.nan_to_num(-1), getattr(first, name)[order].nan_to_num(-1)), name
