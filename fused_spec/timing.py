"""Timing on a machine that is not ours alone: interleaved samples, each with the share of CPU time that others used.

A busy neighbour slows two OpenMP threads up to a hundredfold, since they spin while they wait for each other. So
variants take turns (A, B, A, B), a turn counts only if it was quiet, and what is reported are medians over such turns.
If there is none, the result is "machine busy", not a figure.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

MOST_FOREIGN = 0.05
"""Largest share of the machine's CPU time that others may use during a sample that counts."""

_TICKS = os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """CPU seconds that all processes together have used, hypervisor's theft included (all but idle and iowait)."""
    with open("/proc/stat") as stat:
        numbers = [int(word) for word in stat.readline().split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / _TICKS


class MachineBusy(Exception):
    """No turn was quiet: there is nothing to report."""


@dataclass(frozen=True)
class Sample:
    """One timed call: seconds that passed, what it returned, and the share of CPU time that was not ours."""

    seconds: float
    value: float
    foreign: float


def timed(call: Callable[[], float | None]) -> Sample:
    """Runs a call once. What it returns, say tokens, is kept as `value`; 1 if it returns nothing."""
    busy, own, start = _busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    value = call()
    seconds = time.perf_counter() - start
    others = _busy_seconds() - busy - (sum(os.times()[:4]) - own)
    return Sample(seconds, 1.0 if value is None else value, max(0.0, others) / (seconds * (os.cpu_count() or 1)))


@dataclass
class Turns:
    """Samples of several variants that took turns: turn i of every variant lies next to turn i of the others."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def quiet(self) -> list[int]:
        """Turns in which every sample was quiet."""
        columns = zip(*self.samples.values(), strict=True)
        return [i for i, turn in enumerate(columns) if all(sample.foreign <= MOST_FOREIGN for sample in turn)]

    @property
    def foreign(self) -> float:
        """Median foreign share over all samples."""
        return median(sample.foreign for samples in self.samples.values() for sample in samples)

    def rate(self, name: str) -> float:
        """Median of value per second, over quiet turns. Raises MachineBusy without any, like all figures here."""
        return median(self.samples[name][i].value / self.samples[name][i].seconds for i in self._counted())

    def seconds(self, name: str) -> float:
        """Median seconds of a call, over quiet turns."""
        return median(self.samples[name][i].seconds for i in self._counted())

    def ratio(self, ours: str, peer: str) -> float:
        """How many times faster `ours` is than `peer`: median over quiet turns of the ratio of their rates."""
        pairs = [(self.samples[ours][i], self.samples[peer][i]) for i in self._counted()]
        return median(a.value / a.seconds / (b.value / b.seconds) for a, b in pairs)

    def _counted(self) -> list[int]:
        quiet = self.quiet
        if not quiet:
            raise MachineBusy(
                f"machine busy: others used {self.foreign:.0%} of the CPU time (median), no turn was quiet"
            )
        return quiet


def take_turns(variants: Mapping[str, Callable[[], float | None]], turns: int) -> Turns:
    """Times the variants in turn, the first of them last."""
    first, *others = variants
    result = Turns({name: [] for name in variants})
    for _ in range(turns):
        for name in (*others, first):
            result.samples[name].append(timed(variants[name]))
    return result


def machine() -> dict[str, Any]:
    """What figures depend on: processor, threads, GPU and CUDA version where there is one, and versions."""
    with open("/proc/cpuinfo") as lines:
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
