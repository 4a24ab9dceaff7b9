"""ModelConfig: what is read, what is defaulted and what is refused, by name. What families add is elsewhere."""

import dataclasses
import json
from typing import Any

import pytest
from transformers import LlamaConfig

from fused_spec.errors import InvalidInput
from fused_spec.models.config import ModelConfig, expected_shapes

HF: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def from_hf(changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_hf(HF | changes, generation, "x/config.json")


def from_gguf(changes: dict[str, Any], vocab_size: int = 100, tied: bool = True) -> ModelConfig:
    return ModelConfig.from_gguf(GGUF | changes, vocab_size, tied, "x.gguf")


def test_defaults_are_those_of_llama_config() -> None:
    ours, documented = from_hf({}), LlamaConfig(hidden_size=32, num_attention_heads=4)
    assert ours.num_kv_heads == documented.num_key_value_heads
    assert ours.head_dim == documented.head_dim == 8
    assert ours.rms_norm_eps == documented.rms_norm_eps
    assert ours.rope_theta == documented.to_dict()["rope_parameters"]["rope_theta"]
    assert ours.max_position_embeddings == documented.max_position_embeddings
    assert ours.tie_word_embeddings is documented.tie_word_embeddings is False
    assert ours.eos_token_ids == (documented.eos_token_id,)


def test_reads_what_transformers_writes() -> None:
    written = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=77,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=[7, 9],
    )
    config = ModelConfig.from_hf(json.loads(written.to_json_string()), None, "config.json")
    assert config == ModelConfig("llama", 100, 32, 48, 3, 4, 2, 16, 1e-5, 5e5, 77, True, (7, 9))


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_hf({}).vocab_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 500000}, 500000.0),
        ({"rope_theta": 2e4, "rope_scaling": None}, 2e4),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "default"}}, 2e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
        ({"rope_theta": 2e4, "rope_parameters": {"rope_type": "default"}}, 2e4),
        ({"rope_theta": 2e4, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
    ],
)
def test_rope_theta_old_and_new_keys(changes: dict[str, Any], theta: float) -> None:
    assert from_hf(changes).rope_theta == theta


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6, 5]}, None, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [8, 9]}, (8, 9)),
        ({"eos_token_id": 5}, {"eos_token_id": 8}, (8,)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, (5,)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_eos_from_generation_config_first(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert from_hf(config, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in HF.items() if name != key}
    with pytest.raises(InvalidInput, match=rf"^x/config.json: {key} is missing$"):
        ModelConfig.from_hf(config, None, "x/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen2"}, "architectures is ['LlamaForCausalLM']; allowed: ['Qwen2ForCausalLM']"),
        ({"architectures": ["LlamaModel"]}, "architectures is ['LlamaModel']; allowed: ['LlamaForCausalLM']"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu' or absent"),
        ({"attention_bias": True}, "attention_bias is True; allowed: False or absent"),
        ({"mlp_bias": True}, "mlp_bias is True; allowed: False or absent"),
        ({"attention_bias": 0}, "attention_bias is 0; allowed: False or absent"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1.0 or absent"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; allowed: absent"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; allowed: a number from 1e-30 to 1e+30"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; allowed: a number from 1e-30 to 1e+30"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; allowed: a number from 1e-30 to 1e+30"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; allowed: a number from 1e-30 to 1e+30"),
        ({"rms_norm_eps": 1e-40}, "rms_norm_eps is 1e-40; allowed: a number from 1e-30 to 1e+30"),
        ({"vocab_size": 0}, "vocab_size is 0; allowed: an integer from 1 to"),
        ({"hidden_size": -32}, "hidden_size is -32; allowed: an integer from 1 to"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0; allowed: an integer from 1 to"),
        ({"hidden_size": "32"}, "hidden_size is '32'; allowed: an integer from 1 to"),
        ({"num_attention_heads": True}, "num_attention_heads is True; allowed: an integer from 1 to"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; allowed: an integer from 1 to 1024"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"num_key_value_heads": 8}, "4 attention heads cannot share 8 key/value heads"),
        ({"head_dim": 7}, "head dimension 7 is odd"),
        ({"hidden_size": 34}, "hidden size 34 is not a multiple of 4 heads and no head_dim is given"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; allowed: true or false"),
        ({"eos_token_id": 100}, "eos_token_id is 100; allowed: an integer from 0 to 99"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is '2'; allowed: an integer from 0 to 99"),
        ({"eos_token_id": -1}, "eos_token_id is -1; allowed: an integer from 0 to 99"),
    ],
)
def test_refuses_by_name_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_hf(changes)
    assert str(caught.value).startswith("x/config.json: " + message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_gguf_values_and_defaults() -> None:
    assert from_gguf({}) == ModelConfig("llama", 100, 32, 48, 2, 4, 2, 8, 1e-5, 10000.0, 512, True, ())
    given = {
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": 16,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.scaling.type": "none",
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.eom_token_id": 3,
    }
    config = from_gguf(given, tied=False)
    assert (config.rope_theta, config.head_dim, config.eos_token_ids) == (5e5, 16, (3, 4))
    assert config.tie_word_embeddings is False


def test_gguf_heads_default_to_attention_heads() -> None:
    assert from_gguf({"llama.attention.head_count_kv": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mistral"}, "architecture 'mistral' is not supported; allowed: llama, qwen2, qwen3"),
        ({"general.architecture": "qwen3moe"}, "architecture 'qwen3moe' is not supported; allowed: llama, qwen2, qw"),
        ({"general.architecture": "qwen2vl"}, "architecture 'qwen2vl' is not supported; allowed: llama, qwen2, qwen3"),
        ({"general.architecture": None}, "architecture None is not supported; allowed: llama, qwen2, qwen3"),
        ({"general.architecture": ["llama"]}, "architecture ['llama'] is not supported; allowed: llama, qwen2, qwen3"),
        ({"general.architecture": "qwen2"}, "qwen2.embedding_length is missing"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv is [2, 2]; allowed: an integer"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096; allowed: 0 or absent"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False; allowed: True or absent"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4; allowed: 8 or absent"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4; allowed: 8 or absent"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; allowed: 0 or absent"),
        ({"tokenizer.ggml.eos_token_id": 100}, "tokenizer.ggml.eos_token_id, eot_token_id or eom_token_id is 100"),
    ],
)
def test_gguf_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_gguf(changes)
    assert str(caught.value).startswith("x.gguf: " + message)


@pytest.mark.parametrize("key", [key for key in GGUF if "head_count_kv" not in key])
def test_gguf_missing_key_is_named(key: str) -> None:
    missing = f"^x.gguf: {'architecture None is not supported' if key.startswith('general') else f'{key} is missing$'}"
    with pytest.raises(InvalidInput, match=missing):
        from_gguf({key: None})


def test_expected_shapes_follow_the_sizes() -> None:
    shapes = expected_shapes(from_hf({"num_key_value_heads": 2, "head_dim": 6}))
    assert len(shapes) == 2 * 9 + 3
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (100, 32)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (24, 32)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (12, 32)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (32, 24)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 48)
    assert "lm_head.weight" not in expected_shapes(from_hf({"tie_word_embeddings": True}))
