"""The Triton launches for rules that look at a whole pair of rows: the torch path, an oracle, exact cases, edges."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fused_spec as fs
from fused_spec.kernels import pair_bounds as module
from fused_spec.kernels.acceptance_reference import target_reference
from fused_spec.kernels.draft_slot import DraftSlot
from fused_spec.kernels.launch import recorded
from fused_spec.kernels.pair_bounds import DraftStats, PairBounds, pair_bounds
from fused_spec.kernels.pair_rules import Pair, PairTarget, pair_target
from fused_spec.kernels.processed_rows import Laws
from fused_spec.kernels.row_law import Processing, RowLaw, row_law
from fused_spec.kernels.row_statistics import Rows, row_statistics
from fused_spec.rules import RULES, Rule

CASES = json.loads((Path(__file__).parent / "data" / "acceptance_cases.json").read_text())

NOISE = 1e-6
"""Two rows of float32 weights and their sums are off by a few 2^-24 each. That shifts KL(q||pi) and sum pi by less than
this, and no pi_x by more than the masses moved."""


def processing(rows: Rows, b: int) -> Processing:
    numbers = [rows.temperature, rows.top_k, rows.top_p, rows.min_p]
    t, k, p, m = (value[b].item() if isinstance(value, torch.Tensor) else value for value in numbers)
    return Processing(t, int(k), p, m)


def target_law(rows: Rows, b: int, i: int) -> RowLaw:
    return row_law(rows.logits[b, i], processing(rows, b), None if rows.allowed is None else rows.allowed[b, i])


def all_laws(target: Rows, draft: Rows | None) -> Laws:
    every = [rows for rows in (target, draft) if rows is not None]
    laws = [target_law(rows, b, i) for rows in every for b, i in np.ndindex(*rows.logits.shape[:2])]
    return Laws(
        torch.tensor([law.peak for law in laws]),
        torch.tensor([law.total for law in laws], dtype=torch.float64),
        torch.tensor([law.cutoff for law in laws]),
        None,
    )


def launched(rule: Rule, target: Rows, draft: Rows | None, ids: torch.Tensor, stats: DraftStats | None) -> PairBounds:
    read = None if stats is not None else draft
    laws = all_laws(target, read) if target.filtered or (read is not None and read.filtered) else None
    return pair_bounds(rule, target, draft, ids, row_statistics(target, read), laws, stats)


def sampled(draft: Rows) -> tuple[torch.Tensor, DraftStats]:
    """Drafts and their statistics, as the torch path draws them."""
    options = draft._asdict()
    logits = options.pop("logits")
    drawn = [fs.sample(logits[:, i], seed=i, position=7, backend="torch", **options) for i in range(logits.shape[1])]
    ids, lse, cutoff, logprob = (
        torch.stack([getattr(sample, name) for sample in drawn], 1)
        for name in ("token_ids", "lse", "cutoff", "logprob")
    )
    return ids, (lse, cutoff, logprob)


def pair_of(
    target: Rows, draft: Rows | None, ids: torch.Tensor, stats: DraftStats | None, b: int, i: int
) -> tuple[Pair, RowLaw]:
    law = target_law(target, b, i)
    lse, cutoff, logprob = (None, None, None) if stats is None else (column[b, i].item() for column in stats)
    slot = DraftSlot(
        token=int(ids[b, i]),
        vocab_size=target.logits.shape[2],
        logits=None if draft is None else draft.logits[b, i],
        processing=Processing(1.0, 0, 1.0, 0.0) if draft is None else processing(draft, b),
        lse=lse,
        cutoff=cutoff,
        log_prob=logprob,
    )
    p = slot.row()
    assert p is not None
    return Pair(p, law.probabilities(), slot.highest, law.highest, slot.lost), law


def assert_like_torch(
    rule: Rule, target: Rows, draft: Rows | None, ids: torch.Tensor, stats: DraftStats | None = None
) -> None:
    bounds = launched(rule, target, draft, ids, stats)
    for b, i in np.ndindex(*ids.shape):
        pair, law = pair_of(target, draft, ids, stats, b, i)
        low, high, cut, share = (column[b, i].item() for column in bounds)
        one = rule.at(b, ids.shape[0])
        if isinstance(one, fs.MentoredDecoding):
            rows = pair.p.double(), pair.q.double()
            around = (pair_target(fs.MentoredDecoding(kl), pair).row(*rows) for kl in budgets(float(one.kl)))
            assert_between(PairTarget(low, high, cut, share, support=True).row(*rows), *around)
        else:
            expected = pair_target(one, pair)
            assert (low, high) == (expected.low, expected.high)
            assert cut * law.highest == pytest.approx(expected.cut, rel=2**-21)  # a few float32 roundings
            assert share == pytest.approx(expected.share, abs=NOISE)


def budgets(kl: float) -> tuple[float, float]:
    return max(kl - NOISE, 0.0), kl + NOISE


def assert_between(pi: torch.Tensor, tighter: torch.Tensor, looser: torch.Tensor) -> None:
    """pi lies between the targets of two budgets, each entry; no bound of one of them is looked at."""
    slack = NOISE + 1e-6 * pi
    assert (pi >= torch.minimum(tighter, looser) - slack).all()
    assert (pi <= torch.maximum(tighter, looser) + slack).all()
    assert pi.sum().item() == pytest.approx(1, abs=2 * NOISE)


def random_pair(size: int, draft_size: int, batch: int = 2, m: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, m+1, V] and [B, m, Vd], alike but for noise, some tokens impossible on either side."""
    width = max(size, draft_size)
    common = torch.randn(batch, m + 1, width) * 3
    target, draft = common[..., :size].clone(), (common + torch.randn(batch, m + 1, width))[:, :m, :draft_size]
    target[torch.rand(target.shape) < 0.1] = -math.inf
    draft[torch.rand(draft.shape) < 0.1] = -math.inf
    target[..., 0], draft[..., 0] = 1.0, 1.0
    return target, draft


