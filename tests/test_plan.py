"""The plan: bytes by hand, break-even by brute force, configs without weights."""

import importlib
import itertools
import json
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fused_spec.errors import InvalidInput
from fused_spec.gpus import gpu_of
from fused_spec.kernels.split_attention import SplitBuffers
from fused_spec.models.config import ModelConfig, expected_shapes
from fused_spec.models.device_cache import DeviceCache
from fused_spec.models.gguf_file import GGUFFile
from fused_spec.models.known_configs import KNOWN_CONFIGS, config_of
from fused_spec.plan import Plan, acceptance_for, cache_bytes, plan, quantized_bytes, scratch_bytes, weight_bytes
from fused_spec.round_size import tokens_per_round

TINY = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    eos_token_ids=(),
)
TIED = replace(TINY, tie_word_embeddings=True)
LAYER = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32 + 2 * 32  # q, k and v, o, gate and up and down, norms
H100 = gpu_of("H100")
SMOLLM2, QWEN_600M, QWEN_8B, LLAMA = KNOWN_CONFIGS


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was to be fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


def planned(target: ModelConfig, draft: Any, **changes: Any) -> Plan:
    options: dict[str, Any] = {"num_draft_tokens": 3, "max_length": 20, "dtype": "bfloat16", "gpu": H100}
    return plan(target, draft, **(options | changes))


def test_weights_by_hand() -> None:
    assert weight_bytes(TINY, 2) == 2 * (2 * LAYER + 32 + 2 * 100 * 32)
    assert weight_bytes(TIED, 2) == 2 * (2 * LAYER + 32 + 100 * 32)
    head = 100 * (32 + 4)
    eight = 32 * 36 + 2 * 16 * 36 + 32 * 36 + 2 * 48 * 36 + 32 * (48 + 4)
    assert sum(quantized_bytes(TINY, 8)) == 2 * eight + head
    four = 32 * 20 + 2 * 16 * 20 + 32 * 20 + 2 * 48 * 20 + 32 * 2 * 20  # 32 columns are 20 bytes, 48 are filled up
    assert sum(quantized_bytes(TINY, 4)) == 2 * four + head


@pytest.mark.parametrize(
    ("name", "count"),
    [(SMOLLM2, 134_515_008), (QWEN_8B, 8_190_735_360), (QWEN_600M, 596_049_920), (LLAMA, 8_030_261_248)],
)
def test_weights_of_known_models(name: str, count: int) -> None:
    """The counts are those that the hub shows for these checkpoints."""
    config = config_of(name)
    assert weight_bytes(config, 1) == count == sum(map(math.prod, expected_shapes(config).values()))


def test_memory_by_hand() -> None:
    rows = 512 * (4 * 32 + 2 * (32 + 4 * 8 + 4 * 8 + 8 * 8 + 2 * 48 + 48))
    target = rows + 4 * 4 * 1 * (8 + 2) * 4 + 24 * 8 * 4 + 4 * 100 * 2  # partials, rotations, logits
    alone = planned(TINY, "ngram").memory
    assert (alone.verifier_cache, alone.draft_cache) == (2 * 2 * 24 * 2 * 8 * 2, 0)
    assert (alone.draft_weights, alone.scratch) == (0, target)
    assert alone.total == alone.verifier_weights + alone.verifier_cache + target
    itself = planned(TINY, "self-int4").memory
    assert (itself.draft_weights, itself.draft_cache) == (sum(quantized_bytes(TINY, 4)), 0)
    assert itself.scratch == target + 3 * 100 * 2
    pair = planned(TINY, TIED).memory
    assert (pair.draft_weights, pair.draft_cache) == (weight_bytes(TIED, 2), alone.verifier_cache)
    assert pair.scratch == target + rows + 2 * 4 * 1 * (8 + 2) * 4 + 24 * 8 * 4 + 3 * 100 * 2
    plain = planned(TINY, None).memory
    assert plain.verifier_cache == cache_bytes(TINY, 20 + 1, 2)
    assert planned(TINY, TIED, dtype="float32").memory.verifier_weights == 2 * pair.verifier_weights


