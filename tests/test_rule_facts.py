"""The facts of docs/rules.md on random laws: what each rule pays, what bounds it, and its temperature 0."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_spec as fs
from fused_spec.kernels.acceptance_reference import acceptance_reference, target_reference
from fused_spec.rules import RULES, Rule
from laws import emitted_law
from toy import toy_model

deltas = st.sampled_from([0.01, 0.1, 0.5, 1.0])
PAYING: list[Rule] = [  # the gain is a total variation
    fs.SpeculativeSampling(),
    fs.Cactus(0.3),
    fs.Cactus(0.3, solver="exact"),
    fs.Lenience(0.4),
    fs.Ensemble(0.6),
    fs.MentoredDecoding(0.2),
    fs.CascadeOpt(0.1),
]


def random_law(size: int, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    law = (torch.randn(size, generator=generator).double() * spread).softmax(0)
    law[torch.rand(size, generator=generator) < 0.1] = 0.0
    law[int(torch.randint(size, (1,), generator=generator))] += 0.01
    return law / law.sum()


def kl(h: torch.Tensor, q: torch.Tensor) -> float:
    return (torch.xlogy(h, h) - torch.xlogy(h, q)).sum().item()


class TestFact1:
    """Taylor: chi^2(h||q) <= 2 delta, so KL(h||q) <= ln(1 + 2 delta), attained; only the exact solver keeps delta."""

    @settings(max_examples=60, deadline=None)
    @given(st.integers(2, 2000), st.integers(0, 2**31), st.floats(0.1, 4), deltas)
    def test_bounds(self, size: int, seed: int, spread: float, delta: float) -> None:
        q = random_law(size, seed, spread)
        p = torch.full_like(q, 1 / size)
        for token in {int(q.argmax()), seed % size}:
            taylor = target_reference(fs.Cactus(delta), p, q, token)
            support = q > 0
            assert ((taylor - q)[support] ** 2 / q[support]).sum() <= 2 * delta * (1 + 1e-9)
            assert kl(taylor, q) <= math.log(1 + 2 * delta) + 1e-9
            assert kl(target_reference(fs.Cactus(delta, solver="exact"), p, q, token), q) <= delta + 1e-9

    @pytest.mark.parametrize(("delta", "ratio"), [(0.01, 1.98), (0.1, 1.82), (0.5, 1.39), (1.0, 1.10)])
    def test_where_the_bound_is_attained(self, delta: float, ratio: float) -> None:
        q_n = 1 / (1 + 2 * delta)
        q = torch.tensor([q_n, 1 - q_n], dtype=torch.float64)
        reached = kl(target_reference(fs.Cactus(delta), q, q, 0), q)
        assert reached == pytest.approx(math.log(1 + 2 * delta), abs=1e-9)
        assert reached / delta == pytest.approx(ratio, abs=0.005)


class TestFact2:
    """The acceptance gained over speculative sampling is the total variation paid; rejections make up TV(p, q)."""

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(PAYING), st.integers(2, 200), st.integers(0, 2**31), st.floats(0.1, 3))
    def test_on_random_laws(self, rule: Rule, size: int, seed: int, spread: float) -> None:
        self.check(rule, random_law(size, seed, spread), random_law(size, seed + 1, spread))

    @pytest.mark.parametrize("rule", PAYING, ids=str)
    def test_on_two_thousand_tokens(self, rule: Rule) -> None:
        self.check(rule, random_law(2000, 1, 2.0), random_law(2000, 2, 2.0))

    def check(self, rule: Rule, p: torch.Tensor, q: torch.Tensor) -> None:
        accept, resampled = emitted_law(rule, p, q)
        paid = (accept + resampled - q).abs().sum().item() / 2
        rejected = 1 - accept.sum().item()
        assert rejected + paid == pytest.approx((p - q).abs().sum().item() / 2, abs=1e-9)
        drafts = p.nonzero()[:, 0]
        out = fs.verify(
            q.log().float().expand(len(drafts), 2, -1),
            drafts[:, None],
            p.log().float().expand(len(drafts), 1, -1),
            rule=rule,
            seed=0,
            position=0,
        )
        gain = (p[drafts] * out.tv_gain[:, 0]).sum().item()
        assert gain == pytest.approx(paid, abs=5e-6)  # float32 logits: 2^-24 |ln p|, twice, of numbers up to 1

    def test_the_two_exceptions(self) -> None:
        """Typical acceptance and the token cascade can gain less than nothing, and say that it is no variation."""
        p, q = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.05, 0.05]], dtype=torch.float64)
        for rule in (fs.TypicalAcceptance(0.5, 0.5), fs.CascadeToken(0.0)):
            assert not rule.gain_is_variation
            accept, resampled = emitted_law(rule, q, p)
            gain = (accept - torch.minimum(q, p)).sum().item()
            assert abs(gain - (accept + resampled - p).abs().sum().item() / 2) > 1e-3
        assert all(rule.gain_is_variation for rule in PAYING)
        assert {type(rule) for rule in PAYING} | {fs.TypicalAcceptance, fs.CascadeToken} == set(RULES.values())


class TestFact3:
    """KL(h_alg||q) has no bound in delta for stochastic drafts; for one-hot drafts h_alg = h keeps its own."""

    def test_a_constructed_violation(self) -> None:
        """q has mass 0.001 on 2,000 tail tokens, p all of its: each draft's g just covers p_n, so the output is p."""
        tail, mass = 2000, 1e-3
        q = torch.cat([torch.tensor([1 - mass]), torch.full((tail,), mass / tail)]).double()
        p = torch.cat([torch.tensor([0.0]), torch.full((tail,), 1 / tail)]).double()
        p, q = p / p.sum(), q / q.sum()
        delta = 1 / (2 * mass * tail)
        accept, resampled = emitted_law(fs.Cactus(delta), p, q)
        assert kl(accept + resampled, q) > 12 * delta

    @settings(max_examples=40, deadline=None)
    @given(st.integers(2, 300), st.integers(0, 2**31), st.floats(0.1, 4), deltas)
    def test_one_hot_drafts(self, size: int, seed: int, spread: float, delta: float) -> None:
        q = random_law(size, seed, spread)
        p = torch.zeros_like(q)
        p[seed % size] = 1.0
        for rule, bound in ((fs.Cactus(delta), math.log(1 + 2 * delta)), (fs.Cactus(delta, solver="exact"), delta)):
            accept, resampled = emitted_law(rule, p, q)
            h = target_reference(rule, p, q, seed % size)
            torch.testing.assert_close(accept + resampled, h, rtol=0, atol=1e-9)
            assert kl(accept + resampled, q) <= bound + 1e-9


