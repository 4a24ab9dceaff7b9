"""Top-k, top-p and min-p as one cutoff per row: a token is kept iff its scaled logit z = l / T reaches the cutoff.

Applied in the order top-k, top-p, min-p, each over the renormalised survivors of the one before. Ties at a boundary are
kept, so the kept set is a function of the values alone:

    top-k: z >= the k-th largest z
    top-p: the mass of tokens strictly above z is < top_p (of the survivors' mass)
    min-p: P(x) >= min_p * max P, that is z >= max z + ln(min_p)

Holtzman et al. 2020 (top-p, arXiv 1904.09751); Nguyen et al. 2024 (min-p, arXiv 2407.01082).
"""

import math

import torch

_FIRST_LOOK = 256
"""How many of the largest logits top-p looks at first; eight times as many each time these do not reach top_p."""


def cutoff(scaled: torch.Tensor, peak: float, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest kept value of a row, or -inf where nothing is cut.

    Args:
        scaled: [N] float32 logits / T, -inf where a token is not allowed; no NaN.
        peak: their maximum, finite.
        top_k, top_p, min_p: 0, 1.0 and 0.0 switch a filter off.
    """
    value = -math.inf
    if 0 < top_k < scaled.numel():
        value = _top_k_top_p(scaled, peak, top_k, top_p)
    elif top_p < 1:
        value = _top_p(scaled, peak, top_p)
    if min_p > 0:
        value = max(value, peak + math.log(min_p))
        # The sum above is no logit of the row: report the smallest logit that it keeps.
        value = scaled.masked_fill(scaled < value, math.inf).min().item()
    return value


def _top_k_top_p(scaled: torch.Tensor, peak: float, top_k: int, top_p: float) -> float:
    values = scaled.topk(top_k + 1).values
    lowest = values[top_k - 1].item()
    if lowest == -math.inf:  # fewer than k tokens are allowed at all: top-k cuts nothing
        return _top_p(scaled, peak, top_p) if top_p < 1 else -math.inf
    if top_p == 1:
        return lowest
    tied = lowest == values[top_k].item()
    weights = (values[:top_k] - peak).exp_().double()
    total = weights.sum().item()
    if tied:  # more tokens share the k-th value than fit: all of them survive
        extra = int((scaled == lowest).sum()) - int((values[:top_k] == lowest).sum())
        total += extra * math.exp(lowest - peak)
    return values[_kept(weights, top_p * total) - 1].item()


def _top_p(scaled: torch.Tensor, peak: float, top_p: float) -> float:
    goal = top_p * (scaled - peak).exp_().sum(dtype=torch.float64).item()
    size = min(_FIRST_LOOK, scaled.numel())
    while True:
        values = scaled.topk(size).values
        weights = (values - peak).exp_().double()
        if size == scaled.numel() or weights.sum().item() >= goal:
            return values[_kept(weights, goal) - 1].item()
        size = min(8 * size, scaled.numel())


def _kept(descending: torch.Tensor, goal: float) -> int:
    """How many leading entries have a mass before them that is below the goal; at least one."""
    before = descending.cumsum(0) - descending
    return max(1, int((before < goal).sum()))


def keep_reference(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Float64 oracle: the processed law [V] of a row of logits, straight from the definitions above."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.double().argmax(), logits.numel()).double()
    z = logits.double() / temperature
    kept = z > -math.inf
    if 0 < top_k < z.numel():
        kept &= z >= z.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        mass = z.masked_fill(~kept, -math.inf).softmax(0)
        order = torch.where(kept, z, -math.inf).sort(descending=True)
        before = torch.cat([mass.new_zeros(1), mass[order.indices].cumsum(0)[:-1]])
        first_of_run = torch.searchsorted(-order.values, -z)  # ties share the mass of what lies strictly above them
        kept &= before[first_of_run.clamp(max=z.numel() - 1)] < top_p
    if min_p > 0:
        kept &= z >= z.max() + math.log(min_p)
    return z.masked_fill(~kept, -math.inf).softmax(0)
