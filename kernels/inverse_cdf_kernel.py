"""Inverse CDF in registers, and the lowest legal id: see kernels/inverse_cdf.py for the law."""

import triton
import triton.language as tl

from fused_spec.kernels.processed_rows import INT_MAX
from fused_spec.kernels.row_access import GROUP


@triton.jit
def pick(weights, goal, SIZE: tl.constexpr):
    """(index, mass before it) at which the running sum of weights [SIZE] float32 >= 0 exceeds the goal, in float64.

    An entry of zero weight is never picked, whatever rounding does: a scan in parallel is monotone up to rounding only,
    and the goal may lie a rounding above the sum. -1 if no entry has weight.
    """
    index = tl.arange(0, SIZE)
    mass = weights.to(tl.float64)
    able = weights > 0
    reached = tl.min(tl.where(able & (tl.cumsum(mass, 0) > goal), index, INT_MAX), 0)
    last = tl.max(tl.where(able, index, -1), 0)
    found = tl.minimum(reached, last)
    return found, tl.sum(tl.where(index < found, mass, 0.0), 0)


@triton.jit
def lowest_allowed(allowed, size):
    """The lowest id that a bitmask (or None) allows; 0 where it allows none. Only rows without a law need it."""
    token = 0
    if allowed is not None:
        found = INT_MAX + tl.zeros([], tl.int32)
        for start in range(0, size, GROUP):
            ids = start + tl.arange(0, GROUP)
            word = tl.load(allowed + ids // 32, mask=ids < size, other=0)
            legal = ((word >> (ids % 32)) & 1) != 0
            found = tl.minimum(found, tl.min(tl.where(legal & (ids < size), ids, INT_MAX), 0))
        token = tl.where(found == INT_MAX, 0, found)
    return token
