"""The processed law of one row of logits: P(x) = exp(z_x - lse) where z_x >= cutoff, else 0, with z = l / T.

One row at a time, in float32 with float64 sums, is what a CPU is fastest at, and it keeps no [rows, V] probabilities.
Temperature 0 is the one-hot law at the arg max (the lowest id among ties).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fused_spec.kernels.error_bits import EMPTY_SUPPORT
from fused_spec.kernels.filter import cutoff

GROUP = 1024
"""Masses are summed over fixed groups of this many consecutive ids, then merged in float64, in order."""

NOT_A_NUMBER, EMPTY = 1, 2


class Processing(NamedTuple):
    """What is done to a row of logits before a rule sees it, in this order."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(slots=True)
class RowLaw:
    """A processed row. Tensors are padded with weight 0 to a multiple of GROUP.

    Attributes:
        vocab_size: number of ids V.
        scaled: [padded] float32, z, -inf where not allowed; None for a greedy or faulty row.
        weights: [padded] float32, exp(z - peak), 0 where cut; None for a greedy or faulty row.
        total: sum of the weights.
        peak, cutoff: largest and smallest kept z. Greedy: both the largest logit.
        token: the arg max of a greedy row; the lowest allowed id of a faulty row; else -1.
        allowed: [ceil(V/32)] int32 bitmask, if there is one.
        fault: 0, NOT_A_NUMBER (a NaN or +inf logit: no softmax exists) or EMPTY (no token has weight).
    """

    vocab_size: int
    scaled: torch.Tensor | None
    weights: torch.Tensor | None
    total: float
    peak: float
    cutoff: float
    token: int
    fault: int
    allowed: torch.Tensor | None = None

    @property
    def lse(self) -> float:
        """log(sum exp z) over the kept tokens: -inf of an empty row, NaN or inf of one that holds such."""
        return self.peak + math.log(self.total)

    def allows(self, token: int) -> bool:
        """Whether the token is an id of the vocabulary that no mask excludes."""
        if not 0 <= token < self.vocab_size:
            return False
        return self.allowed is None or (int(self.allowed[token // 32]) >> (token % 32)) & 1 == 1

    def probabilities(self) -> torch.Tensor:
        """P as [padded] float32; not of a faulty row."""
        if self.weights is None:
            row = torch.zeros(padded_size(self.vocab_size))
            row[self.token] = 1.0
            return row
        return self.weights * (1.0 / self.total)

    @property
    def highest(self) -> float:
        """The largest probability, to more digits than float32 sums have: below 1 if any other token has weight."""
        if self.weights is None:
            return 1.0
        top = self.weights == 1
        rest = self.weights.masked_fill(top, 0.0).view(-1, GROUP).sum(1).sum(dtype=torch.float64).item()
        return 1.0 / (int(top.sum()) + rest)

    def arg_max(self) -> int:
        """The most likely token, the lowest id among ties."""
        return self.token if self.weights is None else int(self.weights.argmax())

    def entropy(self) -> float:
        """-sum P ln P in nats."""
        if self.weights is None or self.scaled is None:
            return 0.0
        below = (self.scaled - self.peak).masked_fill_(self.weights == 0, 0.0)  # 0 * -inf would be NaN
        mean = (self.weights * below).view(-1, GROUP).sum(1).sum(dtype=torch.float64).item() / self.total
        return math.log(self.total) - mean

    def error_bit(self, not_a_number: int) -> int:
        """The error bit of a faulty row, `not_a_number` or EMPTY_SUPPORT; 0 of a good one."""
        return {0: 0, NOT_A_NUMBER: not_a_number, EMPTY: EMPTY_SUPPORT}[self.fault]

    def log_prob(self, token: int) -> float:
        """ln P(token), -inf if 0; rounded to float32, so that equal rows give equal numbers wherever computed."""
        if not 0 <= token < self.vocab_size or self.fault:
            return -math.inf
        if self.scaled is None:
            return 0.0 if token == self.token else -math.inf
        z = self.scaled[token].item()
        if z < self.cutoff or z == -math.inf:
            return -math.inf
        value = (z - self.peak) - math.log(self.total)
        return float(np.float32(value)) if value > -1e30 else -math.inf


def row_law(logits: torch.Tensor, processing: Processing, allowed: torch.Tensor | None = None) -> RowLaw:
    """Process one row.

    Args:
        logits: [V] float32, bfloat16 or float16; not modified.
        processing: checked parameters.
        allowed: [ceil(V/32)] int32 bitmask or None; bit i of word w stands for id 32 w + i.
    """
    vocab_size = logits.numel()
    scaled = torch.empty(padded_size(vocab_size), dtype=torch.float32)
    scaled[vocab_size:] = -math.inf
    row = scaled[:vocab_size]
    row.copy_(logits)
    if allowed is not None:
        row.masked_fill_(~unpack_mask(allowed, vocab_size), -math.inf)
    if processing.temperature == 0:
        return _greedy(row, allowed)
    if processing.temperature != 1:
        row.div_(processing.temperature)
    peak = row.max().item()
    if not math.isfinite(peak):
        return _faulty(row, peak, allowed)
    lowest = cutoff(row, peak, processing.top_k, processing.top_p, processing.min_p)
    weights = (scaled - peak).exp_()
    if lowest > -math.inf:
        weights.masked_fill_(scaled < lowest, 0.0)
    total = weights.view(-1, GROUP).sum(1).sum(dtype=torch.float64).item()
    return RowLaw(vocab_size, scaled, weights, total, peak, lowest, -1, 0, allowed)


def _greedy(row: torch.Tensor, allowed: torch.Tensor | None) -> RowLaw:
    token = int(row.argmax())
    peak = row[token].item()
    if not math.isfinite(peak):
        return _faulty(row, peak, allowed)
    return RowLaw(row.numel(), None, None, 1.0, peak, peak, token, 0, allowed)


def _faulty(row: torch.Tensor, peak: float, allowed: torch.Tensor | None) -> RowLaw:
    """The row has no law: report why, and an id that is legal at least."""
    lowest_allowed = 0 if allowed is None else int(unpack_mask(allowed, row.numel()).int().argmax())
    fault = EMPTY if peak == -math.inf else NOT_A_NUMBER
    return RowLaw(row.numel(), None, None, 1.0, peak, -math.inf, lowest_allowed, fault, allowed)


def padded_size(vocab_size: int) -> int:
    """V rounded up to whole groups."""
    return -(-vocab_size // GROUP) * GROUP


def unpack_mask(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[ceil(V/32)] int32 words -> [V] bool."""
    bits = (words.cpu()[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.view(-1)[:vocab_size].bool()
