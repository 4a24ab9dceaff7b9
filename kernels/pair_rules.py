"""Rules whose target pi depends on the whole pair of rows: MentoredDecoding, CascadeOpt and CascadeToken.

A draft is accepted iff u * p_n < pi_n; a rejected slot draws from (pi - p)+. Every pi is a function of p_x and q_x with
a few scalars that are sums or maxima over the rows:

    MentoredDecoding: pi_x = q_x clip(p_x / q_x, low, high), 0 where q_x = 0; low = 1/b <= 1 <= high = 1/a
    CascadeOpt:       pi = q if max p < max q - alpha TV(p, q), else p
    CascadeToken:     pi_x = p_x [x in A] + p(not A) q_x, A = {x: q_x >= (1 - alpha) max q}

These rules read the draft's row of every tested slot, whether it is rejected or not: one pass over two rows more than
the others, and MentoredDecoding sorts the rows' ratios on top.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fused_spec.errors import InvalidInput
from fused_spec.rules import RULES, CascadeOpt, CascadeToken, MentoredDecoding, Rule

Row = npt.NDArray[np.float64]


class PairTarget(NamedTuple):
    """pi_x = (p_x if q_x >= cut else 0) clipped to [low q_x, high q_x], plus share q_x; 0 where q_x = 0 if `support`.

    One form for all three rules: MentoredDecoding has cut = 0 and share = 0; CascadeOpt's p has no bounds either, its q
    is low = high = 1; CascadeToken has no bounds.
    """

    low: float = 0.0
    high: float = math.inf
    cut: float = 0.0
    share: float = 0.0
    support: bool = False

    def at(self, p_n: float, q_n: float, q_in_row: float) -> float:
        """pi of one token; q_in_row is q_n as the row has it, so that the cut falls on the same side here and there."""
        if self.support and q_n == 0:
            return 0.0
        kept = p_n if q_in_row >= self.cut else 0.0
        # Comparing products keeps pi = p exact between the bounds.
        if kept < self.low * q_n:
            kept = self.low * q_n
        elif self.high < math.inf and kept > self.high * q_n:
            kept = self.high * q_n
        return kept + self.share * q_n

    def row(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """pi [N] of two rows [N] of equal length, in their dtype."""
        kept = torch.where(q >= self.cut, p, 0.0)
        kept = torch.maximum(kept, self.low * q)
        if self.high < math.inf:
            kept = torch.minimum(kept, self.high * q)
        kept = kept + self.share * q
        return torch.where(q > 0, kept, 0.0) if self.support else kept


Q = PairTarget(low=1.0, high=1.0)
P = PairTarget()


class Pair(NamedTuple):
    """Two laws over the verifier's ids, with what float32 rows lose."""

    p: torch.Tensor  # [N]
    q: torch.Tensor  # [N]
    p_highest: float
    q_highest: float
    p_lost: float = 0.0  # mass of p on ids that the verifier does not know


def pair_target(rule: Rule, pair: Pair) -> PairTarget:
    """The target of a rule with scalar parameters."""
    p, q = pair.p, pair.q
    if isinstance(rule, CascadeOpt):
        variation = (q - p).clamp(min=0).sum(dtype=torch.float64).item()
        return Q if pair.p_highest < pair.q_highest - float(rule.alpha) * variation else P
    if isinstance(rule, CascadeToken):
        cut = (1 - float(rule.alpha)) * q.max().item()
        outside = torch.where(q >= cut, 0.0, p).sum(dtype=torch.float64).item()
        return PairTarget(cut=cut, share=outside + pair.p_lost)
    if isinstance(rule, MentoredDecoding):
        return _mentored(p.double().numpy(), q.double().numpy(), float(rule.kl))
    raise InvalidInput(f"rule must be one of {', '.join(RULES)}, got {type(rule).__name__}")


def _mentored(p: Row, q: Row, budget: float) -> PairTarget:
    """Bounds of p/q that use up the budget: for every low there is one high that makes pi sum to 1, and KL(q||pi) falls
    as low rises to 1."""
    if budget == 0:
        return Q
    support = q > 0
    p, q = p[support], q[support] / q[support].sum()
    order = np.argsort(p / q)
    p, q = p[order], q[order]
    ratio = p / q
    curve = _Curve(ratio, p, q)
    loosest = curve.lowest()
    if curve.divergence(loosest) <= budget:
        return PairTarget(low=loosest, high=curve.high(loosest), support=True)
    # KL(q||pi) is infinite at low = 0 and finite above: bisect the logarithm, which spans the float64 range.
    log_low, log_one = math.log(max(loosest, 1e-300)), 0.0
    for _ in range(100):
        middle = (log_low + log_one) / 2
        if curve.divergence(math.exp(middle)) <= budget:
            log_one = middle
        else:
            log_low = middle
    low = math.exp(log_one)
    return PairTarget(low=low, high=curve.high(low), support=True)


class _Curve:
    """Sums over a pair of rows sorted by r = p / q, so that any pair of bounds is priced in O(log V)."""

    def __init__(self, ratio: Row, p: Row, q: Row) -> None:
        zero = np.zeros(1)
        self.ratio = ratio
        self.q_below = np.concatenate([zero, np.cumsum(q)])
        self.p_below = np.concatenate([zero, np.cumsum(p)])
        logs = np.log(ratio, out=np.zeros_like(ratio), where=ratio > 0)
        self.log_below = np.concatenate([zero, np.cumsum(q * logs)])
        self.q_above = np.concatenate([np.cumsum(q[::-1])[::-1], zero])
        # Mass of min(p, r_k q) for the bound r_k, rising in k.
        self.capped = self.p_below[:-1] + ratio * self.q_above[:-1]

    def lowest(self) -> float:
        """The smallest low that some high can balance: all of p in q's support plus low * q below it reach 1."""
        missing = 1 - self.p_below[-1]
        if missing <= 0:
            return float(self.ratio[0])
        # sum max(p, low q) = 1: raised mass low * Q_i - P_i over the first i ratios equals what is missing.
        raised = self.ratio * self.q_below[1:] - self.p_below[1:]
        i = int(np.searchsorted(raised, missing))
        below = i if i < len(raised) and raised[i] >= missing else len(raised)
        return min(1.0, float((missing + self.p_below[below]) / self.q_below[below])) if below else float(self.ratio[0])

    def high(self, low: float) -> float:
        """The high for which pi sums to 1; infinite where no ratio needs a bound."""
        i = int(np.searchsorted(self.ratio, low))
        goal = 1 - low * self.q_below[i] + self.p_below[i]
        k = int(np.searchsorted(self.capped, goal))
        if k >= len(self.capped):
            return math.inf
        return max(1.0, float((goal - self.p_below[k]) / self.q_above[k]))

    def divergence(self, low: float) -> float:
        """KL(q||pi) for a low and its high."""
        if low <= 0:
            return math.inf
        high = self.high(low)
        i = int(np.searchsorted(self.ratio, low))
        k = int(np.searchsorted(self.ratio, high, side="right"))
        above = self.q_above[k] * math.log(high) if k < len(self.ratio) else 0.0
        return -float(self.q_below[i] * math.log(low) + self.log_below[k] - self.log_below[i] + above)
