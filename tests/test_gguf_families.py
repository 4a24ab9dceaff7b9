"""GGUF files of every architecture and type against transformers, run on the weights that the files really hold."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, RopeScalingType

from families import BOUND, LLAMA3, SCALINGS, VISIBLE, YARN, distance, loaded, our_logits, some_tokens, their_logits
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.gguf_file import SUPPORTED_TYPES
from fused_spec.models.rope_scaling import yarn_amplitude
from gguf_models import llama3_divisors, wide_model, write_gguf

TOKENS = some_tokens()
KINDS = [kind.name for kind in SUPPORTED_TYPES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, family: str, kind: str) -> None:
    theirs = wide_model(family, tied=kind in ("Q8_0", "Q6_K", "F16"))
    ours = loaded(write_gguf(tmp_path / "x.gguf", theirs, [kind]))
    assert ours.config.architecture == family
    assert distance(our_logits(ours, TOKENS), their_logits(theirs, TOKENS)) < BOUND


def test_types_are_mixed_within_a_file(tmp_path: Path) -> None:
    """As in every published file; here the parts of one fused matrix differ, too."""
    theirs = wide_model("qwen2")
    path = write_gguf(tmp_path / "x.gguf", theirs, KINDS)
    with open_checkpoint(path) as checkpoint:
        assert {info.type for info in checkpoint.source.tensors.values()} == set(SUPPORTED_TYPES)  # type: ignore[attr-defined]
    assert distance(our_logits(loaded(path), TOKENS), their_logits(theirs, TOKENS)) < BOUND


def test_mistral_calls_itself_llama(tmp_path: Path) -> None:
    theirs = wide_model("mistral")
    ours = loaded(write_gguf(tmp_path / "x.gguf", theirs, ["Q8_0"], architecture="llama"))
    assert distance(our_logits(ours, TOKENS), their_logits(theirs, TOKENS)) < BOUND


def yarn_fields(rope: dict[str, Any]) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:  # llama.cpp multiplies what YaRN gives by it
            writer.add_rope_scaling_attn_factors(rope["attention_factor"] / yarn_amplitude(rope["factor"]))
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])

    return add


def linear_fields(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(SCALINGS["linear"]["factor"])


def linear_fields_without_type(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_factor(SCALINGS["linear"]["factor"])


def old_linear_fields(writer: GGUFWriter) -> None:
    writer.add_float32(f"{writer.arch}.rope.scale_linear", SCALINGS["linear"]["factor"])


def llama3_tensor(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", llama3_divisors(LLAMA3, 64))


SCALED: list[tuple[str, dict[str, Any], Callable[[GGUFWriter], None]]] = [
    ("llama", LLAMA3, llama3_tensor),
    ("llama", SCALINGS["linear"], linear_fields),
    ("qwen3", SCALINGS["linear"], linear_fields_without_type),
    ("llama", SCALINGS["linear"], old_linear_fields),
    ("qwen2", YARN, yarn_fields(YARN)),
    ("qwen3", YARN, yarn_fields(YARN)),
    ("llama", SCALINGS["yarn-betas"], yarn_fields(SCALINGS["yarn-betas"])),
    ("qwen3", SCALINGS["yarn-attention"], yarn_fields(SCALINGS["yarn-attention"])),
]


@pytest.mark.parametrize(("family", "rope", "more"), SCALED)
def test_rope_scaling(tmp_path: Path, family: str, rope: dict[str, Any], more: Callable[[GGUFWriter], None]) -> None:
    """And without it the logits are visibly others."""
    theirs = wide_model(family, rope=rope)
    expected = their_logits(theirs, TOKENS)
    ours = loaded(write_gguf(tmp_path / "x.gguf", theirs, more=more))
    assert distance(our_logits(ours, TOKENS), expected) < BOUND
    plain = loaded(write_gguf(tmp_path / "y.gguf", theirs))
    assert plain.config == dataclasses.replace(ours.config, rope_scaling=None)
    assert distance(our_logits(plain, TOKENS), expected) > VISIBLE


@pytest.mark.parametrize(("family", "permuted"), [("llama", False), ("qwen2", True), ("qwen3", True)])
def test_the_other_row_order_would_be_found(tmp_path: Path, family: str, permuted: bool) -> None:
    theirs = wide_model(family)
    ours = loaded(write_gguf(tmp_path / "x.gguf", theirs, permuted=permuted))
    assert distance(our_logits(ours, TOKENS), their_logits(theirs, TOKENS)) > VISIBLE
