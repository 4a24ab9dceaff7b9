"""Files cut, flipped or lied about, byte by byte: a checkpoint is refused in one line that names it, or read whole.

Within a gibibyte of memory, and with no exception but InvalidInput.
"""

import json
import random
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file

from checkpoint_files import bounded_memory, change_config, change_weights, outcome
from families import YARN, family_model, saved
from fused_spec.models.gguf_file import GGUFFile
from gguf_models import write_gguf

SMALL: dict[str, Any] = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 32, "inner": 32, "vocab": 40}
LAYER = "model.layers.0."


def small(family: str, folder: Path) -> Path:
    return saved(family_model(family, **SMALL), folder)


def with_flips(content: bytes, positions: Iterable[int]) -> Iterable[bytes]:
    """One copy for each position, with one bit of that byte flipped."""
    rng = random.Random(0)
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.randrange(8)
        yield bytes(flipped)


def count_refused(model: Path, file: Path, contents: Iterable[bytes]) -> int:
    """Reads the model with each of these contents of one of its files; puts the file back."""
    whole, refused = file.read_bytes(), 0
    with bounded_memory():
        for content in contents:
            file.unlink()  # some file systems wait for the disk when a file is cut and written anew
            file.write_bytes(content)
            refused += outcome(model) != ""
    file.write_bytes(whole)
    assert outcome(model) == ""
    return refused


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return small("qwen2", tmp_path)


def header_size(weights: Path) -> int:
    return 8 + struct.unpack("<Q", weights.read_bytes()[:8])[0]


def test_every_byte_of_a_safetensors_header_flipped(qwen2: Path) -> None:
    """Most flips break the JSON or move a tensor; those in padding and in unused words may pass."""
    weights = qwen2 / "model.safetensors"
    size = header_size(weights)
    refused = count_refused(qwen2, weights, with_flips(weights.read_bytes(), range(size)))
    assert refused > 0.9 * size


def test_values_of_a_safetensors_file_flipped(qwen2: Path) -> None:
    """A float32 of ordinary size stays finite unless its highest exponent bits flip."""
    weights = qwen2 / "model.safetensors"
    content = weights.read_bytes()
    positions = random.Random(1).sample(range(header_size(weights), len(content)), 300)
    assert count_refused(qwen2, weights, with_flips(content, positions)) < 100
    ends = range(0, len(content), 997)
    assert count_refused(qwen2, weights, (content[:end] for end in ends)) == len(ends)


@pytest.mark.parametrize("length", [0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_wrong_length_of_a_safetensors_header(qwen2: Path, length: int) -> None:
    weights = qwen2 / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", length) + weights.read_bytes()[8:])
    with bounded_memory():
        assert outcome(qwen2).startswith(f"{weights}: truncated or corrupt safetensors file: ")


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2**62, 2**62]},
        {"shape": [2**40, 2]},
        {"shape": [-1]},
        {"shape": [1.5]},
        {"shape": []},
        {"shape": [0]},
        {"data_offsets": [0, 2**63]},
        {"data_offsets": [2**63, 2**63 + 128]},
        {"data_offsets": [128, 0]},
        {"data_offsets": [0]},
        {"dtype": "F33"},
        {"dtype": "BOOL"},
        {"dtype": None},
    ],
    ids=str,
)
def test_lies_in_a_safetensors_header(qwen2: Path, entry: dict[str, Any]) -> None:
    weights = qwen2 / "model.safetensors"
    content, size = weights.read_bytes(), header_size(weights)
    header = json.loads(content[8:size])
    header["model.norm.weight"] |= entry
    changed = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(changed)) + changed + content[size:])
    with bounded_memory():
        assert outcome(qwen2).startswith(f"{weights}: t")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_every_byte_of_a_config_flipped(tmp_path: Path, name: str) -> None:
    model = saved(family_model("qwen3", **SMALL, rope=YARN), tmp_path)
    content = (model / name).read_bytes()
    refused = count_refused(model, model / name, with_flips(content, range(len(content))))
    assert refused > len(content) // 10


def test_config_nested_as_deep_as_the_parser_allows(qwen2: Path) -> None:
    """Near the limit of recursion the value can be parsed, but not be shown."""
    config = (qwen2 / "config.json").read_text().rstrip().removesuffix("}")
    depths = range(sys.getrecursionlimit() - 200, sys.getrecursionlimit())
    contents = (f'{config}, "hidden_act": {"[" * depth}1{"]" * depth}}}'.encode() for depth in depths)
    assert count_refused(qwen2, qwen2 / "config.json", contents) == len(depths)


def test_every_byte_of_an_index_flipped(tmp_path: Path) -> None:
    family_model("qwen2", **SMALL).save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    content = index.read_bytes()
    start = content.index(b'"weight_map"')
    refused = count_refused(tmp_path, index, with_flips(content, range(start, len(content))))
    assert refused > 0.5 * (len(content) - start)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_byte_of_a_gguf_header_flipped(tmp_path: Path, family: str) -> None:
    def divisors(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())

    path = write_gguf(tmp_path / "x.gguf", family_model(family, **SMALL), ["Q8_0", "F16", "Q4_1"], more=divisors)
    content = path.read_bytes()
    start = min(info.offset for info in GGUFFile(path).tensors.values())
    refused = count_refused(path, path, with_flips(content, range(start)))
    assert refused > 0.5 * start
    positions = random.Random(2).sample(range(start, len(content)), 300)
    assert count_refused(path, path, with_flips(content, positions)) < 150
    ends = range(0, len(content), 997)
    assert count_refused(path, path, (content[:end] for end in ends)) == len(ends)


