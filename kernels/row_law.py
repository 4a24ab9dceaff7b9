"""The processed law of one row of logits: P(x) = exp(z_x - lse) where z_x >= cutoff, else 0, with z = l * (1 / T).

One row at a time, in float32 with float64 sums, is what a CPU is fastest at, and it keeps no [rows, V] probabilities.
Where top-k or top-p leave few tokens, only these are looked at. Temperature 0 is the one-hot law at the arg max (the
lowest id among ties).
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fused_spec.kernels.error_bits import EMPTY_SUPPORT
from fused_spec.kernels.filter import cutoff

GROUP = 1024
"""Masses are summed over fixed groups of this many consecutive ids, then merged in float64, in order."""

NOT_A_NUMBER, EMPTY = 1, 2

_FEW = 256
"""How many of the largest logits are looked at before a whole row is."""


class Processing(NamedTuple):
    """What is done to a row of logits before a rule sees it, in this order."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def scale(self) -> float:
        """1 / T in float32, rounded once, as kernels have it; 1 for a greedy row."""
        return _inverse(self.temperature) if self.temperature else 1.0


@functools.lru_cache(maxsize=256)
def _inverse(temperature: float) -> float:
    return float(np.float32(1) / np.float32(temperature))


class Survivors(NamedTuple):
    """The few tokens that a filter leaves, in the order of their ids, with z and exp(z - peak) of each."""

    ids: list[int]
    weights: list[float]
    scaled: list[float]


@dataclass(slots=True)
class RowLaw:
    """A processed row. Tensors are padded with weight 0 to a multiple of GROUP.

    Attributes:
        vocab_size: number of ids V.
        scale: 1 / T.
        row: [padded] float32 logits before the temperature, -inf where not allowed; None for a greedy or faulty row.
            Perhaps the caller's own logits, so it is not written to.
        total: sum of the weights.
        peak, cutoff: largest and smallest kept z. Greedy: both the largest logit.
        token: the arg max of a greedy row; the lowest allowed id of a faulty row; else -1.
        allowed: [ceil(V/32)] int32 bitmask, if there is one.
        fault: 0, NOT_A_NUMBER (a NaN or +inf logit: no softmax exists) or EMPTY (no token has weight).
        survivors: if a filter left only few tokens.
        dense: [padded] float32 weights exp(z - peak), 0 where cut, once they were needed.
    """

    vocab_size: int
    scale: float
    row: torch.Tensor | None
    total: float
    peak: float
    cutoff: float
    token: int
    fault: int
    allowed: torch.Tensor | None = None
    survivors: Survivors | None = None
    dense: torch.Tensor | None = None

    @property
    def weights(self) -> torch.Tensor | None:
        """[padded] float32, exp(z - peak), 0 where cut; None for a greedy or faulty row."""
        if self.dense is None and self.survivors is not None and self.row is not None:
            ids, weights, _ = self.survivors
            self.dense = torch.zeros_like(self.row)
            self.dense[torch.tensor(ids)] = torch.tensor(weights)
        return self.dense

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
        if self.survivors is not None:
            return 1.0 / self.total
        if self.dense is None:
            return 1.0
        top = self.dense == 1
        rest = self.dense.masked_fill(top, 0.0).view(-1, GROUP).sum(1).sum(dtype=torch.float64).item()
        return 1.0 / (int(top.sum()) + rest)

    def arg_max(self) -> int:
        """The most likely token, the lowest id among ties."""
        return self.token if self.weights is None else int(self.weights.argmax())

    def entropy(self) -> float:
        """-sum P ln P in nats."""
        if self.survivors is not None:
            weighted = math.fsum(weight * math.log(weight) for weight in self.survivors.weights if weight)
            return math.log(self.total) - weighted / self.total
        if self.dense is None or self.row is None:
            return 0.0
        below = (self.row * self.scale - self.peak).masked_fill_(self.dense == 0, 0.0)  # 0 * -inf would be NaN
        mean = (self.dense * below).view(-1, GROUP).sum(1).sum(dtype=torch.float64).item() / self.total
        return math.log(self.total) - mean

    def error_bit(self, not_a_number: int) -> int:
        """The error bit of a faulty row, `not_a_number` or EMPTY_SUPPORT; 0 of a good one."""
        return {0: 0, NOT_A_NUMBER: not_a_number, EMPTY: EMPTY_SUPPORT}[self.fault]

    def log_prob(self, token: int) -> float:
        """ln P(token), -inf if 0; rounded to float32, so that equal rows give equal numbers wherever computed."""
        if not 0 <= token < self.vocab_size or self.fault:
            return -math.inf
        if self.row is None:
            return 0.0 if token == self.token else -math.inf
        if self.survivors is None:
            z = (self.row[token] * self.scale).item()
        elif token in self.survivors.ids:
            z = self.survivors.scaled[self.survivors.ids.index(token)]
        else:
            return -math.inf
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
    vocab_size, scale = logits.numel(), processing.scale
    row = _padded(logits, allowed)
    if processing.temperature == 0:
        return _greedy(row, vocab_size, allowed)
    law = _few_survivors(row, vocab_size, processing, allowed)
    if law is not None:
        return law
    scaled = row if scale == 1 else row * scale
    peak = scaled.max().item()
    if not math.isfinite(peak):
        return _faulty(vocab_size, peak, allowed)
    lowest = cutoff(scaled[:vocab_size], peak, processing.top_k, processing.top_p, processing.min_p)
    kept = scaled
    if lowest > -math.inf:  # `threshold` keeps what is greater, in one vectorised pass, unlike a comparison and a mask
        kept = F.threshold(scaled, float(np.nextafter(np.float32(lowest), np.float32(-np.inf))), -math.inf)
    weights = (kept - peak).exp_()
    total = weights.view(-1, GROUP).sum(1).sum(dtype=torch.float64).item()
    return RowLaw(vocab_size, scale, row, total, peak, lowest, -1, 0, allowed, dense=weights)


