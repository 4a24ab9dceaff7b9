"""MentoredDecoding's bounds, searched for in a fixed number of sweeps over a pair of rows.

    pi = clip(p, low q, high q), 0 where q = 0, with low <= 1 <= high, sum pi = 1 and KL(q||pi) = kl

(Tran-Thien 2023.) With r = p / q, raising p to low q adds a mass t, and capping it at high q, or at q = 0, removes it:

    sum (low q - p)+ = t = sum (p - high q)+
    KL(q||pi) = F + G,  F = -sum q ln max(min(r, 1), low),  G = -sum q ln min(max(r, 1), high)

As functions of t, F and G are convex with the slopes -1/low and 1/high, since a token held by a bound adds q dlow to t
and -q dlow / low to F; their sum falls to 0 at low = high = 1. A sweep sums up t and F for 32 values of low, t and G
for 32 of high: knots on the two curves. At the t of a knot, KL lies between the best of the other curve's tangents and
its chord, which leaves one or two of the 31 intervals: 6 sweeps narrow ln low from 69, and ln high from 88, to about
1e-6 or less. kernels/pair_bounds.py launches them.
"""

import triton
import triton.language as tl

KNOTS = tl.constexpr(32)
"""Values of each bound that one sweep tries, evenly spaced in their logarithm, the loosest first: t rises."""

SWEEPS = 6

SUMS = tl.constexpr(4 * 32)
"""Float32 numbers of a tile: [2, KNOTS, 2], mass and cost of every low, then of every high."""

LOWEST = tl.constexpr(-69.3147180559945)
"""ln 2^-100: added to a row of probabilities, less q cannot be told from none."""

HIGHEST = tl.constexpr(88.02969193111305)
"""ln 2^127: ratios beyond it need a q below float32's normal numbers, which a GPU may take for 0."""

SAME = tl.constexpr(1e-30)
"""Masses no further apart are equal: LOWEST is to count as low = 0."""

_AT_ONCE = tl.constexpr(8)


@triton.jit
def next_bracket(bracket, partials, slot, tiles, budget, CHUNK: tl.constexpr):
    """(ln low of knot 0, step to the next, ln high of knot 0, step) for a sweep of a slot, from the one before.

    bracket: these four numbers as they were then, [slots, 4], None before the first sweep; partials: what that sweep
    summed up, [slots, tiles, SUMS]. Every program that calls this gets the same, bit for bit: tiles merge in order.
    """
    if bracket is None:
        one = tl.full([], 1.0, tl.float64)
        low, low_step = one * LOWEST, one * (-LOWEST / (KNOTS - 1))
        high, high_step = one * HIGHEST, one * (-HIGHEST / (KNOTS - 1))
    else:
        bracket += slot * 4
        partials += slot * tiles * SUMS
        low, low_step = tl.load(bracket), tl.load(bracket + 1)
        high, high_step = tl.load(bracket + 2), tl.load(bracket + 3)
        low_mass, low_cost = _merged(partials, tiles, CHUNK)
        high_mass, high_cost = _merged(partials + 2 * KNOTS, tiles, CHUNK)
        low_cost = -low_cost
        j = tl.arange(0, KNOTS)
        low_slope, high_slope = -tl.exp(-low - low_step * j), tl.exp(-high - high_step * j)
        low_first, low_last = _interval(low_mass, low_cost, high_mass, high_cost, high_slope, budget)
        high_first, high_last = _interval(high_mass, high_cost, low_mass, low_cost, low_slope, budget)
        low += low_step * low_first
        high += high_step * high_first
        low_step *= (low_last - low_first) / (KNOTS - 1)
        high_step *= (high_last - high_first) / (KNOTS - 1)
    return low, low_step, high, high_step


@triton.jit
def store_bracket(bracket, slot, low, low_step, high, high_step):
    """For the next sweep's `next_bracket`."""
    bracket += slot * 4
    tl.store(bracket, low)
    tl.store(bracket + 1, low_step)
    tl.store(bracket + 2, high)
    tl.store(bracket + 3, high_step)


@triton.jit
def try_knots(p, q, log_ratio, start, step, out, SIGN: tl.constexpr):
    """Stores a tile's (mass, cost) for every knot of one bound; SIGN 1: (t, -F) of low, -1: (t, G) of high, its mirror.

    p, q, log_ratio: [TILE] float32; what ln r is where q = 0 does not matter, but for NaN.
    """
    p, q = (SIGN * p)[None, :], q[None, :]
    log_ratio = tl.minimum(SIGN * log_ratio, 0.0)[None, :]
    for k in range(0, KNOTS, _AT_ONCE):
        j = k + tl.arange(0, _AT_ONCE)
        log_bound = start + step * j
        bound = (SIGN * tl.exp(log_bound)).to(tl.float32)[:, None]
        log_bound = (SIGN * log_bound).to(tl.float32)[:, None]
        tl.store(out + 2 * j, tl.sum(tl.maximum(bound * q - p, 0.0), 1))
        tl.store(out + 2 * j + 1, tl.sum(q * tl.maximum(log_ratio, log_bound), 1))


@triton.jit
def _merged(partials, tiles, CHUNK: tl.constexpr):
    """(mass, cost) of the knots of one bound [KNOTS], float64."""
    j = tl.arange(0, KNOTS)
    mass = tl.zeros([KNOTS], tl.float64)
    cost = mass
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        at = partials + tile[:, None] * SUMS + 2 * j[None, :]
        inside = (tile < tiles)[:, None] & (j < KNOTS)[None, :]
        mass += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float64), 0)
        cost += tl.sum(tl.load(at + 1, mask=inside, other=0.0).to(tl.float64), 0)
    return mass, cost


@triton.jit
def _interval(mass, cost, other_mass, other_cost, other_slope, budget):
    """Indices of two knots of a curve with the answer between them: the last too loose, the first within the budget.

    Knots with less mass than any of the other bracket are too loose, those with more than all of it within the budget:
    so it was when that bracket was made.
    """
    j = tl.arange(0, KNOTS)
    gap = mass[:, None] - other_mass[None, :]
    least = cost + tl.max(other_cost[None, :] + gap * other_slope[None, :], 1)  # by the best tangent
    passed = tl.sum((gap >= -SAME).to(tl.int32), 1)  # how many of the other's knots have no more mass
    before, after = tl.maximum(passed - 1, 0), tl.minimum(passed, KNOTS - 1)
    start, end = tl.gather(other_mass, before, 0), tl.gather(other_mass, after, 0)
    start_cost, end_cost = tl.gather(other_cost, before, 0), tl.gather(other_cost, after, 0)
    share = tl.minimum(tl.maximum(mass - start, 0.0) / tl.where(end > start, end - start, 1.0), 1.0)
    most = cost + start_cost + share * (end_cost - start_cost)  # by the chord
    loose = (passed == 0) | (least > budget)
    within = (passed == KNOTS) | ((passed > 0) & (most <= budget))
    last = tl.min(tl.where(within, j, KNOTS - 1), 0)
    return tl.minimum(tl.max(tl.where(loose, j, 0), 0), last), last
