"""fs.sample: the inverse CDF is exact, and nothing but the row's own arguments decides."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_spec as fs
from fused_spec.kernels.filter import keep_reference
from fused_spec.kernels.inverse_cdf import pick
from fused_spec.kernels.row_law import GROUP, Processing, row_law
from laws import assert_law


def padded(weights: list[float]) -> torch.Tensor:
    out = torch.zeros(-(-len(weights) // GROUP) * GROUP)
    out[: len(weights)] = torch.tensor(weights)
    return out


def test_pick_is_the_inverse_of_the_cdf() -> None:
    """Every token's share of a fine grid of uniforms is its weight, to one grid step: the law, without statistics."""
    weights = torch.zeros(3 * GROUP)
    ids = torch.tensor([0, 5, 1023, 1024, 1025, 2047, 3000, 3071])
    weights[ids] = torch.tensor([0.1, 0.02, 0.2, 0.05, 0.03, 0.25, 0.3, 0.05])
    steps = 2000
    counts = torch.zeros(3 * GROUP)
    last = -1
    for i in range(steps):
        token = pick(weights, (i + 0.5) / steps)
        assert token >= last  # vocabulary order
        counts[token] += 1
        last = token
    assert (counts - weights / weights.sum() * steps).abs().max() <= 1


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-7, 1.0, 1.0, 3e37]), min_size=1, max_size=3000),
    st.sampled_from([0.0, 2**-53, 0.25, 0.5, 1 - 2**-30, 1 - 2**-53]),
)
def test_pick_never_returns_zero_weight(weights: list[float], uniform: float) -> None:
    token = pick(padded(weights), uniform)
    total = torch.tensor(weights).double().sum().item()
    if total == 0 or not math.isfinite(torch.tensor(weights).sum().item()):
        assert token == -1 or weights[token] > 0
        assert (token == -1) == (total == 0 or not math.isfinite(padded(weights).view(-1, GROUP).sum(1).sum().item()))
    else:
        assert weights[token] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_pick_refuses_weights_without_a_finite_sum(bad: float) -> None:
    assert pick(padded([1.0, bad, 2.0]), 0.3) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"min_p": 0.05}])
def test_law_and_statistics(dtype: torch.dtype, options: dict[str, float]) -> None:
    """4,000 draws against the float64 law; false alarm 1e-6 for each of the nine settings."""
    logits = torch.linspace(-3, 3, 50)[torch.randperm(50)].to(dtype)
    draws = 4000
    s = fs.sample(logits.expand(draws, 50), seed=11, position=torch.arange(draws), **options)  # type: ignore[arg-type]
    law = keep_reference(logits, options.get("temperature", 1.0), *_filters(options))
    counts = torch.bincount(s.token_ids, minlength=50)
    assert (law > 0).sum() > 10
    assert_law(counts, law)
    torch.testing.assert_close(s.logprob.double(), law[s.token_ids].log(), rtol=1e-5, atol=1e-6)
    z = logits.double() / options.get("temperature", 1.0)
    torch.testing.assert_close(s.lse[0].item(), z[law > 0].logsumexp(0).item(), rtol=1e-6, atol=1e-6)
    assert s.error.sum() == 0


def _filters(options: dict[str, float]) -> tuple[int, float, float]:
    return int(options.get("top_k", 0)), options.get("top_p", 1.0), options.get("min_p", 0.0)


def test_independent_of_batch_slot_strides_and_global_generator() -> None:
    rows = torch.randn(4, 3000).bfloat16()
    alone = [fs.sample(rows[i : i + 1], seed=7 + i, position=100 + i, top_p=0.9).token_ids.item() for i in range(4)]
    torch.manual_seed(123)
    wide = torch.randn(4, 4000).bfloat16()
    wide[:, 500:3500] = rows
    order = torch.tensor([2, 0, 3, 1])
    out = fs.sample(wide[order][:, 500:3500], seed=7 + order, position=100 + order, top_p=0.9)
    assert out.token_ids.tolist() == [alone[i] for i in order.tolist()]


