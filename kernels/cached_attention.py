"""Attention of a block over a static cache on a GPU, behind one function: flash-attn's, or our own.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

"flash" calls `flash_attn_with_kvcache` for every width. "triton" decodes and verifies with kernels/split_attention.py;
a prompt's wide blocks go through torch's scaled_dot_product_attention, which is made for them and, outside of any
captured graph, may ask the device where the block begins.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fused_spec.errors import InvalidInput
from fused_spec.kernels.flash_attention import flash_attention, require, usable

BACKENDS = ("auto", "flash", "triton")

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(queries [W, H, D], keys and values [capacity, Hkv, D], out [W, H, D]): the attention of one layer."""


def cached_attention(
    backend: str, keys: torch.Tensor, used: torch.Tensor, num_heads: int, width: int
) -> Callable[[torch.Tensor], Attend]:
    """The attention of a model's layers, for one cache.

    Args:
        backend: "flash", "triton", or "auto": flash-attn where it is installed and takes the dtype and head size.
        keys: one layer's cache [capacity, Hkv, D], for its sizes, dtype and device.
        used: [1] int32, where the number of valid slots will be found, those of the block in hand among them.
        num_heads: H, of the queries.
        width: the widest block that is decoded rather than prefilled.

    Returns:
        A function that takes the positions [W] int64 of a block and gives what attends for it in every layer.

    Raises:
        InvalidInput: the backend is none of these, or flash-attn is asked for and cannot be used.
    """
    if backend not in BACKENDS:
        raise InvalidInput(f"attention must be one of {', '.join(map(repr, BACKENDS))} off the CPU, got {backend!r}")
    if backend == "flash" or (backend == "auto" and usable(keys.dtype, keys.shape[2], keys.device)):
        require(keys.dtype, keys.shape[2])
        return lambda positions: lambda queries, keys, values, out: flash_attention(queries, keys, values, used, out)
    from fused_spec.kernels.split_attention import SplitBuffers, split_attention  # a CPU needs no Triton

    buffers = SplitBuffers.empty(keys.shape[0], width, num_heads, keys.shape[1], keys.shape[2], keys.device)

    def over(positions: torch.Tensor) -> Attend:
        if len(positions) > width:
            return prefill_attention(positions)
        return lambda queries, keys, values, out: split_attention(queries, keys, values, positions, out, buffers)

    return over


def prefill_attention(positions: torch.Tensor) -> Attend:
    """Attention of a wide block at these positions, by torch. Reads the first of them on the host."""
    first, width = int(positions[0]), len(positions)
    end = first + width
    mask = None if first == 0 else torch.arange(end, device=positions.device) <= positions[:, None]

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys[:end], values[:end]))
        if mask is not None:  # torch's quick kernels take a mask or grouped heads, not both
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != q.shape[1]
        )
        out.copy_(result[0].transpose(0, 1))

    return attend
