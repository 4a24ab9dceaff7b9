"""Top-k, top-p and min-p: the kept set is the definition's, ties included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_spec.kernels.filter import cutoff, keep_reference
from fused_spec.kernels.row_law import Processing, row_law

GRID = st.integers(-24, 24).map(lambda i: i / 4)  # many exact ties, exact in every dtype


def kept(logits: torch.Tensor, processing: Processing) -> torch.Tensor:
    law = row_law(logits, processing)
    assert law.weights is not None
    return law.weights[: law.vocab_size] > 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(GRID, min_size=1, max_size=60),
    st.integers(0, 70),
    st.sampled_from([1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0]),
    st.sampled_from([1.0, 0.5, 2.0]),
)
def test_law_is_the_reference(values: list[float], top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    """Quarter logits make ties common; no boundary falls within rounding of these masses but by a fluke."""
    logits = torch.tensor(values)
    law = row_law(logits, Processing(temperature, top_k, top_p, min_p))
    assert law.weights is not None
    ours = law.weights[: len(values)].double() / law.total
    # Each weight is a float32 exponential: relative error a few 2^-24, so no entry of a law is off by more.
    torch.testing.assert_close(ours, keep_reference(logits, temperature, top_k, top_p, min_p), rtol=1e-6, atol=0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(GRID, min_size=1, max_size=60),
    st.integers(0, 70),
    st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 1e-3, 0.5]),
    st.sampled_from([1.0, 0.5, 2.0]),
    st.integers(0, 2**32),
)
def test_law_of_a_long_row_is_the_reference(
    values: list[float], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    """Few large logits, many of them alike, at any places of a long row: only these are looked at, with ties kept."""
    logits = torch.full((700,), -20.0)
    logits[torch.randperm(700, generator=torch.Generator().manual_seed(seed))[: len(values)]] = torch.tensor(values)
    law = row_law(logits, Processing(temperature, top_k, top_p, min_p))
    assert law.weights is not None
    ours = law.weights[:700].double() / law.total
    expected = keep_reference(logits, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-30)
    probable = int(expected.argmax())
    assert math.exp(law.log_prob(probable)) == pytest.approx(expected[probable].item(), rel=1e-6)
    exact_entropy = -(expected[expected > 0] * expected[expected > 0].log()).sum().item()
    assert law.entropy() == pytest.approx(exact_entropy, abs=1e-5)


def test_a_filtered_row_is_judged_by_few_tokens() -> None:
    logits = torch.randn(5000)
    assert row_law(logits, Processing(1.0, 20, 0.95, 0.0)).survivors is not None
    assert row_law(logits * 9, Processing(1.0, 0, 0.9, 0.0)).survivors is not None
    assert row_law(logits, Processing(1.0, 0, 1.0, 0.0)).survivors is None
    assert row_law(logits * 0, Processing(1.0, 20, 0.95, 0.0)).survivors is None  # all share the last place


@pytest.mark.parametrize("size", [1000, 5000, 49152])
@pytest.mark.parametrize(
    "options", [(0, 0.9, 0.0), (0, 0.999, 0.0), (20, 0.95, 0.0), (64, 1.0, 0.01), (3000, 0.7, 0.0)]
)
def test_large_rows_keep_the_reference_set(size: int, options: tuple[int, float, float]) -> None:
    top_k, top_p, min_p = options
    logits = torch.randn(size) * 2
    expected = keep_reference(logits, 0.8, top_k, top_p, min_p) > 0
    assert torch.equal(kept(logits, Processing(0.8, top_k, top_p, min_p)), expected)


def test_top_p_looks_past_its_first_look() -> None:
    """A flat row needs nearly all its tokens to reach the mass."""
    assert int(kept(torch.linspace(0, 1e-3, 4000), Processing(1.0, 0, 0.9, 0.0)).sum()) == 3600


def test_ties_at_the_boundary_are_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(logits, Processing(1.0, 2, 1.0, 0.0)).tolist() == [True, True, True, True, False]
    # Top-p: the mass above the tied three is 0.69 < 0.7, so they stay; the last has 0.97 above it.
    assert kept(logits, Processing(1.0, 0, 0.7, 0.0)).tolist() == [True, True, True, True, False]
    # Top-p over what top-k kept, ties counted in its mass: all four survive k = 2, and 3.0 alone has .71 of them.
    assert kept(logits, Processing(1.0, 2, 0.71, 0.0)).tolist() == [True, False, False, False, False]
    assert kept(logits, Processing(1.0, 2, 0.72, 0.0)).tolist() == [True, True, True, True, False]


def test_cutoff_is_a_logit_of_the_row_or_minus_infinity() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, -5.0])
    assert cutoff(logits, 2.0, 0, 1.0, 0.0) == -math.inf
    assert cutoff(logits, 2.0, 4, 1.0, 0.0) == -math.inf
    assert cutoff(logits, 2.0, 2, 1.0, 0.0) == 0.0
    assert cutoff(logits, 2.0, 0, 1.0, 0.1) == 0.0  # 2 + ln 0.1 = -0.3 lies between two logits
    assert cutoff(logits, 2.0, 0, 1.0, 1.0) == 2.0


def test_top_k_over_fewer_allowed_tokens_cuts_nothing() -> None:
    logits = torch.tensor([1.0, -math.inf, 0.0, -math.inf, -math.inf])
    assert kept(logits, Processing(1.0, 3, 1.0, 0.0)).tolist() == [True, False, True, False, False]
    assert kept(logits, Processing(1.0, 3, 0.5, 0.0)).tolist() == [True, False, False, False, False]
