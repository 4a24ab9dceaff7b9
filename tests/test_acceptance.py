"""Rules as scalars, against exact cases, an independent reference and their own special cases."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import fused_spec as fs
from fused_spec.kernels.acceptance import Decision, decide
from fused_spec.kernels.acceptance_reference import acceptance_reference
from fused_spec.rules import RULES, Rule
from laws import chi_square

CASES = json.loads((Path(__file__).parent / "data" / "acceptance_cases.json").read_text())
ALMOST_ONE = 1 - 2**-24


def rule_of(case: dict[str, Any]) -> Rule:
    if case["rule"] == "cactus_exact":
        return fs.Cactus(**case["params"], solver="exact")
    return RULES[case["rule"]](**case["params"])


def test_every_rule_has_cases() -> None:
    assert {case["rule"] for case in CASES} == {*RULES, "cactus_exact"}
    assert len(CASES) == 191


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rule"])
def test_exact_cases(case: dict[str, Any]) -> None:
    """Accept probability and gain to 2e-6: float32 holds ln p to 2^-24 |ln p|, with |ln p| <= 20 in these cases.

    The reference, written from the definitions, gives the same numbers, the residual, the marginal law and the gain.
    """
    p, q = (torch.tensor(case[law], dtype=torch.float64) for law in "pq")
    marginal, total_gain = torch.zeros_like(q), 0.0
    for token, accept in enumerate(case["accept"]):
        if accept is None:
            continue
        exact, gain, residual = acceptance_reference(rule_of(case), p, q, token)
        assert exact == pytest.approx(accept, abs=1e-8)
        if accept < 1:
            torch.testing.assert_close(residual, torch.tensor(case["residual"][token]).double(), rtol=0, atol=1e-7)
        marginal[token] += p[token] * exact
        marginal += p[token] * (1 - exact) * residual
        total_gain += p[token].item() * gain
        out = fs.verify(
            q.log().float().expand(1, 2, -1),
            torch.tensor([[token]]),
            p.log().float().expand(1, 1, -1),
            rule=rule_of(case),
            seed=1,
            position=3,
        )
        assert out.accept_prob.item() == pytest.approx(accept, abs=2e-6)
        assert out.tv_gain.item() == pytest.approx(accept - min(1, case["q"][token] / case["p"][token]), abs=2e-6)
    torch.testing.assert_close(marginal, torch.tensor(case["marginal"]).double(), rtol=0, atol=1e-7)
    assert total_gain == pytest.approx(case["gain"], abs=1e-8)


def test_residual_laws_of_the_exact_cases() -> None:
    """300 rejected draws of each residual law; all cases together raise a false alarm with probability 2e-6 at most."""
    draws, statistic, freedom, laws, smallest = 300, 0.0, 0, 0, 1.0
    for case in CASES:
        p, q = (torch.tensor(case[law], dtype=torch.float64) for law in "pq")
        for token, accept in enumerate(case["accept"]):
            if accept is None or accept >= ALMOST_ONE:
                continue
            out = fs.verify(
                q.log().float().expand(draws, 2, -1),
                torch.full((draws, 1), token),
                p.log().float().expand(draws, 1, -1),
                rule=rule_of(case),
                seed=torch.arange(draws) + 1000 * laws,
                position=token,
                uniforms=torch.full((draws, 1), ALMOST_ONE),
            )
            assert out.num_accepted.sum() == 0
            law = torch.tensor(case["residual"][token], dtype=torch.float64)
            counts = torch.bincount(out.token_ids[:, 0], minlength=len(law))
            one, degrees = chi_square(counts, law)
            if degrees:
                smallest = min(smallest, float(chi2.sf(one, degrees)))
            statistic, freedom, laws = statistic + one, freedom + degrees, laws + 1
    assert laws == 239
    assert chi2.sf(statistic, freedom) > 1e-6
    assert smallest > 1e-6 / laws


def cactus(delta: float, solver: str, q_n: float) -> Decision:
    decision = decide(fs.Cactus(delta, solver=solver), 0.5, q_n)
    assert decision is not None
    return decision


probabilities = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 1e-12, 1 - 1e-12, 0.5, 1 / 3])
deltas = st.floats(0, 5) | st.sampled_from([0.0, 1e-9, 0.01, 0.25, 1.0, 100.0])


@settings(max_examples=300, deadline=None)
@given(probabilities, deltas, st.sampled_from(["taylor", "exact"]))
def test_cactus_threshold_and_scale(q_n: float, delta: float, solver: str) -> None:
    threshold, scale = cactus(delta, solver, q_n)
    assert q_n <= threshold <= 1
    assert scale <= 1
    if threshold < 1 and scale > 0:  # h sums to one: the rest of q is scaled to what n leaves
        assert scale * (1 - q_n) == pytest.approx(1 - threshold, abs=1e-9)
    if q_n == 0:
        assert threshold == 0
    if delta == 0:
        assert (threshold, scale) == (q_n, 1.0 if q_n < 1 or solver == "exact" else 0.0)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-9, 1 - 1e-9), st.floats(1e-6, 5))
def test_exact_solver_finds_the_largest_root(q_n: float, delta: float) -> None:
    def kl(g: float) -> float:
        rest = (1 - g) * math.log((1 - g) / (1 - q_n)) if g < 1 else 0.0
        return g * math.log(g / q_n) + rest

    threshold, _ = cactus(delta, "exact", q_n)
    if delta >= -math.log(q_n):
        assert threshold == 1
    else:
        assert kl(threshold) <= delta + 1e-9
        beyond = threshold + 1e-4 * (1 - threshold) + 1e-7
        assert beyond >= 1 or kl(beyond) > delta - 1e-9


def test_unknown_rules_are_refused() -> None:
    class Homemade(Rule):
        name = "homemade"

    logits = torch.zeros(1, 2, 5)
    with pytest.raises(fs.InvalidInput, match="rule must be one of speculative_sampling, cactus, typical"):
        fs.verify(logits, torch.tensor([[1]]), rule=Homemade(), seed=0, position=0)
