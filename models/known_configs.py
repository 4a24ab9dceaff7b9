"""The config of a model without its weights: of a folder, a config.json, a GGUF file or a hub id, or known by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fused_spec.errors import InvalidInput
from fused_spec.models.checkpoint import HUB_ID, config_file, config_in, download, open_checkpoint
from fused_spec.models.config import ModelConfig

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [151645, 151643],  # generation_config.json
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "Qwen/Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
"""What the config.json of these hub ids says, as far as it is read."""


_BY_NAME = {name.lower(): hub_id for hub_id in KNOWN_CONFIGS for name in (hub_id, hub_id.partition("/")[2])}


def known_config(name: str) -> str | None:
    """The hub id of a model that is known by name: by its hub id or what follows the slash, in any case; else None."""
    return _BY_NAME.get(name.lower())


def config_of(model: str | os.PathLike[str]) -> ModelConfig:
    """Reads a model's config; weights are not looked at, and need not be there.

    Args:
        model: in this order, a folder with config.json, a config.json, a .gguf file (of which the header is read), a
            model that is known by name (`KNOWN_CONFIGS`; "qwen3-8b" is as good as "Qwen/Qwen3-8B"), or a hub id, of
            which config.json and generation_config.json are downloaded.

    Raises:
        InvalidInput: it is none of these, or the model is not supported; one line naming the file.
    """
    text = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidInput(
            f"model is {model!r}; allowed: a folder, a config.json, a .gguf file, a hub id 'org/name' or a known name"
        )
    path = Path(text)
    try:
        if path.is_dir():
            return config_in(path)
        if path.is_file():
            return _of_file(path)
    except OSError as error:  # no permission, a name too long, a device that fails
        raise InvalidInput(f"{text}: {error.strerror or error}") from None
    known = known_config(text) if isinstance(model, str) else None
    if known is not None:
        return ModelConfig.from_hf(KNOWN_CONFIGS[known], None, known)
    if isinstance(model, str) and HUB_ID.fullmatch(text):
        return config_in(download(text, ["config.json", "generation_config.json"]))
    raise InvalidInput(f"{text}: no such file or folder; known by name: {', '.join(KNOWN_CONFIGS)}")


def _of_file(path: Path) -> ModelConfig:
    if path.suffix == ".gguf":
        with open_checkpoint(path) as checkpoint:
            return checkpoint.config
    if path.suffix == ".json":
        return config_file(path)
    raise InvalidInput(f"{path}: not a config; allowed: a folder, a config.json or a .gguf file")
