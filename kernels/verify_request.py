"""The torch path of `verify` for one request: rows in order, and none past the one that decides.

At most one target row and one draft row are processed at a time, in float32 on the CPU, so the memory it takes does not
grow with m.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fused_spec.kernels.acceptance import decide
from fused_spec.kernels.error_bits import DRAFT_IMPOSSIBLE, DRAFT_OUT_OF_RANGE, NAN_DRAFT, NAN_TARGET, ZERO_RESIDUAL
from fused_spec.kernels.inverse_cdf import draw, pick
from fused_spec.kernels.philox import RESAMPLE, acceptance_uniform, sampling_uniform
from fused_spec.kernels.row_law import GROUP, Processing, RowLaw, row_law
from fused_spec.rules import Rule


class Outcome(NamedTuple):
    """One row of a `Verification`, as Python numbers."""

    token_ids: list[int]
    num_accepted: int
    accept_prob: list[float]
    tv_gain: list[float]
    error: int


class _Test(NamedTuple):
    """One tested draft: the pieces its residual is made of."""

    token: int
    p_n: float
    threshold: float
    residual_scale: float


@dataclass(slots=True)
class Request:
    """One request of the batch, its parameters resolved to numbers."""

    target_logits: torch.Tensor  # [m+1, V]
    draft_ids: list[int]
    draft_logits: torch.Tensor | None  # [m, Vd]
    rule: Rule
    key: tuple[int, int]
    target: Processing
    draft: Processing
    allowed: torch.Tensor | None  # [m+1, ceil(V/32)]
    log_probs: list[float] | None
    cutoffs: list[float] | None
    uniforms: list[float] | None
    error: int = 0
    draft_law: RowLaw | None = None  # of the slot under test, when it had to be computed

    def run(self) -> Outcome:
        """Test the drafts in order, up to the row that decides."""
        num_drafts = len(self.draft_ids)
        present = self.draft_ids.index(-1) if -1 in self.draft_ids else num_drafts
        accept_prob, tv_gain = [math.nan] * num_drafts, [math.nan] * num_drafts
        accepted, token = 0, -1
        while token < 0:
            law = row_law(
                self.target_logits[accepted], self.target, None if self.allowed is None else self.allowed[accepted]
            )
            self.error |= law.error_bit(NAN_TARGET)
            if accepted == present:
                token = self._draw(law, accepted)
                break
            test, accept_prob[accepted], tv_gain[accepted] = self._test(law, accepted)
            if self._uniform(accepted) * test.p_n < test.threshold and test.p_n > 0 and not law.fault:
                accepted += 1
            else:
                token = self._resample(law, test, accepted)
        tokens = self.draft_ids[:accepted] + [token] + [-1] * (num_drafts - accepted)
        return Outcome(tokens, accepted, accept_prob, tv_gain, self.error)

    def _uniform(self, slot: int) -> float:
        return acceptance_uniform(self.key[0], self.key[1] + slot) if self.uniforms is None else self.uniforms[slot]

    def _draw(self, law: RowLaw, slot: int) -> int:
        return draw(law, sampling_uniform(self.key[0], self.key[1] + slot, RESAMPLE))

    def _test(self, law: RowLaw, slot: int) -> tuple[_Test, float, float]:
        token = self.draft_ids[slot]
        p_n = self._draft_prob(token, slot)
        q_n = math.exp(law.log_prob(token))
        threshold, scale = decide(self.rule, q_n)
        accept = min(1.0, threshold / p_n) if p_n > 0 else 0.0
        return _Test(token, p_n, threshold, scale), accept, accept - (min(1.0, q_n / p_n) if p_n > 0 else 0.0)

    def _draft_prob(self, token: int, slot: int) -> float:
        """p_n of the slot's draft, 0 where it must be rejected; notes what is wrong with it."""
        known = self.target_logits.shape[1]
        self.draft_law = None
        if self.draft_logits is None:
            if not 0 <= token < known:
                self.error |= DRAFT_OUT_OF_RANGE
                return 0.0
            return 1.0
        if not 0 <= token < max(known, self.draft_logits.shape[1]):
            self.error |= DRAFT_OUT_OF_RANGE
            return 0.0
        if self.log_probs is not None:
            log_prob = self.log_probs[slot]
        else:
            self.draft_law = row_law(self.draft_logits[slot], self.draft)
            log_prob = self.draft_law.log_prob(token)
            self.error |= self.draft_law.error_bit(NAN_DRAFT)
            if self.draft_law.fault:
                return 0.0
        if not log_prob < math.inf:  # the statistics of a faulty row
            self.error |= NAN_DRAFT
            return 0.0
        if log_prob == -math.inf:
            self.error |= DRAFT_IMPOSSIBLE
        return math.exp(log_prob)

    def _resample(self, law: RowLaw, test: _Test, slot: int) -> int:
        """The token of a rejected slot, from (h - p)+, or from q where that has no mass."""
        if law.weights is None:  # a greedy q has one token, and so has its residual
            return law.token
        weights = self._residual(law, test, slot)
        token = pick(weights, sampling_uniform(self.key[0], self.key[1] + slot, RESAMPLE))
        if token < 0:
            self.error |= ZERO_RESIDUAL
            return self._draw(law, slot)
        return token

    def _residual(self, law: RowLaw, test: _Test, slot: int) -> torch.Tensor:
        """(h - p)+ as [padded] float32."""
        assert law.weights is not None
        weights = law.weights * (test.residual_scale / law.total)
        if self.draft_logits is not None:
            p = self._draft_row(test, slot)
            if p is not None:
                shared = min(weights.numel(), p.numel())
                weights[:shared].sub_(p[:shared]).clamp_(min=0)
        if 0 <= test.token < law.vocab_size:
            weights[test.token] = max(test.threshold - test.p_n, 0.0)
        return weights

    def _draft_row(self, test: _Test, slot: int) -> torch.Tensor | None:
        """p of a slot as [padded] float32; None where it is zero everywhere (or one-hot at the draft, set apart)."""
        assert self.draft_logits is not None
        logits = self.draft_logits[slot]
        law = self.draft_law
        if law is None and self.draft.temperature > 0 and test.p_n > 0:
            return self._draft_row_from_stats(logits, test, slot)
        law = law or row_law(logits, self.draft)
        if law.fault:
            return None
        if law.weights is None:
            one_hot = torch.zeros(-(-law.vocab_size // GROUP) * GROUP)
            one_hot[law.token] = 1.0
            return one_hot
        return law.weights.div_(law.total)

    def _draft_row_from_stats(self, logits: torch.Tensor, test: _Test, slot: int) -> torch.Tensor:
        """p without a second normalising pass: ln p_x = (z_x - z_n) + ln p_n, which keeps more digits than lse."""
        assert self.log_probs is not None
        assert self.cutoffs is not None
        z = logits.to("cpu", torch.float32, copy=True)
        if self.draft.temperature != 1:
            z.div_(self.draft.temperature)
        cut = z < self.cutoffs[slot]
        z.sub_(z[test.token].item()).add_(self.log_probs[slot]).exp_()
        return z.masked_fill_(cut, 0.0)
