"""What a pair of models needs of a GPU: memory, and the least time that reading it takes. Computed, from configs alone.

A single stream is bound by memory: a forward pass reads every weight once, whether it has one row or several, and the
keys and values of the context. The floor of a step is what it must read divided by the bandwidth. A round is the
verifier's pass over m + 1 tokens and m draft steps:

    plain(c) = B(1, c)                                         B(W, s) = weights + W row + s slot
    round(c) = B(m + 1, c + m) + sum_{i < m} b(w_i, c + i)

Capitals are the verifier's, small letters the draft's, with c committed tokens; w_0 = 2 for a draft model, which takes
in the last two tokens, and every other w_i = 1. A round emits E(a) = (1 - a^(m+1)) / (1 - a) tokens if each draft is
accepted with probability a whatever became of the others (Leviathan et al. 2023, arXiv 2211.17192, equation 1). So it
is E(a) plain / round times as fast as plain decoding, whatever the bandwidth: that cancels.

What the floor leaves out: gaps between launches and between rounds; what attention and the products fall short of the
bandwidth; compute, which grows with the width; activations, logits, sampling, verification, and everything that is
written. What fits in the L2 cache may be read faster than the floor says.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch

from fused_spec.drafters import PREFILL_CHUNK
from fused_spec.errors import InvalidInput
from fused_spec.gpus import GPU
from fused_spec.models.config import ModelConfig, expected_shapes, weights_read
from fused_spec.models.quantized_linear import GROUP
from fused_spec.options import MAX_DRAFT_TOKENS, NAMED_DRAFTS, SELF_DRAFT_BITS, resolve_dtype, unknown_draft
from fused_spec.round_size import tokens_per_round

NamedDraft = Literal["self-int8", "self-int4", "ngram"]
_FLOAT32, _BFLOAT16 = 4, 2
_CHUNKS, _SLOTS = 64, 64  # split attention has at most so many chunks, of a multiple of so many slots


@dataclass(frozen=True)
class Memory:
    """Bytes that stay allocated. What CUDA, its libraries and captured graphs take comes on top."""

    verifier_weights: int
    draft_weights: int
    verifier_cache: int
    draft_cache: int
    scratch: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Reads:
    """Bytes that a forward pass over W tokens reads with s slots of the cache: weights + W row + s slot.

    Attributes:
        weights: all of them once, but for the table of embeddings, unless it is the head too.
        row: of that table, for one token.
        slot: keys and values of one token.
    """

    weights: int
    row: int
    slot: int

    def of(self, width: int, slots: int) -> int:
        """The bytes of a pass."""
        return self.weights + width * self.row + slots * self.slot


@dataclass(frozen=True)
class Plan:
    """What a target and a draft need of a GPU.

    Attributes:
        num_draft_tokens: m; 0 without a draft. Methods that take another one use it in its place.
        verifier: what its passes read. drafter: the same, None where drafting reads no weights.
        first_width: tokens of a round's first draft step.
    """

    gpu: GPU
    num_draft_tokens: int
    max_length: int
    memory: Memory
    verifier: Reads
    drafter: Reads | None
    first_width: int

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory is large enough."""
        return self.memory.total <= self.gpu.memory_bytes

    def plain_bytes(self, context: int) -> int:
        """What a step of plain decoding reads with `context` committed tokens: B(1, c)."""
        _check_whole("context", context, 1, self.max_length, "max_length")
        return self.verifier.of(1, context)

    def draft_bytes(self, context: int, num_draft_tokens: int | None = None) -> int:
        """What a round's draft steps read: the sum of b(w_i, c + i) over i < m. 0 for n-grams, which are a few KB."""
        m = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if self.drafter is None:
            return 0
        return sum(self.drafter.of(self.first_width if i == 0 else 1, context + i) for i in range(m))

    def round_bytes(self, context: int, num_draft_tokens: int | None = None) -> int:
        """What a round reads: B(m + 1, c + m) and the draft steps."""
        m = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        return self.verifier.of(m + 1, context + m) + self.draft_bytes(context, m)

    def break_even_tokens(self, context: int, num_draft_tokens: int | None = None) -> float:
        """Tokens per round above which a round beats plain decoding: round / plain."""
        return self.round_bytes(context, num_draft_tokens) / self.plain_bytes(context)

    def break_even_acceptance(self, context: int) -> float | None:
        """The a at which E(a) is that; None where a round loses even if every draft is accepted."""
        return acceptance_for(self.break_even_tokens(context), self.num_draft_tokens)

    def speedup(self, acceptance: float, context: int, num_draft_tokens: int | None = None) -> float:
        """How many times as fast as plain decoding rounds are: E(a) plain / round."""
        m = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        number = isinstance(acceptance, int | float) and not isinstance(acceptance, bool)
        if not number or not 0 <= acceptance <= 1:
            raise InvalidInput(f"acceptance must be a number from 0 to 1, got {acceptance!r}")
        return tokens_per_round(acceptance, m) / self.break_even_tokens(context, m)

    def best_num_draft_tokens(self, acceptance: float, context: int) -> int:
        """The m of the largest speed-up, at most 64; 0 where plain decoding is fastest."""
        most = MAX_DRAFT_TOKENS if self.num_draft_tokens else 0
        return max(range(most + 1), key=lambda m: self.speedup(acceptance, context, m))


