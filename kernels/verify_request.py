"""The torch path of `verify` for one request: rows in order, and none past the one that decides.

At most one target row and one draft row are processed at a time, in float32 on the CPU, so the memory it takes does not
grow with m.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fused_spec.kernels.acceptance import decide, typical_threshold
from fused_spec.kernels.draft_slot import DraftSlot
from fused_spec.kernels.error_bits import NAN_TARGET, ZERO_RESIDUAL
from fused_spec.kernels.inverse_cdf import draw, pick
from fused_spec.kernels.pair_rules import Pair, PairTarget, pair_target
from fused_spec.kernels.philox import RESAMPLE, acceptance_uniform, sampling_uniform
from fused_spec.kernels.row_law import Processing, RowLaw, row_law
from fused_spec.rules import Cactus, Rule, TypicalAcceptance


class Outcome(NamedTuple):
    """One row of a `Verification`, by the same names, as Python numbers."""

    token_ids: list[int]
    num_accepted: int
    accept_prob: list[float]
    tv_gain: list[float]
    error: int


class _Verdict(NamedTuple):
    """Accept iff u * p_n < threshold, else resample from (scale q - p)+, or (pi - p)+ where there is a pi."""

    threshold: float
    scale: float = 1.0
    pi: PairTarget | None = None


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
    lses: list[float] | None
    uniforms: list[float] | None
    error: int = 0

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
            draft = self._draft(accepted)
            verdict = self._judge(law, draft)
            accept_prob[accepted], tv_gain[accepted] = _price(law, draft, verdict)
            if self._uniform(accepted) * draft.p_n < verdict.threshold and draft.p_n > 0:
                accepted += 1
            else:
                token = self._resample(law, draft, verdict, accepted)
        tokens = self.draft_ids[:accepted] + [token] + [-1] * (num_drafts - accepted)
        return Outcome(tokens, accepted, accept_prob, tv_gain, self.error)

    def _uniform(self, slot: int) -> float:
        return acceptance_uniform(self.key[0], self.key[1] + slot) if self.uniforms is None else self.uniforms[slot]

    def _draw(self, law: RowLaw, slot: int) -> int:
        return draw(law, sampling_uniform(self.key[0], self.key[1] + slot, RESAMPLE))

    def _draft(self, slot: int) -> DraftSlot:
        draft = DraftSlot(
            token=self.draft_ids[slot],
            vocab_size=self.target_logits.shape[1],
            logits=None if self.draft_logits is None else self.draft_logits[slot],
            processing=self.draft,
            log_prob=None if self.log_probs is None else self.log_probs[slot],
            cutoff=None if self.cutoffs is None else self.cutoffs[slot],
            lse=None if self.lses is None else self.lses[slot],
        )
        self.error |= draft.error
        return draft

    def _judge(self, law: RowLaw, draft: DraftSlot) -> _Verdict:
        """Apply the rule. A relaxed rule may accept what q gives no weight, but never what q does not know or allow."""
        if law.fault or not law.allows(draft.token):
            return _Verdict(0.0)
        q_n = math.exp(law.log_prob(draft.token))
        decision = decide(self.rule, draft.p_n, q_n)
        if decision is not None:
            return _Verdict(decision.threshold, decision.residual_scale)
        if isinstance(self.rule, TypicalAcceptance):
            bar = typical_threshold(float(self.rule.epsilon), float(self.rule.alpha), law.entropy())
            return _Verdict(math.inf if q_n > bar else 0.0)
        p = draft.row()
        if p is None:
            return _Verdict(0.0)
        q = law.probabilities()
        pi = pair_target(self.rule, Pair(p, q, draft.highest, law.highest, draft.lost))
        return _Verdict(pi.at(draft.p_n, q_n, q[draft.token].item()), pi=pi)

    def _resample(self, law: RowLaw, draft: DraftSlot, verdict: _Verdict, slot: int) -> int:
        """The token of a rejected slot, from the residual, or from q where that has no mass."""
        if law.weights is None:  # a greedy q has one token, and so has its residual
            return law.token
        if isinstance(self.rule, TypicalAcceptance):
            return law.arg_max()
        weights = self._residual(law, draft, verdict)
        token = pick(weights, sampling_uniform(self.key[0], self.key[1] + slot, RESAMPLE))
        if token < 0:
            self.error |= ZERO_RESIDUAL
            return self._draw(law, slot)
        return token

    def _residual(self, law: RowLaw, draft: DraftSlot, verdict: _Verdict) -> torch.Tensor:
        """(h - p)+ as [padded] float32."""
        assert law.weights is not None
        p = draft.row()
        if verdict.pi is not None and p is not None:
            weights = verdict.pi.row(p, law.probabilities())
        else:
            weights = law.weights * (verdict.scale / law.total)
        if p is not None:
            weights.sub_(p).clamp_(min=0)
        if 0 <= draft.token < law.vocab_size:
            if draft.p_n > 0:  # a rejection means h_n < p_n, whatever rounding makes of the difference
                weights[draft.token] = 0.0
            elif isinstance(self.rule, Cactus):
                weights[draft.token] = verdict.threshold
        return weights


def _price(law: RowLaw, draft: DraftSlot, verdict: _Verdict) -> tuple[float, float]:
    """(accept probability, acceptance gained over speculative sampling)."""
    if draft.p_n == 0:
        return 0.0, 0.0
    accept = min(1.0, verdict.threshold / draft.p_n)
    if law.fault:
        return accept, 0.0
    return accept, accept - min(1.0, math.exp(law.log_prob(draft.token)) / draft.p_n)
