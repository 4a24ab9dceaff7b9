"""The engine: a verifier, a drafter and an acceptance rule, ready to generate one text at a time."""

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from fused_spec.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter, draft_cost
from fused_spec.errors import InvalidInput
from fused_spec.generation import Generation, GenerationOutput, Request
from fused_spec.kernels.check import check_tensor
from fused_spec.models.checkpoint import Checkpoint, open_checkpoint
from fused_spec.models.gguf_cache import converted
from fused_spec.models.tokenizer import check_same_tokenizer
from fused_spec.models.transformer import Transformer
from fused_spec.options import (
    NAMED_DRAFTS,
    SELF_DRAFT_BITS,
    check_attention,
    check_draft_name,
    check_engine_options,
    check_sampling,
    check_seed,
    check_stops,
    resolve_device,
    resolve_dtype,
    unknown_draft,
)
from fused_spec.prompt import Prompt, encode_prompt
from fused_spec.round import RoundState, Sampling
from fused_spec.round_size import possible_sizes, size_chooser
from fused_spec.rules import Rule, SpeculativeSampling
from fused_spec.runner import EagerRunner, GraphRunner, Runner, Speculation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WIDE_DELTA = 0.25
"""From this budget on, Cactus without truncation deserves a warning (docs/rules.md, fact 5)."""


