"""Whatever is wrong on the command line: status 2, one line on stderr that names it, nothing on stdout."""

import io
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from checkpoint_files import speaking_folder
from cycles import ascii_tokenizer
from fused_spec.cli import main

RULE = "cactus: delta must be a finite number"
DEVICE = "device must be 'cpu', 'cuda' or 'cuda:N', got"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_folder(tmp_path_factory.mktemp("model"), ascii_tokenizer(), 64)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith("fused-spec: error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    assert "Traceback" not in error
    return error.removeprefix("fused-spec: error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--temperature -0.5", "temperature must be 0 (greedy) or in [0.001, 1e+30], got -0.5"),
        ("--temperature nan", "temperature must be 0 (greedy) or in [0.001, 1e+30], got nan"),
        ("--temperature inf", "temperature must be 0 (greedy) or in [0.001, 1e+30], got inf"),
        ("--temperature hot", "argument --temperature: invalid float value: 'hot'"),
        ("--top-p 0", "top_p must be in (0, 1] (1 keeps every token), got 0.0"),
        ("--top-p 1.5", "top_p must be in (0, 1] (1 keeps every token), got 1.5"),
        ("--top-p nan", "top_p must be in (0, 1] (1 keeps every token), got nan"),
        ("--top-k -1", "top_k must be an integer >= 0 and < 2^63 (0 keeps every token), got -1"),
        ("--top-k 2.5", "argument --top-k: invalid int value: '2.5'"),
        ("--min-p 2", "min_p must be in [0, 1] (0 keeps every token), got 2.0"),
        ("--rule cactus:delta=-1", f"{RULE} (or a float tensor [B]) in [0, inf), got -1.0"),
        ("--rule cactus:delta=nan", f"{RULE} (or a float tensor [B]) in [0, inf), got nan"),
        ("--rule cactus:delta=x", "cactus: delta must be a number, got 'x'"),
        ("--rule cactus", "cactus: delta is required, as in cactus:delta=0.25"),
        ("--rule cactus:", "cactus: delta is required, as in cactus:delta=0.25"),
        ("--rule cactus:delta", "cactus: unknown parameter 'delta'; known: delta, solver (as name=value)"),
        ("--rule cactus:delta=1,gamma=2", "cactus: unknown parameter 'gamma=2'; known: delta, solver (as name=value)"),
        ("--rule cactus:delta=1,delta=1", "cactus: delta is given twice"),
        ("--rule cactus:delta=1,solver=x", "cactus: solver must be 'taylor' or 'exact', got 'x'"),
        ("--rule cactus:delta=1,", "cactus: unknown parameter ''; known: delta, solver (as name=value)"),
        ("--rule speculative_sampling:x=1", "speculative_sampling: unknown parameter 'x=1'; known: none"),
        ("--rule cactus2", "unknown rule 'cactus2'; known: cactus, "),
        ("--unknown 3", "unrecognized arguments: --unknown 3 (see fused-spec --help)"),
        ("--temp 0.5", "unrecognized arguments: --temp 0.5 (see fused-spec --help)"),
        ("--max-new 5", "unrecognized arguments: --max-new 5 (see fused-spec --help)"),
        ("more", "unrecognized arguments: more (see fused-spec --help)"),
        ("--num-draft-tokens 0", "num_draft_tokens must be an integer from 1 to 64 or 'auto', got 0"),
        ("--num-draft-tokens 65", "num_draft_tokens must be an integer from 1 to 64 or 'auto', got 65"),
        ("--num-draft-tokens x", "argument --num-draft-tokens: expected an integer or auto, got 'x'"),
        ("--round-sizes 4,x", "argument --round-sizes: expected integers as in 4,4,2, got '4,x'"),
        ("--round-sizes 3", "round_sizes must be a list of sizes out of (0,), got [3]"),
        ("--max-new-tokens -1", "max_new_tokens must be an integer >= 0, got -1"),
        ("--max-length 0", "max_length must be an integer >= 2, got 0"),
        ("--max-length 65", "max_length 65 is more than the target's context of 64 tokens"),
        ("--seed -1", "seed must be an integer, 0 <= seed < 2^63, got -1"),
        (f"--seed {2**63}", f"seed must be an integer, 0 <= seed < 2^63, got {2**63}"),
        ("--stop a --stop=", "stop must be non-empty strings, got ['a', '']"),
        ("--dtype int8", "dtype must be bfloat16, float16, float32 or None, got 'int8'"),
        ("--device nonsense", f"{DEVICE} 'nonsense'"),
        ("--device mps", f"{DEVICE} 'mps'"),
        ("--device cuda:x", f"{DEVICE} 'cuda:x'"),
        (f"--device cuda:{torch.cuda.device_count()}", "is not available: this torch sees"),
        ("--attention flash", "attention must be 'auto' or 'sdpa' on the device 'cpu', got 'flash'"),
        ("--draft no/such/model.gguf", "no/such/model.gguf: no such file or folder"),
        ("--draft=", "'ngram', 'self-int8', 'self-int4' or None, got ''"),
        ("--chat", "this checkpoint has no chat template; pass the prompt as text or token ids"),
        ("--prompt-file x", "argument --prompt-file: not allowed with argument --prompt"),
        ("--logprobs yes", "unrecognized arguments: yes"),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], folder: Path, flags: str, named: str) -> None:
    length = [] if "--max-length" in flags else ["--max-length", "64"]
    assert named in refusal(capsys, "generate", str(folder), "--prompt", "012", *length, *flags.split(" "))


