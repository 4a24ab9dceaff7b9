"""What the GPU check measures with: chances, margins, and the arithmetic of times on a GPU that is only pretended."""

import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import check_laws
import check_margins
import check_models
import check_report
import check_run
import check_speed
import check_times
from check_models import Replayer
from check_run import Setting
from fused_spec import SpeculativeSampling
from fused_spec.gpus import gpu_of
from fused_spec.models.config import ModelConfig

REDUCED = Setting(torch.device("cpu"), reduced=True)


def test_chi_square_chances() -> None:
    """Against exact tails: of one degree of freedom, erfc(sqrt(x/2)); of two, exp(-x/2)."""
    half = torch.full((2,), 0.5, dtype=torch.float64)
    assert check_laws.p_value(torch.tensor([60.0, 40.0]), half) == pytest.approx(math.erfc(math.sqrt(2)))
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert check_laws.p_value(torch.tensor([30.0, 20.0, 10.0]), third) == pytest.approx(math.exp(-5))
    assert check_laws.p_value(torch.tensor([60.0, 40.0, 1.0]), torch.tensor([0.5, 0.5, 0.0]).double()) == 0
    rare = torch.tensor([0.94, 0.02, 0.02, 0.02], dtype=torch.float64)  # pooled: 6 and 94 expected
    assert check_laws.p_value(torch.tensor([94.0, 6.0, 0.0, 0.0]), rare) == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="too few counts"):
        check_laws.p_value(torch.tensor([2.0, 1.0]), half)


def test_draws_are_excused_within_rounding_of_a_boundary_only() -> None:
    law = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64)
    assert check_margins.draw_margin(law, 2, 0.4) == 0
    assert check_margins.draw_margin(law, 0, 0.25 + 2e-6) == pytest.approx(0.5)
    assert check_margins.draw_margin(law, 2, 0.25 - 2e-6) == pytest.approx(0.5)
    assert check_margins.draw_margin(law, 0, 0.25 + 2e-6, mass=0.1) == pytest.approx(0.05)  # a residual of little mass
    assert check_margins.draw_margin(law, 3, 0.4) > 1e4


def accepted_round(seed: int) -> check_margins.Round:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    target = check_margins.Row(logits, options)
    draft = check_margins.Row(torch.tensor([0.8, 0.1, 0.1]).log(), options)
    return check_margins.Round([target, target], [draft], [0], SpeculativeSampling(), seed, 7)


def test_decisions_are_excused_within_rounding_of_a_boundary_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is accepted with a probability of 5/8; u decides that is set here."""
    for uniform, share in ((0.625 + 7.25e-6, 1.0), (0.625, 0.0), (0.6, 0.025 / 7.25e-6)):
        monkeypatch.setattr(check_margins, "acceptance_uniform", lambda seed, position, u=uniform: u)
        assert accepted_round(3).excuse((1, 0), (0, 1)) == pytest.approx(share, rel=2e-3, abs=2e-3)
    monkeypatch.setattr(check_margins, "sampling_uniform", lambda *key: 0.3)
    assert accepted_round(3).excuse((0, 2), (0, 1)) > 1000  # of the residual [0, 1/2, 1/2]
    assert accepted_round(3).excuse((0, 1), (0, 2)) == 0
    assert accepted_round(3).excuse((1, 0), (1, 1)) == 0


def test_filter_edges() -> None:
    row = check_margins.Row(
        torch.tensor([0.5, 0.3, 0.2]).log(), {"temperature": 1.0, "top_k": 0, "top_p": 0.8, "min_p": 0.4}
    )
    assert row.filter_margin(2) < 0.1  # 0.8 lies before it, and 0.2 is 0.4 of 0.5
    assert row.filter_margin(1) > 1e4
    assert check_margins.kept_margin(row, math.log(0.3), math.log(0.2)) == pytest.approx(
        0.2 / check_margins.MASS, rel=1e-3
    )


class Clock:
    """A CUDA event of a device that takes a millisecond for whatever lies between two of them."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Clock") -> float:
        return 1.0


