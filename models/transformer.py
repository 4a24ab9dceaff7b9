"""A decoder-only transformer of the Llama family over a static KV cache, for one sequence.

Shapes: W tokens in a block, H query heads, Hkv key/value heads, D head size, V vocabulary. Activations are [W, hidden]:
a single stream has no batch dimension. What is added up over the layers stays in float32, matrix products are made in
the working dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fused_spec.kernels.attention import Block, attention, block
from fused_spec.kernels.rms_norm import RMSNorm, rms_norm
from fused_spec.kernels.rope import as_pairs, rope
from fused_spec.models.checkpoint import Checkpoint
from fused_spec.models.config import ModelConfig
from fused_spec.models.kv_cache import KVCache, LayerSlots
from fused_spec.models.linear import Linear, linear
from fused_spec.models.quantized_linear import Int4Linear, Int8Linear


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
        dtype, device: of the weights and logits.
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
        self.dtype, self.device = embedding.dtype, embedding.device

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> "Transformer":
        """Read a checkpoint tensor by tensor into the working dtype; q/k/v and gate/up become one matrix each."""
        config = checkpoint.config
        with tqdm(total=len(checkpoint.names()), desc=checkpoint.path.name, unit="tensor", disable=None) as progress:

            def read(name: str) -> torch.Tensor:
                progress.update()
                return checkpoint.tensor(name, dtype).to(device)

            embedding = read("model.embed_tokens.weight")
            layers = [_load_layer(read, f"model.layers.{i}.", config) for i in range(config.num_layers)]
            norm = RMSNorm.of(read("model.norm.weight"), config.rms_norm_eps)
            head = linear(embedding if config.tie_word_embeddings else read("lm_head.weight"))
        return cls(config, embedding, layers, norm, head)

    def quantized(self, bits: int) -> "Transformer":
        """The same model with every matrix product in `bits` = 8 or 4; embedding and norms are shared with this one."""

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
        return Transformer(self.config, self.embedding, layers, self.norm, copy(self.head))

    def new_cache(self, capacity: int) -> KVCache:
        """A cache for this model's keys and values."""
        return KVCache(self.config, capacity, self.device)

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
        config = self.config
        where = block(positions, config.num_heads, config.num_kv_heads, config.head_dim)
        rotations = cache.rotations[where.first : where.valid, None]
        x = F.embedding(tokens, self.embedding).float()
        for layer, slots in zip(self.layers, cache.layers(where), strict=True):
            x += self._attention(layer, x, slots, rotations, where)
            x += self._mlp(layer, x)
        return self.head(rms_norm(x[-1:] if last_only else x, self.norm)).to(self.dtype)

    def _attention(
        self, layer: Layer, x: torch.Tensor, slots: LayerSlots, rotations: torch.Tensor, where: Block
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(rms_norm(x, layer.attention_norm)).float().view(len(x), -1, dim)
        if layer.qk_norm is not None:
            qk = qkv[:, : heads + kv_heads]
            qk.copy_(rms_norm(qk, layer.qk_norm))
        q, k, _ = as_pairs(qkv).split((heads, kv_heads, kv_heads), dim=1)
        rope(q.unflatten(1, (kv_heads, -1)), rotations[:, None], out=where.queries)
        rope(k, rotations, out=slots.new_keys)
        slots.new_values.copy_(qkv[:, heads + kv_heads :])
        return layer.attention_out(attention(where, slots.keys, slots.values))

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm)).chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up))


def _load_layer(read: Callable[[str], torch.Tensor], prefix: str, config: ModelConfig) -> Layer:
    def fused(*names: str, bias: bool = False) -> Linear:
        weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
        return linear(weight, torch.cat([read(f"{prefix}{name}.bias") for name in names]) if bias else None)

    def norm(name: str) -> RMSNorm:
        return RMSNorm.of(read(f"{prefix}{name}.weight"), config.rms_norm_eps)

    qk_norm = None
    if config.family.qk_norm:
        q, k = read(f"{prefix}self_attn.q_norm.weight"), read(f"{prefix}self_attn.k_norm.weight")
        heads = torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
        qk_norm = RMSNorm.of(heads, config.rms_norm_eps)
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.family.qkv_bias),
        qk_norm=qk_norm,
        attention_out=fused("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
