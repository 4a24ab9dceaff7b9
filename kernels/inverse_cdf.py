"""Sampling by inverse CDF in vocabulary order, with one uniform number.

The masses of fixed groups of 1024 consecutive ids are merged in float64, in order; they pick the group, and a scan
inside it picks the token. One 53-bit number resolves the rarest token that float32 weights can express, and costs a
millionth of the noise per token that an exponential race draws.
"""

import math

import torch

from fused_spec.kernels.row_law import GROUP, RowLaw, Survivors


def pick(weights: torch.Tensor, uniform: float) -> int:
    """Index drawn in proportion to the weights, or -1 if their sum is zero or not finite.

    A token of zero weight is never returned, whatever rounding does.

    Args:
        weights: [G * 1024] float32, >= 0.
        uniform: U in [0, 1).
    """
    groups = weights.view(-1, GROUP)
    masses = groups.sum(1).double()
    merged = masses.cumsum(0)
    total = merged[-1].item()
    if not 0 < total < math.inf:
        return -1
    goal = uniform * total
    group = int(torch.searchsorted(merged, goal, right=True))
    if group == len(merged):  # uniform * total was rounded up to the total
        group = int(masses.nonzero()[-1])
    scan = groups[group].double().cumsum(0)
    goal -= merged[group - 1].item() if group else 0.0
    index = int(torch.searchsorted(scan, goal, right=True))
    if index == GROUP:  # the group's float32 mass lies a rounding above its float64 scan
        index = int(groups[group].nonzero()[-1])
    return group * GROUP + index


def draw(law: RowLaw, uniform: float) -> int:
    """One token of a processed law; the arg max of a greedy one, a legal id of a faulty one."""
    if law.survivors is not None:
        return pick_survivor(law.survivors, uniform * law.total)
    return law.token if law.weights is None else pick(law.weights, uniform)


def pick_survivor(survivors: Survivors, goal: float) -> int:
    """The token at which the sum of weights exceeds the goal; never one of zero weight."""
    reached, token = 0.0, -1
    for survivor, weight in zip(survivors.ids, survivors.weights, strict=True):
        if weight > 0:
            token, reached = survivor, reached + weight
            if reached > goal:
                break
    return token
