"""What the GPU check says of the machine, its bandwidth, and the results: a table and a JSON file."""

import json
import os
import platform
import shutil
import subprocess
import time
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from check_run import ABSENT, FAILED, OK, SKIPPED, Result, Setting
from fused_spec.gpus import GPU, gpu_of

RESULTS = Path(__file__).parents[1] / "perf" / "results"

SHEETS = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
}
"""Names of drivers for what fused_spec/gpus.py has data sheets of. Other GPUs of the same family have other memory."""

NOT_MEANINGFUL = "no timing (interpreted)"
"""What stands where a time would, if kernels are interpreted on a CPU."""

_CLOCKS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
)


def machine(setting: Setting) -> dict[str, Any]:
    """What results depend on."""
    facts: dict[str, Any] = {
        "device": device_name(setting.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flash_attn": _version("flash-attn"),
        "flashinfer": _version("flashinfer-python"),
        "cpu_cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        facts |= {
            "cuda": torch.version.cuda,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "nvidia_smi": nvidia_smi(),
        }
    return facts


def device_name(device: torch.device) -> str:
    """As the driver has it, or the CPU's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def nvidia_smi() -> dict[str, str] | None:
    """Driver and clocks as they are now, or None without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return {"error": str(error).splitlines()[0]}
    lines = done.stdout.strip().splitlines() or [""]
    return dict(zip(_CLOCKS, (field.strip() for field in lines[0].split(",")), strict=False))


@cache
def copied_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy on the device moves, read and written: the median of ten."""
    count = min(2**30, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return 2 * count / median(seconds[3:])


def gpu(device: torch.device) -> tuple[GPU, str]:
    """The device with its bandwidth, and where that is from: the data sheet, or a large copy where there is none."""
    name = device_name(device)
    if name in SHEETS:
        return gpu_of(SHEETS[name]), "data sheet"
    facts = torch.cuda.get_device_properties(device)
    bandwidth = round(copied_bandwidth(device) / 1e9)
    capability = 10 * facts.major + facts.minor
    measured = GPU(name, facts.total_memory, bandwidth, facts.L2_cache_size, capability, facts.multi_processor_count)
    return measured, "a large copy"


def table(results: list[Result]) -> str:
    """A line for each check."""
    return "\n".join(result.line() for result in results)


def passed(results: list[Result]) -> bool:
    """Whether some check ran, none failed and none was skipped."""
    return any(r.status == OK for r in results) and all(r.status in (OK, ABSENT) for r in results)


def verdict(results: list[Result]) -> str:
    """How many checks came to what, and the names of those that did not pass."""
    counts = {status: [r.name for r in results if r.status == status] for status in (OK, FAILED, SKIPPED, ABSENT)}
    parts = [f"{len(names)} {status}" for status, names in counts.items() if names]
    bad = [f"{status}: {', '.join(counts[status])}" for status in (FAILED, SKIPPED) if counts[status]]
    return "\n".join(["; ".join(parts) or "nothing ran", *bad])


def document(facts: dict[str, Any], results: list[Result], not_selected: list[str], **others: Any) -> dict[str, Any]:
    """What the JSON file has."""
    checks = [asdict(result) for result in results]
    return {"machine": facts, **others, "passed": passed(results), "checks": checks, "not_selected": not_selected}


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write JSON, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=1) + "\n")


def default_path(device: torch.device) -> Path:
    """perf/results/gpu-NVIDIA-H200.json, for instance."""
    return RESULTS / f"gpu-{'-'.join(device_name(device).replace('/', ' ').split())}.json"
