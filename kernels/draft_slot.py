"""One tested draft and its law p, read as far as a rule needs it: mostly only p_n, the whole row after a rejection."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fused_spec.kernels.error_bits import DRAFT_IMPOSSIBLE, DRAFT_OUT_OF_RANGE, EMPTY_SUPPORT, NAN_DRAFT
from fused_spec.kernels.row_law import Processing, RowLaw, padded_size, row_law


@dataclass(slots=True)
class DraftSlot:
    """The draft of one slot.

    Attributes:
        token: its id.
        vocab_size: V of the verifier; the draft's own may be larger or smaller.
        logits: [Vd], or None for a deterministic drafter, whose p is one-hot at the token.
        processing: what the draft was drawn with.
        log_prob, cutoff, lse: from `draft_stats`, if given.
        p_n: probability of the token, 0 where it must be rejected. error: why, as bits.
        highest: largest probability of p. lost: mass of p on ids that the verifier does not know; both known
            once `row` was called.
    """

    token: int
    vocab_size: int
    logits: torch.Tensor | None
    processing: Processing
    log_prob: float | None = None
    cutoff: float | None = None
    lse: float | None = None
    p_n: float = 0.0
    error: int = 0
    highest: float = 1.0
    lost: float = 0.0
    law: RowLaw | None = None  # once it had to be computed

    def __post_init__(self) -> None:
        known = self.vocab_size if self.logits is None else max(self.vocab_size, self.logits.numel())
        if not 0 <= self.token < known:
            self.error = DRAFT_OUT_OF_RANGE
        elif self.logits is None:
            self.p_n = 1.0
        elif self.log_prob is not None:
            if self.log_prob <= 1e-3:  # above 0 by rounding at most
                self.p_n = math.exp(self.log_prob) if self.token < self.logits.numel() else 0.0
                self.error = 0 if self.p_n > 0 else DRAFT_IMPOSSIBLE
            else:  # the statistics of a faulty row, or none at all
                self.error = EMPTY_SUPPORT if self.lse == -math.inf else NAN_DRAFT
        else:
            self.law = row_law(self.logits, self.processing)
            self.p_n = math.exp(self.law.log_prob(self.token))
            self.error = self.law.error_bit(NAN_DRAFT) or (0 if self.p_n > 0 else DRAFT_IMPOSSIBLE)

    def row(self) -> torch.Tensor | None:
        """p as [padded V] float32, cut or padded with zeros to the verifier's ids; None where there is no law.

        A greedy drafter's p is one-hot at the draft; a draft that it cannot have made says nothing of p. Neither do
        statistics that give their own draft no probability.
        """
        size = padded_size(self.vocab_size)
        if self.logits is None or self.processing.temperature == 0:
            if self.p_n == 0:
                return None
            p = torch.zeros(size)
            if self.token < self.vocab_size:
                p[self.token] = 1.0
            else:
                self.lost = 1.0
            return p
        if self.log_prob is not None and self.p_n == 0:
            return None
        if self.law is None and self.p_n > 0:
            p = self._row_from_statistics(self.logits)
        else:
            law = self.law or row_law(self.logits, self.processing)
            if law.fault:
                return None
            p, self.highest = law.probabilities(), law.highest
        if p.numel() < size:
            p = torch.nn.functional.pad(p, (0, size - p.numel()))
        self.lost = p[self.vocab_size :].sum(dtype=torch.float64).item()
        p[self.vocab_size :] = 0.0
        return p[:size]

    def _row_from_statistics(self, logits: torch.Tensor) -> torch.Tensor:
        """p without a second normalising pass: ln p_x = (z_x - z_n) + ln p_n, which keeps more digits than lse."""
        assert self.log_prob is not None
        assert self.cutoff is not None
        z = logits.to("cpu", torch.float32, copy=True)
        if self.processing.temperature != 1:
            z.mul_(self.processing.scale)
        drafted = z[self.token].item()
        self.highest = math.exp(min(0.0, (z.max().item() - drafted) + self.log_prob))
        if self.cutoff > -math.inf:  # keeps what is greater than the number below the cutoff
            below = float(np.nextafter(np.float32(self.cutoff), np.float32(-np.inf)))
            z = torch.nn.functional.threshold(z, below, -math.inf)
        return z.sub_(drafted).add_(self.log_prob).exp_()
