"""Attention of a few new tokens over a static KV cache, causal within the block.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

Query head h reads key/value head h // G, G = H / Hkv. Grouped heads: Ainslie et al. 2023, arXiv 2305.13245.

A row of a narrow block must come out the same bits wherever in a block it stands and however wide the block is, or
greedy text would depend on what was drafted. In torch's CPU kernel the bits of a row depend on two sizes. One is the
number of slots it looks at: here that is its own position rounded up to a whole stride, whatever the block, and what it
may not see is masked. The other is the number of query rows that are multiplied at once: a multiple of four here. Such
rows are the query heads of a group, which read the same keys.

Where bits do not matter, in a prompt and for a draft model, the rows of a query head are multiplied on their own, with
as many slots as are valid. That takes less time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fused_spec.kernels.rope import as_pairs

STRIDE = 64
"""The number of slots that a narrow block's row looks at is a multiple of this; so is a cache's capacity."""

_ROWS = 4
NARROW = 128
"""Widest block that is decoded rather than prefilled: 64 drafts and one more, with room to spare."""


class Part(NamedTuple):
    """Some tokens of a block, which look at the same slots.

    Attributes:
        tokens: which, counted from the start of the block.
        end: number of slots that are looked at.
        mask: what is added to scores, 0 or -inf: [rows, end], for all rows of the block; None if plainly causal, one
            token that sees all slots included.
    """

    tokens: slice
    end: int
    mask: torch.Tensor | None


class Span(NamedTuple):
    """Which cache slots a block of consecutive tokens may read; built once per forward pass, shared by all layers.

    Attributes:
        first: slot of the block's first token.
        valid: number of slots that are valid once the block is written.
        parts: one, or one for each stride that a narrow block has tokens in.
    """

    first: int
    valid: int
    parts: list[Part]

    @property
    def end(self) -> int:
        """Number of slots that any token looks at; those from `valid` on must hold finite numbers."""
        return self.parts[-1].end


def span(positions: torch.Tensor, group: int, by_head: bool) -> Span:
    """The span of a block at consecutive positions [W], for G query heads in a group; reads the first on the host."""
    first, width = int(positions[0]), positions.numel()
    valid = first + width
    if by_head:
        mask = _hide_later(positions, valid) if first and width > 1 else None
        return Span(first, valid, [Part(slice(0, width), valid, mask)])
    padding = -width * group % _ROWS
    if width == 1:
        rows = positions.expand(group + padding)
    else:
        rows = F.pad(positions.repeat_interleave(group), (0, padding), value=first)
    whole = _hide_later(rows, -(-valid // STRIDE) * STRIDE)
    parts = []
    for end in range((first // STRIDE + 1) * STRIDE, whole.shape[1] + 1, STRIDE):
        tokens = slice(max(end - STRIDE - first, 0), min(end - first, width))
        parts.append(Part(tokens, end, whole if end == whole.shape[1] else whole[:, :end].contiguous()))
    return Span(first, valid, parts)


def _hide_later(positions: torch.Tensor, end: int) -> torch.Tensor:
    later = torch.arange(end, device=positions.device) > positions[:, None]
    return torch.zeros(later.shape, device=positions.device).masked_fill_(later, -torch.inf)


@dataclass(frozen=True)
class HeadBuffers:
    """Where the queries of W tokens are put and their results come out, in the order that attention wants.

    Attributes:
        queries: [W, Hkv, G, D/2] complex64, rotary pairs: a view of `rows` to write to.
        rows: [1, Hkv, W G + padding, D] float32, or [1, H, W, D] by head.
        used: how many of the rows count.
        results: a view of the [W, H D] that `of` was given: [Hkv, W, G, D], for one token [1, Hkv, G, D], and by head
            [1, H, W, D].
    """

    queries: torch.Tensor
    rows: torch.Tensor
    used: int
    results: torch.Tensor

    @classmethod
    def of(cls, out: torch.Tensor, kv_heads: int, head_dim: int, by_head: bool) -> "HeadBuffers":
        """Buffers for results in `out` [W, H D], of any dtype."""
        heads = out.unflatten(1, (kv_heads, -1, head_dim))  # [W, Hkv, G, D]
        width, _, group, _ = heads.shape
        if by_head:
            rows = out.new_zeros(1, kv_heads * group, width, head_dim, dtype=torch.float32)
            queries = rows.view(kv_heads, group, width, head_dim).permute(2, 0, 1, 3)
            return cls(as_pairs(queries), rows, width, heads.flatten(1, 2).transpose(0, 1)[None])
        used = width * group
        rows = out.new_zeros(1, kv_heads, -(-used // _ROWS) * _ROWS, head_dim, dtype=torch.float32)
        queries = rows[0, :, :used].view(kv_heads, width, group, head_dim).transpose(0, 1)
        return cls(as_pairs(queries), rows, used, heads if width == 1 else heads.transpose(0, 1))


def attention(buffers: HeadBuffers, where: Span, k: torch.Tensor, v: torch.Tensor) -> None:
    """Attend to the slots of one layer's cache.

    Args:
        buffers: hold the layer's queries, and take its results.
        where: the block's span, by head as the buffers are or not.
        k, v: [1, Hkv, end, D] float32, the slots that the span looks at, the block's own among them.
    """
    grouped = k.shape[1] == buffers.rows.shape[1]
    for part in where.parts:
        causal = part.mask is None and buffers.used > 1  # one row sees all slots; torch would let it see the first
        if part.end < where.end:  # a block on both sides of a stride's end: every row is computed for each side
            keys, values = k[:, :, : part.end], v[:, :, : part.end]
        else:
            keys, values = k, v
        out = F.scaled_dot_product_attention(
            buffers.rows, keys, values, attn_mask=part.mask, is_causal=causal, enable_gqa=not grouped
        )
        results = out[:, :, : buffers.used]
        if results.shape != buffers.results.shape:
            results = results.view(buffers.results.shape)
        if len(where.parts) == 1:
            buffers.results.copy_(results)
        else:
            buffers.results[:, part.tokens] = results[:, part.tokens]


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
