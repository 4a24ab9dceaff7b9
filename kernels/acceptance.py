"""The arithmetic of the acceptance rules, on scalars.

A drafted token n with draft probability p_n is accepted iff u * p_n < g, strictly and in linear space, where u is
uniform in [0, 1); p_n = 0 rejects. A rejected slot draws its token in proportion to (h - p)+ with h_n = g and
h_x = s q_x elsewhere, so two scalars describe a rule: the threshold g and the residual scale s.

    SpeculativeSampling: g = q_n,                                        s = 1
    Cactus, taylor:      g = min(q_n + sqrt(2 delta q_n (1 - q_n)), 1),  s = 1 - sqrt(2 delta q_n / (1 - q_n))
    Cactus, exact:       g = largest root of d(g||q_n) = delta,          s = (1 - g) / (1 - q_n)

with s = 0 where g = 1, and the binary divergence d(g||q) = g ln(g/q) + (1-g) ln((1-g)/(1-q)).
"""

import math
from typing import NamedTuple

import torch

from fused_spec.errors import InvalidInput
from fused_spec.rules import Cactus, Rule, SpeculativeSampling


class Decision(NamedTuple):
    """What a rule says about one drafted token: accept iff u * p_n < threshold; residual (scale * q - p)+ off n."""

    threshold: float
    residual_scale: float


def decide(rule: Rule, q_n: float) -> Decision:
    """Threshold and residual scale of a rule with scalar parameters for a draft of verifier probability q_n."""
    if isinstance(rule, SpeculativeSampling):
        return Decision(q_n, 1.0)
    if isinstance(rule, Cactus):
        return (
            _cactus_exact(q_n, float(rule.delta)) if rule.solver == "exact" else _cactus_taylor(q_n, float(rule.delta))
        )
    raise InvalidInput(f"rule must be one of SpeculativeSampling, Cactus, got {type(rule).__name__}")


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


def acceptance_reference(rule: Rule, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[float, float, torch.Tensor]:
    """Float64 oracle written from the definitions: (accept probability, tv_gain, normalised residual law [V]).

    p, q: [V] float64 laws with p[token] > 0. The residual is q where (h - p)+ has no mass.
    """
    p_n, q_n = p[token].item(), q[token].item()
    if isinstance(rule, SpeculativeSampling):
        h = q.clone()
    elif isinstance(rule, Cactus) and rule.solver == "taylor":
        g = min(q_n + math.sqrt(2 * float(rule.delta) * q_n * (1 - q_n)), 1.0)
        h = q * ((1 - g) / (1 - q_n)) if q_n < 1 else torch.zeros_like(q)
        h[token] = g
    elif isinstance(rule, Cactus):
        g = _largest_root_reference(q_n, float(rule.delta))
        h = q * ((1 - g) / (1 - q_n)) if q_n < 1 else torch.zeros_like(q)
        h[token] = g
    else:
        raise InvalidInput(f"no reference for {type(rule).__name__}")
    accept = min(1.0, h[token].item() / p_n)
    residual = (h - p).clamp(min=0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    return accept, accept - min(1.0, q_n / p_n), residual


def _largest_root_reference(q: float, delta: float) -> float:
    """The g >= q with d(g||q) = delta by plain bisection of the textbook formula; 1 where d stays below delta."""
    if q in (0.0, 1.0) or -math.log(q) <= delta:
        return 0.0 if q == 0 else 1.0
    low, high = q, 1.0
    for _ in range(200):
        g = (low + high) / 2
        divergence = g * math.log(g / q) + ((1 - g) * math.log((1 - g) / (1 - q)) if g < 1 else 0.0)
        low, high = (g, high) if divergence <= delta else (low, g)
    return low
