"""RoPE, attention, log-probabilities and int8 products against oracles, within float32 rounding."""

import math

import pytest
import torch
import torch.nn.functional as F

from fused_spec.kernels.attention import STRIDE, attention, attention_reference, span
from fused_spec.kernels.logprob import token_logprobs
from fused_spec.kernels.rope import rope, rope_reference, rope_table
from fused_spec.models import linear
from fused_spec.models.linear import DenseLinear, Int8Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope(dtype: torch.dtype) -> None:
    """Angles are float32 products: at position p they are off by p * 2^-24 radians at most, twice over."""
    positions = torch.tensor([0, 1, 2, 511, 4000])
    x = torch.randn(5, 3, 64).to(dtype)
    ours = rope(x, rope_table(10000.0, 64, 4001)[positions][:, None])
    exact = rope_reference(x, positions, 10000.0)
    bound = (positions * 2.0**-23 + 2.0**-21)[:, None, None] * x.abs().max()
    assert ((ours.double() - exact).abs() < bound).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("first", [0, 1, 37])
@pytest.mark.parametrize("width", [1, 2, 6, 20])
def test_attention(heads: int, kv_heads: int, first: int, width: int) -> None:
    """Slots behind a row's own position never matter: they hold NaN beyond the block and large values within it."""
    positions = torch.arange(first, first + width)
    k, v = torch.randn(2, STRIDE, kv_heads, 16)
    k[first + width :], v[first + width :] = math.nan, math.nan
    q = torch.randn(width, heads, 16)
    ours = attention(q, k, v, span(positions))
    exact = attention_reference(q, k, v, positions)
    # Weights sum to 1 and |v| < 6, so the error is a few float32 roundings of values below 6.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=6 * 2.0**-20)


@pytest.mark.parametrize("start", [20, 250, 508, 1019])
def test_a_row_is_the_same_bits_anywhere_in_a_block(start: int) -> None:
    """Also where blocks begin and end on either side of a stride."""
    k, v = torch.randn(2, 3 * STRIDE, 3, 64)
    q = torch.randn(3 * STRIDE, 9, 64)
    expected = attention(q[start : start + 5], k.clone(), v.clone(), span(torch.arange(start, start + 5)))
    for shift in range(-4, 5):
        where = torch.arange(start + shift, start + shift + 5)
        other = attention(q[where], k.clone(), v.clone(), span(where))
        for i in range(max(0, shift), min(5, 5 + shift)):
            assert torch.equal(other[i - shift], expected[i])


def test_rows_of_a_block_do_not_see_later_ones() -> None:
    q, k, v = torch.randn(4, 2, 8), torch.randn(STRIDE, 2, 8), torch.randn(STRIDE, 2, 8)
    where = span(torch.arange(10, 14))
    before = attention(q, k, v, where)
    k[12:], v[12:] = 1e4, 1e4
    assert torch.equal(attention(q, k, v, where)[:2], before[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_logprobs(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 5000) * 3).to(dtype)
    ids = torch.tensor([7, 4999, -1, 0])
    ours = token_logprobs(logits, ids)
    exact = logits.double().log_softmax(-1)
    assert ours[2].isnan()
    for i in (0, 1, 3):
        assert ours[i].item() == pytest.approx(exact[i, ids[i]].item(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("columns", [64, 48, 16, 24, 33])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_int8_product(
    dtype: torch.dtype, fused: bool, columns: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantisation moves a weight by half a step of max|row| / 127; both products then agree with the exact sum."""
    if not fused:
        monkeypatch.setattr(linear, "_has_int8_product", lambda device: False)
    weight = torch.randn(96, columns).to(dtype)
    weight[5] = 0
    product = Int8Linear(weight)
    fused = fused and columns % 16 == 0
    assert product.fused == fused
    restored = product.weight.double() * product.scale.double()[:, None]
    step = weight.double().abs().amax(1, keepdim=True) / 127
    # The scale, rounded to bfloat16, is off by 2^-9 of itself, up to 127 times.
    assert ((restored - weight.double()).abs() <= step * (0.5 + 127 * 2.0**-8) + 1e-30).all()
    guarded = torch.full((3 * columns + 200,), math.nan, dtype=dtype)  # unaligned, and NaN on both sides
    x = guarded[64 + offset : 64 + offset + 3 * columns].view(3, columns)
    x.copy_(torch.randn(3, columns))
    exact = x.double() @ restored.T
    # The fused product rounds x and the result to bfloat16, the other one all it does to the working dtype.
    eps = torch.finfo(torch.bfloat16 if fused else dtype).eps
    scale = x.double().abs() @ restored.abs().T
    assert ((product(x).double() - exact).abs() <= 2 * eps * scale + 1e-30).all()
    assert product.quantize_int8() is product


def test_dense_product_and_its_copy() -> None:
    weight = torch.randn(10, 6)
    x = torch.randn(2, 6)
    assert torch.equal(DenseLinear(weight)(x), F.linear(x, weight))
    assert isinstance(DenseLinear(weight).quantize_int8(), Int8Linear)
