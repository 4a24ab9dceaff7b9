"""Processed rows inside a kernel: P(x) = exp((z_x - shift) + offset) where z_x >= cutoff, else 0.

A row's shift is its largest logit / T and its offset -log(sum exp(z - shift)) over the kept tokens. Both come from the
group statistics of `row_statistics`, or from `row_cutoffs` where filters are on; no probability is ever stored.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.kernels.row_access import finite_base

INT_MAX = tl.constexpr(2**31 - 1)


class Laws(NamedTuple):
    """What filters leave of each row, rows in the order of `GroupStatistics`.

    Attributes:
        peak: [rows] float32, the largest z; a greedy row's too.
        total: [rows] float64, sum exp(z - peak) over kept tokens; NaN of a row with a NaN or +inf, 0 of an empty one.
        cutoff: [rows] float32, the smallest kept z, -inf where nothing is cut.
        weighted_total: [rows] float64, sum exp(z - peak) (z - peak) over kept tokens, or None.
    """

    peak: torch.Tensor
    total: torch.Tensor
    cutoff: torch.Tensor
    weighted_total: torch.Tensor | None


@triton.jit
def merged_peaks(peak, rows, inside, groups, all_rows, CHUNK: tl.constexpr):
    """[S] float32 largest z of some rows [S] (int64 indices, `inside` marks those that exist)."""
    top = tl.max(tl.full([CHUNK, rows.shape[0]], -float("inf"), tl.float32), 0)
    for start in range(0, groups, CHUNK):
        g = start + tl.arange(0, CHUNK)
        there = (g < groups)[:, None] & inside[None, :]
        m = tl.load(peak + g[:, None] * all_rows + rows[None, :], mask=there, other=-float("inf"))
        top = tl.maximum(top, tl.max(m, 0))
    return top


@triton.jit
def merged_sums(peak, mass, weighted, top, rows, inside, groups, all_rows, CHUNK: tl.constexpr):
    """[S] float64 sums of exp(z - top) and of exp(z - top) (z - top), groups merged in order; 0 without `weighted`."""
    base = finite_base(top)
    total = tl.sum(tl.zeros([CHUNK, rows.shape[0]], tl.float64), 0)
    weighted_total = total
    for start in range(0, groups, CHUNK):
        g = start + tl.arange(0, CHUNK)
        there = (g < groups)[:, None] & inside[None, :]
        at = g[:, None] * all_rows + rows[None, :]
        below = tl.load(peak + at, mask=there, other=-float("inf")) - base[None, :]
        scale = tl.exp(below)
        s = tl.load(mass + at, mask=there, other=0.0) * scale
        total += tl.sum(s.to(tl.float64), 0)
        if weighted is not None:
            e = tl.load(weighted + at, mask=there, other=0.0) * scale + s * tl.where(s > 0, below, 0.0)
            weighted_total += tl.sum(e.to(tl.float64), 0)
    return total, weighted_total


@triton.jit
def merged_first(peak, first, top, rows, inside, groups, all_rows, CHUNK: tl.constexpr):
    """[S] int32 lowest id with z = top: the greedy token of each row."""
    token = tl.min(tl.full([CHUNK, rows.shape[0]], INT_MAX, tl.int32), 0)
    for start in range(0, groups, CHUNK):
        g = start + tl.arange(0, CHUNK)
        there = (g < groups)[:, None] & inside[None, :]
        at = g[:, None] * all_rows + rows[None, :]
        m = tl.load(peak + at, mask=there, other=-float("inf"))
        f = tl.load(first + at, mask=there, other=INT_MAX)
        token = tl.minimum(token, tl.min(tl.where(there & (m == top[None, :]), f, INT_MAX), 0))
    return token


@triton.jit
def row_laws(
    peak,
    mass,
    weighted,
    law_peak,
    law_total,
    law_cutoff,
    law_weighted_total,
    rows,
    inside,
    groups,
    all_rows,
    CHUNK: tl.constexpr,
):
    """(peak, total, cutoff, weighted_total) of rows [S]: merged from statistics, or loaded if law_peak is given."""
    if law_peak is not None:
        top = tl.load(law_peak + rows, mask=inside, other=-float("inf"))
        total = tl.load(law_total + rows, mask=inside, other=0.0)
        cutoff = tl.load(law_cutoff + rows, mask=inside, other=-float("inf"))
        weighted_total = total
        if law_weighted_total is not None:
            weighted_total = tl.load(law_weighted_total + rows, mask=inside, other=0.0)
    else:
        top = merged_peaks(peak, rows, inside, groups, all_rows, CHUNK)
        total, weighted_total = merged_sums(peak, mass, weighted, top, rows, inside, groups, all_rows, CHUNK)
        cutoff = tl.full([rows.shape[0]], -float("inf"), tl.float32)
    return top, total, cutoff, weighted_total


@triton.jit
def probability(z, cutoff, shift, offset):
    """P of tokens by their z as float32: 0 below the cutoff, of -inf and of NaN."""
    return tl.where(z >= cutoff, tl.exp((z - shift) + offset), 0.0)


def law_arguments(laws: Laws | None, *names: str) -> dict[str, torch.Tensor | None]:
    """Some tensors of the laws as a kernel takes them, as law_peak and so on; None each where nothing is filtered."""
    return {f"law_{name}": None if laws is None else getattr(laws, name) for name in names}


def chunk_of_groups(rows: int) -> int:
    """How many groups are merged at a time, for S padded rows: about 1024 numbers, eight a thread."""
    return max(8, min(256, 1024 // rows))
