"""Rope scaling from configs and GGUF metadata: what is read and refused. That it is right is in test_families.py."""

from typing import Any

import pytest
import torch

from families import LLAMA3, YARN
from fused_spec.errors import InvalidInput
from fused_spec.models.config import ModelConfig
from fused_spec.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling, divided_frequencies

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
YARN_AMPLITUDE = 1.2079441541679836  # 0.1 ln 8 + 1


def from_hf(changes: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(HF | changes, None, "x/config.json")


def from_gguf(changes: dict[str, Any]) -> ModelConfig:
    prefixed = {f"llama.rope.{key}": value for key, value in changes.items()}
    return ModelConfig.from_gguf(GGUF | prefixed, 100, True, "x.gguf")


def without(rope: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != key}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, LinearScaling(2.0)),
        ({"rope_parameters": LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": without(LLAMA3, "original_max_position_embeddings")}, Llama3Scaling(8.0, 1.0, 4.0, 512)),
        ({"rope_parameters": YARN}, YarnScaling(8.0, 64, YARN_AMPLITUDE)),
        ({"rope_parameters": without(YARN, "factor")}, YarnScaling(8.0, 64, YARN_AMPLITUDE)),
        ({"rope_parameters": YARN | {"factor": None}}, YarnScaling(8.0, 64, YARN_AMPLITUDE)),
        ({"rope_parameters": without(YARN, "original_max_position_embeddings")}, YarnScaling(8.0, 512, YARN_AMPLITUDE)),
        ({"rope_parameters": YARN, "rope_scaling": YARN}, YarnScaling(8.0, 64, YARN_AMPLITUDE)),
        ({"rope_parameters": YARN | {"truncate": None}}, YarnScaling(8.0, 64, YARN_AMPLITUDE, truncate=False)),
        ({"rope_parameters": YARN | {"factor": 0.5}}, YarnScaling(0.5, 64, 1.0)),
    ],
)  # fmt: skip
def test_what_is_read(changes: dict[str, Any], expected: Any) -> None:
    assert from_hf(changes).rope_scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type is 'dynamic'; allowed: 'default', "),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling: type is 'su'; allowed: 'default', 'linear', 'llama3', 'y"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope_type is 'longrope'; allowed: 'd"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters: rope_type is ['yarn']; allowed: 'default'"),
        ({"rope_parameters": {"factor": 4}}, "rope_parameters: factor is 4; allowed: 1.0 or absent"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is ['full_attention']; allow"),
        ({"rope_parameters": 3}, "rope_parameters is 3; allowed: an object or null"),
        ({"rope_scaling": []}, "rope_scaling is []; allowed: an object or null"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters: rope_theta is 0; allowed: a number from 1e-30"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor is 0.5; allowed"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "rope_scaling: factor is -2.0; allowed: a number from"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-44}}, "rope_scaling: factor is 1e-44; allowed: a number"),
        *(
            ({"rope_parameters": without(LLAMA3, key)}, f"rope_parameters: {key} is missing")
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        ),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
            "rope_parameters: high_freq_factor is 1.0; allowed: a number above low_freq_factor, which is 1.0",
        ),
        (
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 5.0}},
            "rope_parameters: high_freq_factor is 4.0; allowed: a number above low_freq_factor, which is 5.0",
        ),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 0}},
            "rope_parameters: original_max_position_embeddings is 0; allowed: an integer from 1 to",
        ),
        ({"original_max_position_embeddings": "8192"}, "original_max_position_embeddings is '8192'; allowed: an integ"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: factor is missing"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 512}},
            "rope_parameters: factor is missing",
        ),
        ({"rope_parameters": YARN | {"attention_factor": 0}}, "rope_parameters: attention_factor is 0; allowed: a num"),
        ({"rope_parameters": YARN | {"beta_fast": "32"}}, "rope_parameters: beta_fast is '32'; allowed: a number"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters: truncate is 1; allowed: true or false"),
        (
            {"rope_parameters": YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}},
            "rope_parameters: mscale is -1.0; allowed: a number from",
        ),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta is 1.0; allowed with YaRN: a number above 1"),
        (
            {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 4.0}},
            "rope_scaling is {'rope_type': 'yarn', ",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e4}, "rope_scaling": {"type": "default", "rope_theta": 1e4}},
            "rope_scaling is {'type': 'default', 'rope_theta': 10000.0}; allowed: absent, or with the meaning of",
        ),
    ],
)  # fmt: skip
def test_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_hf(changes)
    assert str(caught.value).startswith("x/config.json: " + message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scaling.type": "none", "scaling.factor": 8.0}, None),
        ({"scaling.factor": 1.0}, None),
        ({"scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"scale_linear": 4.0}, LinearScaling(4.0)),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, LinearScaling(2.0)),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, LinearScaling(2.0)),
        ({"scaling.type": "yarn", "scaling.factor": 8.0}, YarnScaling(8.0, 512, YARN_AMPLITUDE)),
        ({"scaling.type": "yarn"}, YarnScaling(1.0, 512, 1.0)),  # which scales nothing, as in llama.cpp
        (
            {"scaling.type": "yarn", "scaling.factor": 8.0, "scaling.attn_factor": 0.5},
            YarnScaling(8.0, 512, 0.5 * YARN_AMPLITUDE),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 8.0, "scaling.original_context_length": 64,
             "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0, "scaling.yarn_log_multiplier": 0.0},
            YarnScaling(8.0, 64, YARN_AMPLITUDE, 16.0, 2.0),
        ),
    ],
)  # fmt: skip
def test_gguf_what_is_read(changes: dict[str, Any], expected: Any) -> None:
    assert from_gguf(changes).rope_scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling.type": "longrope"}, "scaling.type is 'longrope'; allowed: 'none', 'linear', 'yarn' or absent"),
        ({"scaling.type": 3}, "scaling.type is 3; allowed: 'none', 'linear', 'yarn' or absent"),
        ({"scaling.factor": 0.0}, "scaling.factor is 0.0; allowed: a number from 1e-30 to 1e+30"),
        ({"scaling.factor": float("nan")}, "scaling.factor is nan; allowed: a number from 1e-30 to 1e+30"),
        ({"scaling.attn_factor": 1.5}, "scaling.attn_factor is 1.5; allowed: 1.0 or absent"),
        ({"scaling.factor": 2.0, "scaling.attn_factor": 1.5}, "scaling.attn_factor is 1.5; allowed: 1.0 or absent"),
        ({"scaling.yarn_log_multiplier": 0.1}, "scaling.yarn_log_multiplier is 0.1; allowed: 0.0 or absent"),
        ({"scaling.type": "yarn", "scaling.yarn_ext_factor": 0.5}, "scaling.yarn_ext_factor is 0.5; allowed: 1.0 or"),
        ({"scaling.type": "yarn", "scaling.yarn_attn_factor": 2.0}, "scaling.yarn_attn_factor is 2.0; allowed: 1.0"),
    ],
)
def test_gguf_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_gguf(changes)
    assert str(caught.value).startswith("x.gguf: llama.rope." + message)


@pytest.mark.parametrize("values", [[1.0] * 3, [1.0] * 5, [], [1, 1, 1, 0], [1, 1, 1, -1], [1, 1, 1, 1e-40],
                                    [1, 1, 1, float("nan")], [1, 1, 1, float("inf")]])  # fmt: skip
def test_divisors_that_are_none(values: list[float]) -> None:
    message = r"^x: tensor rope_freqs.weight must hold 4 numbers from 1e-30 to 1e\+30$"
    with pytest.raises(InvalidInput, match=message):
        divided_frequencies(torch.tensor(values), 8, "x")


def test_divisors_divide() -> None:
    scaling = divided_frequencies(torch.tensor([1.0, 2.0, 4.0, 8.0]), 8, "x")
    assert torch.equal(scaling.scale(torch.full((4,), 0.5), 1e4), torch.tensor([0.5, 0.25, 0.125, 0.0625]))
