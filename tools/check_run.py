"""Runs checks and keeps what became of each, in this process or in others.

A check is a function of a `Setting`. It raises if something is wrong, and says what it found otherwise. On a GPU checks
run in processes of their own: a kernel that faults takes the CUDA context of its process along, one that hangs never
comes back, and kernels are compiled on several CPU cores at once. Nothing counts as passed that did not run to its end.
"""

import gc
import json
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused_spec.kernels.check import default_backend

OK, FAILED, SKIPPED, ABSENT = "ok", "FAILED", "skipped", "absent"
"""What became of a check. Skipped: the time was used up. Absent: what it is about is not on this machine."""

STARTS_ANEW = 75
"""Status of a process that leaves further checks to another, since its device no longer works."""

PEERS = "peers/"
"""What the names of checks begin with that run others' kernels: a crash of theirs is no failure."""


class Absent(Exception):
    """A check has nothing to look at on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Setting:
    """Where checks run.

    Attributes:
        device: of all tensors.
        reduced: tiny sizes in float32, for Triton's interpreter.
    """

    device: torch.device
    reduced: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Which dtypes to look at: the interpreter cuts float32 off where a GPU rounds to bfloat16."""
        return (torch.float32,) if self.reduced else (torch.bfloat16, torch.float32)

    def synchronise(self) -> None:
        """Wait for the device, which is when faults of kernels are noticed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Finding(NamedTuple):
    """What a check that passed has to say: its key number in words, and numbers by name for the JSON file."""

    key: str
    numbers: dict[str, Any]


Check = Callable[[Setting], Finding]


@dataclass
class Result:
    """What became of a check. `detail` has the traceback of a failure."""

    name: str
    status: str
    seconds: float = 0.0
    key: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    detail: str = ""

    def line(self) -> str:
        """One line of the table."""
        return f"{self.name:<32} {self.status:<8} {self.seconds:6.1f} s  {self.key}"


def attempt(name: str, check: Check, setting: Setting) -> Result:
    """Run one check, from a fixed seed, and leave no memory behind."""
    torch.manual_seed(0)
    begin, status, detail = time.monotonic(), FAILED, ""
    numbers: dict[str, Any] = {}
    try:
        # Off a GPU, what runs there by default is Triton's path under its interpreter.
        with torch.inference_mode(), default_backend("triton") if setting.reduced else nullcontext():
            key, numbers = check(setting)
            setting.synchronise()
        status = OK
    except Absent as error:
        status, key = ABSENT, str(error)
    except Exception as error:
        key, detail = _headline(error), traceback.format_exc()
    gc.collect()
    if setting.device.type == "cuda" and works(setting.device):
        torch.cuda.empty_cache()
    return Result(name, status, time.monotonic() - begin, key, numbers, detail)


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def works(device: torch.device) -> bool:
    """Whether a device still computes."""
    try:
        return bool((torch.ones(2, device=device) + 1).sum().item() == 4)
    except RuntimeError:  # CUDA's errors are of this kind
        return False


def run_here(
    names: Sequence[str],
    checks: dict[str, Check],
    setting: Setting,
    deadline: float,
    say: Callable[[Result], None],
) -> list[Result]:
    """Run checks one after the other until a time of `time.monotonic`; what is left then is skipped."""
    results = []
    for name in names:
        result = attempt(name, checks[name], setting) if time.monotonic() < deadline else _skipped(name)
        say(result)
        results.append(result)
    return results


def _skipped(name: str) -> Result:
    return Result(name, SKIPPED, key="not run to its end: the budget was used up")


def run_as_child(names: Sequence[str], checks: dict[str, Check], setting: Setting, stream: Any) -> int:
    """What a process of `run_apart` does: a line of JSON for each check. Gives its status."""
    for name in names:
        result = attempt(name, checks[name], setting)
        print(json.dumps(asdict(result)), file=stream, flush=True)
        if not works(setting.device):
            return STARTS_ANEW
    return 0


def run_apart(
    names: Sequence[str], command: Sequence[str], deadline: float, limit: float, say: Callable[[Result], None]
) -> list[Result]:
    """Run checks in another process, and in a further one what a crash or a hang of it left.

    Args:
        names: the checks, appended to the command.
        command: starts a process that calls `run_as_child` with standard output as its stream.
        deadline: time of `time.monotonic` at which whatever runs is stopped.
        limit: seconds that one check may take, start of the process included.
        say: called with each result.
    """
    results: list[Result] = []
    while len(results) < len(names):
        for result in _of_one_process(names[len(results) :], command, deadline, limit):
            say(result)
            results.append(result)
    return results


def _of_one_process(names: Sequence[str], command: Sequence[str], deadline: float, limit: float) -> Iterable[Result]:
    """Results up to the end of a process, one at least; all of them where the time is used up."""
    if time.monotonic() >= deadline:
        yield from map(_skipped, names)
        return
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen([*command, *names], stdout=out, stderr=err)
        try:
            yield from _watched(process, names, output, errors, deadline, limit)
        finally:
            process.kill()
            process.wait()


def _watched(
    process: "subprocess.Popen[bytes]", names: Sequence[str], output: Path, errors: Path, deadline: float, limit: float
) -> Iterable[Result]:
    count, begin = 0, time.monotonic()
    while True:
        status = process.poll()  # before its output is read, so that nothing is missed
        new = [Result(**json.loads(line)) for line in output.read_text().split("\n")[count:-1]]
        if new:
            yield from new
            count, begin = count + len(new), time.monotonic()
        seconds = time.monotonic() - begin
        if count == len(names) or (status == STARTS_ANEW and count):
            return
        if time.monotonic() >= deadline:
            yield from map(_skipped, names[count:])
            return
        if status is not None or seconds > limit:
            ended = f"gave no result within {limit:.0f} s" if status is None else f"ended with status {status}"
            what = ABSENT if names[count].startswith(PEERS) else FAILED
            yield Result(names[count], what, seconds, f"its process {ended}", detail=errors.read_text()[-4000:])
            return
        time.sleep(0.05)
