"""Where drafts come from: a second model, the verifier's own weights in int8, the text so far, or nowhere."""

from typing import Protocol

import torch

from fused_spec.kernels.ngram import ngram_propose
from fused_spec.kernels.sample import Sample, sample
from fused_spec.models.config import weights_read
from fused_spec.models.device_cache import WIDEST
from fused_spec.models.transformer import Cache, Transformer
from fused_spec.options import SELF_DRAFT_BITS
from fused_spec.round import Drafts, RoundState, Sampling

PREFILL_CHUNK = WIDEST
"""Prompt tokens per forward pass: bounds the memory of a long prompt's attention."""


class Drafter(Protocol):
    """Proposes tokens. The proposal may depend on committed tokens only."""

    def prefill(self, tokens: torch.Tensor) -> None:
        """Take in the prompt [P] of a new sequence."""

    def propose(self, state: RoundState, sampling: Sampling, size: int) -> Drafts:
        """Write `size` drafts, the first of which is for position `state.length`, behind the tokens in `state.block`.

        `state.block` and `state.positions` are those of the round (kernels/round_inputs.py).
        """


class NoDrafter:
    """Plain decoding: a round is the verifier's next token."""

    def prefill(self, tokens: torch.Tensor) -> None:
        """Nothing to do."""

    def propose(self, state: RoundState, sampling: Sampling, size: int) -> Drafts:
        """No drafts, whatever the size."""
        return Drafts(state.block[None, 2:2])


class NgramDrafter:
    """Prompt lookup: the continuation of the latest earlier occurrence of the text's ending; p is one-hot."""

    def prefill(self, tokens: torch.Tensor) -> None:
        """Nothing to do: the state holds the prompt."""

    def propose(self, state: RoundState, sampling: Sampling, size: int) -> Drafts:
        """Copy up to `size` tokens from the latest match."""
        ids = state.block[2 : size + 2]
        ngram_propose(state.tokens, state.length, size, out=ids)
        return Drafts(ids[None])


class ModelDrafter:
    """A model that drafts token by token, with a cache of its own or (self-drafting) the verifier's.

    With its own cache the first step takes two tokens, since after a fully accepted round the last draft was never run
    through the model. With the verifier's cache every committed slot is valid, and the entries that drafting writes are
    overwritten by verification.
    """

    def __init__(self, model: Transformer, most: int, cache: Cache, *, shared: bool) -> None:
        """Buffers for up to `most` drafts; `shared` says that the cache is the verifier's."""
        self.model, self.cache = model, cache
        self._shared = shared
        self._logits = torch.empty(1, most, model.config.vocab_size, dtype=model.logits_dtype, device=model.device)
        lse, cutoff, logprob = torch.empty(3, 1, most, dtype=torch.float32, device=model.device)
        self._stats = (lse, cutoff, logprob)
        self._error = torch.empty(most, dtype=torch.int32, device=model.device)

    def prefill(self, tokens: torch.Tensor) -> None:
        """Fill an own cache with the prompt; a shared one is filled by the verifier."""
        if not self._shared:
            prefill(self.model, tokens, self.cache)

    def propose(self, state: RoundState, sampling: Sampling, size: int) -> Drafts:
        """Sample tokens one after the other, keeping their logits and statistics for verification."""
        lse, cutoff, logprob = self._stats
        for i in range(size):
            known = slice(0 if i == 0 and not self._shared else i + 1, i + 2)
            new, slot = slice(i + 2, i + 3), slice(i, i + 1)
            logits = self._logits[0, slot]
            tokens, positions = state.block[known], state.positions[known]
            self.model.forward(tokens, positions, self.cache, last_only=True, drafting=True, out=logits)
            drawn = Sample(state.block[new], logprob[0, slot], lse[0, slot], cutoff[0, slot], self._error[slot])
            sample(logits, seed=state.seed, position=state.positions[new], out=drawn, **sampling.options())
        stats = (lse[:, :size], cutoff[:, :size], logprob[:, :size])
        return Drafts(state.block[None, 2 : size + 2], self._logits[:, :size], stats)


def draft_cost(target: Transformer, draft: Transformer | str | None) -> float:
    """A draft step's share of a plain step of the verifier, by the bytes of weights read."""
    if isinstance(draft, Transformer):
        return weights_read(draft.config) / weights_read(target.config)
    return SELF_DRAFT_BITS.get(draft or "", 0) / (8 * target.embedding.element_size())


def prefill(model: Transformer, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Run a prompt [P], P >= 1, in chunks; gives the logits [1, V] of its last token."""
    positions = torch.arange(len(tokens), device=tokens.device)
    for block, where in zip(tokens.split(PREFILL_CHUNK), positions.split(PREFILL_CHUNK), strict=True):
        logits = model.forward(block, where, cache, last_only=True)
    return logits