Weights = dict[str, torch.Tensor]
BROKEN: list[tuple[str, Callable[[Weights], object], str]] = [
    (
        "qwen2",
        lambda weights: [weights.pop(f"{LAYER}self_attn.{part}_proj.bias") for part in "qkv"],
        f": tensor '{LAYER}self_attn.k_proj.bias' and 2 more is missing",
    ),
    (
        "qwen2",
        lambda weights: weights.update({f"{LAYER}self_attn.o_proj.bias": torch.zeros(32)}),
        f": unexpected tensor '{LAYER}self_attn.o_proj.bias'; this config has no such tensor",
    ),
    (
        "qwen2",
        lambda weights: weights.update({f"{LAYER}self_attn.k_proj.bias": torch.zeros(16)}),
        f"/model.safetensors: tensor {LAYER}self_attn.k_proj.bias has shape [16]; the config needs [8]",
    ),
    (
        "qwen2",
        lambda weights: weights[f"{LAYER}self_attn.v_proj.bias"].fill_(float("nan")),
        f"/model.safetensors: tensor {LAYER}self_attn.v_proj.bias holds NaN or infinite values as float32",
    ),
    (
        "qwen3",
        lambda weights: weights.pop(f"{LAYER}self_attn.q_norm.weight"),
        f": tensor '{LAYER}self_attn.q_norm.weight' is missing",
    ),
    (
        "qwen3",
        lambda weights: weights.update({f"{LAYER}self_attn.q_norm.weight": torch.ones(16)}),
        f"/model.safetensors: tensor {LAYER}self_attn.q_norm.weight has shape [16]; the config needs [8]",
    ),
    (
        "qwen3",
        lambda weights: weights.update({f"{LAYER}self_attn.k_norm.weight": torch.ones(8, dtype=torch.int32)}),
        f"/model.safetensors: tensor '{LAYER}self_attn.k_norm.weight' has dtype I32; allowed: F32, F16, BF16",
    ),
    (
        "qwen3",
        lambda weights: weights[f"{LAYER}self_attn.k_norm.weight"].fill_(float("inf")),
        f"/model.safetensors: tensor {LAYER}self_attn.k_norm.weight holds NaN or infinite values as float32",
    ),
    (
        "mistral",
        lambda weights: weights.update({f"{LAYER}self_attn.q_proj.bias": torch.zeros(16)}),
        f": unexpected tensor '{LAYER}self_attn.q_proj.bias'; this config has no such tensor",
    ),
]


@pytest.mark.parametrize(("family", "change", "message"), BROKEN)
def test_tensors_that_families_add(
    tmp_path: Path, family: str, change: Callable[[Weights], object], message: str
) -> None:
    change_weights(small(family, tmp_path), change)
    assert outcome(tmp_path) == f"{tmp_path}{message}"


def test_a_family_without_its_tensors(qwen2: Path) -> None:
    """Renamed in the config only: each family's own tensors are missed, or are too many."""
    for family, class_name, message in (
        ("qwen3", "Qwen3ForCausalLM", f"tensor '{LAYER}self_attn.k_norm.weight' and 1 more is missing"),
        ("llama", "LlamaForCausalLM", f"unexpected tensor '{LAYER}self_attn.k_proj.bias' and 2 more"),
    ):
        change_config(qwen2, model_type=family, architectures=[class_name])
        assert outcome(qwen2).startswith(f"{qwen2}: {message}")


def test_a_gguf_file_without_what_its_architecture_adds(tmp_path: Path) -> None:
    """A llama file that calls itself qwen2 or qwen3, and the other way round."""
    for family, architecture, message in (
        ("llama", "qwen2", f"tensor '{LAYER}self_attn.k_proj.bias' and 2 more is missing"),
        ("llama", "qwen3", f"tensor '{LAYER}self_attn.k_norm.weight' and 1 more is missing"),
        ("qwen2", "llama", f"unexpected tensor '{LAYER}self_attn.q_proj.bias' and 2 more"),
        ("qwen3", "llama", f"unexpected tensor '{LAYER}self_attn.q_norm.weight' and 1 more"),
    ):
        path = write_gguf(tmp_path / "x.gguf", family_model(family, **SMALL), architecture=architecture)
        assert outcome(path).startswith(f"{path}: {message}")


def test_a_gguf_file_with_a_scale_that_is_no_number(tmp_path: Path) -> None:
    """The first scale of a block of Q8_0 becomes NaN, and then infinite."""
    path = write_gguf(tmp_path / "x.gguf", family_model("qwen3", **SMALL), ["Q8_0", "F16", "Q4_1"])
    content, name = bytearray(path.read_bytes()), f"{LAYER}mlp.up_proj.weight"
    offset = GGUFFile(path).tensors[name].offset
    for scale in (b"\xff\x7f", b"\x00\x7c"):
        content[offset : offset + 2] = scale
        path.write_bytes(content)
        assert outcome(path) == f"{path}: tensor {name} holds NaN or infinite values as float32"


def test_what_is_read_is_the_whole_of_it(qwen2: Path) -> None:
    """That `outcome` reads what was saved, and that a large allocation would be an error: both would see a fault."""
    assert outcome(qwen2) == ""
    with bounded_memory(), pytest.raises(RuntimeError, match="allocate"):
        torch.empty(2**33, dtype=torch.uint8)
    assert f"{LAYER}self_attn.q_proj.bias" in load_file(qwen2 / "model.safetensors")
