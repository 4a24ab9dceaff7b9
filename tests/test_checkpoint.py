"""open_checkpoint: the same weights from every kind of file, and one clear line for whatever is wrong with one."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from fused_spec.errors import InvalidInput
from fused_spec.models.checkpoint import interleave_halves, open_checkpoint
from fused_spec.models.config import expected_shapes
from fused_spec.models.gguf_file import hugging_face_name
from fused_spec.models.tokenizer import tokenizer_from_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 8, 32, 300
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def model(tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    llama = LlamaForCausalLM(config)
    for parameter in llama.parameters():
        parameter.data = parameter.data.to(dtype)
    return llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path)
    return tmp_path


def refusal(path: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def gguf_bytes(
    weights: dict[str, torch.Tensor], fields: dict[str, Any] | None = None, vocabulary: bool = True
) -> bytes:
    """A llama GGUF file of Hugging Face weights, q and k permuted as llama.cpp's converter does."""
    back = {hugging_face_name(name): name for name in ("token_embd.weight", "output_norm.weight", "output.weight")}
    for layer in range(2):
        for part in (
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        ):
            back[hugging_face_name(f"blk.{layer}.{part}.weight")] = f"blk.{layer}.{part}.weight"
    with tempfile.TemporaryDirectory() as scratch:
        writer = gguf.GGUFWriter(Path(scratch) / "x.gguf", "llama")
        writer.add_block_count(2)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(48)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        for key, value in (fields or {}).items():
            writer.add_uint32(key, value)
        if vocabulary:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<s>"])
            writer.add_token_types([1] * 257 + [3])
            writer.add_token_merges(["a b"])
            writer.add_eos_token_id(257)
        for name, weight in weights.items():
            array = weight.numpy()
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = len(array) // HEAD_DIM
                array = array.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(back.get(name, name), np.ascontiguousarray(array))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(scratch) / "x.gguf").read_bytes()


def gguf_file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return path


def rotate(x: torch.Tensor, position: int, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of [heads, HEAD_DIM] in float64, with pairs side by side or half a head apart."""
    angle = position * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    out = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return torch.stack(out, dim=-1).flatten(1) if interleaved else torch.cat(out, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_folder_gives_the_weights_of_transformers(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    reference = model(tied, dtype)
    reference.save_pretrained(tmp_path)
    state = reference.state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert checkpoint.config.tie_word_embeddings is tied
        assert checkpoint.names() == list(expected_shapes(checkpoint.config))
        assert set(checkpoint.names()) == set(state) - ({"lm_head.weight"} if tied else set())
        for name in checkpoint.names():
            weight = checkpoint.tensor(name)
            assert weight.dtype == dtype
            assert weight.is_contiguous()
            permuted = name.endswith(("q_proj.weight", "k_proj.weight"))
            assert torch.equal(weight, interleave_halves(state[name], HEAD_DIM) if permuted else state[name])


def test_interleave_moves_each_half_to_every_other_row() -> None:
    rows = torch.arange(2 * HEAD_DIM)[:, None] * torch.ones(1, 3, dtype=torch.int64)
    expected = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert interleave_halves(rows, HEAD_DIM)[:, 2].tolist() == expected
    assert interleave_halves(rows[:, 0], HEAD_DIM).tolist() == expected


def test_interleaved_rotary_gives_the_scores_of_half_split(folder: Path) -> None:
    """What the permutation is for: q·k after rotation, from our rows and from the stored ones."""
    state = {name: weight.double() for name, weight in load_file(folder / "model.safetensors").items()}
    x, y = torch.randn(2, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k_name = Q.replace("q_proj", "k_proj")
    with open_checkpoint(folder) as checkpoint:
        ours = [checkpoint.tensor(name).double() for name in (Q, k_name)]
    scores = []
    for (q_weight, k_weight), interleaved in ((ours, True), ((state[Q], state[k_name]), False)):
        q = rotate((q_weight @ x).view(HEADS, HEAD_DIM), 7, interleaved)
        k = rotate((k_weight @ y).view(KV_HEADS, HEAD_DIM), 3, interleaved)
        scores.append((q.view(KV_HEADS, -1, HEAD_DIM) * k[:, None]).sum(-1))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-12, atol=1e-14)


def test_shards_give_the_same_weights(tmp_path: Path, folder: Path) -> None:
    sharded = tmp_path / "sharded"
    model().save_pretrained(sharded, max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    with open_checkpoint(folder) as whole, open_checkpoint(str(sharded)) as parts:
        assert whole.names() == parts.names()
        assert all(torch.equal(whole.tensor(name), parts.tensor(name)) for name in whole.names())


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_gives_the_same_weights_as_the_folder(tmp_path: Path, tied: bool) -> None:
    reference = model(tied)
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    path = gguf_file(tmp_path, gguf_bytes(weights))
    with open_checkpoint(tmp_path) as folder, open_checkpoint(path) as file:
        assert file.path == path
        assert file.config.tie_word_embeddings is tied
        assert file.config.eos_token_ids == (257,)
        assert folder.names() == file.names()
        assert all(torch.equal(folder.tensor(name), file.tensor(name)) for name in file.names())


def test_real_file(smollm2_path: Path) -> None:
    with open_checkpoint(smollm2_path) as checkpoint:
        config = checkpoint.config
        assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
        assert config.tie_word_embeddings
        assert config.eos_token_ids == (2,)
        assert len(checkpoint.names()) == 272
        assert checkpoint.tensor(Q).shape == (576, 576)
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        assert tokenizer.decode(tokenizer("Hello")["input_ids"]) == "Hello"


def test_tokenizer_of_folder_and_file(tmp_path: Path, folder: Path) -> None:
    content = gguf_bytes(load_file(folder / "model.safetensors"))
    with open_checkpoint(gguf_file(tmp_path, content)) as file, open_checkpoint(folder) as checkpoint:
        assert checkpoint.tokenizer() is None
        from_file = file.tokenizer()
        assert from_file is not None
        from_file.save_pretrained(folder)
        from_folder = checkpoint.tokenizer()
        assert from_folder is not None
        assert from_folder("ab 12")["input_ids"] == from_file("ab 12")["input_ids"]
    bare = gguf_file(tmp_path, gguf_bytes(load_file(folder / "model.safetensors"), vocabulary=False))
    with open_checkpoint(bare) as file:
        assert file.tokenizer() is None


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


def test_generation_config_wins_for_eos(folder: Path) -> None:
    change_config(folder, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert open_checkpoint(folder).config.eos_token_ids == (7, 8)


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


def test_ignores_inverse_frequencies_of_old_files(folder: Path) -> None:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    change_weights(folder, lambda weights: weights.update(old | {"model.rotary_emb.inv_freq": torch.ones(4)}))
    assert not any("rotary" in name for name in open_checkpoint(folder).names())


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
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: tensor {K} holds NaN or infinite values"


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
    path = gguf_file(tmp_path, gguf_bytes(weights | {"rope_freqs.weight": torch.ones(4)}))
    assert refusal(path) == f"{path}: unexpected tensor 'rope_freqs.weight'; this config has no such tensor"
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


def test_hub_id_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refusal("no-such-org/no-such-model")
    assert message.startswith("no-such-org/no-such-model: no such folder, and it cannot be fetched from the hub: ")


def test_hub_id_downloads_only_what_is_read(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **arguments: Any) -> str:
        asked.update(arguments, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with open_checkpoint("org/name") as checkpoint:
        assert checkpoint.path == folder
    assert asked["repo_id"] == "org/name"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern.endswith(("bin", "py", "*")) for pattern in asked["allow_patterns"])


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
