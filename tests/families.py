"""Tiny random models of every family, made by transformers, and their logits beside ours.

Weights are random enough that every part of the arithmetic shows in the logits: norm weights from 0.5 to 1.5, biases
as large as what they are added to, matrices with a standard deviation of `SPREAD`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.transformer import Transformer

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SPREAD = 0.2
POSITIONS, CONTEXT, ORIGINAL = 300, 512, 64
BOUND = 1e-4
"""Of the range of the logits. Float32 rounds at 6e-8, sums over some hundred columns and two layers lose about two
digits of it; the faults that are planted move the logits by more than `VISIBLE`."""
VISIBLE = 100 * BOUND

PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-mscale-alone": YARN | {"mscale": 0.5},
    "yarn-attention": YARN | {"attention_factor": 0.9},
    "yarn-betas": YARN | {"beta_fast": 2.0, "beta_slow": 0.5},
    "yarn-real-ends": YARN | {"truncate": False},
    "yarn-from-lengths": YARN | {"factor": None},
}


def family_model(
    family: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    tied: bool = False,
    rope: dict[str, Any] = PLAIN,
    layers: int = 2,
    hidden: int = 96,
    inner: int = 128,
    vocab: int = 200,
    spread: float = SPREAD,
) -> PreTrainedModel:
    """A model for `CONTEXT` positions, without an EOS token."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=spread,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope),
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1000 * heads + head_dim)
    model: PreTrainedModel = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0, spread * hidden**0.5)
    return model


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The folder, with the model in it."""
    model.save_pretrained(folder)
    return folder


def spell_as_before(folder: Path) -> None:
    """Rewrites `rope_parameters` as `rope_theta` and `rope_scaling` with "type", as before transformers 5."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope == {"type": "default"} else rope
    path.write_text(json.dumps(config))


def loaded(path: Path) -> Transformer:
    """Our model of a checkpoint, in float32."""
    with open_checkpoint(path) as checkpoint:
        return Transformer.load(checkpoint, torch.float32, torch.device("cpu"))


def some_tokens(vocab: int = 200) -> torch.Tensor:
    """[POSITIONS] int64."""
    return torch.randint(0, vocab, (POSITIONS,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def our_logits(model: Transformer, tokens: torch.Tensor, widths: list[int] | None = None) -> torch.Tensor:
    """[W, V], run in blocks of these widths, or all at once."""
    cache, rows, start = model.new_cache(len(tokens)), [], 0
    for width in widths or [len(tokens)]:
        block = torch.arange(start, start + width)
        rows.append(model.forward(tokens[block], block, cache))
        start += width
    assert start == len(tokens)
    return torch.cat(rows)


@torch.inference_mode()
def their_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[W, V] of transformers."""
    logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, as a part of the range of the logits."""
    return ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item()
