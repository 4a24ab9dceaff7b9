"""The Triton path of `int4_linear`: one launch; a program has a few outputs, and goes along their rows of the weight.

A thread takes a whole group of every output: one load of 128 bits for the levels, one of 32 for scale and middle. With
s = sum x (level - 8) and t = sum x over the group's columns it adds scale * s + middle * t to what it sums.
"""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.int8_linear_triton import ENOUGH_PROGRAMS, Tile, stacked, store_products
from fused_spec.kernels.launch import launch


def int4_tile(rows: int, outs: int, columns: int) -> Tile:
    """Four loads of 128 bits in flight for each thread, where there are enough outputs and registers for that."""
    few = outs < 4 * ENOUGH_PROGRAMS
    groups = min(max(triton.next_power_of_2(triton.cdiv(columns, 32)), 32), 128)
    return Tile(rows=min(rows, 2), outs=2 if few or rows > 1 else 4, columns=32 * groups, warps=groups // 32)


@triton.jit
def _eight_columns(row, columns, first, GROUPS: tl.constexpr):
    """Two blocks [G, 4] float32: four columns from first [G, 1] on, and the next four; 0 beyond the last one."""
    if row.dtype.element_ty == tl.float32:
        c = first + tl.arange(0, 4)[None, :]
        low = tl.load(row + c, mask=c < columns, other=0.0)
        high = tl.load(row + c + 4, mask=c + 4 < columns, other=0.0)
    else:  # also in loads of 128 bits
        c = first + tl.arange(0, 8)[None, :]
        both = tl.load(row + c, mask=c < columns, other=0.0).to(tl.float32)
        low, high = tl.split(tl.permute(tl.reshape(both, [GROUPS, 2, 4]), (0, 2, 1)))
    return low, high


@triton.jit
def _products(row, columns, g, words, pairs, OUTS: tl.constexpr, GROUPS: tl.constexpr):
    """Sums [G] over the columns of groups g [G] of one row of x, for each output.

    Four levels under the exponent of 2^23, all but one of them masked, are 2^23 + 16^place * level as a number: exact,
    and done in fewer instructions than shifts and the hardware's conversions take.
    """
    total = tl.zeros([GROUPS, 4], tl.float32)
    parts: tl.tuple = ()
    for _o in tl.static_range(OUTS):
        parts += (total,)
    for half in tl.static_range(2):
        halves: tl.tuple = ()
        for o in tl.static_range(OUTS):
            halves += ((words[o] >> (16 * half)) & 0xFFFF | 0x4B000000,)
        for pair in tl.static_range(0, 4, 2):
            blocks = _eight_columns(row, columns, g[:, None] * 32 + 16 * half + 4 * pair, GROUPS)
            for i in tl.static_range(2):
                total += blocks[i]
                block = blocks[i] * (1.0 / 16 ** (pair + i))
                longer: tl.tuple = ()
                for o in tl.static_range(OUTS):
                    level = (halves[o] & (0x7F800000 + 15 * 16 ** (pair + i))).to(tl.float32, bitcast=True)
                    longer += (tl.fma(level - (8388608.0 + 8 * 16 ** (pair + i)), block, parts[o]),)
                parts = longer
    t = tl.sum(total, 1)
    products: tl.tuple = ()
    for o in tl.static_range(OUTS):
        scale = (pairs[o] << 16).to(tl.float32, bitcast=True)
        middle = (pairs[o] & -65536).to(tl.float32, bitcast=True)
        products += (tl.sum(parts[o], 1) * scale + t * middle,)
    return products


@triton.jit
def int4_linear_kernel(
    x, x_stride, levels, scale_and_middle, bias, out, out_stride, rows, outs, columns, groups, row_tiles,
    ROWS: tl.constexpr, OUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)  # row tiles next to each other: the second one finds the weight in the cache
    first_row, first_out = program % row_tiles * ROWS, program // row_tiles * OUTS
    sums = tl.zeros([GROUPS, ROWS * OUTS], tl.float32)
    for start in range(0, groups, GROUPS):
        g = start + tl.arange(0, GROUPS)
        inside = g < groups
        four = g[:, None] * 4 + tl.arange(0, 4)[None, :]
        words: tl.tuple = ()
        pairs: tl.tuple = ()
        for o in tl.static_range(OUTS):  # beyond the last output, that one again
            at = tl.minimum(first_out + o, outs - 1).to(tl.int64) * groups
            word = tl.load(levels + at * 4 + four, mask=inside[:, None], other=0, eviction_policy="evict_first")
            pair = tl.load(scale_and_middle + at + g, mask=inside, other=0, eviction_policy="evict_first")
            words += (word,)
            pairs += (pair,)
        products: tl.tuple = ()
        for r in tl.static_range(ROWS):
            row = x + tl.minimum(first_row + r, rows - 1).to(tl.int64) * x_stride
            products = products + _products(row, columns, g, words, pairs, OUTS, GROUPS)
        sums += stacked(products)
    store_products(tl.sum(sums, 0), None, bias, out, out_stride, rows, outs, first_row, first_out, OUTS)


def int4_linear_triton(
    x: torch.Tensor,
    levels: torch.Tensor,
    scale_and_middle: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """Launch for arguments that were checked; writes out [R, out]. `tile` is for tests."""
    (rows, columns), (outs, groups, _) = x.shape, scale_and_middle.shape
    tile = tile or int4_tile(rows, outs, columns)
    row_tiles = triton.cdiv(rows, tile.rows)
    launch(
        int4_linear_kernel,
        (triton.cdiv(outs, tile.outs) * row_tiles,),
        num_warps=tile.warps,
        x=x,
        x_stride=x.stride(0),
        levels=levels.view(torch.int32),
        scale_and_middle=scale_and_middle.view(torch.int32),
        bias=bias,
        out=out,
        out_stride=out.stride(0),
        rows=rows,
        outs=outs,
        columns=columns,
        groups=groups,
        row_tiles=row_tiles,
        ROWS=tile.rows,
        OUTS=tile.outs,
        GROUPS=tile.columns // 32,
    )
