"""Where a row is cut: the largest key K with mass(z > K) >= goal, by bisection over int32 keys in the order of float32.

Tokens above K are kept. The mass counts tokens for top-k and adds up exp(z - max z) for top-p; either never grows with
K, rounded or not, since floating-point addition is monotone and the order of the sum is fixed.
"""

import triton
import triton.language as tl

from fused_spec.kernels.processed_rows import INT_MAX
from fused_spec.kernels.row_access import SUBGROUP, scaled_logits

LOWEST = tl.constexpr(-2139095041)
"""The key of -inf: a token above it is allowed, and a row cut there is not cut."""

WAYS = tl.constexpr(8)
"""How many keys one sweep over a row tries: 11 sweeps at most instead of 32."""


@triton.jit
def ordered(z):
    """int32 keys in the order of float32 numbers, with one key for both zeros."""
    bits = z.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(key == -1, 0, key)


@triton.jit
def unordered(key):
    """The float32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_above(key, weight, bound):
    """float64 sum of the weights, a block [N, 128] or one number, where the key is above `bound`."""
    return tl.sum(tl.sum(tl.where(key > bound.to(tl.int32), weight, 0.0), 1), 0).to(tl.float64)


@triton.jit
def search_block(key, weight, low, high, goal, least, most):
    """Neighbours (K, K + 1) with mass(> K) >= goal > mass(> K + 1), for K in [low, high); int64 scalars.

    The goal counts as reached at `low` and missed at `high`. Any K with least <= mass(> K) <= most ends the search as
    (K, K).
    """
    while high - low > 1:
        middle = (low + high) >> 1
        above = mass_above(key, weight, middle)
        found = (above >= least) & (above <= most)
        low = tl.where(found | (above >= goal), middle, low)
        high = tl.where(found | (above < goal), middle, high)
    return low, high


@triton.jit
def search_row(row, size, allowed, temperature, top, low, high, goal, COUNT: tl.constexpr, TILE: tl.constexpr):
    """K as `search_block` finds it, of a whole row that is read again for every step."""
    way = tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS) // (WAYS + 1)  # rounded up
        bounds = tl.minimum(low + (way + 1) * step, high).to(tl.int32)
        above = tl.zeros([WAYS], tl.float64)
        for start in range(0, size, TILE):
            ids = start + tl.arange(0, TILE)
            z = scaled_logits(row, ids, ids < size, allowed, temperature)
            weight = 1.0 if COUNT else tl.exp(z - top)[:, None]
            above += tl.sum(tl.where(ordered(z)[:, None] > bounds[None, :], weight, 0.0), 0).to(tl.float64)
        reached = tl.sum((above >= goal).to(tl.int32), 0)  # by the lower of the bounds
        high = tl.minimum(low + (reached + 1) * step, high)
        low += reached * step
    return low


@triton.jit
def block_sums(key, weight, top, cut):
    """Of the tokens of a block above `cut`: float64 mass and mass times z - top, and the lowest key."""
    kept = key > cut.to(tl.int32)
    w = tl.where(kept, weight, 0.0)
    below = tl.where(w > 0, unordered(key) - top, 0.0)  # 0 * -inf would be NaN
    total = tl.sum(tl.sum(w, 1).to(tl.float64), 0)
    weighted_total = tl.sum(tl.sum(w * below, 1).to(tl.float64), 0)
    return total, weighted_total, tl.min(tl.min(tl.where(kept, key, INT_MAX), 1), 0)


@triton.jit
def row_sums(row, size, allowed, temperature, top, cut, TILE: tl.constexpr):
    """The same of a whole row."""
    total = top.to(tl.float64) * 0.0
    weighted_total = total
    lowest = ordered(top)
    ids = tl.arange(0, TILE // SUBGROUP)[:, None] * SUBGROUP + tl.arange(0, SUBGROUP)[None, :]
    for start in range(0, size, TILE):
        z = scaled_logits(row, start + ids, start + ids < size, allowed, temperature)
        t, m, lowest_here = block_sums(ordered(z), tl.exp(z - top), top, cut)
        total += t
        weighted_total += m
        lowest = tl.minimum(lowest, lowest_here)
    return total, weighted_total, lowest
