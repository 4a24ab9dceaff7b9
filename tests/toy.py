"""Tiny random models whose laws can be enumerated."""

import torch

from fused_spec.kernels.rms_norm import RMSNorm
from fused_spec.models.config import ModelConfig
from fused_spec.models.linear import DenseLinear
from fused_spec.models.transformer import Layer, Transformer


def toy_model(
    seed: int,
    *,
    vocab_size: int = 16,
    sharpness: float = 1.0,
    layers: int = 1,
    context: int = 256,
    eos: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    architecture: str = "llama",
) -> Transformer:
    """A random transformer of hidden size 16; `sharpness` is the spread of its logits.

    Of the architectures, qwen2 has biases and qwen3 normalises queries and keys.
    """
    hidden, heads, kv_heads, dim, inner = 16, 2, 1, 8, 24
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_ids=eos,
    )
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * spread / columns**0.5).to(dtype)

    def qk_norm() -> RMSNorm | None:
        if not config.family.qk_norm:
            return None
        return RMSNorm.of(1 + weight(heads + kv_heads, dim), config.rms_norm_eps)

    norm = RMSNorm.of(torch.ones(hidden), config.rms_norm_eps)
    qkv_rows = (heads + 2 * kv_heads) * dim
    blocks = [
        Layer(
            attention_norm=norm,
            qkv=DenseLinear(
                weight(qkv_rows, hidden, 2.0), weight(qkv_rows, 1)[:, 0] if config.family.qkv_bias else None
            ),
            qk_norm=qk_norm(),
            attention_out=DenseLinear(weight(hidden, heads * dim, 2.0)),
            mlp_norm=norm,
            gate_up=DenseLinear(weight(2 * inner, hidden, 2.0)),
            down=DenseLinear(weight(hidden, inner, 2.0)),
        )
        for _ in range(layers)
    ]
    embedding = (torch.randn(vocab_size, hidden, generator=generator)).to(dtype)
    head = DenseLinear(weight(vocab_size, hidden, sharpness))
    return Transformer(config, embedding, blocks, norm, head)


def next_laws(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """[W, V] float64: the law of the token that follows each prefix of `tokens` (T = 1)."""
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        logits = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), cache)
    return logits.double().softmax(-1)
