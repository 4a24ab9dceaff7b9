"""Every family and rope scaling against transformers, from checkpoints that transformers wrote."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint_files import change_weights
from families import (
    BOUND,
    FAMILIES,
    LLAMA3,
    PLAIN,
    POSITIONS,
    SCALINGS,
    VISIBLE,
    YARN,
    distance,
    family_model,
    loaded,
    our_logits,
    saved,
    some_tokens,
    spell_as_before,
    their_logits,
)
from fused_spec import Engine
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.config import ModelConfig
from fused_spec.models.transformer import Transformer

TOKENS = some_tokens()
WIDTHS = [[1] * POSITIONS, [7, 100, 1, 2, 190]]
HEADS = {1: (3, 3), 3: (6, 2), 8: (16, 2)}  # by the number of query heads that share a key/value head
DIMS = (64, 96, 128)

# Every pair of family, ratio, head size and tying occurs.
SHAPES = [
    (family, ratio, DIMS[(i + j) % 3], bool((i + j) % 2))
    for i, family in enumerate(FAMILIES)
    for j, ratio in enumerate(HEADS)
]


def test_every_pair_of_shapes_occurs() -> None:
    for first, second, pairs in ((0, 1, 12), (0, 2, 12), (0, 3, 8), (1, 2, 9), (1, 3, 6), (2, 3, 6)):
        assert len({(shape[first], shape[second]) for shape in SHAPES}) == pairs


@pytest.mark.parametrize(("family", "ratio", "head_dim", "tied"), SHAPES)
def test_logits_in_blocks_of_any_width(tmp_path: Path, family: str, ratio: int, head_dim: int, tied: bool) -> None:
    heads, kv_heads = HEADS[ratio]
    theirs = family_model(family, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tied=tied)
    ours = loaded(saved(theirs, tmp_path))
    assert ours.config.architecture == family
    expected = their_logits(theirs, TOKENS)
    for widths in ([POSITIONS], *WIDTHS):
        assert distance(our_logits(ours, TOKENS, widths), expected) < BOUND
    assert_same_greedy_text(ours, theirs)


def assert_same_greedy_text(ours: Transformer, theirs: PreTrainedModel, count: int = 30) -> None:
    """At every token the best must lead the second by far more than the two differ, or it would say nothing."""
    prompt = TOKENS[:40]
    with torch.inference_mode():
        text: torch.Tensor = theirs.generate(  # type: ignore[operator]
            prompt[None], attention_mask=torch.ones(1, 40), max_new_tokens=count, do_sample=False, pad_token_id=0
        )[0]
    expected = their_logits(theirs, text)
    best = expected[39:-1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 10 * (our_logits(ours, text) - expected).abs().max()
    engine = Engine(ours, max_length=200)
    generated = engine.generate(prompt.tolist(), max_new_tokens=count, temperature=0, ignore_eos=True)
    assert list(generated.token_ids) == text[40:].tolist()


FAMILY_OF_SCALING = dict(zip(SCALINGS, [*FAMILIES, *FAMILIES, "llama"], strict=True))
FAMILY_OF_SCALING |= {"llama3": "llama", "yarn": "qwen3", "linear": "mistral"}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling(tmp_path: Path, name: str) -> None:
    """300 positions, nearly five times the original length; and both spellings of config.json mean the same."""
    theirs = family_model(FAMILY_OF_SCALING[name], rope=SCALINGS[name])
    ours = loaded(saved(theirs, tmp_path))
    expected = their_logits(theirs, TOKENS)
    for widths in ([POSITIONS], WIDTHS[1]):
        assert distance(our_logits(ours, TOKENS, widths), expected) < BOUND
    spell_as_before(tmp_path)
    assert "rope_parameters" not in (tmp_path / "config.json").read_text()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == ours.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(their_logits(again, TOKENS), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_rope_scaling_means_the_same_in_every_family(family: str, name: str) -> None:
    theirs = family_model(family, rope=SCALINGS[name])
    config = ModelConfig.from_hf(json.loads(theirs.config.to_json_string()), None, "config.json")
    rotary: Any = theirs.model.rotary_emb
    # the same formula in another order of operations: a few roundings of float32
    torch.testing.assert_close(config.rope_frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert config.rope_amplitude == pytest.approx(rotary.attention_scaling, rel=1e-12)


def test_length_beside_the_scaling_wins(tmp_path: Path) -> None:
    """`original_max_position_embeddings` on the outside, as some files have it."""
    folder = saved(family_model("llama", rope=LLAMA3), tmp_path)
    spell_as_before(folder)
    config = json.loads((folder / "config.json").read_text())
    config["original_max_position_embeddings"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.config.rope_parameters["original_max_position_embeddings"] == 100
    assert distance(our_logits(loaded(folder), TOKENS), their_logits(again, TOKENS)) < BOUND


def zeroed(part: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda weights: [weight.zero_() for name, weight in weights.items() if name.endswith(part)]


def made_one(part: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda weights: [weight.fill_(1) for name, weight in weights.items() if name.endswith(part)]


DROPPED = [
    *(("qwen2", f"{part}_proj.bias", zeroed) for part in "qkv"),
    *(("qwen3", f"{part}_norm.weight", made_one) for part in ("q", "k")),
    *(
        ("mistral", f"{part}.weight", made_one)
        for part in ("input_layernorm", "post_attention_layernorm", "model.norm")
    ),
]


@pytest.mark.parametrize(("family", "part", "change"), DROPPED)
def test_a_dropped_weight_would_be_found(tmp_path: Path, family: str, part: str, change: Callable[..., Any]) -> None:
    theirs = family_model(family)
    change_weights(saved(theirs, tmp_path), change(part))
    assert distance(our_logits(loaded(tmp_path), TOKENS), their_logits(theirs, TOKENS)) > VISIBLE


@pytest.mark.parametrize(
    ("family", "spared"),
    [("llama", "proj.weight"), ("qwen2", "proj.bias"), ("qwen3", "norm.weight"), ("mistral", "q_proj.weight")],
)
def test_a_row_order_left_as_stored_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, spared: str
) -> None:
    theirs = family_model(family)
    rotated = re.compile(rf"(?!.*{re.escape(spared)}).*\.self_attn\.[qk]_(proj|norm)\.(weight|bias)")
    monkeypatch.setattr("fused_spec.models.checkpoint._ROTATED", rotated)
    ours = loaded(saved(theirs, tmp_path))
    # where q and k are both left alone, the pairs still meet: only their frequencies are wrong
    assert distance(our_logits(ours, TOKENS), their_logits(theirs, TOKENS)) > VISIBLE


MISREAD: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    (SCALINGS["linear"], None),
    (LLAMA3, None),
    (YARN, None),
    (YARN, {"amplitude": 1.0}),
    (SCALINGS["yarn-mscale"], {"amplitude": 1.0}),
    (SCALINGS["yarn-betas"], {"beta_fast": 32.0}),
    (SCALINGS["yarn-betas"], {"beta_slow": 1.0}),
    (SCALINGS["yarn-real-ends"], {"truncate": True}),
    (LLAMA3, {"high_freq_factor": 8.0}),
    (LLAMA3, {"low_freq_factor": 2.0}),
    (LLAMA3, {"original_length": 128}),
]


@pytest.mark.parametrize(("rope", "wrong"), MISREAD)
def test_a_misread_scaling_would_be_found(tmp_path: Path, rope: dict[str, Any], wrong: dict[str, Any] | None) -> None:
    theirs = family_model("llama", rope=rope)
    ours = loaded(saved(theirs, tmp_path))
    assert ours.config.rope_scaling is not None
    scaling = None if wrong is None else dataclasses.replace(ours.config.rope_scaling, **wrong)  # type: ignore[type-var]
    misread = Transformer(
        dataclasses.replace(ours.config, rope_scaling=scaling), ours.embedding, ours.layers, ours.norm, ours.head
    )
    assert distance(our_logits(misread, TOKENS), their_logits(theirs, TOKENS)) > VISIBLE


def test_a_wrong_base_would_be_found(tmp_path: Path) -> None:
    theirs = family_model("qwen2", rope=PLAIN)
    ours = loaded(saved(theirs, tmp_path))
    config = dataclasses.replace(ours.config, rope_theta=10000.0)
    misread = Transformer(config, ours.embedding, ours.layers, ours.norm, ours.head)
    assert distance(our_logits(misread, TOKENS), their_logits(theirs, TOKENS)) > VISIBLE
