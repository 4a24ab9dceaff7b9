"""RMS norm, RoPE, attention and log-probabilities against oracles, within float32 rounding."""

import math

import pytest
import torch

from bitwise import assert_same_row
from fused_spec.kernels.attention import HeadBuffers, Span, attention, attention_reference, span
from fused_spec.kernels.logprob import token_logprobs
from fused_spec.kernels.rms_norm import NormBuffers, RMSNorm, rms_norm, rms_norm_reference
from fused_spec.kernels.rope import as_pairs, rope, rope_frequencies, rope_reference, rope_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(dtype: torch.dtype, eps: float, scale: float) -> None:
    """A length of n terms, summed in any order, is off by n/2 roundings at most; four operations add one each."""
    x = torch.randn(3, 5, 48) * scale
    x[1] = 0
    weight = torch.randn(5, 48).to(dtype)
    exact = rms_norm_reference(x, weight, eps)
    for out in (torch.empty_like(x), x):  # in place as well
        rms_norm(x, RMSNorm.of(weight, eps), NormBuffers.like(x), out=out)
        assert ((out.double() - exact).abs() <= exact.abs() * (24 + 8) * 2.0**-24).all()


def test_rms_norm_into_bfloat16() -> None:
    x, weight, out = torch.randn(3, 48), torch.randn(48), torch.empty(3, 48, dtype=torch.bfloat16)
    rms_norm(x, RMSNorm.of(weight, 1e-5), NormBuffers.like(x), out=out)
    exact = rms_norm_reference(x, weight, 1e-5)
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_a_sum(dtype: torch.dtype) -> None:
    """The same bits as the two steps one by one; without buffers as well."""
    x, add, norm = torch.randn(3, 48), torch.randn(3, 48).to(dtype), RMSNorm.of(torch.randn(48), 1e-5)
    total, expected = x + add, torch.empty(3, 48)
    rms_norm(total, norm, NormBuffers.like(total), out=expected)
    for buffers in (NormBuffers.like(x), None):
        stream, out = x.clone(), torch.empty(3, 48)
        rms_norm(stream, norm, buffers, out=out, add=add)
        assert torch.equal(stream, total)
        assert torch.equal(out, expected)


def test_rope() -> None:
    """Angles are float32 products: at position p they are off by p * 2^-24 radians at most, twice over."""
    positions = torch.tensor([0, 1, 2, 511, 4000])
    x = torch.randn(5, 3, 64)
    ours = torch.empty(3, 5, 64).transpose(0, 1)  # the result may lie anywhere
    rope(as_pairs(x), rope_table(rope_frequencies(10000.0, 64), 4001)[positions][:, None], out=as_pairs(ours))
    exact = rope_reference(x, positions, 10000.0)
    bound = (positions * 2.0**-23 + 2.0**-21)[:, None, None] * x.abs().max()
    assert ((ours.double() - exact).abs() < bound).all()


def test_rope_table_has_the_amplitude() -> None:
    table = rope_table(rope_frequencies(10000.0, 8), 5, amplitude=1.25)
    torch.testing.assert_close(table.abs(), torch.full((5, 4), 1.25))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, by_head: bool = False
) -> tuple[torch.Tensor, Span]:
    """Queries [W, H, D] over a cache [capacity, Hkv, D], as a layer does it."""
    width, heads, dim = q.shape
    where = span(torch.arange(first, first + width), heads // k.shape[1], by_head)
    out = torch.full((width, heads * dim), math.nan)
    buffers = HeadBuffers.of(out, k.shape[1], dim, by_head)
    buffers.queries.copy_(as_pairs(q).unflatten(1, (k.shape[1], -1)))
    attention(buffers, where, *(buffer[None, : where.end].transpose(1, 2) for buffer in (k, v)))
    return out.view(width, heads, dim), where


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("first", [0, 1, 37, 60, 300])
@pytest.mark.parametrize("width", [1, 2, 6, 20, 128, 129, 200])
@pytest.mark.parametrize("by_head", [False, True])
def test_attention(heads: int, kv_heads: int, first: int, width: int, by_head: bool) -> None:
    """Slots behind a row's own position never matter; those beyond what the block looks at may hold anything."""
    k, v = torch.randn(2, 640, kv_heads, 16)
    k[first + width :], v[first + width :] = 1e4, 1e4
    q = torch.randn(width, heads, 16)
    where = span(torch.arange(first, first + width), heads // kv_heads, by_head)
    k[where.end :], v[where.end :] = math.nan, math.nan
    ours, _ = attend(q, k, v, first, by_head)
    oracle = attention_reference(q, k, v, torch.arange(first, first + width))
    # Weights sum to 1 and |v| < 6, so the error is a few float32 roundings of values below 6.
    torch.testing.assert_close(ours.double(), oracle, rtol=0, atol=6 * 2.0**-20)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (16, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("position", [3, 63, 64, 127, 128, 253, 256, 300, 380, 511, 512, 637, 700, 766, 1022, 1024])
def test_a_row_is_the_same_bits_in_any_block(heads: int, kv_heads: int, position: int) -> None:
    """Wherever in a narrow block it stands, however wide that is, and on which side of a stride the block ends."""
    k, v = torch.randn(2, 1152, kv_heads, 64)
    q = torch.randn(1100, heads, 64)
    expected, _ = attend(q[position : position + 1], k, v, position)
    for width in (2, 3, 5, 7, 9, 33):
        for before in {0, 1, width // 2, width - 1}:
            if before <= position:
                start = position - before
                rows, _ = attend(q[start : start + width], k, v, start)
                assert_same_row(rows[before], expected[0], 2.0**-20)


@pytest.mark.parametrize("width", [4, 150])
@pytest.mark.parametrize("by_head", [False, True])
def test_rows_of_a_block_do_not_see_later_ones(width: int, by_head: bool) -> None:
    q, k, v = torch.randn(width, 2, 8), torch.randn(192, 2, 8), torch.randn(192, 2, 8)
    before, _ = attend(q, k, v, 10, by_head)
    k[12:], v[12:] = 1e4, 1e4
    after, _ = attend(q, k, v, 10, by_head)
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2:], before[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_logprobs(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 5000) * 3).to(dtype)
    ids = torch.tensor([7, 4999, -1, 0])
    ours = token_logprobs(logits, ids)
    exact = logits.double().log_softmax(-1)
    assert ours[2].isnan()
    for i in (0, 1, 3):
        assert ours[i].item() == pytest.approx(exact[i, ids[i]].item(), abs=1e-5)