def test_the_cache_on_a_gpu_is_as_large_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_spec.models.device_cache.cached_attention", lambda *_: None)
    cache = DeviceCache(TINY, 24, 4, torch.bfloat16, torch.device("meta"), "auto")
    assert cache.keys.nbytes + cache.values.nbytes == planned(TINY, "ngram").memory.verifier_cache


@pytest.mark.parametrize("capacity", [1, 64, 65, 4096, 4097, 4102, 9000, 131072])
def test_partials_are_those_of_the_kernel(capacity: int) -> None:
    buffers = SplitBuffers.empty(capacity, 6, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, torch.device("meta"))
    without = scratch_bytes(TINY, capacity, 0, 2)  # no wider than a prompt's chunk, so the rest is the same
    assert scratch_bytes(TINY, capacity, 6, 2) - without == sum(buffer.nbytes for buffer in buffers)


def test_reads_by_hand() -> None:
    weights, row, slot = 2 * (2 * LAYER + 32 + 3200), 64, 2 * 2 * 2 * 8 * 2
    plain = planned(TINY, None)
    assert plain.plain_bytes(7) == plain.round_bytes(7) == weights + row + 7 * slot
    assert plain.draft_bytes(7) == 0
    verify = weights + 4 * row + (7 + 3) * slot
    assert planned(TINY, "ngram").round_bytes(7) == verify
    drafting = 3 * weights + (2 + 1 + 1) * row + (7 + 8 + 9) * slot  # of the tied model: its table is its head
    assert planned(TINY, TIED).draft_bytes(7) == drafting
    assert planned(TINY, TIED).round_bytes(7) == verify + drafting
    matrices = sum(quantized_bytes(TINY, 8)) + 2 * (2 * 2 * 32 + 32)
    assert planned(TINY, "self-int8").round_bytes(7) == verify + 3 * matrices + 3 * row + 24 * slot
    assert planned(TINY, "self-int8").round_bytes(7, 1) == weights + 2 * row + 8 * slot + matrices + row + 7 * slot


def test_floors() -> None:
    a, b = (planned(config_of(LLAMA), "self-int4", gpu=gpu_of(name)) for name in ("A100", "H200"))
    assert a.gpu.microseconds(a.plain_bytes(20)) == pytest.approx(a.plain_bytes(20) / 2039e9 * 1e6)
    assert a.round_bytes(20) == b.round_bytes(20)
    assert a.speedup(0.8, 20) == b.speedup(0.8, 20)
    large = config_of(LLAMA)
    assert planned(large, None, gpu=gpu_of("RTX 4090")).fits
    assert not planned(large, None, gpu=gpu_of("RTX 4090"), dtype="float32").fits


