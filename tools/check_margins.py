"""How close to a boundary a draw lies, in float64: what excuses two implementations that decide differently.

Two paths that compute the same formulas in another order agree but where a number lies within rounding of a boundary:
u of the probability of acceptance, U of a step of the distribution function that a token is drawn from, a drafted token
of the edge of a filter, a rule of its own condition. Each distance is measured here as a share of what rounding
explains; above 1, a difference is a fault. Laws, rules and residuals are those of the float64 oracles.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fused_spec.kernels.acceptance_reference import acceptance_reference, target_reference
from fused_spec.kernels.filter import keep_reference
from fused_spec.kernels.philox import RESAMPLE, acceptance_uniform, sampling_uniform
from fused_spec.kernels.row_law import unpack_mask
from fused_spec.rules import CascadeOpt, CascadeToken, Ensemble, Lenience, Rule, TypicalAcceptance

MASS = 4e-6
"""Of a distribution function: float32 weights are off by some 1e-6 of themselves where exp is approximate and z is
around 16, and so is what they sum to; a residual is a difference of two such."""

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Of a probability of acceptance: float32 holds ln p to 1e-6."""


class Row(NamedTuple):
    """A row of logits and how it is processed."""

    logits: torch.Tensor  # [V]
    options: dict[str, float]  # temperature, top_k, top_p, min_p
    allowed: torch.Tensor | None = None  # [ceil(V/32)]

    def z(self) -> torch.Tensor:
        """[V] float64 logits, -inf where not allowed."""
        z = self.logits.double()
        if self.allowed is not None:
            z = z.masked_fill(~unpack_mask(self.allowed, z.numel()), -math.inf)
        return z

    def law(self) -> torch.Tensor:
        """[V] float64."""
        return keep_reference(self.z(), **self.options)  # type: ignore[arg-type]

    def filter_margin(self, token: int) -> float:
        """Distance of a token from the edge of top-p and min-p, as a share of what rounding explains."""
        if token >= self.logits.numel() or self.options["temperature"] == 0:
            return math.inf
        z = self.z() / self.options["temperature"]
        margins = []
        if self.options["top_p"] < 1:
            inside = keep_reference(self.z(), self.options["temperature"], int(self.options["top_k"]))
            before = inside[z > z[token]].sum().item()
            margins.append(abs(before - self.options["top_p"]) / MASS)
        if self.options["min_p"] > 0:
            margins.append(abs((z[token] - z.max()).item() - math.log(self.options["min_p"])) / MASS)
        return min(margins, default=math.inf)


def draw_margin(law: torch.Tensor, token: int, uniform: float, mass: float = 1.0) -> float:
    """Distance of U from the part of [0, 1) that inverse sampling gives to a token, as a share of what is explained.

    `mass` is what the law summed to before it was normalised: rounding is relative to what was subtracted.
    """
    steps = law.cumsum(0) / law.sum()
    above = steps[token].item()
    below = steps[token - 1].item() if token else 0.0
    return max(below - uniform, uniform - above, 0.0) * mass / MASS


@dataclass(frozen=True)
class Round:
    """One request of a call of `verify`, on the CPU.

    Attributes:
        target: m + 1 rows. draft: m rows, or None for a deterministic drafter. drafts: ids, up to the first -1.
        seed, position: as given to `verify`.
    """

    target: list[Row]
    draft: list[Row] | None
    drafts: list[int]
    rule: Rule
    seed: int
    position: int

    def laws(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(p, q) of a slot, float64, over all ids that either knows."""
        q = self.target[slot].law()
        if self.draft is None:
            p = torch.zeros_like(q)
            p[self.drafts[slot]] = 1.0
        else:
            p = self.draft[slot].law()
        size = max(p.numel(), q.numel())
        grown = [torch.nn.functional.pad(law, (0, size - law.numel())) for law in (p, q)]
        return grown[0], grown[1]

    def decision_margin(self, slot: int) -> float:
        """How close the acceptance of a slot's draft is to going the other way."""
        token, (p, q) = self.drafts[slot], self.laws(slot)
        margins = [self.target[slot].filter_margin(token), _condition_margin(self.rule, p, q, token)]
        if self.draft is not None:
            margins.append(self.draft[slot].filter_margin(token))
        if p[token] > 0:
            accept, _, _ = acceptance_reference(self.rule, p, q, token)
            distance = abs(acceptance_uniform(self.seed, self.position + slot) - accept)
            margins.append(distance / (RELATIVE * accept + ABSOLUTE))
        return min(margins)

    def token_margin(self, slot: int, token: int) -> float:
        """How far the draw behind the accepted drafts is from giving this token."""
        uniform = sampling_uniform(self.seed, self.position + slot, RESAMPLE)
        if slot == len(self.drafts):
            return draw_margin(self.target[slot].law(), token, uniform)
        p, q = self.laws(slot)
        drafted = self.drafts[slot]
        if p[drafted] == 0:
            return math.inf
        _, _, residual = acceptance_reference(self.rule, p, q, drafted)
        plain = isinstance(self.rule, Lenience | Ensemble | TypicalAcceptance)
        h = q if plain else target_reference(self.rule, p, q, drafted)
        mass = (h - p).clamp(min=0).sum().item()
        return draw_margin(residual, token, uniform, mass)

    def excuse(self, ours: tuple[int, int], theirs: tuple[int, int]) -> float:
        """Of two outcomes (accepted, last token) that differ: the distance from a boundary between them."""
        slot = min(ours[0], theirs[0])
        return self.decision_margin(slot) if ours[0] != theirs[0] else self.token_margin(slot, ours[1])


def _condition_margin(rule: Rule, p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """Distance of the conditions that some rules have besides u."""
    if isinstance(rule, TypicalAcceptance):
        bar = min(float(rule.epsilon), float(rule.alpha) * math.exp(torch.xlogy(q, q).sum().item()))
        return abs(q[token].item() / bar - 1) / RELATIVE if bar > 0 else math.inf
    if isinstance(rule, CascadeOpt):
        gap = p.max() - q.max() + float(rule.alpha) * (q - p).clamp(min=0).sum()
        return abs(gap.item()) / MASS
    if isinstance(rule, CascadeToken):
        return abs(q[token].item() / ((1 - float(rule.alpha)) * q.max().item() or 1.0) - 1) / RELATIVE
    return math.inf


def kept_margin(row: Row, ours: float, theirs: float) -> float:
    """Of two cutoffs of a row that differ: the mass that only one of them keeps, as a share of what is explained."""
    temperature = row.options["temperature"] or 1.0
    z = row.z() / temperature
    low, high = min(ours, theirs), max(ours, theirs)
    slack = 2.0**-22 * max(abs(low), abs(high)) if math.isfinite(low) else 0.0
    between = (z >= low - slack) & (z < high - slack)
    return z.softmax(0)[between].sum().item() / MASS


def per_request(options: dict[str, Any], index: int) -> dict[str, float]:
    """The processing options of one request, as numbers."""
    names = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = {name: options.get(name, neutral) for name, neutral in names.items()}
    return {name: v[index].item() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
