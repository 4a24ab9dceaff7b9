"""open_checkpoint: one clear line for whatever is wrong with a file."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from checkpoint_files import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    K,
    Q,
    change_config,
    change_weights,
    gguf_bytes,
    gguf_file,
    model,
    refusal,
)
from fused_spec.errors import InvalidInput
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.rope_scaling import DividedFrequencies
from fused_spec.models.tokenizer import tokenizer_from_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path)
    return tmp_path


def test_tokenizer_larger_than_the_embedding(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "ab", *(f"<{i}>" for i in range(VOCAB - 256))],
        "tokenizer.ggml.merges": ["a b"],
    }
    tokenizer_from_gguf(fields).save_pretrained(folder)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(InvalidInput, match=r"token '<43>' has id 300, but the embedding has 300 rows$"),
    ):
        checkpoint.tokenizer()


@pytest.mark.parametrize("path", ["", None, 3, b"x"])
def test_refuses_what_is_no_path(path: Any) -> None:
    assert refusal(path) == f"model is {path!r}; allowed: a folder, a .gguf file or a hub id 'org/name'"


def test_refuses_missing_and_foreign_paths(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", "none", "./a/b", "models/x.gguf", "models/model.safetensors"):
        assert refusal(missing) == f"{missing}: no such file or folder"
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        (tmp_path / name).touch()
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: pickle checkpoints are not read")
    (tmp_path / "model.onnx").touch()
    assert refusal(tmp_path / "model.onnx").startswith(f"{tmp_path / 'model.onnx'}: not a model; allowed: a .gguf file")


def test_refuses_folders_without_weights_or_config(tmp_path: Path) -> None:
    needed = "no weights: needed is model.safetensors or model.safetensors.index.json; there is"
    assert refusal(tmp_path) == f"{tmp_path}: {needed} nothing"
    (tmp_path / "x.gguf").touch()
    (tmp_path / "readme").touch()
    assert refusal(tmp_path) == f"{tmp_path}: {needed} readme, x.gguf"
    (tmp_path / "pytorch_model.bin").touch()
    assert refusal(tmp_path).startswith(f"{tmp_path / 'pytorch_model.bin'}: pickle checkpoints are not read")
    (tmp_path / "model.safetensors").touch()
    assert refusal(tmp_path).startswith(f"{tmp_path}: config.json is missing; there is model.safetensors, ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "not valid JSON: "), ("{", "not valid JSON: "), ("[" * 100_000, "not valid JSON: "),
     ("[]", "holds a JSON list; allowed: an object"), ("\udcff", "not valid JSON: ")],
    ids=["empty", "cut", "deep", "list", "binary"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_refuses_corrupt_json(folder: Path, name: str, content: str, reason: str) -> None:
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    assert refusal(folder).startswith(f"{folder / name}: {reason}")


def test_refuses_truncated_and_corrupt_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], whole + b"\0", b"\xff" * 100, b"\0" * 100):
        path.write_bytes(content)
        assert refusal(folder).startswith(f"{path}: truncated or corrupt safetensors file: ")


def test_refuses_missing_and_unexpected_tensors(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(K))
    assert refusal(folder) == f"{folder}: tensor '{K}' is missing"
    change_weights(folder, lambda weights: weights.pop(Q))
    assert refusal(folder) == f"{folder}: tensor '{Q}' and 1 more is missing"
    model().save_pretrained(folder)
    bias = Q.replace("weight", "bias")
    change_weights(folder, lambda weights: weights.update({bias: torch.zeros(HIDDEN)}))
    assert refusal(folder) == f"{folder}: unexpected tensor '{bias}'; this config has no such tensor"
    model().save_pretrained(folder)
    change_config(folder, num_hidden_layers=1)
    assert "unexpected tensor 'model.layers.1." in refusal(folder)


def test_refuses_wrong_shape_and_dtype(folder: Path) -> None:
    path = folder / "model.safetensors"
    change_weights(folder, lambda weights: weights.update({K: torch.zeros(HIDDEN, 16)}))
    assert refusal(folder) == f"{path}: tensor {K} has shape [32, 16]; the config needs [16, 32]"
    for dtype, name in ((torch.int8, "I8"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")):
        wrong = torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN).to(dtype)
        change_weights(folder, lambda weights, wrong=wrong: weights.update({K: wrong}))  # type: ignore[misc]
        assert refusal(folder) == f"{path}: tensor '{K}' has dtype {name}; allowed: F32, F16, BF16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_refuses_nan_and_infinity_on_reading(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    model(dtype=dtype).save_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: weights[K][3].fill_(value))
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.tensor(Q)
        with pytest.raises(InvalidInput) as caught:
            checkpoint.tensor(K)
    kind = str(dtype).removeprefix("torch.")
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: tensor {K} holds NaN or infinite values as {kind}"


def test_refuses_what_is_infinite_in_the_working_dtype(folder: Path) -> None:
    change_weights(folder, lambda weights: weights[K][3].fill_(7e4))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tensor(K, torch.bfloat16).dtype == torch.bfloat16
        with pytest.raises(InvalidInput) as caught:
            checkpoint.tensor(K, torch.float16)
    assert str(caught.value) == f"{folder / 'model.safetensors'}: tensor {K} holds NaN or infinite values as float16"


def test_refuses_unknown_tensor_and_reading_after_close(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    kept = checkpoint.tensor("model.norm.weight")
    with pytest.raises(InvalidInput, match=r": no tensor x$"):
        checkpoint.tensor("x")
    checkpoint.close()
    with pytest.raises(InvalidInput, match=r": checkpoint is closed$"):
        checkpoint.tensor(Q)
    assert kept.sum() == HIDDEN


def test_tied_model_that_stores_a_head(tmp_path: Path) -> None:
    model(tied=True).save_pretrained(tmp_path)
    embedding = "model.embed_tokens.weight"
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[embedding].clone()}))
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint.names()
    for wrong in (lambda head: head + 1, lambda head: head.half()):
        change_weights(
            tmp_path,
            lambda weights, wrong=wrong: weights.update({"lm_head.weight": wrong(weights[embedding])}),  # type: ignore[misc]
        )
        assert refusal(tmp_path).endswith(f"tie_word_embeddings is true, but lm_head.weight differs from {embedding}")
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.zeros(3, HIDDEN)}))
    assert "tensor lm_head.weight has shape [3, 32]; the config needs [300, 32]" in refusal(tmp_path)


def test_refuses_bad_shards(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path, max_shard_size="30KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first = index["weight_map"][K]

    def refused_with(weight_map: Any) -> str:
        index_path.write_text(json.dumps(index | {"weight_map": weight_map}))
        return refusal(tmp_path)

    assert refused_with({}) == refused_with([]) == f"{index_path}: weight_map is missing or empty"
    for outside in ("../x.safetensors", "/x.safetensors", "", "a/b", 3):
        message = f"{index_path}: weight_map['{K}'] is {outside!r}; allowed: the name of a file beside it"
        assert refused_with(index["weight_map"] | {K: outside}) == message
    moved = {name: file for name, file in index["weight_map"].items() if name != K}
    assert refused_with(moved).startswith(
        f"{tmp_path / first}: its tensors are not those its index names; they differ in"
    )
    (tmp_path / first).rename(tmp_path / "elsewhere")
    assert refused_with(index["weight_map"]) == f"{tmp_path / first}: shard is missing; {index_path.name} names it"
    (tmp_path / first).write_bytes((tmp_path / "elsewhere").read_bytes()[:-1])
    assert refused_with(index["weight_map"]).startswith(f"{tmp_path / first}: truncated or corrupt safetensors file: ")


def test_refuses_gguf_that_does_not_fit_its_metadata(tmp_path: Path, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    path = gguf_file(tmp_path, gguf_bytes(weights | {"blk.0.attn_q.bias": torch.ones(HIDDEN)}))
    bias = Q.replace("weight", "bias")
    assert refusal(path) == f"{path}: unexpected tensor '{bias}'; this config has no such tensor"
    gguf_file(tmp_path, gguf_bytes({name: weight for name, weight in weights.items() if name != K}))
    assert refusal(path) == f"{path}: tensor '{K}' is missing"
    gguf_file(tmp_path, gguf_bytes({name: weight for name, weight in weights.items() if "embed" not in name}))
    assert refusal(path) == f"{path}: tensor token_embd.weight is missing"
    gguf_file(tmp_path, gguf_bytes(weights | {K: torch.zeros(HEAD_DIM, HIDDEN)}))
    assert refusal(path) == f"{path}: tensor {K} has shape [8, 32]; the config needs [16, 32]"
    gguf_file(tmp_path, gguf_bytes(weights, {"llama.expert_count": 8}))
    assert refusal(path) == f"{path}: llama.expert_count is 8; allowed: 0 or absent"
    gguf_file(tmp_path, gguf_bytes(weights)[:-1])
    assert refusal(path).startswith(f"{path}: truncated: tensor ")


def test_refuses_bad_rope_freqs(tmp_path: Path, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    good = torch.tensor([1.0, 1.0, 2.0, 8.0])
    path = gguf_file(tmp_path, gguf_bytes(weights | {"rope_freqs.weight": good}))
    assert open_checkpoint(path).config.rope_scaling == DividedFrequencies((1.0, 1.0, 2.0, 8.0))
    for bad in (good[:3], torch.ones(8), -good, good * 0, good / 0, good * float("nan")):
        gguf_file(tmp_path, gguf_bytes(weights | {"rope_freqs.weight": bad}))
        assert refusal(path) == f"{path}: tensor rope_freqs.weight must hold 4 numbers from 1e-30 to 1e+30"
    gguf_file(tmp_path, gguf_bytes(weights | {"rope_freqs.weight": good}, {"llama.rope.scale_linear": 2}))
    assert refusal(path) == f"{path}: tensor rope_freqs.weight beside rope.scaling; allowed: one of them"
    change_weights(folder, lambda weights: weights.update({"rope_freqs.weight": good}))
    assert refusal(folder) == f"{folder}: unexpected tensor 'rope_freqs.weight'; this config has no such tensor"


def test_hub_id_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refusal("no-such-org/no-such-model")
    assert message.startswith("no-such-org/no-such-model: no such folder, and it cannot be fetched from the hub: ")


@pytest.fixture(scope="module")
def small_gguf() -> bytes:
    return gguf_bytes({name: weight.contiguous() for name, weight in model(tied=True).state_dict().items()})


@settings(max_examples=150, deadline=5000)
@given(data=st.data())
def test_flipped_bits_in_a_gguf_model_raise_nothing_else(small_gguf: bytes, data: st.DataObject) -> None:
    """Header, sizes, vocabulary and values: whatever flips, the outcome is a model or InvalidInput."""
    header_bytes = small_gguf.index(b"output_norm.weight") + 100
    positions = st.one_of(st.integers(0, header_bytes), st.integers(0, len(small_gguf) - 1))
    content = bytearray(small_gguf)
    for position, bit in data.draw(st.lists(st.tuples(positions, st.integers(0, 7)), min_size=1, max_size=3)):
        content[position] ^= 1 << bit
    with tempfile.TemporaryDirectory() as scratch:
        path = gguf_file(Path(scratch), bytes(content))
        message = ""
        try:
            with open_checkpoint(path) as checkpoint:
                for name in checkpoint.names():
                    checkpoint.tensor(name)
                checkpoint.tokenizer()
        except InvalidInput as error:
            message = str(error)
    assert "\n" not in message
