"""The arithmetic of the acceptance rules, on scalars.

A drafted token n with draft probability p_n is accepted iff u * p_n < g, strictly and in linear space, where u is
uniform in [0, 1); p_n = 0 rejects. A rejected slot draws its token from a residual. For most rules that is (h - p)+
with h_n = g and h_x = s q_x elsewhere, so two scalars describe the rule, the threshold g and the residual scale s:

    SpeculativeSampling: g = q_n,                                        s = 1
    Cactus, taylor:      g = min(q_n + sqrt(2 delta q_n (1 - q_n)), 1),  s = 1 - sqrt(2 delta q_n / (1 - q_n))
    Cactus, exact:       g = largest root of d(g||q_n) = delta,          s = (1 - g) / (1 - q_n)
    Lenience:            g = q_n / lenience,                             s = 1
    Ensemble:            g = weight q_n + (1 - weight) p_n,              s = 1

with s = 0 where Cactus' g is 1, and d(g||q) = g ln(g/q) + (1-g) ln((1-g)/(1-q)). TypicalAcceptance accepts iff
q_n > min(epsilon, alpha exp(-H(q))) and otherwise takes the arg max of q. The rules that look at the whole pair of rows
have a file of their own, kernels/pair_rules.py.
"""

import math
from typing import NamedTuple

from fused_spec.rules import Cactus, Ensemble, Lenience, MentoredDecoding, Rule, SpeculativeSampling


class Decision(NamedTuple):
    """What a rule says about one drafted token: accept iff u * p_n < threshold; residual (scale * q - p)+ off n."""

    threshold: float
    residual_scale: float


def decide(rule: Rule, p_n: float, q_n: float) -> Decision | None:
    """Threshold and residual scale of a rule with scalar parameters; None if it needs more than p_n and q_n."""
    if isinstance(rule, SpeculativeSampling):
        return Decision(q_n, 1.0)
    if isinstance(rule, Cactus):
        return (
            _cactus_exact(q_n, float(rule.delta)) if rule.solver == "exact" else _cactus_taylor(q_n, float(rule.delta))
        )
    if isinstance(rule, Lenience):
        return Decision(q_n / float(rule.lenience), 1.0)
    if isinstance(rule, Ensemble):
        weight = float(rule.weight)
        return Decision(weight * q_n + (1 - weight) * p_n, 1.0)
    if isinstance(rule, MentoredDecoding) and rule.kl == 0:
        return Decision(q_n, 1.0)
    return None


def _cactus_taylor(q_n: float, delta: float) -> Decision:
    threshold = min(q_n + math.sqrt(2 * delta * q_n * (1 - q_n)), 1.0)
    if threshold == 1.0:
        return Decision(1.0, 0.0)
    return Decision(threshold, 1 - math.sqrt(2 * delta * q_n / (1 - q_n)))


def _cactus_exact(q_n: float, delta: float) -> Decision:
    if delta == 0 or q_n == 0:
        return Decision(q_n, 1.0)
    if delta >= -math.log(q_n):
        return Decision(1.0, 0.0)
    low, high = q_n, 1.0  # d is 0 at q_n and rises to -ln q_n > delta at 1
    while low < (middle := (low + high) / 2) < high:
        if _binary_kl(middle, q_n) <= delta:
            low = middle
        else:
            high = middle
    return Decision(low, (1 - low) / (1 - q_n))


def _binary_kl(g: float, q: float) -> float:
    """d(g||q) for 0 < q <= g < 1, in a form that keeps its digits where g is close to q."""
    return g * math.log1p((g - q) / q) + (1 - g) * math.log1p((q - g) / (1 - q))


def typical_threshold(epsilon: float, alpha: float, entropy: float) -> float:
    """What q_n must exceed under TypicalAcceptance; entropy of q in nats."""
    return min(epsilon, alpha * math.exp(-entropy))