@pytest.mark.parametrize(
    ("rule", "exact"),
    [
        *((rule, True) for rule in (fs.SpeculativeSampling(), fs.Cactus(5.0), fs.Cactus(5.0, solver="exact"))),
        (fs.Lenience(0.01), True),
        (fs.MentoredDecoding(5.0), True),
        (fs.TypicalAcceptance(1.0, 0.9), True),
        (fs.TypicalAcceptance(0.9, 1.0), True),
        (fs.TypicalAcceptance(1.0, 1.0), None),  # rejects even the right token: nothing exceeds a bar of 1
        (fs.CascadeToken(0.99), True),
        (fs.CascadeToken(1.0), False),
        (fs.Ensemble(1.0), True),
        (fs.Ensemble(0.5), False),
        (fs.CascadeOpt(-0.1), True),
        (fs.CascadeOpt(0.0), False),
    ],
    ids=str,
)
def test_fact_4_temperature_zero(rule: Rule, exact: bool | None) -> None:
    """p and q one-hot: exact match, but for the settings that follow the draft. Half the drafts are right."""
    target, draft = torch.randn(100, 2, 30), torch.randn(100, 1, 30)
    best = target[:, 0].argmax(-1)
    ids = torch.where(torch.arange(100) % 2 == 0, best, draft[:, 0].argmax(-1))
    draft[torch.arange(100), 0, ids] = 10.0
    right = ids == best
    out = fs.verify(target, ids[:, None], draft, rule=rule, seed=torch.arange(100), position=0, temperature=0.0)
    if exact is False:
        assert out.num_accepted[right].all()
        assert out.num_accepted[~right].any()
        return
    assert (out.num_accepted.bool() == (right if exact else torch.zeros_like(right))).all()
    assert torch.equal(out.token_ids[:, 0], best)


def test_fact_5_the_warning_comes_once() -> None:
    model = toy_model(1)
    engine = fs.Engine(model, draft="ngram", rule=fs.Cactus(0.25), max_length=64)
    quiet = [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in quiet:
            engine.stream([1, 2], **options)  # type: ignore[arg-type]
        fs.Engine(model, draft="ngram", rule=fs.Cactus(0.2), max_length=64).stream([1, 2])
    with pytest.warns(UserWarning, match="without top_k, top_p or min_p"):
        engine.stream([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([1, 2], max_new_tokens=3)


def test_fact_6_entropy_of_masked_rows() -> None:
    """The entropy skips what has no weight (0 ln 0 = 0), so that a mask does not turn the bar into NaN."""
    target = torch.randn(1, 2, 40)
    target[..., 20:] = -math.inf
    q = target[0, 0].double().softmax(0)
    for token in range(20):
        rule = fs.TypicalAcceptance(0.05, 0.3)
        out = fs.verify(target, torch.tensor([[token]]), rule=rule, seed=0, position=0)
        p = torch.nn.functional.one_hot(torch.tensor(token), 40).double()
        assert out.accept_prob.item() == acceptance_reference(rule, p, q, token)[0]