RANDOM_RULES = (fs.MentoredDecoding(0.15), fs.CascadeOpt(0.05), fs.CascadeToken(0.6))


@pytest.mark.parametrize("rule", RANDOM_RULES, ids=str)
class TestLikeTorch:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_dtypes_and_paddings(self, rule: Rule, dtype: torch.dtype) -> None:
        sizes = {torch.float32: (700, 700), torch.bfloat16: (2500, 2000), torch.float16: (900, 2100)}[dtype]
        target, draft = (row.to(dtype) for row in random_pair(*sizes, batch=1, m=2))
        rows = Rows(target, None, 0.7), Rows(draft, None, 1.0)
        assert_like_torch(rule, *rows, torch.zeros(1, 2).long())

    @pytest.mark.parametrize("greedy", [(True, False), (False, True), (True, True)])
    def test_temperature_zero(self, rule: Rule, greedy: tuple[bool, bool]) -> None:
        """The first of two requests; a tie goes to the lowest id."""
        logits = random_pair(300, 310)
        for row in logits:
            row[0, :, [17, 200]] = 20.0
        target, draft = (
            Rows(row, None, torch.tensor([0.0 if zero else 0.8, 1.3])) for row, zero in zip(logits, greedy, strict=True)
        )
        ids, stats = sampled(draft)
        assert_like_torch(rule, target, draft, ids.int())
        assert_like_torch(rule, target, draft, ids, stats)

    def test_draft_statistics(self, rule: Rule) -> None:
        """With filters, and an id that the verifier does not know."""
        target, draft = random_pair(400, 450)
        draft[0, 0, 430] = 30.0
        rows = Rows(draft, None, torch.tensor([0.7, 1.5]), 40, 0.9)
        ids, stats = sampled(rows)
        assert ids[0, 0] == 430
        allowed = torch.randint(-(2**31), 2**31, (2, 2, 13), dtype=torch.int32) | 1
        assert_like_torch(rule, Rows(target, allowed, 0.9), rows, ids, stats)

    def test_filters(self, rule: Rule) -> None:
        target, draft = random_pair(500, 400)
        filters = 0.9, torch.tensor([0, 30]), torch.tensor([0.95, 0.8]), 0.01
        assert_like_torch(rule, Rows(target, None, *filters), Rows(draft, None, *filters), torch.zeros(2, 1).long())

    def test_deterministic_drafter(self, rule: Rule) -> None:
        target, _ = random_pair(600, 1, m=2)
        target[0, 0, 5] = -math.inf
        assert_like_torch(rule, Rows(target, None, 1.1), None, torch.tensor([[5, 0], [599, 300]], dtype=torch.int32))

    def test_parameter_of_each_request(self, rule: Rule) -> None:
        target, draft = random_pair(120, 120, batch=4)
        values = torch.tensor([0.0, 0.02, 0.4, 1.0])
        assert_like_torch(
            RULES[rule.name](**{f.name: values for f in fields(rule)}),
            Rows(target, None, 1.0),
            Rows(draft, None, 1.0),
            torch.zeros(4, 1).long(),
        )


