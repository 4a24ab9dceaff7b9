"""Absolute figures, kept by the device they were measured on: arguments for pytest-benchmark, `make perf` adds them.

    python perf/absolute.py [--save]

Runs are stored under perf/results/benchmarks/<device>, with --save. Where there is one of this device, a median that is
more than 10 % above the last of them fails; where there is none, nothing is compared. A virtual machine whose speed
moves by more than that from run to run should have none.
"""

import re
import sys
from pathlib import Path

from fused_spec.timing import machine

STORAGE = Path(__file__).resolve().parent / "results" / "benchmarks"


def device() -> str:
    """The name of the GPU, or else of the processor and its number of cores, fit for a folder."""
    facts = machine()
    name = facts["gpu"] or f"{facts['cpu']} {facts['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def arguments(*, save: bool, storage: Path = STORAGE) -> list[str]:
    """What pytest-benchmark is told."""
    folder = storage / device()
    told = [f"--benchmark-storage=file://{folder}"]
    if save:
        told.append("--benchmark-save=run")
    if any(folder.glob("*/*.json")):
        told += ["--benchmark-compare", "--benchmark-compare-fail=median:10%"]
    return told


if __name__ == "__main__":
    print(" ".join(arguments(save="--save" in sys.argv[1:])))