def test_a_draft_that_does_not_exist(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """The message must say which drafts there are."""
    error = refusal(capsys, "generate", str(folder), "--prompt", "0", "--max-length", "64", "--draft", "self-int3")
    assert "self-int3" in error
    assert "'ngram', 'self-int8', 'self-int4'" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generat"], "argument COMMAND: invalid choice: 'generat' (choose from "),
        (["generate"], "the following arguments are required: MODEL"),
        (["generate", "model"], "one of the arguments --prompt --prompt-file is required"),
        (["chat"], "the following arguments are required: MODEL"),
        (["chat", "model", "--prompt", "x"], "unrecognized arguments: --prompt x"),
        (["generate", "model", "--prompt", "x", "a\nb"], "unrecognized arguments: a b"),
        (["generate", "no\nmodel", "--prompt", "x"], "no model: no such file or folder"),
        (["generate", "no-model", "--prompt", "x"], "no-model: no such file or folder"),
        (["generate", "", "--prompt", "x"], "model is ''; allowed: a folder, a .gguf file or a hub id"),
        (["generate", "model", "--prompt", ""], "the prompt is empty; at least one token is needed"),
        (["generate", "model", "--prompt-file", "none"], "--prompt-file none: "),
    ],
)
def test_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert named in refusal(capsys, *arguments)


def test_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    command = ["generate", str(folder), "--max-length", "64"]
    too_long = "the prompt has 64 tokens; it must have fewer than max_length = 64"
    assert refusal(capsys, *command, "--prompt", "0" * 64) == too_long
    bad_bytes = "the prompt is not valid Unicode: '\\udcff' at 1"  # what Python makes of a byte that is not UTF-8
    assert refusal(capsys, *command, "--prompt", "0\udcff") == bad_bytes
    (tmp_path / "latin").write_bytes(b"gr\xfc\xdfe")
    assert refusal(capsys, *command, "--prompt-file", str(tmp_path / "latin")).startswith(f"--prompt-file {tmp_path}")
    assert refusal(capsys, *command, "--prompt-file", str(tmp_path)).endswith(f"Is a directory: '{tmp_path}'")
    for content, named in ((b"", "the prompt is empty"), (b"\xff", "--prompt-file -: 'utf-8' codec can't decode")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        assert refusal(capsys, *command, "--prompt-file", "-").startswith(named)


def test_chat_with_piped_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    command = ["chat", str(folder), "--max-length", "64"]
    for content, named in ((b"hi\n", "this checkpoint has no chat template"), (b"\xff\n", "standard input: 'utf-8'")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        assert refusal(capsys, *command).startswith(named)


def test_models(capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path) -> None:
    def refused(model: Path, *flags: str) -> str:
        return refusal(capsys, "generate", str(model), "--prompt", "012", "--max-length", "64", *flags)

    assert refused(tmp_path).startswith(f"{tmp_path}: no weights: needed is model.safetensors")
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"0": 0, "1": 1, "2": 2}, merges=[])))
    speaking_folder(tmp_path, other, 64)
    capsys.readouterr()  # transformers' progress bar
    named = f"draft {tmp_path} and target {folder} have different tokenizers: token "
    assert refused(folder, "--draft", str(tmp_path)).startswith(named)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    corrupt = f"{weights}: truncated or corrupt safetensors file: "
    assert refused(tmp_path).startswith(corrupt)
    assert refused(folder, "--draft", str(tmp_path)).startswith(corrupt)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert refused(tmp_path / "model.gguf").startswith(f"{tmp_path / 'model.gguf'}: truncated GGUF file")
