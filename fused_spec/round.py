"""One round of speculative decoding as a function over static buffers.

State lives on the device; nothing here reads it on the host, so that a round can be captured in a graph and launched
before the previous one was looked at. The invariants:

* tokens[:length] are committed; the verifier's cache is valid for slots 0..length-2, a draft model's for 0..length-3.
* rollback is a write of `length`: slots at and beyond it are stale and will be overwritten before they are read.
* a round after `done` leaves tokens and length alone.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fused_spec.kernels.commit import Sequences
from fused_spec.kernels.logprob import token_logprobs
from fused_spec.kernels.verify import Verification, verify
from fused_spec.models.kv_cache import KVCache
from fused_spec.models.transformer import Transformer
from fused_spec.rules import Rule

if TYPE_CHECKING:
    from fused_spec.drafters import Drafter


@dataclass(frozen=True)
class Sampling:
    """How logits are processed before they are sampled or tested."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `sample` and `verify`."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}


@dataclass(frozen=True)
class RoundState:
    """The buffers of a sequence and of its last round, m drafts wide. All are written in place.

    Attributes:
        tokens: [capacity] int64.
        length, limit: [1] int64, committed tokens and the length at which generation ends.
        done: [1] bool.
        seed: [1] int64.
        stop_ids: [E] int64, tokens that end the text.
        emitted: [1] int64, how many tokens the last round committed.
        drafted: [1] int64, how many drafts it tested or could have tested.
        verification: outcome of the last round, B = 1.
        logprobs: [m+1] float32, unprocessed log-probabilities of the last round's tokens, if asked for.
    """

    tokens: torch.Tensor
    length: torch.Tensor
    limit: torch.Tensor
    done: torch.Tensor
    seed: torch.Tensor
    stop_ids: torch.Tensor
    emitted: torch.Tensor
    drafted: torch.Tensor
    verification: Verification
    logprobs: torch.Tensor
    slots: torch.Tensor = field(repr=False)  # [m+1] int64: 0..m

    @classmethod
    def empty(
        cls, capacity: int, num_draft_tokens: int, stop_ids: tuple[int, ...], device: torch.device
    ) -> "RoundState":
        """Buffers for sequences of up to `capacity` tokens and rounds of m drafts."""

        def zeros(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            tokens=zeros(capacity),
            length=zeros(1),
            limit=zeros(1),
            done=zeros(1, torch.bool),
            seed=zeros(1),
            stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=device),
            emitted=zeros(1),
            drafted=zeros(1),
            verification=Verification.empty(1, num_draft_tokens, device),
            logprobs=zeros(num_draft_tokens + 1, torch.float32),
            slots=torch.arange(num_draft_tokens + 1, device=device),
        )

    def start(self, prompt: list[int], limit: int, seed: int) -> None:
        """Begin a sequence: the prompt is committed, nothing is decoded yet."""
        self.tokens[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self.length.fill_(len(prompt))
        self.limit.fill_(limit)
        self.seed.fill_(seed)
        self.done.fill_(False)

    def sequences(self, *, ignore_stop_ids: bool) -> Sequences:
        """The buffers as `verify` and `commit` append to them; views, B = 1."""
        return Sequences(
            tokens=self.tokens[None],
            length=self.length,
            limit=self.limit,
            done=self.done,
            stop_ids=self.stop_ids[:0] if ignore_stop_ids else self.stop_ids,
            emitted=self.emitted,
            drafted=self.drafted,
        )


def decode_round(
    state: RoundState,
    verifier: Transformer,
    cache: KVCache,
    drafter: "Drafter",
    rule: Rule,
    sampling: Sampling,
    *,
    with_logprobs: bool,
    ignore_stop_ids: bool,
) -> None:
    """Draft m tokens, run the verifier over m + 1, accept and commit."""
    drafts = drafter.propose(state, sampling)
    if drafts.logits is None and state.tokens.device.type == "cpu":  # no graph to keep in shape: only what is there
        present = int((drafts.token_ids[0] >= 0).cumprod(0).sum())
        drafts = drafts._replace(token_ids=drafts.token_ids[:, :present])
    ids = drafts.token_ids[0]
    positions = state.length - 1 + state.slots[: len(ids) + 1]
    # A missing draft (-1), or one that only the drafter's padded vocabulary has, still needs an id to look up: its row
    # and those after it are never used.
    block = torch.cat([state.tokens[state.length - 1], ids]).clamp(0, verifier.config.vocab_size - 1)
    logits = verifier.forward(block, positions, cache)
    verify(
        logits[None],
        drafts.token_ids,
        drafts.logits,
        rule=rule,
        seed=state.seed,
        position=state.length,
        draft_stats=drafts.stats,
        out=state.verification.first(len(ids)),
        sequences=state.sequences(ignore_stop_ids=ignore_stop_ids),
        **sampling.options(),
    )
    if with_logprobs:
        state.logprobs[: len(ids) + 1] = token_logprobs(logits, state.verification.token_ids[0, : len(ids) + 1])
