"""A decoder-only transformer of the Llama family over a static KV cache, for one sequence.

Shapes: W tokens in a block, H query heads, Hkv key/value heads, D head size, V vocabulary. Activations are [W, hidden]:
a single stream has no batch dimension. What is added up over the layers stays in float32, matrix products are made in
the working dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from fused_spec.kernels.check import runs_on_triton
from fused_spec.kernels.embedding import embed
from fused_spec.kernels.rms_norm import RMSNorm, rms_norm
from fused_spec.kernels.silu_mul import silu_mul
from fused_spec.models.checkpoint import Checkpoint
from fused_spec.models.config import ModelConfig, expected_shapes
from fused_spec.models.device_cache import DeviceCache
from fused_spec.models.kv_cache import KVCache
from fused_spec.models.linear import DenseLinear, Linear, linear
from fused_spec.models.quantized_linear import Int4Linear, Int8Linear

Cache = KVCache | DeviceCache
"""Keys and values of one sequence, and the attention that goes with where they are."""

Read = Callable[..., torch.Tensor]
"""(names) -> their tensors on top of each other."""

Mapped = Callable[[str], torch.Tensor | None]
"""(name) -> the tensor where it lies in the file, or None."""

_EMBEDDING = "model.embed_tokens.weight"
_FEW_ROWS, _FEW_ROWS_OF_SMALL_MODELS, _SMALL = 3, 5, 1024
"""Rows up to which products for few rows are the faster ones. With a hidden size up to 1024 more time goes into getting
in and out of products than into themselves, and those have less to do there."""


@dataclass(frozen=True)
class Layer:
    """The weights of one block."""

    attention_norm: RMSNorm  # [hidden]
    qkv: Linear  # hidden -> (H + 2 Hkv) D
    qk_norm: RMSNorm | None  # [H + Hkv, D], for each head of queries and keys
    attention_out: Linear  # H D -> hidden
    mlp_norm: RMSNorm  # [hidden]
    gate_up: Linear  # hidden -> 2 inner
    down: Linear  # inner -> hidden


class Transformer:
    """Weights and their use: tokens in, logits out. Holds no state of a sequence; the cache is an argument.

    Attributes:
        config: sizes.
        device: of the weights.
        logits_dtype: the working dtype, or float32 where the head's product gives that.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[Layer],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding  # [V, hidden]
        self.layers = layers
        self.norm = norm  # [hidden]
        self.head = head
        self.device = embedding.device
        probe = torch.zeros(self.least_rows, config.hidden_size, dtype=head.dtype, device=self.device)
        self.logits_dtype = head(probe).dtype

    @property
    def least_rows(self) -> int:
        """Rows of activations that the matrix products need."""
        return max(self.layers[0].qkv.least_rows, self.head.least_rows)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *, rows: int = 1) -> "Transformer":
        """Read a checkpoint tensor by tensor into the working dtype; q/k/v and gate/up become one matrix each.

        `rows` is how many tokens most forward passes will have, for which the weights are laid out: 1 for plain
        decoding, m + 1 for verification.
        """
        few = rows <= (_FEW_ROWS_OF_SMALL_MODELS if checkpoint.config.hidden_size <= _SMALL else _FEW_ROWS)
        shapes = expected_shapes(checkpoint.config)
        with tqdm(total=len(shapes), desc=checkpoint.path.name, unit="tensor", disable=None) as progress:

            def read(*names: str) -> torch.Tensor:
                """Copied one by one: `torch.cat` would need all of them twice."""
                parts = [shapes[name] for name in names]
                stacked = torch.empty(sum(part[0] for part in parts), *parts[0][1:], dtype=dtype, device=device)
                for name, rows_of in zip(names, stacked.split([part[0] for part in parts]), strict=True):
                    rows_of.copy_(checkpoint.tensor(name, dtype))
                    progress.update()
                return stacked

            return cls._assemble(checkpoint.config, read, few, lambda name: checkpoint.mapped(name, dtype))

    @classmethod
    def uninitialised(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> "Transformer":
        """A model of some shape whose weights are whatever the memory holds; on the meta device it takes none."""
        shapes = expected_shapes(config)

        def read(*names: str) -> torch.Tensor:
            parts = [shapes[name] for name in names]
            return torch.empty(sum(part[0] for part in parts), *parts[0][1:], dtype=dtype, device=device)

        return cls._assemble(config, read, False, lambda name: None)

    @classmethod
    def _assemble(cls, config: ModelConfig, read: Read, few: bool, mapped: Mapped) -> "Transformer":
        # The head first: what it takes to rearrange the largest matrix is needed while there is nothing else yet.
        embedding = read(_EMBEDDING)
        head = linear(embedding if config.tie_word_embeddings else read("lm_head.weight"), None, few)
        if config.tie_word_embeddings and not isinstance(head, DenseLinear):
            # For looking up rows of a table whose other copy the head rearranges, the file's own will do.
            in_file = mapped(_EMBEDDING)
            embedding = embedding if in_file is None else in_file
        layers = [_load_layer(read, f"model.layers.{i}.", config, few, mapped) for i in range(config.num_layers)]
        norm = RMSNorm.of(read("model.norm.weight"), config.rms_norm_eps)
        return cls(config, embedding, layers, norm, head)

    def quantized(self, bits: int) -> "Transformer":
        """The same model with the layers' matrix products in `bits` = 8 or 4; embedding and norms are shared.

        The head's product is in 8 bits either way: in 4 it would lose more acceptance than all layers together.
        """

        def copy(weight: Linear) -> Linear:
            dense, bias = weight.dense(), weight.bias
            return Int8Linear(dense, bias) if bits == 8 else Int4Linear(dense, bias)

        layers = [
            replace(
                layer,
                qkv=copy(layer.qkv),
                attention_out=copy(layer.attention_out),
                gate_up=copy(layer.gate_up),
                down=copy(layer.down),
            )
            for layer in self.layers
        ]
        return Transformer(self.config, self.embedding, layers, self.norm, Int8Linear(self.head.dense()))

    def new_cache(self, capacity: int, *, width: int = 65, attention: str = "auto") -> Cache:
        """A cache for this model's keys and values.

        Args:
            capacity: number of slots, at least.
            width: the widest block that is decoded rather than prefilled; more scratch memory off the CPU.
            attention: off the CPU, see `cached_attention`.
        """
        if not runs_on_triton(None, self.device):
            return KVCache(self.config, capacity, self.device)
        return DeviceCache(self.config, capacity, width, self.embedding.dtype, self.device, attention)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        *,
        last_only: bool = False,
        drafting: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a block of tokens and write their keys and values into the cache.

        Args:
            tokens: [W] int64; an id that is no row of the embedding (a missing draft's -1, one that only another
                model's padding has) is taken for the nearest: no tokenizer gives it a text.
            positions: [W] int64, consecutive, below the cache's capacity. Slots before the first must be
                valid.
            cache: written at `positions`.
            last_only: compute the logits of the last row only.
            drafting: on a CPU, be faster; a row may then come out with other bits in a block of another width.
            out: where the logits go, or None for a new tensor.

        Returns:
            [W, V] logits ([1, V] with last_only); `out` if given.
        """
        block = cache.block(positions, self.least_rows, self.layers[0].qkv.dtype, drafting)
        room = block.room
        embed(tokens, self.embedding, out=room.stream[: len(tokens)])
        pending = None  # what the last product gave and is not in the stream yet
        for i, layer in enumerate(self.layers):
            rms_norm(room.stream, layer.attention_norm, room.norm, out=room.normed, add=pending)
            attended = block.attend(i, layer.qkv(room.normed), layer.qk_norm)
            pending = layer.attention_out(attended)
            rms_norm(room.stream, layer.mlp_norm, room.norm, out=room.normed, add=pending)
            silu_mul(layer.gate_up(room.normed), out=room.activated)
            pending = layer.down(room.activated)
        rms_norm(room.stream, self.norm, room.norm, out=room.normed, add=pending)
        wanted = slice(len(tokens) - 1, len(tokens)) if last_only else slice(0, len(tokens))
        return self._logits(room.normed, wanted, out)

    def _logits(self, normed: torch.Tensor, wanted: slice, out: torch.Tensor | None) -> torch.Tensor:
        """The logits of some rows, with as few others as the head's product takes."""
        begin = max(min(wanted.start, wanted.stop - self.least_rows), 0)
        rows = normed[begin : max(wanted.stop, begin + self.least_rows)].to(self.head.dtype)
        if len(rows) == wanted.stop - wanted.start:
            return self.head(rows, out)
        logits = self.head(rows)[wanted.start - begin : wanted.stop - begin]
        return logits if out is None else out.copy_(logits)


def _load_layer(read: Read, prefix: str, config: ModelConfig, few: bool, mapped: Mapped) -> Layer:
    def product(*names: str, bias: bool = False) -> Linear:
        biases = read(*(f"{prefix}{name}.bias" for name in names)) if bias else None
        weights = [f"{prefix}{name}.weight" for name in names]
        in_file = [weight for weight in map(mapped, weights if few else []) if weight is not None]
        return linear(read(*weights), biases, few, in_file if len(in_file) == len(weights) else ())

    def norm(name: str) -> RMSNorm:
        return RMSNorm.of(read(f"{prefix}{name}.weight"), config.rms_norm_eps)

    qk_norm = None
    if config.family.qk_norm:
        q, k = read(f"{prefix}self_attn.q_norm.weight"), read(f"{prefix}self_attn.k_norm.weight")
        heads = torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
        qk_norm = RMSNorm.of(heads, config.rms_norm_eps)
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.family.qkv_bias),
        qk_norm=qk_norm,
        attention_out=product("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=product("mlp.gate_proj", "mlp.up_proj"),
        down=product("mlp.down_proj"),
    )
