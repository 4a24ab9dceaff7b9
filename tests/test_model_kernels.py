"""RoPE, attention, log-probabilities and int8 products against oracles, within float32 rounding."""

import math

import pytest
import torch
import torch.nn.functional as F

from fused_spec.kernels.attention import attention, attention_reference, span
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
    k, v = torch.randn(2, 64, kv_heads, 16)
    k[first + width :], v[first + width :] = math.nan, math.nan
    q = torch.randn(width, heads, 16)
    ours = attention(q, k, v, span(positions))
    exact = attention_reference(q, k, v, positions)
    # Weights sum to 1 and |v| < 6, so the error is a few float32 roundings of values below 6.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=6 * 2.0**-20)


def test_rows_of_a_block_do_not_see_later_ones() -> None:
    q, k, v = torch.randn(4, 2, 8), torch.randn(32, 2, 8), torch.randn(32, 2, 8)
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
def test_int8_product(dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantisation moves a weight by half a step of max|row| / 127; both products then agree with the exact sum."""
    if not fused:
        monkeypatch.setattr(linear, "_has_int8_product", lambda dtype, device: False)
    weight = torch.randn(96, 64).to(dtype)
    weight[5] = 0
    product = Int8Linear(weight)
    restored = product.weight.double() * product.scale.double()[:, None]
    step = weight.double().abs().amax(1, keepdim=True) / 127
    # A bfloat16 scale adds a relative error of 2^-9 to the half step.
    assert ((restored - weight.double()).abs() <= step * (0.5 + 127 * 2.0**-9) + 1e-30).all()
    x = torch.randn(3, 64).to(dtype)
    exact = x.double() @ restored.T
    eps = torch.finfo(dtype).eps
    scale = x.double().abs() @ restored.abs().T
    assert ((product(x).double() - exact).abs() <= 2 * eps * scale + 1e-30).all()
    assert product.quantize_int8() is product


def test_dense_product_and_its_copy() -> None:
    weight = torch.randn(10, 6)
    x = torch.randn(2, 6)
    assert torch.equal(DenseLinear(weight)(x), F.linear(x, weight))
    assert isinstance(DenseLinear(weight).quantize_int8(), Int8Linear)
