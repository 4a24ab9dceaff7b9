"""The Triton path of `int8_linear`: one launch; a program has a few outputs, and goes along their rows of the weight.

A thread takes 16 neighbouring columns of every output, 128 bits, and loads those of all outputs before it uses any.
What it sums stays its own until the end. Each output is a block of its own, of the shape of the block of x: then both
are laid out alike, and nothing has to be exchanged between threads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.kernels.launch import launch

VECTOR = tl.constexpr(16)
"""Weights of one load."""

ENOUGH_PROGRAMS = 3 * 132
"""Three for every multiprocessor of an H100: with fewer, programs are made smaller."""


class Tile(NamedTuple):
    """What one program does at a time.

    Attributes:
        rows: of x. outs: rows of the weight. columns: of both.
        warps: as many as have something to load.
    """

    rows: int
    outs: int
    columns: int
    warps: int


def int8_tile(rows: int, outs: int, columns: int) -> Tile:
    """Four loads of 128 bits in flight for each thread, and a short row as a whole."""
    few = outs < 4 * ENOUGH_PROGRAMS
    wide = min(max(triton.next_power_of_2(columns), 512), 4096 if few else 2048)
    return Tile(rows=min(rows, 2), outs=2 if few else 4, columns=wide, warps=min(wide // 512, 4))


@triton.jit
def stacked(blocks):
    """[S, n] of a tuple of n = 1, 2, 4 or 8 blocks [S], in their order. Threads keep what they have."""
    for _level in tl.static_range(3):
        if len(blocks) > 1:
            pairs: tl.tuple = ()
            for i in tl.static_range(len(blocks) // 2):
                pairs += (tl.join(blocks[i], blocks[i + len(blocks) // 2]),)
            blocks = pairs
    return tl.reshape(blocks[0], [blocks[0].shape[0], blocks[0].numel // blocks[0].shape[0]])


@triton.jit
def store_products(sums, scale, bias, out, out_stride, rows, outs, first_row, first_out, OUTS: tl.constexpr):
    """Write scale * sums + bias; sums [n] are those of OUTS outputs for one row after another. scale may be None."""
    slots = tl.arange(0, sums.shape[0])
    r, o = first_row + slots // OUTS, first_out + slots % OUTS
    there = (r < rows) & (o < outs)
    if scale is not None:
        sums *= tl.load(scale + o, mask=there, other=0.0)
    if bias is not None:
        sums += tl.load(bias + o, mask=there, other=0.0).to(tl.float32)
    tl.store(out + r.to(tl.int64) * out_stride + o, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _as_float(integers):
    """int8 to float32 in whole-rate instructions; the conversion that the hardware has is slower than memory.

    1.5 * 2^23 + i has i in its last bits.
    """
    return (integers.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def int8_linear_kernel(
    x, x_stride, weight, scale, bias, out, out_stride, rows, outs, columns, row_tiles,
    ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)  # row tiles next to each other: the second one finds the weight in the cache
    first_row, first_out = program % row_tiles * ROWS, program // row_tiles * OUTS
    VECTORS: tl.constexpr = COLUMNS // VECTOR
    lanes = tl.arange(0, VECTORS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    sums = tl.zeros([VECTORS, ROWS * OUTS], tl.float32)
    for start in range(0, columns, COLUMNS):
        c = start + lanes
        inside = c < columns
        weights: tl.tuple = ()
        for o in tl.static_range(OUTS):  # beyond the last output, that one again
            at = weight + tl.minimum(first_out + o, outs - 1).to(tl.int64) * columns
            weights += (tl.load(at + c, mask=inside, other=0, eviction_policy="evict_first"),)
        products: tl.tuple = ()
        for r in tl.static_range(ROWS):
            at = x + tl.minimum(first_row + r, rows - 1).to(tl.int64) * x_stride
            row = tl.load(at + c, mask=inside, other=0.0).to(tl.float32)
            for o in tl.static_range(OUTS):
                products += (tl.sum(row * _as_float(weights[o]), 1),)
        sums += stacked(products)
    store_products(tl.sum(sums, 0), scale, bias, out, out_stride, rows, outs, first_row, first_out, OUTS)


def int8_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """Launch for arguments that were checked; writes out [R, out]. `tile` is for tests."""
    (rows, columns), outs = x.shape, len(weight)
    tile = tile or int8_tile(rows, outs, columns)
    row_tiles = triton.cdiv(rows, tile.rows)
    launch(
        int8_linear_kernel,
        (triton.cdiv(outs, tile.outs) * row_tiles,),
        num_warps=tile.warps,
        x=x,
        x_stride=x.stride(0),
        weight=weight,
        scale=scale,
        bias=bias,
        out=out,
        out_stride=out.stride(0),
        rows=rows,
        outs=outs,
        columns=columns,
        row_tiles=row_tiles,
        ROWS=tile.rows,
        OUTS=tile.outs,
        COLUMNS=tile.columns,
    )