@pytest.mark.parametrize("name", ["mentored", "cascade_opt", "cascade_token"])
def test_exact_cases(name: str) -> None:
    """All of a rule's cases in one launch each, as requests with parameters of their own, padded to 8 ids."""
    cases = [case for case in CASES if case["rule"] == name]
    assert len(cases) >= 18
    p, q = (torch.zeros(len(cases), 8, dtype=torch.float64) for _ in range(2))
    for b, case in enumerate(cases):
        p[b, : len(case["p"])], q[b, : len(case["q"])] = torch.tensor(case["p"]), torch.tensor(case["q"])
    (parameter,) = cases[0]["params"]
    values = torch.tensor([case["params"][parameter] for case in cases], dtype=torch.float64)
    rule = RULES[name](**{parameter: values})
    rows = Rows(q.log().float()[:, None].expand(-1, 2, -1), None, 1.0), Rows(p.log().float()[:, None], None, 1.0)
    bounds = launched(rule, *rows, torch.zeros(len(cases), 1).long(), None)
    for b, case in enumerate(cases):
        low, high, cut, share = (column[b, 0].item() for column in bounds)
        scalars = PairTarget(low, high, cut * q[b].max().item() * (1 - NOISE), share, support=name == "mentored")
        pi = scalars.row(p[b], q[b])
        for n, accept in enumerate(case["accept"]):
            if accept is not None:  # float32 holds ln p to 2^-24 |ln p|, with |ln p| <= 20 in these cases
                assert min(1, (pi[n] / p[b, n]).item()) == pytest.approx(accept, abs=2e-6)


@pytest.mark.parametrize("kl", [1e-4, 0.03, 0.3, 3.0])
def test_mentored_against_the_oracle(kl: float) -> None:
    """Float64 laws from the definition of softmax, sharp and flat, on supports that differ."""
    target, draft = random_pair(60, 60, batch=3)
    temperature = torch.tensor([0.3, 1.0, 4.0])
    rows = Rows(target, None, temperature), Rows(draft, None, temperature)
    bounds = launched(fs.MentoredDecoding(kl), *rows, torch.zeros(3, 1).long(), None)
    for b, t in enumerate(temperature.tolist()):
        p, q = (row[b, 0].double().div(t).softmax(0) for row in (draft, target))
        pi = PairTarget(bounds.low[b, 0].item(), bounds.high[b, 0].item(), support=True).row(p, q)
        assert_between(pi, *(target_reference(fs.MentoredDecoding(near), p, q, 0) for near in budgets(kl)))