class Engine:
    """Speculative decoding of one sequence at a time.

    Build one with `Engine.from_pretrained`; the constructor takes models that are loaded already, so that several
    engines can share weights.

    Attributes:
        target: the verifier.
        tokenizer: None for a checkpoint that has none; prompts are token ids then, and `text` stays empty.
        rule: the acceptance rule; a new one counts from the next call of `stream` or `generate`.
        num_draft_tokens: as given; round_sizes: every m that a round may have.
        drafter, cache, state: the buffers of the sequence being decoded. runner: who runs its rounds.
        eos_token_ids: tokens that end a text.
        max_length: most tokens of prompt and text together.
    """

    def __init__(
        self,
        target: Transformer,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        draft: Transformer | str | None = None,
        rule: Rule | None = None,
        num_draft_tokens: int | Literal["auto"] = 5,
        max_length: int = 4096,
        attention: str = "auto",
    ) -> None:
        """Allocate caches and buffers around loaded models.

        Args:
            target: the verifier.
            tokenizer: its tokenizer, if it has one.
            draft: a loaded model with the same tokenizer, "ngram" (prompt lookup), "self-int8" or "self-int4" (the
                verifier's own weights in 8 or 4 bits, sharing its cache) or None (plain decoding).
            rule: an acceptance rule; None is SpeculativeSampling(), which is lossless.
            num_draft_tokens: m, drafts per round, 1 to 64, or "auto": a few sizes, chosen round by round from how many
                of the drafts tested so far were accepted.
            max_length: most tokens of prompt and text together, at most the models' contexts.
            attention: on a GPU "flash" (flash-attn), "triton" (our own) or "auto" (flash-attn where it is installed and
                takes the model); on a CPU "sdpa" (torch's) or "auto".

        Raises:
            InvalidInput: an argument is none of these.
        """
        rule = SpeculativeSampling() if rule is None else rule
        check_engine_options(rule, num_draft_tokens, max_length)
        check_attention(attention, target.device)
        if draft is not None and not isinstance(draft, Transformer) and draft not in NAMED_DRAFTS:
            raise unknown_draft(draft)
        for model, name in ((target, "target"), (draft, "draft")):
            if isinstance(model, Transformer) and max_length > model.config.max_position_embeddings:
                context = model.config.max_position_embeddings
                raise InvalidInput(f"max_length {max_length} is more than the {name}'s context of {context} tokens")
        self.target, self.tokenizer, self.rule, self.max_length = target, tokenizer, rule, max_length
        self.num_draft_tokens = num_draft_tokens
        self.eos_token_ids = frozenset(target.config.eos_token_ids)
        self.round_sizes = possible_sizes(draft is not None, num_draft_tokens)
        most = self.round_sizes[-1]
        capacity = max_length + most + 1
        self.cache = target.new_cache(capacity, width=most + 1, attention=attention)
        self.state = RoundState.empty(capacity, most, target.config.eos_token_ids, target.device)
        self.running: object = None
        self.use_drafter(self._drafter(draft, most, capacity, attention))
        self._draft_cost = draft_cost(target, draft)
        self._warned = False

    def _drafter(self, draft: Transformer | str | None, most: int, capacity: int, attention: str) -> Drafter:
        if draft is None:
            return NoDrafter()
        if draft == "ngram":
            return NgramDrafter()
        if isinstance(draft, str):
            return ModelDrafter(self.target.quantized(SELF_DRAFT_BITS[draft]), most, self.cache, shared=True)
        return ModelDrafter(draft, most, draft.new_cache(capacity, width=2, attention=attention), shared=False)

    def use_drafter(self, drafter: Drafter) -> None:
        """Take drafts from somewhere else, in rounds of the same sizes. A text that is under way ends here."""
        self.drafter = drafter
        self.runner = self._runner()
        self.running = None

    def _runner(self) -> Runner:
        parts = Speculation(self.target, self.cache, self.drafter, self.state)
        if self.target.device.type != "cuda":
            return EagerRunner(parts)
        from fused_spec.cuda_graph import CudaRecorder

        return GraphRunner(parts, self.round_sizes, CudaRecorder(self.target.device))

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str],
        *,
        draft: str | os.PathLike[str] | None = None,
        rule: Rule | None = None,
        num_draft_tokens: int | Literal["auto"] = 5,
        max_length: int = 4096,
        dtype: torch.dtype | Literal["bfloat16", "float16", "float32"] | None = None,
        device: str | torch.device | None = None,
        attention: str = "auto",
    ) -> "Engine":
        """Load models and allocate everything a generation needs.

        Args:
            target: the verifier: a Hugging Face folder (safetensors), a .gguf file or a hub id.
            draft: the same, or "ngram", "self-int8", "self-int4" or None; see `Engine`.
            rule, num_draft_tokens, max_length, attention: see `Engine`.
            dtype: of weights and logits; None is bfloat16.
            device: None is CUDA where there is one, else the CPU.

        Raises:
            InvalidInput: a path, a file in it or an argument is not usable; the message says what came and what is
                allowed.
        """
        rule = SpeculativeSampling() if rule is None else rule
        check_engine_options(rule, num_draft_tokens, max_length)
        check_draft_name(draft)
        place, number = resolve_device(device), resolve_dtype(dtype)
        check_attention(attention, place)
        # what most forward passes of the target have
        rows = 1 if draft in (None, "ngram") else possible_sizes(True, num_draft_tokens)[-1] + 1
        with open_checkpoint(target) as checkpoint:
            tokenizer = checkpoint.tokenizer()
            if draft is None or draft in NAMED_DRAFTS:
                model = _load(checkpoint, number, place, rows)
                drafting: Transformer | str | None = None if draft is None else str(draft)
            else:
                with open_checkpoint(draft) as draft_checkpoint:
                    draft_tokenizer = draft_checkpoint.tokenizer()
                    if tokenizer is not None and draft_tokenizer is not None:
                        check_same_tokenizer(tokenizer, draft_tokenizer, str(target), str(draft))
                    model = _load(checkpoint, number, place, rows)
                    drafting = _load(draft_checkpoint, number, place, rows=2)
        return cls(
            model,
            tokenizer,
            draft=drafting,
            rule=rule,
            num_draft_tokens=num_draft_tokens,
            max_length=max_length,
            attention=attention,
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        allowed: torch.Tensor | None = None,
        round_sizes: Sequence[int] | None = None,
    ) -> Generation:
        """Generate round by round: iterate over the result for chunks; its `output` then holds the whole.

        Args:
            prompt: text, token ids, or chat messages [{"role": ..., "content": ...}] for the chat template.
            max_new_tokens: >= 0. Generation also ends at `max_length` tokens in all, finish_reason "length".
            temperature: 0 is greedy. top_k: 0 is off. top_p: (0, 1]. min_p: [0, 1].
            seed: 0 <= seed < 2^63; None draws one, which the output reports.
            stop: strings that end the text; the text ends before the first of them.
            ignore_eos: go on behind EOS tokens.
            logprobs: report the verifier's unprocessed log-probability of every token.
            allowed: int32 bitmask [ceil(V/32)] of the ids that the text may have, bit i of word w for id 32 w + i.
            round_sizes: m of each round, as an earlier text's `stats.round_sizes` has them: with its seed and settings
                they replay it, also where num_draft_tokens is "auto". Later rounds are sized as without.

        Raises:
            InvalidInput: an argument is none of these, or the prompt is empty or has max_length tokens or more.
        """
        if not isinstance(self.rule, Rule):
            raise InvalidInput(f"rule must be an acceptance rule such as SpeculativeSampling(), got {self.rule!r}")
        check_sampling(temperature, top_k, top_p, min_p, max_new_tokens)
        stops = check_stops(stop, self.tokenizer is not None)
        mask = self._mask(allowed)
        if temperature > 0 and (top_k, top_p, min_p) == (0, 1, 0):
            self._warn_of_the_tail()
        ids = encode_prompt(prompt, self.tokenizer, self.target.config.vocab_size, self.max_length)
        return Generation(
            self,
            Request(
                prompt=ids,
                limit=min(len(ids) + max_new_tokens, self.max_length),
                sampling=Sampling(temperature, top_k, top_p, min_p, mask),
                sizes=size_chooser(self.round_sizes, self._draft_cost, round_sizes),
                seed=check_seed(seed),
                stop=stops,
                ignore_eos=ignore_eos,
                logprobs=logprobs,
            ),
        )

    def _mask(self, allowed: torch.Tensor | None) -> torch.Tensor | None:
        if allowed is None:
            return None
        check_tensor("allowed", allowed, (-(-self.target.config.vocab_size // 32),), (torch.int32,))
        return allowed.to(self.target.device, copy=True)

    def _warn_of_the_tail(self) -> None:
        """Say once per engine that a wide budget without truncation hands the text over to the draft."""
        delta = torch.as_tensor(getattr(self.rule, "delta", 0.0)).max().item()
        if delta >= WIDE_DELTA and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.rule} without top_k, top_p or min_p: in the tail Cactus accepts sqrt(2 delta / q) times what q "
                "gives a token, so the text largely becomes the draft's; its authors use top_p=0.95, top_k=20",
                stacklevel=3,
            )

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        allowed: torch.Tensor | None = None,
        round_sizes: Sequence[int] | None = None,
    ) -> GenerationOutput:
        """Generate a whole text; arguments and errors as in `stream`."""
        generation = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            allowed=allowed,
            round_sizes=round_sizes,
        )
        for _ in generation:
            pass
        return generation.output


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, rows: int) -> Transformer:
    with converted(checkpoint, dtype) as cached:
        return Transformer.load(cached, dtype, device, rows=rows)
