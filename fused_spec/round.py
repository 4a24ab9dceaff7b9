"""One round of speculative decoding as a function over static buffers.

State lives on the device; nothing here reads it on the host, so that a round can be captured in a graph and launched
before the previous one was looked at. The invariants:

* tokens[:length] are committed; the verifier's cache is valid for slots 0..length-2, a draft model's for 0..length-3.
* rollback is a write of `length`: slots at and beyond it are stale and will be overwritten before they are read.
* a round after `done` leaves tokens and length alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fused_spec.kernels.check import Scalar, runs_on_triton
from fused_spec.kernels.commit import Sequences
from fused_spec.kernels.logprob import token_logprobs
from fused_spec.kernels.round_inputs import round_inputs
from fused_spec.kernels.verify import DraftStats, verify
from fused_spec.models.transformer import Cache, Transformer
from fused_spec.report import Report
from fused_spec.rules import Rule

if TYPE_CHECKING:
    from fused_spec.drafters import Drafter


@dataclass(frozen=True)
class Sampling:
    """How logits are processed before they are sampled or tested: numbers, or tensors [1] that a graph reads anew.

    `allowed` is an int32 bitmask [ceil(V/32)] of the ids that the verifier may give, or None for all.
    """

    temperature: Scalar = 1.0
    top_k: Scalar = 0
    top_p: Scalar = 1.0
    min_p: Scalar = 0.0
    allowed: torch.Tensor | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `sample` and `verify`, without the mask."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    @property
    def filtered(self) -> bool:
        """Whether tokens are cut; for numbers."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

    @property
    def greedy(self) -> bool:
        """Whether T = 0; for numbers."""
        return bool(self.temperature == 0)


@dataclass(frozen=True)
class Drafts:
    """What `verify` takes, for B = 1.

    Attributes:
        token_ids: [1, m] int64, -1 from the first slot without a draft.
        logits: [1, m, Vd], or None for a deterministic drafter.
        stats, uniforms: see `verify`.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor | None = None
    stats: DraftStats | None = None
    uniforms: torch.Tensor | None = None


@dataclass(frozen=True)
class RoundState:
    """The buffers of a sequence, for rounds of up to m drafts. All are written in place.

    Attributes:
        tokens: [capacity] int64.
        limit: [1] int64, the length at which generation ends.
        seed: [1] int64.
        stop_ids: [E] int64, tokens that end the text; -1 where there are none to mind.
        block: [m+2] int64, the last two committed tokens, then the drafts. positions: [m+2] int64, theirs.
        report: where the last round left the sequence; its `length` and `done` are the sequence's own.
    """

    tokens: torch.Tensor
    limit: torch.Tensor
    seed: torch.Tensor
    stop_ids: torch.Tensor
    block: torch.Tensor
    positions: torch.Tensor
    report: Report
    eos_token_ids: tuple[int, ...]

    @classmethod
    def empty(
        cls, capacity: int, num_draft_tokens: int, eos_token_ids: tuple[int, ...], device: torch.device | str
    ) -> "RoundState":
        """Buffers for sequences of up to `capacity` tokens and rounds of up to m drafts, at rest."""

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        state = cls(
            tokens=zeros(capacity),
            limit=zeros(1),
            seed=zeros(1),
            stop_ids=zeros(len(eos_token_ids)),
            block=zeros(num_draft_tokens + 2),
            positions=zeros(num_draft_tokens + 2),
            report=Report(num_draft_tokens, device),
            eos_token_ids=eos_token_ids,
        )
        state.rest()
        return state

    @property
    def length(self) -> torch.Tensor:
        """[1] int64, committed tokens."""
        return self.report.length

    @property
    def done(self) -> torch.Tensor:
        """[1] bool, whether the text has ended."""
        return self.report.done

    def start(self, prompt: list[int], limit: int, seed: int, *, ignore_stop_ids: bool = False) -> None:
        """Begin a sequence: the prompt is committed, nothing is decoded yet."""
        self.tokens[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self.stop_ids.copy_(torch.tensor([-1 if ignore_stop_ids else token for token in self.eos_token_ids]))
        self.length.fill_(len(prompt))
        self.limit.fill_(limit)
        self.seed.fill_(seed)
        self.done.fill_(False)

    def rest(self) -> None:
        """A finished sequence of two tokens: rounds run on it, as when a graph is captured, and change nothing."""
        self.length.fill_(2)
        self.limit.fill_(2)
        self.done.fill_(True)

    def sequences(self) -> Sequences:
        """The buffers as `verify` and `commit` append to them; views, B = 1."""
        return Sequences(
            tokens=self.tokens[None],
            length=self.length,
            limit=self.limit,
            done=self.done,
            stop_ids=self.stop_ids,
            emitted=self.report.emitted,
            drafted=self.report.drafted,
        )


def decode_round(
    state: RoundState,
    verifier: Transformer,
    cache: Cache,
    drafter: "Drafter",
    rule: Rule,
    sampling: Sampling,
    *,
    size: int,
    with_logprobs: bool = False,
) -> None:
    """Draft `size` tokens, run the verifier over one more, accept and commit."""
    round_inputs(state.tokens, state.length, state.block, state.positions)
    drafts = drafter.propose(state, sampling, size)
    if drafts.logits is None and not runs_on_triton(None, state.tokens.device):
        # No graph to keep in shape: only what is there.
        size = int((drafts.token_ids[0] >= 0).cumprod(0).sum())
        drafts = Drafts(drafts.token_ids[:, :size])
    logits = verifier.forward(state.block[1 : size + 2], state.positions[1 : size + 2], cache)
    settle(state, logits, drafts, rule, sampling, with_logprobs=with_logprobs)


def settle(
    state: RoundState,
    logits: torch.Tensor,
    drafts: Drafts,
    rule: Rule,
    sampling: Sampling,
    *,
    with_logprobs: bool = False,
) -> None:
    """Test m drafts against the verifier's logits [m+1, V], draw the token that follows and commit what came out."""
    size = drafts.token_ids.shape[1]
    allowed = sampling.allowed
    outcome = state.report.verification(size)
    verify(
        logits[None],
        drafts.token_ids,
        drafts.logits,
        rule=rule,
        seed=state.seed,
        position=state.length,
        allowed=None if allowed is None else allowed.expand(1, size + 1, -1),
        draft_stats=drafts.stats,
        uniforms=drafts.uniforms,
        out=outcome,
        sequences=state.sequences(),
        **sampling.options(),
    )
    if with_logprobs:
        token_logprobs(logits, outcome.token_ids[0], out=state.report.logprobs[: size + 1])
