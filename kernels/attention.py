"""Attention of a few new tokens over a static KV cache, causal within the block.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

Query head h reads key/value head h // G, G = H / Hkv. Grouped heads: Ainslie et al. 2023, arXiv 2305.13245.

A row of a narrow block must come out the same bits wherever in a block it stands and however wide the block is, or
greedy text would depend on what was drafted. In torch's CPU kernel the bits of a row depend on two sizes: on the number
of slots, so narrow blocks attend to whole strides with what is not valid yet masked; and on the number of query rows
that are multiplied at once, so it is made a multiple of four. Such rows are the query heads of a group, which read the
same keys.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fused_spec.kernels.rope import as_pairs

STRIDE = 128
"""Slots that narrow blocks attend to are a multiple of this; so is a cache's capacity."""

_ROWS = 4
_NARROW = 128
"""Widest block that is decoded rather than prefilled: 64 drafts and one more, with room to spare."""


@dataclass(frozen=True)
class Block:
    """W consecutive tokens that attend: which slots they may read, and a buffer for their queries.

    Built once per forward pass and used by every layer.

    Attributes:
        first: slot of the block's first token.
        valid: number of slots that are valid once the block is written.
        end: number of slots that are looked at; those from `valid` on must hold finite numbers.
        mask: what is added to scores, 0 or -inf, [rows, end]; None for a plainly causal block.
        queries: [W, Hkv, G, D/2] complex64, rotary pairs: where the layer at hand puts its queries; a view of `rows`.
        rows: [1, Hkv, W G + padding, D] if the block is narrow, [1, H, W, D] if it is wide.
    """

    first: int
    valid: int
    end: int
    mask: torch.Tensor | None
    queries: torch.Tensor
    rows: torch.Tensor


def block(positions: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> Block:
    """The block at consecutive positions [W]; reads the first of them on the host."""
    first, width, group, device = int(positions[0]), positions.numel(), heads // kv_heads, positions.device
    valid = first + width
    if width > _NARROW:
        rows = torch.empty(1, heads, width, head_dim, device=device)
        queries = rows.view(kv_heads, group, width, head_dim).permute(2, 0, 1, 3)
        return Block(first, valid, valid, _hide_later(positions, valid) if first else None, as_pairs(queries), rows)
    end, used = -(-valid // STRIDE) * STRIDE, width * group
    rows = torch.zeros(1, kv_heads, -(-used // _ROWS) * _ROWS, head_dim, device=device)
    queries = rows[0, :, :used].view(kv_heads, width, group, head_dim).transpose(0, 1)
    padded = F.pad(positions.repeat_interleave(group), (0, -used % _ROWS), value=first)
    return Block(first, valid, end, _hide_later(padded, end), as_pairs(queries), rows)


def _hide_later(positions: torch.Tensor, end: int) -> torch.Tensor:
    later = torch.arange(end, device=positions.device) > positions[:, None]
    return torch.zeros(later.shape, device=positions.device).masked_fill_(later, -torch.inf)


def attention(where: Block, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend to the slots of one layer's cache.

    Args:
        where: the block, with this layer's queries in its buffer.
        k, v: [1, Hkv, end, D] float32, the slots that the block looks at, its own among them.

    Returns:
        [W, H D] float32.
    """
    width, kv_heads, group, _ = where.queries.shape
    if width > _NARROW:
        out = F.scaled_dot_product_attention(
            where.rows, k, v, attn_mask=where.mask, is_causal=where.mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(width, -1)
    out = F.scaled_dot_product_attention(where.rows, k, v, attn_mask=where.mask)
    return out[0, :, : width * group].view(kv_heads, width, group, -1).transpose(0, 1).reshape(width, -1)


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
