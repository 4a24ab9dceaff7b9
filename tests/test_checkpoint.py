"""open_checkpoint: the same weights from every kind of file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Q,
    change_config,
    change_weights,
    gguf_bytes,
    gguf_file,
    model,
)
from fused_spec.models.checkpoint import interleave_halves, open_checkpoint
from fused_spec.models.config import expected_shapes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path)
    return tmp_path


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


def test_mapped_weights_are_those_that_were_read_or_none(tmp_path: Path) -> None:
    """In a folder of transformers' the rows of queries and keys have another order than they are wanted in."""
    model(True, torch.bfloat16).save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        mapped = {name: checkpoint.mapped(name, torch.bfloat16) for name in checkpoint.names()}
        read = {name: checkpoint.tensor(name) for name in checkpoint.names()}
        assert all(checkpoint.mapped(name, torch.float32) is None for name in checkpoint.names())
    for name, weight in mapped.items():
        permuted = name.endswith(("q_proj.weight", "k_proj.weight"))
        assert weight is None if permuted else weight is not None and torch.equal(weight, read[name])


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


def test_generation_config_wins_for_eos(folder: Path) -> None:
    change_config(folder, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert open_checkpoint(folder).config.eos_token_ids == (7, 8)


def test_ignores_inverse_frequencies_of_old_files(folder: Path) -> None:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    change_weights(folder, lambda weights: weights.update(old | {"model.rotary_emb.inv_freq": torch.ones(4)}))
    assert not any("rotary" in name for name in open_checkpoint(folder).names())


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