def plan(
    target: ModelConfig,
    draft: ModelConfig | NamedDraft | None,
    *,
    num_draft_tokens: int,
    max_length: int,
    dtype: torch.dtype | str | None,
    gpu: GPU,
) -> Plan:
    """The memory that an engine with these models needs on a GPU, and what its passes read.

    Args:
        target, draft: the config of each model; the draft may be a name or None, as for `Engine`.
        num_draft_tokens: m, 1 to 64; not used without a draft.
        max_length: most tokens of prompt and text together, at most the models' contexts.
        dtype: of weights, cache and logits; None is bfloat16.

    Raises:
        InvalidInput: an argument is none of these.
    """
    if not (draft is None or isinstance(draft, ModelConfig) or draft in NAMED_DRAFTS):
        raise unknown_draft(draft)
    models = [config for config in (target, draft) if isinstance(config, ModelConfig)]
    _check_whole("num_draft_tokens", num_draft_tokens, 1, MAX_DRAFT_TOKENS)
    _check_whole("max_length", max_length, 2, min(config.max_position_embeddings for config in models), "the context")
    size = resolve_dtype(dtype).itemsize
    m = 0 if draft is None else num_draft_tokens
    capacity = max_length + m + 1
    scratch = scratch_bytes(target, capacity, m + 1, size) + (m + 1) * target.vocab_size * size
    draft_weights, draft_cache, drafter = 0, 0, None
    if isinstance(draft, ModelConfig):
        draft_weights, draft_cache = weight_bytes(draft, size), cache_bytes(draft, capacity, size)
        scratch += scratch_bytes(draft, capacity, 2, size) + m * draft.vocab_size * size
        drafter = reads(draft, size)
    elif draft in SELF_DRAFT_BITS:
        draft_weights = sum(quantized_bytes(target, SELF_DRAFT_BITS[draft]))
        scratch += m * target.vocab_size * size
        drafter = reads(target, size, SELF_DRAFT_BITS[draft])
    memory = Memory(
        verifier_weights=weight_bytes(target, size),
        draft_weights=draft_weights,
        verifier_cache=cache_bytes(target, capacity, size),
        draft_cache=draft_cache,
        scratch=scratch,
    )
    return Plan(gpu, m, max_length, memory, reads(target, size), drafter, 2 if isinstance(draft, ModelConfig) else 1)


def weight_bytes(config: ModelConfig, size: int) -> int:
    """Every tensor of the checkpoint with `size` bytes per number; a tied head is the table of embeddings."""
    return size * _count(expected_shapes(config).values())


def quantized_bytes(config: ModelConfig, bits: int) -> list[int]:
    """Of each matrix of a quantised copy; its table of embeddings, norms and biases are the verifier's own.

    int8 [out, in]: a byte per number and a float32 scale per row. int4: half a byte per number and two bfloat16 per
    GROUP columns, for which a row is filled up. The head is in int8 either way.
    """
    layers = [shape for name, shape in expected_shapes(config).items() if len(shape) == 2 and ".layers." in name]
    if bits == 8:
        sizes = [_int8_bytes(*shape) for shape in layers]
    else:
        sizes = [rows * -(-columns // GROUP) * (GROUP // 2 + 2 * _BFLOAT16) for rows, columns in layers]
    return [*sizes, _int8_bytes(config.vocab_size, config.hidden_size)]


def cache_bytes(config: ModelConfig, capacity: int, size: int) -> int:
    """Keys and values of all layers, 2 x layers x capacity x Hkv x D, in the working dtype."""
    return 2 * config.num_layers * capacity * config.num_kv_heads * config.head_dim * size


def scratch_bytes(config: ModelConfig, capacity: int, width: int, size: int) -> int:
    """What a model's passes need besides weights, cache and logits, decoding blocks of up to `width` tokens.

    R = max(width, 512) rows, the 512 being a prompt's chunks, of: the stream (hidden, float32), normed (hidden),
    queries and attended (H D each), the products that go into them (H + 2 Hkv) D and 2 inner, and activated (inner).
    Split attention's partials, float32: width x H x chunks x (D + 2), as kernels/split_attention.py cuts a cache. The
    table of rotations: capacity x D float32.
    """
    heads, head_dim = config.num_heads, config.head_dim
    narrow = config.hidden_size + (3 * heads + 2 * config.num_kv_heads) * head_dim + 3 * config.intermediate_size
    rows = max(width, PREFILL_CHUNK) * (config.hidden_size * _FLOAT32 + narrow * size)
    chunk = _SLOTS * -(-capacity // (_SLOTS * _CHUNKS))
    partials = width * heads * -(-capacity // chunk) * (head_dim + 2) * _FLOAT32
    return rows + partials + capacity * head_dim * _FLOAT32


def reads(config: ModelConfig, size: int, bits: int | None = None) -> Reads:
    """What a model's passes read, or those of its quantised copy, if `bits` are given."""
    if bits is None:
        weights = weights_read(config) * size
    else:
        vectors = _count(shape for shape in expected_shapes(config).values() if len(shape) == 1)
        weights = sum(quantized_bytes(config, bits)) + vectors * size
    return Reads(weights, config.hidden_size * size, cache_bytes(config, 1, size))


def acceptance_for(tokens: float, num_draft_tokens: int) -> float | None:
    """The a at which E(a) is this many tokens: 0 where any a gives more, None where not even 1 gives as many."""
    if tokens <= 1:
        return 0.0
    if tokens > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until they are neighbours
        low, high = (middle, high) if tokens_per_round(middle, num_draft_tokens) < tokens else (low, middle)
    return high


def _int8_bytes(rows: int, columns: int) -> int:
    return rows * (columns + _FLOAT32)


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _check_whole(name: str, value: object, low: int, high: int, limit: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"{name} must be an integer from {low} to {high}{limit and f' ({limit})'}, got {value!r}")
