"""fs.verify on rows that have no law, drafts that cannot be, and residuals without mass."""

import math
from typing import Any

import pytest
import torch

import fused_spec as fs
from fused_spec.rules import Rule
from rounds import RULES, SPS, run


class TestFaultyRows:
    """No NaN escapes, no id leaves the vocabulary, the other requests of the batch do not notice."""

    size, m = 60, 2

    def outcome(self, rule: Rule, spoil: Any, **options: Any) -> tuple[fs.Verification, fs.Verification]:
        """(spoiled, clean) with request 1 of 3 spoiled; drafts are the verifier's likely tokens."""
        generator = torch.Generator().manual_seed(1)
        target = torch.randn(3, self.m + 1, self.size, generator=generator)
        draft = target[:, : self.m] + torch.randn(3, self.m, self.size, generator=generator) / 4
        ids = draft.argmax(-1)
        clean = run(target, ids, draft, rule=rule, **options)
        target, draft, ids = target.clone(), draft.clone(), ids.clone()
        spoil(target[1], draft[1], ids[1])
        spoiled = run(target, ids, draft, rule=rule, **options)
        for b in (0, 2):
            assert torch.equal(spoiled.token_ids[b], clean.token_ids[b])
            assert spoiled.error[b] == 0
        tokens = spoiled.token_ids[1, : int(spoiled.num_accepted[1]) + 1]
        assert ((tokens >= 0) & (tokens < self.size)).all()
        tested = spoiled.accept_prob[1, : int(spoiled.num_accepted[1]) + 1]
        assert not tested.isnan().any()
        return spoiled, clean

    @pytest.mark.parametrize("rule", RULES, ids=str)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        ("spoil", "bits"),
        [
            (lambda t, d, n: t[0].fill_(math.nan), 1),
            (lambda t, d, n: t[0, 5:6].fill_(math.nan), 1),
            (lambda t, d, n: t[0, 5:6].fill_(math.inf), 1),
            (lambda t, d, n: t[0].fill_(-math.inf), 4),
            (lambda t, d, n: d[0].fill_(math.nan), 2),
            (lambda t, d, n: d[0, 5:6].fill_(math.inf), 2),
            (lambda t, d, n: d[0].fill_(-math.inf), 4),
            (lambda t, d, n: n[0:1].fill_(60), 8),
            (lambda t, d, n: n[0:1].fill_(-7), 8),
            (lambda t, d, n: n[0:1].fill_(2**40), 8),
            (lambda t, d, n: d[0, n[0] : n[0] + 1].fill_(-math.inf), 16),
        ],
    )
    def test_first_slot(self, rule: Rule, temperature: float, spoil: Any, bits: int) -> None:
        out, _ = self.outcome(rule, spoil, temperature=temperature)
        # A cascade that follows p leaves no residual: it then samples from q, and says so.
        assert out.error[1] in ((bits, bits | 32) if isinstance(rule, fs.CascadeOpt) else (bits,))
        assert out.num_accepted[1] == 0
        assert out.accept_prob[1, 0] == 0

    def test_rows_behind_the_deciding_one_do_not_matter(self) -> None:
        reject_all = torch.full((3, self.m), 1 - 2**-24)

        def spoil(target: torch.Tensor, draft: torch.Tensor, ids: torch.Tensor) -> None:
            target[1:], draft[1:], ids[1:] = math.nan, math.nan, 9999

        out, clean = self.outcome(SPS, spoil, uniforms=reject_all)
        assert clean.num_accepted[1] == 0
        assert torch.equal(out.token_ids[1], clean.token_ids[1])
        assert out.error[1] == 0

    def test_faulty_bonus_row(self) -> None:
        out, _ = self.outcome(SPS, lambda t, d, n: t[self.m].fill_(math.nan), uniforms=torch.zeros(3, self.m))
        assert (out.num_accepted[1].item(), out.error[1].item()) == (self.m, 1)
        assert out.token_ids[1, self.m] == 0

    def test_without_draft_logits_an_unknown_id_is_out_of_range(self) -> None:
        out = run(torch.randn(1, 2, 60), [[60]])
        assert (out.num_accepted.item(), out.error.item()) == (0, 8)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_zero_probability_is_never_accepted(rule: Rule) -> None:
    """u = 0 must not let a token with q_n = 0 through; mixtures with p may, unless a mask forbids the token."""
    target = torch.tensor([[[0.0, -math.inf, 1.0]] * 2])
    draft = torch.zeros(1, 1, 3)
    mixture = isinstance(rule, fs.Ensemble | fs.CascadeOpt | fs.CascadeToken)
    mask = torch.full((1, 2, 1), 0b101, dtype=torch.int32)
    for options in ({"allowed": mask},) if mixture else ({}, {"allowed": mask}):
        out = run(target, [[1]], draft, rule=rule, uniforms=torch.zeros(1, 1), **options)
        assert out.num_accepted.item() == 0
        assert out.token_ids[0, 0] != 1


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ids_that_the_verifier_lacks_are_never_accepted(rule: Rule) -> None:
    target, draft = torch.zeros(200, 2, 10), torch.zeros(200, 1, 14)
    ids = torch.arange(200)[:, None] % 14
    out = run(target, ids, draft, rule=rule, seed=torch.arange(200))
    assert (out.num_accepted[ids[:, 0] >= 10] == 0).all()
    assert (out.token_ids < 10).all()
    assert out.error.sum() == 0


