"""Fixtures of the benchmarks, and the file that their figures go to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from check_report import nvidia_smi
from contenders import Ours, Transformers
from demo import smollm2_path
from fused_spec import Engine
from fused_spec.timing import machine
from quiet import pytest_runtest_call as pytest_runtest_call

THREADS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, default=None, help="JSON file to write the measured figures to")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """What stored runs say of the machine: versions, and of an NVIDIA GPU the driver and its clocks."""
    machine_info.update(machine(), nvidia_smi=nvidia_smi())


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What tests measured, by name; written to the file that --figures names."""
    measured: dict[str, Any] = {}
    yield measured
    path = request.config.getoption("--figures")
    if path is not None and measured:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "figures": measured}, indent=1) + "\n")


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Any:
    """Prints to the terminal, past pytest's capture: these tests are run for what they print."""

    def show(text: str) -> None:
        with capfd.disabled():
            print(f"\n{text}", flush=True)

    return show


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return smollm2_path()


def _ours(path: Path, draft: str | None, m: int) -> Ours:
    return Ours(Engine.from_pretrained(path, draft=draft, num_draft_tokens=m, max_length=2048, device="cpu"))


@pytest.fixture(scope="session")
def plain(smollm2: Path) -> Ours:
    return _ours(smollm2, None, 1)


@pytest.fixture(scope="session")
def self_int4(smollm2: Path) -> Ours:
    return _ours(smollm2, "self-int4", 4)


@pytest.fixture(scope="session")
def self_int8(smollm2: Path) -> Ours:
    return _ours(smollm2, "self-int8", 3)


@pytest.fixture(scope="session")
def ngram(smollm2: Path) -> Ours:
    return _ours(smollm2, "ngram", 5)


@pytest.fixture(scope="session")
def peer(smollm2: Path) -> Transformers:
    return Transformers(smollm2)