class Pretended(Setting):
    """A GPU, so to speak, that is not known by name: tiny sizes, but all that times something runs."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    facts = SimpleNamespace(L2_cache_size=4096, total_memory=10**9, major=9, minor=0, multi_processor_count=2)
    for name, value in {
        "Event": Clock,
        "get_device_properties": lambda device: facts,
        "mem_get_info": lambda device: (2**31, 2**32),
        "get_device_name": lambda device: "some GPU",
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(check_times, "CudaRecorder", lambda device: Replayer())
    for name, value in {"VOCAB": 300, "REPLAYS": 2, "TURNS": 3}.items():
        monkeypatch.setattr(check_times, name, value)
    for name, value in {"TOKENS": 9, "PROMPT": 12, "MAX_LENGTH": 64, "M": 2}.items():
        monkeypatch.setattr(check_speed, name, value)
    check_report.copied_bandwidth.cache_clear()
    return Pretended(torch.device("cpu"), reduced=False)


def test_times_are_those_of_one_verification(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond for 2 replays of 16 verifications: 31.25 us. To be no faster than the baseline is a failure."""
    round_ = check_times.logits(pretended, 6)
    times = check_times.time_of(check_times.fused, round_, pretended)
    assert times == (31.25, 31.25)
    with pytest.raises(AssertionError, match="plain baseline takes"):
        check_times.check_verify(6, pretended)
    slow = {check_times.fused: check_times.Times(2.0, 3.0), check_times.materialised: check_times.Times(40.0, 50.0)}
    monkeypatch.setattr(check_times, "time_of", lambda verify, *_: slow[verify])
    key, numbers = check_times.check_verify(6, pretended)
    assert key.startswith("2.0 us warm, target 8, 3.0 cold, floor ")
    assert numbers["microseconds"] == {"warm": 2.0, "cold": 3.0}
    bandwidth = 2 * 2**29 / 1e-3  # a copy of a quarter of what is free, read and written
    assert numbers["floor_microseconds"] == pytest.approx(6 * 300 * 4 / bandwidth * 1e6, rel=0.01)


@pytest.mark.parametrize("draft", [None, "ngram", "self-int8", "Qwen3-0.6B"])
def test_speeds(draft: str | None, pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_speed, "_config", lambda setting, name: tiny(name))
    key, numbers = check_speed.check_speed(check_speed.Subject("Qwen3-8B", draft), pretended)
    assert re.fullmatch(r"\d+ tokens/s, \d+ rounds/s of \d\.\d\d tokens, \d+% of bandwidth", key)
    seconds = numbers["round_milliseconds"] / 1e3
    assert numbers["tokens_per_second"] * seconds == pytest.approx(numbers["tokens_per_round"])
    assert numbers["bandwidth_from"] == "a large copy"
    assert numbers["bandwidth_share"] == pytest.approx(numbers["bytes_per_second"] * 1e-3 / 2**30, rel=0.01)
    assert numbers["whole_call_seconds"] > 0


def tiny(name: str) -> ModelConfig:
    return check_models.small_config(REDUCED)


def test_models_that_do_not_fit_are_absent(pretended: Pretended) -> None:
    with pytest.raises(check_run.Absent, match=r"needs \d+\.\d GB of memory, 2\.1 are free"):
        check_speed.check_speed(check_speed.Subject("Qwen3-8B", None), pretended)


def test_other_acceptance_than_prescribed_is_noticed(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_speed, "_config", lambda setting, name: tiny(name))
    monkeypatch.setattr(check_speed, "TOKENS", 50)
    none = partial(lambda kind, drafter, _, state: kind(drafter, 0.0, state), check_speed.SyntheticDrafter)
    monkeypatch.setattr(check_speed, "SyntheticDrafter", none)
    with pytest.raises(AssertionError, match=r"tested drafts accepted, 0\.7 was prescribed"):
        check_speed.check_speed(check_speed.Subject("Qwen3-8B", "Qwen3-0.6B"), pretended)


def test_the_machine(pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Setting(torch.device("cuda:0"), reduced=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_report.machine(gpu)["nvidia_smi"] is None
    program = tmp_path / "nvidia-smi"
    for script, expected in {
        "echo '580.1, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700.00 W'": {"driver_version": "580.1"},
        "exit 6": {"error": f"Command '['{program}'"},
    }.items():
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        facts = check_report.machine(gpu)
        for name, value in expected.items():
            assert facts["nvidia_smi"][name].startswith(value)
    assert (facts["device"], facts["compute_capability"], facts["l2_bytes"]) == ("some GPU", "9.0", 4096)
    assert check_report.default_path(gpu.device) == check_report.RESULTS / "gpu-some-GPU.json"


def test_data_sheets_are_found_by_the_names_that_drivers_give() -> None:
    for sheet in check_report.SHEETS.values():
        assert gpu_of(sheet).name == sheet
