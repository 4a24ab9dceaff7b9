"""Absolute figures are stored and compared by device."""

from pathlib import Path

import pytest

import absolute


def test_a_device_without_a_stored_run_is_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / absolute.device()
    assert absolute.arguments(save=False, storage=tmp_path) == [f"--benchmark-storage=file://{folder}"]
    assert absolute.arguments(save=True, storage=tmp_path)[1:] == ["--benchmark-save=run"]
    (folder / "Linux-CPython-3.11-64bit").mkdir(parents=True)
    (folder / "Linux-CPython-3.11-64bit" / "0001_run.json").touch()
    expected = ["--benchmark-compare", "--benchmark-compare-fail=median:10%"]
    assert absolute.arguments(save=False, storage=tmp_path)[1:] == expected


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"gpu": "NVIDIA H200", "cpu": "x", "cores": 16}, "nvidia-h200"),
        ({"gpu": None, "cpu": "AMD EPYC 9R14", "cores": 2}, "amd-epyc-9r14-2-cores"),
    ],
)
def test_devices(facts: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absolute, "machine", lambda: facts)
    assert absolute.device() == name