class TestEdges:
    def mentored(self, kl: float, p: list[float], q: list[float]) -> PairBounds:
        target, draft = (Rows(torch.tensor([law]).log().expand(1, n, -1), None, 1.0) for law, n in ((q, 2), (p, 1)))
        return launched(fs.MentoredDecoding(kl), target, draft, torch.zeros(1, 1).long(), None)

    def test_budgets_that_decide_alone(self) -> None:
        p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
        nothing, anything, equal = self.mentored(0.0, p, q), self.mentored(1e30, p, q), self.mentored(1e-3, p, p)
        assert (nothing.low.item(), nothing.high.item()) == (1.0, 1.0)
        for bounds in (anything, equal):  # pi = p
            assert bounds.low.item() < 1e-20
            assert bounds.high.item() > 1e20

    def test_tokens_that_p_lacks(self) -> None:
        """By hand: pi = (low, low, 2 - low, 2 - low) / 4, so KL = -(1/2) ln low - (1/2) ln(2 - low)."""
        low = 1 - math.sqrt(1 - math.exp(-2 * 0.3))
        bounds = self.mentored(0.3, [0.0, 0.0, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25])
        assert bounds.low.item() == pytest.approx(low, rel=2 * NOISE)
        assert bounds.high.item() == pytest.approx(2 - low, rel=2 * NOISE)

    def test_tokens_that_q_lacks(self) -> None:
        """However large the budget, the mass that p has outside q's support must go elsewhere: here 0.75 low = 0.5."""
        bounds = self.mentored(9.0, [0.25, 0.25, 0.0, 0.5], [0.125, 0.125, 0.75, 0.0])
        assert bounds.low.item() == pytest.approx(0.5 / 0.75, rel=2 * NOISE)
        assert bounds.high.item() > 2

    def test_cascade_of_saturated_rows(self) -> None:
        """A largest probability below 1 by less than float32 resolves still decides."""
        sharper, flatter = torch.tensor([[[0.0, -20.0, -20.0]]]), torch.tensor([[[-19.0, 0.0, -19.0]]])
        for q, p, follows_q in ((sharper, flatter, True), (flatter, sharper, False)):
            rows = Rows(q.expand(1, 2, -1), None, 1.0), Rows(p, None, 1.0)
            bounds = launched(fs.CascadeOpt(0.0), *rows, torch.zeros(1, 1).long(), None)
            assert bounds.high.item() == (1.0 if follows_q else math.inf)


@pytest.mark.parametrize("rule", RANDOM_RULES, ids=str)
def test_tiles_and_what_scratch_held_change_nothing(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = random_pair(2300, 2300, batch=1)
    rows = Rows(target, None, 1.0), Rows(draft, None, 1.0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    results = [launched(rule, *rows, ids, None)]
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        out = empty(*args, **options)
        return out.fill_(math.nan) if out.is_floating_point() else out.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    results.append(launched(rule, *rows, ids, None))
    assert results[0].low.equal(results[1].low)
    assert results[0].high.equal(results[1].high)
    assert results[0].share.equal(results[1].share)
    for tile in (1024, 4096):
        monkeypatch.setattr(module, "TILE", tile)
        results.append(launched(rule, *rows, ids, None))
        for one, other in zip(results[0], results[-1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=NOISE)


@pytest.mark.parametrize("rule", RANDOM_RULES, ids=str)
def test_faulty_rows_yield_numbers_and_leave_others_alone(rule: Rule) -> None:
    target, draft = random_pair(200, 200, batch=6)
    rows = Rows(target, None, 1.0), Rows(draft, None, 1.0)
    ids = torch.zeros(6, 1, dtype=torch.int64)
    good = launched(rule, *rows, ids, None)
    target[0], target[1, 0, 7], target[2, 0, 9], draft[3, 0, 3], ids[4] = -math.inf, math.nan, math.inf, math.nan, 999
    bad = launched(rule, *rows, ids, None)
    for one, other in zip(good, bad, strict=True):
        assert one[4:].equal(other[4:])  # with the draft's row the id does not matter
    unknown = torch.full((6, 1), math.nan), torch.full((6, 1), -math.inf), torch.full((6, 1), math.nan)
    for bounds in (bad, launched(rule, *rows, ids, unknown)):
        assert not any(column.isnan().any() for column in bounds)
        assert bounds.share.isfinite().all()


def test_launches_and_refusal() -> None:
    target, draft = (Rows(torch.empty(1, n, 3000, device="meta"), None, 1.0) for n in (3, 2))
    ids = torch.empty(1, 2, dtype=torch.int64, device="meta")
    statistics = row_statistics(target, draft)
    for rule, count in zip(RANDOM_RULES, (7, 2, 2), strict=True):
        with recorded() as launches:
            pair_bounds(rule, target, draft, ids, statistics, None, None)
        assert len(launches) == count
        with recorded() as launches:
            assert pair_bounds(rule, target, None, ids[:, :0], statistics, None, None).low.shape == (1, 0)
        assert not launches
    with pytest.raises(fs.InvalidInput, match="rule must be MentoredDecoding, CascadeOpt or CascadeToken, got Cactus"):
        pair_bounds(fs.Cactus(0.1), target, draft, ids, statistics, None, None)
