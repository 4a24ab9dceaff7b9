"""Drafts that are accepted with a prescribed probability: an engine's speed apart from what models agree on.

A draft is accepted if u p_n < g. Here u is 0 or just below 1, decided beforehand for every position, and the drafter
claims to have been certain of its drafts, p_n = 1: at temperature > 0 u alone decides, but for drafts that the verifier
gives no weight at all or all of it. All else is done as ever, down to the residual of a rejected row, so a round takes
the time that it takes. The text means nothing.
"""

import torch

from fused_spec.drafters import Drafter
from fused_spec.errors import InvalidInput
from fused_spec.round import Drafts, RoundState, Sampling

_BELOW_ONE = 1 - 2.0**-24


class SyntheticDrafter:
    """A drafter that has logits, with an acceptance rate of our choosing."""

    def __init__(self, drafter: Drafter, acceptance: float, state: RoundState) -> None:
        """Draw for each position of `state` whether a draft there is accepted, from a fixed seed.

        Raises:
            InvalidInput: `acceptance` is not a probability.
        """
        if not 0 <= acceptance <= 1:
            raise InvalidInput(f"acceptance must be a number from 0 to 1, got {acceptance!r}")
        capacity, most = len(state.tokens), len(state.block) - 2
        accepted = torch.rand(capacity + most, generator=torch.Generator().manual_seed(0)) < acceptance
        device = state.tokens.device
        self._drafter = drafter
        self._uniforms = torch.where(accepted, 0.0, _BELOW_ONE).to(device)
        self._drawn = torch.empty(1, most, device=device)
        self._claimed = torch.zeros(1, most, device=device)

    def prefill(self, tokens: torch.Tensor) -> None:
        """As the drafter does."""
        self._drafter.prefill(tokens)

    def propose(self, state: RoundState, sampling: Sampling, size: int) -> Drafts:
        """The drafter's drafts, with uniforms of their positions and the claimed probability."""
        drafts = self._drafter.propose(state, sampling, size)
        if drafts.stats is None:
            raise InvalidInput("a prescribed acceptance needs a drafter with logits: a model or a self-draft")
        uniforms = self._drawn[:, :size]
        torch.index_select(self._uniforms, 0, state.positions[2 : size + 2], out=uniforms[0])
        lse, cutoff, _ = drafts.stats
        return Drafts(drafts.token_ids, drafts.logits, (lse, cutoff, self._claimed[:, :size]), uniforms)
