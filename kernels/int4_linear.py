"""Product of a few rows with a weight in 4 bits: 32 neighbours of a row share a scale and a middle.

    w = (level - 8) scale + middle,  level in 0..15,  y = x w^T + bias

Only the weight is quantised; sums are float32. 5 bits a weight are read: with few rows, what time is spent on. Groups
with an offset are those of llama.cpp's Q4_1, the packing is for the kernel in kernels/int4_linear_triton.py.
"""

import torch
import torch.nn.functional as F

from fused_spec.kernels.check import check_tensor, runs_on_triton
from fused_spec.kernels.int8_linear import check_rows, checked_output

GROUP = 32
"""Columns of a row that share a scale and a middle."""


def pack_levels(levels: torch.Tensor) -> torch.Tensor:
    """Levels 0..15 [out, columns], whole groups, of any integer dtype, as bytes [out, columns / 2] uint8.

    A group is 16 bytes, one load of 128 bits: 4 words of 32 bits, lowest byte first. Nibble n of word j, counted from
    the lowest bits, is column 4 n + j. So the nibbles in one place of the four words are neighbours, as what they are
    multiplied by is, and those of one word need no shift apart: what is left of a word under a mask is a level times
    a power of two.
    """
    low, high = levels.to(torch.uint8).unflatten(1, (-1, 4, 2, 4)).unbind(3)  # [out, groups, byte, word]
    return (low | high << 4).transpose(2, 3).flatten(1)


def unpack_levels(packed: torch.Tensor) -> torch.Tensor:
    """What `pack_levels` was given, [out, columns] uint8."""
    octets = packed.unflatten(1, (-1, 4, 4)).transpose(2, 3)  # [out, groups, byte, word]
    return torch.stack([octets & 15, octets >> 4], dim=3).flatten(1)


def int4_weight(levels: torch.Tensor, scale_and_middle: torch.Tensor) -> torch.Tensor:
    """The weight that packed levels and their groups stand for, [out, columns] float32, columns of whole groups."""
    scale, middle = scale_and_middle.float().split(1, dim=-1)
    groups = unpack_levels(levels).unflatten(1, (-1, GROUP))
    return ((groups.float() - 8) * scale + middle).flatten(1)


def int4_linear(
    x: torch.Tensor,
    levels: torch.Tensor,
    scale_and_middle: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply rows.

    Args:
        x: [R, in] float32, bfloat16 or float16, unit stride in the last dimension.
        levels: [out, 16 G] uint8 with G = ceil(in / 32), as `pack_levels` makes them, contiguous. Columns from `in` on
            may be any level.
        scale_and_middle: [out, G, 2] bfloat16, finite, contiguous: both in one load.
        bias: [out] of any floating dtype, contiguous, or None.
        out: where the result goes, or None.
        backend: "triton", "torch", or None: Triton where x is not on the CPU.

    Returns:
        [R, out] in the dtype of x; `out` if given. Sums are float32, in an order that depends on the shapes only.

    Raises:
        InvalidInput: an argument has another shape, dtype or stride than stated here.
    """
    check_rows(x)
    outs, columns = len(levels), x.shape[1]
    groups = -(-columns // GROUP)
    check_tensor("levels", levels, (outs, groups * GROUP // 2), (torch.uint8,))
    check_tensor("scale_and_middle", scale_and_middle, (outs, groups, 2), (torch.bfloat16,))
    out = checked_output(x, (levels, scale_and_middle), bias, outs, out)
    if len(x) and runs_on_triton(backend, x.device):
        from fused_spec.kernels.int4_linear_triton import int4_linear_triton  # the torch path needs no Triton

        int4_linear_triton(x, levels, scale_and_middle, bias, out)
        return out
    dense = int4_weight(levels, scale_and_middle)[:, :columns]
    return out.copy_(F.linear(x.float(), dense, None if bias is None else bias.float()))


def int4_linear_reference(
    x: torch.Tensor, levels: torch.Tensor, scale_and_middle: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Float64 oracle, one column at a time."""
    y = torch.zeros(len(x), len(levels), dtype=torch.float64)
    for column in range(x.shape[1]):
        group, place = divmod(column, GROUP)
        nibble, word = divmod(place, 4)
        octet = levels[:, 16 * group + 4 * word + nibble // 2].long()
        scale, middle = scale_and_middle[:, group].double().unbind(1)
        y += torch.outer(x[:, column].double(), ((octet >> 4 * (nibble % 2) & 15) - 8) * scale + middle)
    return y if bias is None else y + bias.double()
