"""A decoder-only transformer of the Llama family over a static KV cache, for one sequence.

Shapes: W tokens in a block, H query heads, Hkv key/value heads, D head size, V vocabulary. Activations are [W, hidden]:
a single stream has no batch dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fused_spec.kernels.attention import Span, attention, span
from fused_spec.kernels.rope import rope
from fused_spec.models.checkpoint import Checkpoint
from fused_spec.models.config import ModelConfig
from fused_spec.models.kv_cache import KVCache
from fused_spec.models.linear import DenseLinear, Linear


@dataclass(frozen=True)
class Layer:
    """The weights of one block."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> (H + 2 Hkv) D
    attention_out: Linear  # H D -> hidden
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 inner
    down: Linear  # inner -> hidden


@dataclass(frozen=True)
class Block:
    """Where a block of W tokens stands; the same for every layer."""

    positions: torch.Tensor  # [W] int64, consecutive
    rotations: torch.Tensor  # [W, 1, D/2] complex64
    span: Span


class Transformer:
    """Weights and their use: tokens in, logits out. Holds no state of a sequence; the cache is an argument.

    Attributes:
        config: sizes.
        dtype, device: of the weights and logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[Layer],
        norm: torch.Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding  # [V, hidden]
        self.layers = layers
        self.norm = norm  # [hidden]
        self.head = head
        self.dtype, self.device = embedding.dtype, embedding.device

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> "Transformer":
        """Read a checkpoint tensor by tensor into the working dtype; q/k/v and gate/up become one matrix each."""
        config = checkpoint.config
        with tqdm(total=len(checkpoint.names()), desc=checkpoint.path.name, unit="tensor", disable=None) as progress:

            def read(name: str) -> torch.Tensor:
                progress.update()
                return checkpoint.tensor(name).to(device, dtype)

            embedding = read("model.embed_tokens.weight")
            layers = [_load_layer(read, f"model.layers.{i}.") for i in range(config.num_layers)]
            norm = read("model.norm.weight")
            head = embedding if config.tie_word_embeddings else read("lm_head.weight")
        return cls(config, embedding, layers, norm, DenseLinear(head))

    def quantized_int8(self) -> "Transformer":
        """The same model with every matrix product in int8; embedding and norms are shared with this one."""
        layers = [
            Layer(
                layer.attention_norm,
                layer.qkv.quantize_int8(),
                layer.attention_out.quantize_int8(),
                layer.mlp_norm,
                layer.gate_up.quantize_int8(),
                layer.down.quantize_int8(),
            )
            for layer in self.layers
        ]
        return Transformer(self.config, self.embedding, layers, self.norm, self.head.quantize_int8())

    def new_cache(self, capacity: int) -> KVCache:
        """A cache for this model's keys and values."""
        return KVCache(self.config, capacity, self.dtype, self.device)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache, *, last_only: bool = False
    ) -> torch.Tensor:
        """Run a block of tokens and write their keys and values into the cache.

        Args:
            tokens: [W] int64 ids < V.
            positions: [W] int64, consecutive, below the cache's capacity. Slots before the first must be
                valid.
            cache: written at `positions`.
            last_only: compute the logits of the last row only.

        Returns:
            [W, V] logits in the working dtype ([1, V] with last_only).
        """
        block = Block(positions, cache.rotations[positions][:, None], span(positions))
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            x = x + self._attention(layer, index, x, block, cache)
            x = x + self._mlp(layer, x)
        return self.head(self._norm(x[-1:] if last_only else x, self.norm))

    def _attention(self, layer: Layer, index: int, x: torch.Tensor, block: Block, cache: KVCache) -> torch.Tensor:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(-1, heads + 2 * kv_heads, dim)
        qk = rope(qkv[:, : heads + kv_heads], block.rotations)
        cache.write(index, block.positions, qk[:, heads:], qkv[:, heads + kv_heads :])
        out = attention(qk[:, :heads].to(cache.dtype), cache.keys[index], cache.values[index], block.span)
        return layer.attention_out(out.flatten(1).to(x.dtype))

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=1)
        return layer.down(F.silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _load_layer(read: Callable[[str], torch.Tensor], prefix: str) -> Layer:
    def fused(*names: str) -> DenseLinear:
        return DenseLinear(torch.cat([read(f"{prefix}{name}.weight") for name in names]))

    return Layer(
        attention_norm=read(f"{prefix}input_layernorm.weight"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_out=fused("self_attn.o_proj"),
        mlp_norm=read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
