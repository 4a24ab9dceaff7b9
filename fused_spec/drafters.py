"""Where drafts come from: a second model, the verifier's own weights in int8, the text so far, or nowhere."""

from typing import NamedTuple, Protocol

import torch

from fused_spec.kernels.ngram import ngram_propose
from fused_spec.kernels.sample import sample
from fused_spec.kernels.verify import DraftStats
from fused_spec.models.kv_cache import KVCache
from fused_spec.models.transformer import Transformer
from fused_spec.round import RoundState, Sampling

PREFILL_CHUNK = 512
"""Prompt tokens per forward pass: bounds the memory of a long prompt's attention."""


class Drafts(NamedTuple):
    """What `verify` takes, for B = 1."""

    token_ids: torch.Tensor  # [1, m] int64, -1 from the first slot without a draft
    logits: torch.Tensor | None  # [1, m, Vd]
    stats: DraftStats | None


class Drafter(Protocol):
    """Proposes m tokens per round. The proposal may depend on committed tokens only."""

    num_tokens: int

    def prefill(self, tokens: torch.Tensor) -> None:
        """Take in the prompt [P] of a new sequence."""

    def propose(self, state: RoundState, sampling: Sampling) -> Drafts:
        """Draft for slots 0..m-1, the first of which is position `state.length`."""


class NoDrafter:
    """Plain decoding: a round is the verifier's next token."""

    num_tokens = 0

    def __init__(self, device: torch.device) -> None:
        self._none = torch.empty(1, 0, dtype=torch.int64, device=device)

    def prefill(self, tokens: torch.Tensor) -> None:
        """Nothing to do."""

    def propose(self, state: RoundState, sampling: Sampling) -> Drafts:
        """No drafts."""
        return Drafts(self._none, None, None)


class NgramDrafter:
    """Prompt lookup: the continuation of the latest earlier occurrence of the text's ending; p is one-hot."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def prefill(self, tokens: torch.Tensor) -> None:
        """Nothing to do: the state holds the prompt."""

    def propose(self, state: RoundState, sampling: Sampling) -> Drafts:
        """Copy up to m tokens from the latest match."""
        return Drafts(ngram_propose(state.tokens, state.length, self.num_tokens)[None], None, None)


class ModelDrafter:
    """A model that drafts token by token, with a cache of its own or (self-drafting) the verifier's.

    With its own cache the first step takes two tokens, since after a fully accepted round the last draft was never run
    through the model. With the verifier's cache every committed slot is valid, and the entries that drafting writes are
    overwritten by verification.
    """

    def __init__(
        self, model: Transformer, num_tokens: int, capacity: int, verifier_cache: KVCache | None = None
    ) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.cache = model.new_cache(capacity) if verifier_cache is None else verifier_cache
        self._shared = verifier_cache is not None
        self._first = torch.arange(-1 if self._shared else -2, 0, device=model.device)
        self._ids = torch.empty(1, num_tokens, dtype=torch.int64, device=model.device)
        shape = (1, num_tokens, model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=model.logits_dtype, device=model.device)
        lse, cutoff, logprob = torch.empty(3, 1, num_tokens, dtype=torch.float32, device=model.device)
        self._stats = (lse, cutoff, logprob)

    def prefill(self, tokens: torch.Tensor) -> None:
        """Fill an own cache with the prompt; a shared one is filled by the verifier."""
        if not self._shared:
            prefill(self.model, self._known(tokens), self.cache)

    def propose(self, state: RoundState, sampling: Sampling) -> Drafts:
        """Sample m tokens one after the other, keeping their logits and statistics for verification."""
        positions = state.length + self._first
        block = state.tokens[positions]
        for i in range(self.num_tokens):
            logits = self.model.forward(self._known(block), positions, self.cache, last_only=True)
            positions = state.length + i
            drawn = sample(logits, seed=state.seed, position=positions, **sampling.options())
            block = drawn.token_ids
            self._logits[:, i] = logits
            self._ids[:, i] = block
            for buffer, value in zip(self._stats, (drawn.lse, drawn.cutoff, drawn.logprob), strict=True):
                buffer[:, i] = value
        return Drafts(self._ids, self._logits, self._stats)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids that a smaller padded vocabulary lacks get its last row: no tokenizer gives such an id a text."""
        return tokens.clamp(max=self.model.config.vocab_size - 1)


def prefill(model: Transformer, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Run a prompt [P], P >= 1, in chunks; gives the logits [1, V] of its last token."""
    positions = torch.arange(len(tokens), device=tokens.device)
    for block, where in zip(tokens.split(PREFILL_CHUNK), positions.split(PREFILL_CHUNK), strict=True):
        logits = model.forward(block, where, cache, last_only=True)
    return logits