def test_streams_and_per_request_parameters() -> None:
    logits = torch.zeros(2, 4096)
    draft = fs.sample(logits, seed=3, position=5)
    resample = fs.sample(logits, seed=3, position=5, stream="resample")
    assert draft.token_ids[0] == draft.token_ids[1]
    assert draft.token_ids[0] != resample.token_ids[0]
    mixed = fs.sample(logits, seed=3, position=5, temperature=torch.tensor([0.0, 1.0]))
    assert mixed.token_ids.tolist() == [0, draft.token_ids[1].item()]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(1, 5000).bfloat16()
    logits[0, [1030, 4000]] = 2.0
    s = fs.sample(logits, seed=0, position=0, temperature=0.0)
    assert (s.token_ids.item(), s.logprob.item(), s.lse.item(), s.cutoff.item()) == (1030, 0.0, 2.0, 2.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_faulty_rows_are_flagged_and_leave_others_alone(temperature: float) -> None:
    rows = torch.randn(5, 40)
    rows[1, 3], rows[2], rows[3, 7] = math.nan, -math.inf, math.inf
    mask = torch.tensor([[-1, -1]] * 4 + [[0, 0]], dtype=torch.int32)
    s = fs.sample(rows, seed=torch.arange(5), position=9, temperature=temperature, allowed=mask)
    clean = fs.sample(rows[:1], seed=0, position=9, temperature=temperature)
    assert s.error.tolist() == [0, 1, 4, 1, 4]
    assert s.token_ids[0] == clean.token_ids[0]
    assert s.token_ids[1:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_mask(temperature: float) -> None:
    """Bit i of word w stands for id 32 w + i; bit 31 is the sign bit."""
    allowed = [0, 31, 32, 63, 64, 69]
    words = torch.zeros(1, 3, dtype=torch.int64)
    for token in allowed:
        words[0, token // 32] |= 1 << (token % 32)
    mask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    logits = torch.randn(1, 70)
    drawn = {
        fs.sample(logits, seed=i, position=0, temperature=temperature, allowed=mask).token_ids.item()
        for i in range(300)
    }
    assert drawn == (set(allowed) if temperature else {allowed[int(logits[0, allowed].argmax())]})


def test_out_is_written_and_inputs_are_not() -> None:
    logits = torch.randn(2, 33)
    before = logits.clone()
    out = fs.Sample.empty(2)
    assert fs.sample(logits, seed=1, position=2, temperature=0.7, out=out) is out
    assert torch.equal(out.token_ids, fs.sample(logits, seed=1, position=2, temperature=0.7).token_ids)
    assert torch.equal(logits, before)


def test_row_law_at_low_temperature_stays_finite() -> None:
    law = row_law(torch.tensor([50.0, 49.0, -80.0]), Processing(1e-3, 0, 1.0, 0.0))
    assert (law.log_prob(0), law.log_prob(1)) == (0.0, -1000.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"temperature": math.inf}, "temperature must be 0"),
        ({"temperature": 1e-4}, "temperature must be 0"),
        ({"temperature": "1"}, "temperature: expected a number"),
        ({"temperature": torch.ones(3)}, r"shape \(1,\)"),
        ({"top_k": -1}, "top_k must be an integer >= 0"),
        ({"top_k": 1.5}, "top_k: expected an integer"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"seed": -1}, "0 <= seed < 2"),
        ({"seed": 2**63}, "0 <= seed < 2"),
        ({"seed": 1.0}, "seed: expected an integer"),
        ({"seed": True}, "seed: expected an integer"),
        ({"position": -1}, "position: expected a token index"),
        ({"stream": "accept"}, "stream must be one of"),
        ({"backend": "cuda"}, "backend must be None, 'torch' or 'triton'"),
        ({"allowed": torch.zeros(1, 1, dtype=torch.int32)}, r"allowed: expected shape \(1, 2\)"),
        ({"allowed": torch.zeros(1, 2)}, "allowed: expected int32, got float32"),
        ({"logits": torch.zeros(40)}, r"logits: expected a tensor \[B, V\], got \(40,\)"),
        ({"logits": torch.zeros(1, 40, dtype=torch.float64)}, "logits: expected float32"),
        ({"logits": torch.zeros(40, 2).T[:1]}, "unit stride"),
        ({"logits": torch.zeros(1, 0)}, "at least one token"),
        ({"out": fs.Sample.empty(2)}, r"out token_ids: expected shape \(1,\)"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"logits": torch.zeros(1, 40), "seed": 0, "position": 0} | options
    with pytest.raises(fs.InvalidInput, match=message) as caught:
        fs.sample(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