def test_zero_residual_samples_from_q() -> None:
    """p >= q everywhere off n within float32, p_n > q_n by a rounding: nothing is left to resample but q itself."""
    target = torch.tensor([[[0.0, -200.0, -1.0]] * 2])
    out = run(target, [[1]], target[:, :1], uniforms=torch.zeros(1, 1))
    assert out.error.item() == 0
    cactus = fs.Cactus(50.0)  # g = 1 for q_n > 0.0099: scale 0 leaves no residual when u rounds to 1
    logits = torch.tensor([[[0.0, 0.0]] * 2])
    out = run(logits, [[0]], torch.tensor([[[-math.inf, 0.0]]]), rule=cactus, seed=1)
    assert out.error.item() == 16
    assert out.token_ids[0, 0] in (0, 1)
    one_hot = torch.tensor([[[0.0, -math.inf]]])  # h = p = one-hot, but the draft is the other token
    out = run(torch.tensor([[[0.0, -math.inf]] * 2]), [[1]], one_hot)
    assert (out.error.item(), out.token_ids[0, 0].item()) == (16 | 32, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_support_yields_its_lowest_allowed_id(temperature: float) -> None:
    rows = torch.zeros(2, 1, 40)
    rows[0, 0, 5], rows[1, 0, 7] = -math.inf, math.nan
    mask = torch.tensor([[[1 << 5, 0]], [[0b11 << 6, 0]]], dtype=torch.int32)
    out = run(rows, torch.empty(2, 0, dtype=torch.int64), allowed=mask, temperature=temperature)
    assert (out.token_ids[:, 0].tolist(), out.error.tolist()) == ([5, 6], [4, 1])


def test_statistics_of_faulty_draft_rows_give_the_same_bits() -> None:
    target = torch.randn(3, 2, 40)
    draft = torch.randn(3, 1, 40)
    draft[0], draft[1, 0, 3] = -math.inf, math.nan
    s = fs.sample(draft[:, 0], seed=1, position=10)
    stats = (s.lse[:, None], s.cutoff[:, None], s.logprob[:, None])
    for options in ({}, {"draft_stats": stats}):
        assert run(target, s.token_ids[:, None], draft, **options).error.tolist() == [4, 2, 0]


def test_statistics_that_are_no_probability_are_rejected() -> None:
    stats = (torch.zeros(1, 1), torch.full((1, 1), -math.inf), torch.full((1, 1), 1000.0))
    out = run(torch.randn(1, 2, 40), [[3]], torch.randn(1, 1, 40), draft_stats=stats)
    assert (out.num_accepted.item(), out.error.item()) == (0, 2)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_soft_mask_and_extreme_logits(rule: Rule) -> None:
    """Finite logits of any size: no overflow, no warning, no id that has no weight."""
    target = torch.tensor([[[0.0, -2.0, 5.0, -1e30], [3.4e38, -3.4e38, 0.0, 0.0]]])
    draft = torch.tensor([[[600.0, 0.0, -1e30, 3.0]]])
    for token in range(4):
        for temperature in (0.001, 0.7, 1e30):
            out = run(target, [[token]], draft, rule=rule, temperature=temperature)
            assert 0 <= out.token_ids[0, 0] < 4
            assert 0 <= out.accept_prob.item() <= 1


def test_out_is_checked_whole() -> None:
    target = torch.zeros(2, 2, 8)
    for name, wrong in (("num_accepted", torch.zeros(3)), ("tv_gain", torch.zeros(2, 1, dtype=torch.int64))):
        fields = vars(fs.Verification.empty(2, 1)) | {name: wrong}
        with pytest.raises(fs.InvalidInput, match=f"out {name}: expected"):
            run(target, [[1], [2]], out=fs.Verification(**fields))
    with pytest.raises(fs.InvalidInput, match="out: expected a Verification, got dict"):
        run(target, [[1], [2]], out={})
