"""Attention of a few new tokens over a static KV cache, causal within the block.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

Query head h reads key/value head h // (H / Hkv). Grouped heads: Ainslie et al. 2023, arXiv 2305.13245.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Span(NamedTuple):
    """Which cache slots a block of consecutive tokens may read; built once per forward and shared by all layers.

    Attributes:
        valid: number of slots that are valid once the block is written.
        mask: [W, valid] bool, True where row i may read slot j; None where every row reads every slot.
        causal: the block starts at position 0, so a plain causal mask does.
    """

    valid: int
    mask: torch.Tensor | None
    causal: bool


def span(positions: torch.Tensor) -> Span:
    """The span of a block at consecutive positions [W] (host memory)."""
    first, width = int(positions[0]), positions.numel()
    valid = first + width
    if width == 1:
        return Span(valid, None, False)
    if first == 0:
        return Span(valid, None, True)
    return Span(valid, torch.arange(valid) <= positions[:, None], False)


def attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, where: Span) -> torch.Tensor:
    """Attend to the valid slots of one layer's cache.

    Args:
        q: [W, H, D], dtype of the cache.
        k_cache, v_cache: [capacity, Hkv, D]; the block's own keys and values are written already.
        where: the span of the block.

    Returns:
        [W, H, D] in q's dtype.
    """
    k, v = k_cache[: where.valid].transpose(0, 1), v_cache[: where.valid].transpose(0, 1)
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
