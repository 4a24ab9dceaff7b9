"""Attention of a few new tokens over a static KV cache, causal within the block.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

Query head h reads key/value head h // (H / Hkv). Grouped heads: Ainslie et al. 2023, arXiv 2305.13245.

A row of a narrow block must come out the same bits wherever in a block it stands, or greedy text would depend on what
was drafted. torch's CPU kernel walks the cache in strides of 512 slots and only the last, shorter one depends on the
length, so narrow blocks attend to whole strides, with what is not valid yet masked and cleared.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

STRIDE = 512
"""Slots that torch's CPU attention handles at a time. A cache's capacity is a multiple of it."""

_NARROW = 128
"""Widest block that is decoded rather than prefilled: 64 drafts and one more, with room to spare."""


class Span(NamedTuple):
    """Which cache slots a block of consecutive tokens may read; built once per forward and shared by all layers.

    Attributes:
        valid: number of slots that are valid once the block is written.
        end: number of slots that are looked at.
        mask: [W, end] bool, True where row i may read slot j; None where every row reads every slot.
        causal: the block starts at position 0, so a plain causal mask does.
    """

    valid: int
    end: int
    mask: torch.Tensor | None
    causal: bool


def span(positions: torch.Tensor) -> Span:
    """The span of a block at consecutive positions [W]; reads the first of them on the host."""
    first, width = int(positions[0]), positions.numel()
    valid = first + width
    if width == 1:
        return Span(valid, valid, None, False)
    if width <= _NARROW:
        end = -(-valid // STRIDE) * STRIDE
        return Span(valid, end, torch.arange(end, device=positions.device) <= positions[:, None], False)
    if first == 0:
        return Span(valid, valid, None, True)
    return Span(valid, valid, torch.arange(valid, device=positions.device) <= positions[:, None], False)


def attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, where: Span) -> torch.Tensor:
    """Attend to the valid slots of one layer's cache.

    Args:
        q: [W, H, D], dtype of the cache.
        k_cache, v_cache: [capacity, Hkv, D], capacity a multiple of STRIDE; the block's own keys and values are written
            already. Stale slots that the span covers are set to zero: a mask does not hide a NaN.
        where: the span of the block.

    Returns:
        [W, H, D] in q's dtype.
    """
    if where.end > where.valid:
        k_cache[where.valid : where.end].zero_()
        v_cache[where.valid : where.end].zero_()
    k, v = k_cache[: where.end].transpose(0, 1), v_cache[: where.end].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=where.mask, is_causal=where.causal, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Float64 oracle, row by row and head by head."""
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            k, v = k_cache[: position + 1, head // group].double(), v_cache[: position + 1, head // group].double()
            out[i, head] = (k @ q[i, head].double() / q.shape[2] ** 0.5).softmax(0) @ v
    return out
