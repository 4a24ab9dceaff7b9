"""Float64 oracle of every acceptance rule, written from the definitions and used by tests only."""

import math
from typing import Any

import numpy as np
import torch

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


def acceptance_reference(
    rule: Rule, p: torch.Tensor, q: torch.Tensor, token: int, target: torch.Tensor | None = None
) -> tuple[float, float, torch.Tensor]:
    """(accept probability, gain over speculative sampling, normalised residual law [V]) of one draft.

    p, q: [V] float64 laws with p[token] > 0. The residual is q where (h - p)+ has no mass. `target` saves computing h
    again for rules whose h is the same for every token.
    """
    p_n, q_n = p[token].item(), q[token].item()
    if isinstance(rule, TypicalAcceptance):
        entropy = -torch.xlogy(q, q).sum().item()
        accept = 1.0 if q_n > min(float(rule.epsilon), float(rule.alpha) * math.exp(-entropy)) else 0.0
        return accept, accept - min(1.0, q_n / p_n), torch.nn.functional.one_hot(q.argmax(), len(q)).double()
    if isinstance(rule, Lenience | Ensemble):
        share = q_n / float(rule.lenience) if isinstance(rule, Lenience) else None
        weight = float(rule.weight) if isinstance(rule, Ensemble) else 1.0
        accept = min(1.0, (weight * q_n + (1 - weight) * p_n if share is None else share) / p_n)
        h = q
    else:
        h = target_reference(rule, p, q, token) if target is None else target
        accept = min(1.0, h[token].item() / p_n)
    residual = (h - p).clamp(min=0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    return accept, accept - min(1.0, q_n / p_n), residual


def target_reference(rule: Rule, p: torch.Tensor, q: torch.Tensor, token: int) -> torch.Tensor:
    """h [V]: the law a draft is tested against and resampled from."""
    if isinstance(rule, SpeculativeSampling):
        return q
    if isinstance(rule, Cactus):
        q_n, delta = q[token].item(), float(rule.delta)
        g = (
            _largest_root(q_n, delta)
            if rule.solver == "exact"
            else min(q_n + math.sqrt(2 * delta * q_n * (1 - q_n)), 1.0)
        )
        h = q * ((1 - g) / (1 - q_n)) if q_n < 1 else torch.zeros_like(q)
        h[token] = g
        return h
    if isinstance(rule, CascadeOpt):
        return q if p.max() < q.max() - float(rule.alpha) * (q - p).clamp(min=0).sum() else p
    if isinstance(rule, CascadeToken):
        kept = p * (q >= (1 - float(rule.alpha)) * q.max())
        return kept + (1 - kept.sum()) * q
    assert isinstance(rule, MentoredDecoding)
    return _mentored(p, q, float(rule.kl))


def _largest_root(q: float, delta: float) -> float:
    """The g >= q with d(g||q) = delta by plain bisection of the textbook formula; 1 where d stays below delta."""
    if q in (0.0, 1.0) or -math.log(q) <= delta:
        return 0.0 if q == 0 else 1.0
    low, high = q, 1.0
    for _ in range(200):
        g = (low + high) / 2
        divergence = g * math.log(g / q) + ((1 - g) * math.log((1 - g) / (1 - q)) if g < 1 else 0.0)
        low, high = (g, high) if divergence <= delta else (low, g)
    return low


def _mentored(p: torch.Tensor, q: torch.Tensor, kl: float) -> torch.Tensor:
    """Two nested bisections over the bounds of p / q: `a` as small as the budget allows, `b` so that pi sums to 1."""
    p_row, q_row = p.numpy(), q.numpy()
    support = q_row > 0

    def pi_for(high: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The law whose upper bound is high = 1/a."""
        low, one = 0.0, 1.0
        for _ in range(60):
            middle = (low + one) / 2
            fits = np.minimum(np.maximum(p_row, middle * q_row), high * q_row).sum() <= 1
            low, one = (middle, one) if fits else (low, middle)
        pi: np.ndarray[Any, np.dtype[np.float64]] = np.minimum(np.maximum(p_row, low * q_row), high * q_row)
        return pi

    def affordable(log_high: float) -> bool:
        pi = pi_for(math.exp(log_high))[support]
        return bool((pi > 0).all() and (q_row[support] * np.log(q_row[support] / pi)).sum() <= kl)

    log_low, log_high = 0.0, 60.0
    if affordable(log_high):
        return torch.from_numpy(pi_for(math.exp(log_high)))
    for _ in range(60):
        middle = (log_low + log_high) / 2
        log_low, log_high = (middle, log_high) if affordable(middle) else (log_low, middle)
    return torch.from_numpy(pi_for(math.exp(log_low)))
