"""The command `fused-spec bench --plan`: what it prints, and what it refuses."""

import json
from typing import Any

import pytest

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
        ("qwen3-8b", "bench measures nothing in this version; --plan computes what follows from the config alone"),
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
