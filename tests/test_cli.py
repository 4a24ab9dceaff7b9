"""The command line: every parameter is a flag with the same default, and what comes out is what the engine gives."""

import functools
import inspect
import io
import json
import signal
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import speaking_folder, tokenizer_of
from fused_spec import Engine, parse_rule
from fused_spec.cli import _parser, main

LONG_RUN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import fused_spec.cli as c"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A tiny random model with a real tokenizer and chat template."""
    return speaking_folder(tmp_path_factory.mktemp("tiny"), tokenizer_of(smollm2_path), 4096)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Run a command that succeeds: (stdout, stderr)."""
    assert main(arguments) == 0
    return capsys.readouterr()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fused-spec {version('fused-spec')}\n"


def parameters(function: Any) -> dict[str, Any]:
    """Keyword-only parameters and their defaults."""
    found = inspect.signature(function).parameters.values()
    keywords = {parameter.name: parameter.default for parameter in found if parameter.kind is parameter.KEYWORD_ONLY}
    keywords.pop("allowed", None)  # a mask of tokens has no form on a command line
    return keywords


@pytest.mark.parametrize("command", [["generate", "model", "--prompt", "x"], ["chat", "model"]])
def test_every_parameter_is_a_flag_with_its_default(command: list[str]) -> None:
    values = vars(_parser().parse_args(command))
    expected = parameters(Engine.from_pretrained) | parameters(Engine.generate)
    assert parameters(Engine.generate) == parameters(Engine.stream)
    assert values["target"] == "model"
    values["stop"] = values["stop"] or ()
    assert {name: values[name] for name in expected} == expected
    others = {"target", "json", "command", "prompt", "prompt_file", "chat", "system"}
    assert values.keys() - expected.keys() <= others


GIVEN: dict[str, tuple[list[str], Any]] = {
    "draft": (["ngram"], "ngram"),
    "rule": (["cactus:delta=0.25,solver=exact"], parse_rule("cactus:delta=0.25,solver=exact")),
    "num_draft_tokens": (["3"], 3),
    "max_length": (["99"], 99),
    "dtype": (["float32"], "float32"),
    "device": (["cpu"], "cpu"),
    "attention": (["sdpa"], "sdpa"),
    "max_new_tokens": (["7"], 7),
    "temperature": (["0.5"], 0.5),
    "top_k": (["40"], 40),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.05"], 0.05),
    "seed": (["11"], 11),
    "stop": (["a", "b c"], ["a", "b c"]),
    "ignore_eos": ([""], True),
    "logprobs": ([""], True),
    "round_sizes": (["4,4,2"], [4, 4, 2]),
}


def test_every_flag_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, generating = parameters(Engine.from_pretrained), parameters(Engine.generate)
    assert set(GIVEN) == loading.keys() | generating.keys()
    seen: dict[str, Any] = {}

    class Enough(Exception):
        pass

    class Recorder:
        def stream(self, prompt: str, **values: Any) -> None:
            seen.update(prompt=prompt, generating=values)
            raise Enough

    @functools.wraps(Engine.from_pretrained)  # for its signature, from which the flags are made
    def load(target: str, **values: Any) -> Recorder:
        seen.update(target=target, loading=values)
        return Recorder()

    monkeypatch.setattr(Engine, "from_pretrained", load)
    flags = [
        word
        for name, (texts, _) in GIVEN.items()
        for text in texts
        for word in (f"--{name.replace('_', '-')}", text)
        if word
    ]
    with pytest.raises(Enough):
        main(["generate", "some/model", "--prompt", "Hi", *flags])
    expected = {name: value for name, (_, value) in GIVEN.items()}
    assert seen["target"] == "some/model"
    assert seen["prompt"] == "Hi"
    assert seen["loading"] == {name: expected[name] for name in loading}
    assert seen["generating"] == {name: expected[name] for name in generating}


@pytest.mark.parametrize("draft", [[], ["--draft", "ngram"], ["--draft", "self-int8", "--rule", "cactus:delta=0.1"]])
def test_generate(capsys: pytest.CaptureFixture[str], folder: Path, engine: Engine, draft: list[str]) -> None:
    arguments = ["generate", str(folder), "--prompt", "Hello", "--seed", "5", "--max-new-tokens", "12", *draft]
    shown, note = run(capsys, *arguments)
    printed, silence = run(capsys, *arguments, "--json", "--logprobs")
    assert silence == ""
    answer = json.loads(printed)
    assert printed.count("\n") == 1
    assert set(answer) == {"seed", "text", "token_ids", "finish_reason", "stats", "logprobs"}
    assert shown == answer["text"] + "\n"
    assert note.startswith(f"[{len(answer['token_ids'])} tokens, {answer['finish_reason']}, seed 5, ")
    assert note.endswith("]\n")
    assert note.count("\n") == 1
    assert ("total variation" in note) is ("cactus:delta=0.1" in draft)
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 12
    assert answer["stats"]["emitted"] == 11
    if not draft:
        expected = engine.generate("Hello", seed=5, max_new_tokens=12, logprobs=True)
        assert (expected.text, expected.token_ids) == (answer["text"], answer["token_ids"])
        assert expected.logprobs == answer["logprobs"]


def test_seed_is_reported_and_reproduces(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ["generate", str(folder), "--prompt", "Hello", "--max-new-tokens", "6", "--json"]
    first = json.loads(run(capsys, *arguments)[0])
    again = json.loads(run(capsys, *arguments, "--seed", str(first["seed"]))[0])
    assert again["token_ids"] == first["token_ids"]
    assert again["logprobs"] is None


def test_prompt_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, engine: Engine
) -> None:
    prompt = "Ein Satz, grüße 🙂\nund noch einer.\n"
    options = ["--seed", "1", "--max-new-tokens", "8", "--json"]
    expected = engine.generate(prompt, seed=1, max_new_tokens=8).token_ids
    (tmp_path / "prompt").write_text(prompt, encoding="utf-8")
    printed, _ = run(capsys, "generate", str(folder), "--prompt-file", str(tmp_path / "prompt"), *options)
    assert json.loads(printed)["token_ids"] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
    printed, _ = run(capsys, "generate", str(folder), "--prompt-file", "-", *options)
    assert json.loads(printed)["token_ids"] == expected


def test_chat_template(capsys: pytest.CaptureFixture[str], folder: Path, engine: Engine) -> None:
    options = ["--prompt", "Why?", "--chat", "--seed", "1", "--max-new-tokens", "8", "--json"]
    answer = json.loads(run(capsys, "generate", str(folder), *options)[0])
    expected = engine.generate([{"role": "user", "content": "Why?"}], seed=1, max_new_tokens=8)
    assert answer["token_ids"] == expected.token_ids
    assert answer["token_ids"] != engine.generate("Why?", seed=1, max_new_tokens=8).token_ids


def test_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, engine: Engine
) -> None:
    """Every answer depends on what was said since the beginning or /reset, and on the system message."""

    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    system, one, two = message("system", "Be kind."), message("user", "One?"), message("user", "Two?")
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 6}
    first = engine.generate([system, one], **options)
    second = engine.generate([system, one, message("assistant", first.text), two], **options)
    fresh = engine.generate([system, two], **options)
    arguments = ["chat", str(folder), "--system", "Be kind.", "--seed", "3", "--max-new-tokens", "6"]
    for typed in ("One?\n\nTwo?\n/reset\nTwo?\n", "One?\nTwo?\n/reset\nTwo?\n/exit\nnever\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        printed, silence = run(capsys, *arguments, "--json")
        answers = [json.loads(line) for line in printed.splitlines()]
        assert [answer["token_ids"] for answer in answers] == [out.token_ids for out in (first, second, fresh)]
        assert silence == ""
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?"))
    assert run(capsys, *arguments) == (f"{first.text}\n{second.text}\n", "")


def test_text_that_the_terminal_cannot_show_is_escaped(
    monkeypatch: pytest.MonkeyPatch, folder: Path, engine: Engine
) -> None:
    texts = {seed: engine.generate("Hello", seed=seed, max_new_tokens=20).text for seed in range(20)}
    seed, text = next(item for item in texts.items() if not item[1].isascii())
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, encoding="ascii"))
    assert main(["generate", str(folder), "--prompt", "Hello", "--seed", str(seed), "--max-new-tokens", "20"]) == 0
    assert screen.getvalue() == text.encode("ascii", "backslashreplace") + b"\n"


def test_installed_script() -> None:
    script = Path(sysconfig.get_path("scripts")) / "fused-spec"
    done = subprocess.run([script, "chat", "no/such/folder"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fused-spec: error: no/such/folder: no such file or folder\n"


def long_run(folder: Path) -> "subprocess.Popen[bytes]":
    """A generation of thousands of tokens, of which the first is out already."""
    arguments = ["generate", str(folder), "--prompt", "Hi", "--seed", "1", "--max-new-tokens", "4000", "--ignore-eos"]
    code = f"{LONG_RUN}; sys.exit(c.main({arguments!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.read(1)) == 1
    return process


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    with long_run(folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_interrupt_ends_without_a_traceback(folder: Path) -> None:
    with long_run(folder) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
    assert process.returncode == 130
