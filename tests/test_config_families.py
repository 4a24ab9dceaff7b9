"""ModelConfig by family: defaults, published configs, what their tensors are, and the features that are refused."""

from typing import Any

import pytest

from families import FAMILIES
from fused_spec.errors import InvalidInput
from fused_spec.models.config import ModelConfig, expected_shapes
from fused_spec.models.rope_scaling import Llama3Scaling

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
}
NO_WINDOW: dict[str, Any] = {"sliding_window": None}


def read(model_type: str, changes: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(SIZES | {"model_type": model_type} | changes, None, "x/config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    ours = read(family, NO_WINDOW if family == "mistral" else {})
    theirs = FAMILIES[family][0](**SIZES)
    assert ours.family.class_name == FAMILIES[family][1].__name__
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 64)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_null_asks_for_as_many_key_value_heads_as_heads(family: str) -> None:
    theirs = FAMILIES[family][0](**SIZES, num_key_value_heads=None)
    assert read(family, {"num_key_value_heads": None}).num_kv_heads == theirs.num_key_value_heads == 64


def test_null_asks_for_the_head_size_that_follows() -> None:
    assert read("qwen3", {"head_dim": None}).head_dim == read("llama", {"head_dim": None}).head_dim == 4


def published(family: str, sizes: list[int], **more: Any) -> dict[str, Any]:
    keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    head = {
        "architectures": [FAMILIES[family][1].__name__],
        "model_type": family,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    return head | dict(zip([*keys, "num_key_value_heads"], sizes, strict=True)) | more


QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
LLAMA31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "Llama-2-7b-hf": (
        published(
            "llama",
            [32000, 4096, 11008, 32, 32, 32],
            rms_norm_eps=1e-5,
            max_position_embeddings=4096,
            pretraining_tp=1,
            rope_scaling=None,
            tie_word_embeddings=False,
            eos_token_id=2,
        ),
        ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 1e-5, 1e4, 4096, False, (2,)),
    ),
    "Llama-3.1-8B": (
        published(
            "llama",
            [128256, 4096, 14336, 32, 32, 8],
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            attention_bias=False,
            mlp_bias=False,
            rope_scaling=LLAMA31_ROPE,
            rope_theta=500000.0,
            tie_word_embeddings=False,
            eos_token_id=[128001, 128008, 128009],
        ),
        ModelConfig(
            "llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 131072, False,
            (128001, 128008, 128009), Llama3Scaling(8.0, 1.0, 4.0, 8192),
        ),
    ),
    "SmolLM2-135M": (
        published(
            "llama",
            [49152, 576, 1536, 30, 9, 3],
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            rope_interleaved=False,
            rope_scaling=None,
            rope_theta=100000,
            tie_word_embeddings=True,
            eos_token_id=0,
        ),
        ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, 8192, True, (0,)),
    ),
    "Mistral-7B-v0.3": (
        published(
            "mistral",
            [32768, 4096, 14336, 32, 32, 8],
            rms_norm_eps=1e-5,
            max_position_embeddings=32768,
            rope_theta=1000000.0,
            sliding_window=None,
            tie_word_embeddings=False,
            eos_token_id=2,
        ),
        ModelConfig("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 1e-5, 1e6, 32768, False, (2,)),
    ),
    "Qwen2.5-1.5B": (
        published(
            "qwen2",
            [151936, 1536, 8960, 28, 12, 2],
            rms_norm_eps=1e-6,
            max_position_embeddings=131072,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            use_mrope=False,
            eos_token_id=151643,
            **QWEN_WINDOW,
        ),
        ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e6, 131072, True, (151643,)),
    ),
    "Qwen3-0.6B": (
        published(
            "qwen3",
            [151936, 1024, 3072, 28, 16, 8],
            head_dim=128,
            attention_bias=False,
            rms_norm_eps=1e-6,
            max_position_embeddings=40960,
            rope_theta=1000000,
            rope_scaling=None,
            tie_word_embeddings=True,
            eos_token_id=151645,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=28,
        ),
        ModelConfig("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, 40960, True, (151645,)),
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        published(
            "qwen2",
            [151936, 1536, 8960, 28, 12, 2],
            rms_norm_eps=1e-6,
            max_position_embeddings=131072,
            rope_theta=10000,
            tie_word_embeddings=False,
            use_mrope=False,
            eos_token_id=151643,
            **(QWEN_WINDOW | {"sliding_window": 4096, "max_window_layers": 21}),
        ),
        ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e4, 131072, False, (151643,)),
    ),
    "DeepSeek-R1-Distill-Llama-8B": (
        published(
            "llama",
            [128256, 4096, 14336, 32, 32, 8],
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            attention_bias=False,
            mlp_bias=False,
            rope_scaling=LLAMA31_ROPE,
            rope_theta=500000.0,
            tie_word_embeddings=False,
            eos_token_id=128001,
        ),
        ModelConfig(
            "llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 131072, False, (128001,),
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    config, expected = PUBLISHED[name]
    assert ModelConfig.from_hf(config, None, name) == expected


def test_what_families_add_to_a_layer() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    plain = set(expected_shapes(read("llama", sizes)))
    assert set(expected_shapes(read("mistral", sizes | NO_WINDOW))) == plain
    layer = "model.layers.1.self_attn."
    qwen2, qwen3 = expected_shapes(read("qwen2", sizes)), expected_shapes(read("qwen3", sizes))
    assert {name for name in qwen2.keys() - plain if name.startswith(layer)} == {f"{layer}{x}_proj.bias" for x in "qkv"}
    assert {name for name in qwen3.keys() - plain if name.startswith(layer)} == {
        f"{layer}{x}_norm.weight" for x in "qk"
    }
    assert [qwen2[f"{layer}{x}_proj.bias"] for x in "qkv"] == [(32,), (16,), (16,)]
    assert [qwen3[f"{layer}{x}_norm.weight"] for x in "qk"] == [(8,), (8,)]
    assert (len(qwen2) - len(plain), len(qwen3) - len(plain)) == (6, 4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window is 4096; allowed: null (no window)"),
        ("mistral", {}, "sliding_window is 4096 (assumed: the key is absent); allowed: null (no window)"),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096; allowed: null (no window)"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True; allowed: False or absent"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True; allowed: False or absent"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention', 'sli"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types is 'full_attention'; allowed: 'full_attention' for"),
        ("llama", {"layer_types": ["chunked_attention"]}, "layer_types is ['chunked_attention']; allowed: 'full_at"),
        ("mixtral", {}, "model_type 'mixtral' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ("qwen2_moe", {}, "model_type 'qwen2_moe' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ("qwen3_moe", {}, "model_type 'qwen3_moe' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ("mistral", {"num_local_experts": 8}, "num_local_experts is 8; allowed: absent (no mixture of experts)"),
        ("qwen2", {"num_experts": 60}, "num_experts is 60; allowed: absent (no mixture of experts)"),
        ("qwen2_vl", {}, "model_type 'qwen2_vl' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ("mllama", {}, "model_type 'mllama' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ("llama", {"vision_config": {"depth": 32}}, "vision_config is {'depth': 32}; allowed: absent (text models)"),
        ("mistral", {"attention_bias": True}, "attention_bias is True; allowed: False or absent"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True; allowed: False or absent"),
        ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "architectures is ['Qwen2ForSequenceClass"),
    ],
)  # fmt: skip
def test_refuses_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(family, changes)
    assert str(caught.value).startswith("x/config.json: " + message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", NO_WINDOW | {"layer_types": ["full_attention"] * 2}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}),
        ("qwen2", {"attention_bias": True}),  # transformers has the bias whatever the key says
        ("qwen3", {"sliding_window": 4096}),
        ("llama", NO_WINDOW | {"quantization_config": None, "vision_config": None}),
    ],
)
def test_what_is_off_does_not_matter(family: str, changes: dict[str, Any]) -> None:
    plain = read(family, NO_WINDOW if family == "mistral" else {})
    assert read(family, changes) == plain