@pytest.mark.parametrize("draft", [TIED, "self-int8", "self-int4", "ngram"])
def test_monotonicity(draft: Any) -> None:
    base = planned(TINY, draft)
    assert base.plain_bytes(8) > base.plain_bytes(7)
    assert base.round_bytes(8) > base.round_bytes(7)
    sizes = [base.round_bytes(7, m) for m in range(9)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == base.plain_bytes(7)
    for changes in ({"max_length": 21}, {"num_draft_tokens": 4}, {"dtype": "float32"}):
        assert planned(TINY, draft, **changes).memory.total > base.memory.total
    speeds = [base.speedup(rate / 10, 7) for rate in range(11)]
    assert speeds == sorted(set(speeds))
    best = [base.best_num_draft_tokens(rate / 10, 7) for rate in range(11)]
    assert best == sorted(best)
    assert best[0] == 0


@pytest.mark.parametrize("m", [1, 2, 5])
def test_tokens_and_break_even_by_brute_force(m: int) -> None:
    def tokens(rate: float) -> float:
        """Over all patterns of accepted and rejected drafts."""
        return sum(
            math.prod(rate if accepted else 1 - rate for accepted in pattern) * (1 + (*pattern, False).index(False))
            for pattern in itertools.product((True, False), repeat=m)
        )

    grid = [i / 1000 for i in range(1001)]
    for needed in (1.0, 1.2, 1.9, m + 0.9, m + 1.0):
        least = next(rate for rate in grid if tokens(rate) >= needed - 1e-12)
        found = acceptance_for(needed, m)
        assert found is not None
        assert least - 1e-3 <= found <= least + 1e-12
        assert tokens_per_round(found, m) == pytest.approx(needed)
    assert acceptance_for(0.5, m) == 0
    assert acceptance_for(m + 1.001, m) is None


@pytest.mark.parametrize("draft", [config_of(QWEN_600M), "self-int8", "self-int4"])
def test_break_even_and_best_size_of_a_real_model(draft: Any) -> None:
    real = planned(config_of(QWEN_8B), draft, num_draft_tokens=5, max_length=4096)
    rate = real.break_even_acceptance(1024)
    assert rate is not None
    assert real.speedup(rate, 1024) == pytest.approx(1)
    for acceptance in (0.6, 0.9):
        best = real.best_num_draft_tokens(acceptance, 1024)
        assert all(real.speedup(acceptance, 1024, best) >= real.speedup(acceptance, 1024, m) for m in range(65))


def test_a_draft_as_large_as_its_target_never_pays() -> None:
    itself = planned(TINY, TINY)
    assert itself.break_even_acceptance(7) is None
    assert itself.best_num_draft_tokens(0.9, 7) == 0


@pytest.mark.parametrize("name", ["H100", "h-100", "h 200", "rtx4090", "RTX 4090", "rtx-4090", "l40s", "A100"])
def test_gpu_names(name: str) -> None:
    assert gpu_of(name).name.replace(" ", "") == name.upper().replace(" ", "").replace("-", "")


def test_config_of_files(tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFFile, "load", None)  # the header will do
    header = config_of(smollm2_path)
    assert replace(header, rms_norm_eps=1e-5) == config_of(SMOLLM2)
    assert header.rms_norm_eps == pytest.approx(1e-5)
    folder = tmp_path / "Qwen3-8B"  # a folder comes before a name that is known
    folder.mkdir()
    values = KNOWN_CONFIGS[LLAMA]
    (folder / "config.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    assert config_of("Qwen3-8B") == config_of(folder / "config.json") == config_of(LLAMA)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert config_of(folder).eos_token_ids == config_of(folder / "config.json").eos_token_ids == (1, 2)


def test_config_of_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_CONFIGS[LLAMA]))
    asked: list[Any] = []

    def download(repo_id: str, **arguments: Any) -> str:
        asked.append((repo_id, arguments))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert config_of("org/name") == config_of("llama-3.1-8b") == config_of("META-LLAMA/Llama-3.1-8B")
    assert asked == [("org/name", {"allow_patterns": ["config.json", "generation_config.json"]})]

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InvalidInput, match=r"^org/name: no such folder, .* from the hub: no route$"):
        config_of("org/name")


def test_config_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "bad.json").write_text("{")
    refused: dict[str | Path, str] = {
        "qwen4": "qwen4: no such file or folder; known by name: HuggingFaceTB/SmolLM2-135M-Instruct, ",
        tmp_path / "empty": "config.json is missing; there is nothing",
        tmp_path / "model.safetensors": "not a config; allowed: a folder, a config.json or a .gguf file",
        tmp_path / "bad.json": "bad.json: not valid JSON: ",
        tmp_path / "none": "no such file or folder",
        "x" * 300: "File name too long",
        "": "model is ''; allowed: a folder, a config.json, ",
    }
    for model, named in refused.items():
        with pytest.raises(InvalidInput) as caught:
            config_of(model)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_page_is_what_the_code_gives() -> None:
    page = Path(__file__).parents[1] / "docs" / "plan.md"
    assert page.read_text(encoding="utf-8") == importlib.import_module("write_plan").document()