def _padded(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """A row of logits in float32 on the CPU, -inf where a mask or the padding is; the logits themselves if they do."""
    vocab_size = logits.numel()
    if logits.dtype == torch.float32 and vocab_size % GROUP == 0 and logits.device.type == "cpu" and allowed is None:
        return logits
    row = torch.empty(padded_size(vocab_size), dtype=torch.float32)
    row[vocab_size:] = -math.inf
    row[:vocab_size] = logits
    if allowed is not None:
        row[:vocab_size].masked_fill_(~unpack_mask(allowed, vocab_size), -math.inf)
    return row


def _few_survivors(
    row: torch.Tensor, vocab_size: int, processing: Processing, allowed: torch.Tensor | None
) -> RowLaw | None:
    """The law of a row of which top-k or top-p leaves few tokens, from its largest logits; None if these do not do."""
    scale, (_, top_k, top_p, min_p) = processing.scale, processing
    if not (0 < top_k <= _FEW - 16 or (top_k == 0 and top_p < 1)) or vocab_size <= _FEW:
        return None
    values, groups, at = largest(row, top_k + 16 if top_k else _FEW)  # more than k: others may share the last place
    z = (values * scale).tolist()
    peak = z[0]
    if not math.isfinite(peak):
        return _faulty(vocab_size, peak, allowed)
    weights = [math.exp(value - peak) for value in z]
    count, mass = len(z), 0.0
    if top_k:
        count = sum(value >= z[top_k - 1] for value in z)
        if count == len(z):  # beyond what was looked at there may be more like the last
            return None
    if top_p < 1:
        mass = math.fsum(weights[:count]) if top_k else _mass(row if scale == 1 else row * scale, peak)
        before = 0.0
        for i, weight in enumerate(weights[:count]):
            if i and before >= top_p * mass:
                count = sum(value >= z[i - 1] for value in z)
                break
            before += weight
    if min_p > 0:
        count = min(count, sum(value >= peak + math.log(min_p) for value in z))
    lowest = z[count - 1]
    if count == len(z) or lowest == -math.inf:  # the same
        return None
    ids = [groups[i // 128] * 128 + i % 128 for i in at[:count]]
    kept = sorted(zip(ids, weights[:count], z[:count], strict=True))
    survivors = Survivors(*(list(column) for column in zip(*kept, strict=True)))
    total = math.fsum(survivors.weights)
    return RowLaw(vocab_size, scale, row, total, peak, lowest, -1, 0, allowed, survivors)


def _mass(scaled: torch.Tensor, peak: float) -> float:
    """Sum of exp(z - peak)."""
    return (scaled - peak).exp_().view(-1, GROUP).sum(1).sum(dtype=torch.float64).item()


def largest(row: torch.Tensor, count: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """The `count` largest values of a row [multiple of 128], descending, and where they are.

    They lie in those groups of 128 that have the largest maxima, so that only these are searched. Gives these groups
    and the values' places among them: place i is index 128 groups[i // 128] + i % 128.
    """
    groups = row.view(-1, 128)
    chosen = groups.amax(1).topk(min(count, len(groups))).indices
    values, at = groups.index_select(0, chosen).view(-1).topk(count)
    return values, chosen.tolist(), at.tolist()


def _greedy(row: torch.Tensor, vocab_size: int, allowed: torch.Tensor | None) -> RowLaw:
    groups = row.view(-1, GROUP)
    group = int(groups.amax(1).argmax())  # the first of equals, here and below
    token = group * GROUP + int(groups[group].argmax())
    peak = row[token].item()
    if not math.isfinite(peak):
        return _faulty(vocab_size, peak, allowed)
    return RowLaw(vocab_size, 1.0, None, 1.0, peak, peak, token, 0, allowed)


def _faulty(vocab_size: int, peak: float, allowed: torch.Tensor | None) -> RowLaw:
    """The row has no law: report why, and an id that is legal at least."""
    lowest_allowed = 0 if allowed is None else int(unpack_mask(allowed, vocab_size).int().argmax())
    fault = EMPTY if peak == -math.inf else NOT_A_NUMBER
    return RowLaw(vocab_size, 1.0, None, 1.0, peak, -math.inf, lowest_allowed, fault, allowed)


def padded_size(vocab_size: int) -> int:
    """V rounded up to whole groups."""
    return -(-vocab_size // GROUP) * GROUP


def unpack_mask(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[ceil(V/32)] int32 words -> [V] bool."""
    bits = (words.cpu()[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.view(-1)[:vocab_size].bool()
