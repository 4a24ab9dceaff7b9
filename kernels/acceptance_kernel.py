"""The acceptance rules in registers: threshold and residual scale of many slots at once, in float64.

The formulas are those of kernels/acceptance.py, one branch per rule, chosen when the kernel is compiled. The exact
root of Cactus' binary divergence comes from a fixed number of Newton steps that fall back to bisection: d(g||q) is
convex and rises from q to 1, so that a step from either side lands right of the root and goes down from there.
"""

import torch
import triton
import triton.language as tl

from fused_spec.rules import (
    Cactus,
    CascadeOpt,
    CascadeToken,
    Ensemble,
    Lenience,
    MentoredDecoding,
    Rule,
    SpeculativeSampling,
    TypicalAcceptance,
)

SPECULATIVE_SAMPLING = tl.constexpr(0)
CACTUS = tl.constexpr(1)
CACTUS_EXACT = tl.constexpr(2)
TYPICAL = tl.constexpr(3)
LENIENCE = tl.constexpr(4)
ENSEMBLE = tl.constexpr(5)
PAIR = tl.constexpr(6)
PAIR_WITHIN_SUPPORT = tl.constexpr(7)

_NEWTON_STEPS = tl.constexpr(12)
"""Enough for 1e-9 of g, over probabilities from 1e-300 to 1 - 1e-9 and budgets from 1e-12 to -ln q."""

Number = float | torch.Tensor


def rule_arguments(rule: Rule) -> tuple[int, Number, Number]:
    """(branch, first and second parameter) of a rule; a parameter that it lacks is 0."""
    if isinstance(rule, SpeculativeSampling):
        return SPECULATIVE_SAMPLING.value, 0.0, 0.0
    if isinstance(rule, Cactus):
        return (CACTUS_EXACT if rule.solver == "exact" else CACTUS).value, rule.delta, 0.0
    if isinstance(rule, TypicalAcceptance):
        return TYPICAL.value, rule.epsilon, rule.alpha
    if isinstance(rule, Lenience):
        return LENIENCE.value, rule.lenience, 0.0
    if isinstance(rule, Ensemble):
        return ENSEMBLE.value, rule.weight, 0.0
    assert isinstance(rule, MentoredDecoding | CascadeOpt | CascadeToken)
    return (PAIR_WITHIN_SUPPORT if isinstance(rule, MentoredDecoding) else PAIR).value, 0.0, 0.0


@triton.jit
def _largest_root(q, delta):
    """The g in (q, 1) with d(g||q) = delta, for 0 < q < 1 and 0 < delta < -ln q."""
    low, high = q, 1.0 + 0.0 * q
    g = q + tl.sqrt(2 * delta * q * (1 - q))
    g = tl.where(g < 1, g, (1 + q) / 2)
    for _ in range(_NEWTON_STEPS):
        above = tl.log(g / q)
        x = (q - g) / (1 - q)
        series = x * (1 - x * (0.5 - x * (0.3333333333333333 - x * 0.25)))  # ln(1 + x), whose x must not be rounded off
        below = tl.where(x > -1e-3, series, tl.log((1 - g) / (1 - q)))
        excess = g * above + (1 - g) * below - delta
        low, high = tl.where(excess <= 0, g, low), tl.where(excess > 0, g, high)
        slope = above - below
        step = g - excess / tl.where(slope > 0, slope, 1.0)
        within = (step >= low) & (step <= high) & (step > q) & (step < 1)
        g = tl.where((slope > 0) & within, step, (low + high) / 2)
    return g


@triton.jit
def threshold_and_scale(p, q, first, second, entropy, weight, low, high, cut, share, RULE: tl.constexpr):
    """(g, s) of slots: accept iff u * p < g, else resample from (s q - p)+, or from (pi - p)+ of a pair rule.

    p, q: [S] float64 probabilities of the drafts. first, second: the rule's parameters. entropy: of q in nats.
    weight: q relative to its row's largest. low, high, cut, share: pi of a pair rule (kernels/pair_rules.py).
    """
    g = q
    s = 1.0 + 0.0 * q
    if RULE == CACTUS:
        g = tl.minimum(q + tl.sqrt(2 * first * q * (1 - q)), 1.0)
        s = tl.where(g < 1, 1 - tl.sqrt(2 * first * q / tl.where(g < 1, 1 - q, 1.0)), 0.0)
    elif RULE == CACTUS_EXACT:
        first += 0.0 * q  # a block: Triton 3.9's interpreter mistakes the dtype of a scalar comparison that it spreads
        between = (first > 0) & (q > 0) & (q < 1)
        safe = tl.where(between, q, 0.5)
        whole = between & (first >= -tl.log(safe))
        g = tl.where(between, _largest_root(safe, tl.where(between & (whole == 0), first, 0.1)), q)
        g = tl.where(whole, 1.0, g)
        s = tl.where(between, (1 - g) / (1 - safe), tl.where((q < 1) | (first == 0), 1.0, 0.0))
    elif RULE == TYPICAL:
        bar = tl.minimum(first, second * tl.exp(-entropy))
        g = tl.where(q > bar, float("inf"), 0.0)
    elif RULE == LENIENCE:
        g = q / first
    elif RULE == ENSEMBLE:
        g = first * q + (1 - first) * p
    elif RULE >= PAIR:
        g = clipped(tl.where(weight >= cut, p, 0.0), q, low, high) + share * q
        if RULE == PAIR_WITHIN_SUPPORT:
            g = tl.where(q > 0, g, 0.0)
    return g, s


@triton.jit
def clipped(kept, q, low, high):
    """`kept` within [low q, high q]; a bound of infinity is none, also where q = 0."""
    upper = tl.where(high < float("inf"), high, 0.0) * q
    kept = tl.maximum(kept, low * q)
    return tl.where(high < float("inf"), tl.minimum(kept, upper), kept)
