"""The command `fused-spec bench`: what it prints, measured or planned, and what it refuses."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import speaking_folder, tokenizer_of
from fused_spec import timing
from fused_spec.cli import main
from fused_spec.gpus import GPUS, gpu_of
from fused_spec.models.known_configs import KNOWN_CONFIGS, config_of
from fused_spec.plan import plan

SMOLLM2, QWEN_600M, QWEN_8B, _ = KNOWN_CONFIGS


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", "--plan", *arguments]) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    return printed


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["qwen3-8b", "--draft", "Qwen3-0.6B", "--num-draft-tokens", "2", "--max-length", "512"]
    answer = json.loads(shown(capsys, *given, "--gpu", "h100", "RTX4090", "--acceptance", "0.5", "--json"))
    options: dict[str, Any] = {"num_draft_tokens": 2, "max_length": 512, "dtype": "bfloat16", "gpu": gpu_of("H100")}
    expected = plan(config_of(QWEN_8B), config_of(QWEN_600M), **options)
    assert answer["memory"]["total"] == expected.memory.total
    assert answer["context"] == 512
    assert answer["reads"]["round"] == expected.round_bytes(512)
    assert [gpu["gpu"] for gpu in answer["gpus"]] == ["H100", "RTX 4090"]
    assert [gain["speedup"] for gain in answer["acceptances"]] == [expected.speedup(0.5, 512)]
    fastest = 1e6 * 1.75 / gpu_of("H100").microseconds(expected.round_bytes(512))
    assert answer["gpus"][0]["tokens_per_second"] == [pytest.approx(fastest)]
    text = shown(capsys, *given, "--acceptance", "0.5")
    assert all(name in text for name in (*GPUS, "a=0.5", "Left out: gaps between launches", "not measured"))
    assert f"{fastest:.0f}" in next(line for line in text.splitlines() if line.startswith("H100"))
    assert "best m" not in shown(capsys, "qwen3-8b")
    small = shown(capsys, SMOLLM2, "--draft", "self-int4", "--context", "64")
    assert "A draft step reads 96 MB, which fits the L2 cache of L40S:" in small
    assert "Drafts without a model read next to nothing" in shown(capsys, "llama-3.1-8b", "--draft", "ngram")
    assert json.loads(shown(capsys, "qwen3-8b", "--json"))["break_even_acceptance"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("qwen3-8b", "qwen3-8b: no such file or folder"),
        ("x --gpu H100", "--gpu is for --plan"),
        ("x --context 7", "--context is for --plan"),
        ("x --acceptance 0.5", "--acceptance needs --draft: plain decoding has no drafts to accept"),
        ("x --draft ngram --acceptance 0.5 0.6", "--acceptance prescribes one rate, got 0.5 0.6"),
        ("--plan qwen3-8b --turns 3", "--turns measures, and --plan computes only"),
        ("--plan qwen3-8b --seed 3", "--seed measures, and --plan computes only"),
        ("--plan", "the following arguments are required: MODEL"),
        ("--plan qwen4", "qwen4: no such file or folder; known by name: "),
        ("--plan qwen3-8b --gpu B200", "gpu must be one of H100, H200, A100, L40S, RTX 4090, got 'B200'"),
        ("--plan qwen3-8b --draft self-int3", "draft must be a model (a folder, a .gguf file or a hub id), 'ngram', "),
        ("--plan qwen3-8b --draft no/such.gguf", "no/such.gguf: no such file or folder"),
        ("--plan qwen3-8b --dtype int8", "dtype must be bfloat16, float16, float32 or None, got 'int8'"),
        ("--plan qwen3-8b --num-draft-tokens 65", "num_draft_tokens must be an integer from 1 to 64, got 65"),
        ("--plan qwen3-8b --max-length 1", "max_length must be an integer from 2 to 40960 (the context), got 1"),
        ("--plan qwen3-8b --context 4097", "context must be an integer from 1 to 4096 (max_length), got 4097"),
        ("--plan qwen3-8b --draft ngram --acceptance 1.5", "acceptance must be a number from 0 to 1, got 1.5"),
        ("--plan qwen3-8b --draft ngram --acceptance nan", "acceptance must be a number from 0 to 1, got nan"),
        ("--plan qwen3-8b --acceptance 0.5", "--acceptance needs --draft: plain decoding has no drafts to accept"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: str, named: str) -> None:
    assert main(["bench", *arguments.split()]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith(f"fused-spec: error: {named}")
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A tiny random model with a real tokenizer."""
    return speaking_folder(tmp_path_factory.mktemp("tiny"), tokenizer_of(smollm2_path), 4096)


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments, "--tokens", "9", "--turns", "2"]) == 0
    return str(capsys.readouterr().out)


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside these."""
    monkeypatch.setattr(timing, "MOST_FOREIGN", math.inf)


@pytest.mark.usefixtures("_quiet")
def test_measuring(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    given = [str(folder), "--draft", "self-int8", "--max-length", "256", "--temperature", "0", "--plot", str(picture)]
    answer = json.loads(measured(capsys, *given, "--json"))
    assert [way["name"] for way in answer["ways"]] == ["plain", "1", "2", "3", "4", "6", "8", "auto"]
    assert answer["ways"][0]["over_plain"] == 1
    assert answer["ways"][0]["tokens_per_round"] is None
    assert all(way["tokens_per_second"] > 0 for way in answer["ways"])
    assert all(way["tokens_per_round"] >= 1 for way in answer["ways"][1:])
    assert answer["settings"] == {"new_tokens": 9, "turns": 2, "seed": 1, "temperature": 0.0}
    assert answer["quiet_turns"] == 2
    assert answer["machine"]["torch"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = measured(capsys, str(folder), "--draft", "self-int8", "--num-draft-tokens", "3", "--max-length", "256")
    assert [line.split()[0] for line in text.splitlines()] == ["drafts", "plain", "3", "others"]
    assert [line.split()[0] for line in measured(capsys, str(folder), "--max-length", "256").splitlines()] == [
        "drafts", "plain", "others",
    ]  # fmt: skip


@pytest.mark.usefixtures("_quiet")
def test_prescribed_acceptance(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = [str(folder), "--draft", "self-int8", "--num-draft-tokens", "3", "--max-length", "256", "--json"]
    for rate, per_round in (("1", 4.0), ("0", 1.0)):
        answer = json.loads(measured(capsys, *given, "--acceptance", rate))
        assert answer["ways"][1]["tokens_per_round"] == per_round


def test_what_measuring_needs(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*arguments: str) -> str:
        status = main(["bench", str(folder), "--max-length", "256", "--tokens", "3", *arguments])
        assert status in (1, 2)
        error = str(capsys.readouterr().err)
        assert error.count("\n") == 1
        return error

    assert "turns must be an integer >= 1, got 0" in refused("--turns", "0")
    monkeypatch.setattr(timing, "MOST_FOREIGN", -1.0)
    assert "machine busy: others used" in refused()
    monkeypatch.setattr(timing, "MOST_FOREIGN", math.inf)
    assert "--plot" in refused("--plot", str(tmp_path / "no" / "such.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "--plot needs matplotlib: pip install 'fused-spec[bench]'" in refused("--plot", str(tmp_path / "x.png"))
