"""Compile a recorded launch for a GPU that is not there, and read from the machine code what it costs.

Triton's own just-in-time path derives types, alignment and constants from the arguments, so that what is compiled is
what a GPU of this architecture would run. Two things stand in for a GPU: the driver's answer to which target it has,
and addresses. A meta tensor's address reads 0 whatever its offset, which would promise 16-byte alignment that a slice
lacks. Here tensors lie at their offset in a storage that begins aligned, as CUDA's allocators make them (256 bytes).
"""

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelParam

from fused_spec.kernels.launch import COMPILATION, Launch

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory one program may have, by compute capability (CUDA C++ Programming Guide, technical
specifications); Triton looks at it only where it loads a kernel."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LOADED_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


class CompilationFailed(Exception):
    """A kernel does not compile for an architecture; the message is the last line of what the compiler says."""


class Compiled(NamedTuple):
    """One kernel for one architecture.

    Attributes:
        key: the same for launches that share one compiled kernel.
        registers: of each thread.
        local: bytes of stack and local memory of each thread: what registers spilled, and arrays.
        shared: bytes of each program.
        copies_ahead: whether it copies from global to shared memory without waiting.
        loads: instructions that load from global memory, by bits that a thread gets from one; None if not counted.
    """

    key: str
    registers: int
    local: int
    shared: int
    copies_ahead: bool
    loads: dict[int, int] | None


_results: dict[tuple[Any, ...], Compiled | str] = {}
"""By architecture, whether loads are counted, and signature: the code, or why there is none."""

_wanted: list[tuple[Launch, int, bool]] = []
"""What the processes of `compile_all` share out among them."""


def signature(launch: Launch) -> tuple[Any, ...]:
    """All that compiled code depends on, hashable. Equal for launches that run the same code, on whatever grid."""
    options = launch[3:]  # what follows the arguments is for the compiler
    value = launch.arguments.get
    return launch.kernel, options, tuple([seen(parameter, value(parameter.name)) for parameter in launch.kernel.params])


def seen(parameter: KernelParam, value: object) -> object:
    """What Triton makes code for: constants, and of the rest the type and what address or number may be divided by."""
    if parameter.is_constexpr:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return value.dtype, parameter.do_not_specialize or StandIn(value).data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        bits = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else -64
        return bits if parameter.do_not_specialize else (bits, value == 1, value % 16 == 0)
    return type(value)


def compile_launch(launch: Launch, arch: int, *, loads: bool = True) -> Compiled:
    """Compile for a compute capability, 90 for 9.0. Launches of one signature are compiled once in a process.

    To count the loads takes a quarter of a second.

    Raises:
        CompilationFailed: the kernel does not compile, or needs more shared memory than there is.
    """
    key = arch, loads, signature(launch)
    if key not in _results:
        _results[key] = _attempt(launch, arch, loads)
    result = _results[key]
    if isinstance(result, str):
        raise CompilationFailed(result)
    return result


def compile_all(launches: Iterable[tuple[Launch, int]], *, loads: bool = True) -> None:
    """Do what `compile_launch` would for all of these and architectures, in as many processes as there are CPUs."""
    wanted = {(arch, loads, signature(launch)): (launch, arch, loads) for launch, arch in launches}
    new = [key for key in wanted if key not in _results]
    _wanted[:] = [wanted[key] for key in new]
    if new:
        # Forked, so that a process has the launches; it makes code of them and touches no tensor's contents.
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
            attempts = pool.map(_attempt_wanted, range(len(new)))
            _results.update(zip(new, tqdm(attempts, "compiling", len(new), unit="kernel", disable=None), strict=True))


def _attempt_wanted(index: int) -> Compiled | str:
    return _attempt(*_wanted[index])


def _attempt(launch: Launch, arch: int, loads: bool) -> Compiled | str:
    try:
        return _compile(launch, arch, loads)
    except CompilationFailed as error:
        return str(error)


def _compile(launch: Launch, arch: int, loads: bool) -> Compiled:
    driver.set_active(_Target(arch))
    arguments = {
        name: StandIn(value) if isinstance(value, torch.Tensor) else value for name, value in launch.arguments.items()
    }
    try:
        kernel = launch.kernel.warmup(grid=launch.grid, num_warps=launch.num_warps, **COMPILATION, **arguments)
    except Exception as error:  # whatever the compiler raises: its own errors, MLIR's RuntimeError, ptxas' failures
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CompilationFailed(f"{type(error).__name__}: {lines[-1] if lines else 'no message'}") from error
    shared = kernel.metadata.shared
    if shared > SHARED_LIMIT[arch]:
        raise CompilationFailed(f"it needs {shared} bytes of shared memory, and there are {SHARED_LIMIT[arch]}")
    cubin, copies_ahead = kernel.asm["cubin"], "cp.async" in kernel.asm["ptx"]
    usage = resources(_dump(cubin, "cuobjdump", "--dump-resource-usage"))
    widths = load_widths(_dump(cubin, "nvdisasm", "-c", "-ndf")) if loads else None
    return Compiled(kernel.hash, **usage, shared=shared, copies_ahead=copies_ahead, loads=widths)


def resources(usage: str) -> dict[str, int]:
    """Registers and local memory in what `cuobjdump --dump-resource-usage` says of one kernel."""
    (line,) = re.findall(r"REG:\d+.*", usage)
    fields = dict(field.split(":") for field in line.split() if ":" in field)
    return {"registers": int(fields["REG"]), "local": int(fields["STACK"]) + int(fields["LOCAL"])}


def load_widths(instructions: str) -> dict[int, int]:
    """Global loads in what nvdisasm prints, by width in bits."""
    widths: Counter[int] = Counter()
    for modifiers in re.findall(r"\bLDG(?:STS)?((?:\.\w+)+)", instructions):
        (bits,) = {_LOADED_BITS[word] for word in modifiers.split(".") if word in _LOADED_BITS} or {32}
        widths[bits] += 1
    return dict(sorted(widths.items()))


@cache
def _dump(cubin: bytes, tool: str, *flags: str) -> str:
    """What one of the wheel's own tools says of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / tool), *flags, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class StandIn:
    """What Triton asks of a tensor argument: its dtype and address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


class _Target:
    """What Triton asks of a driver before it launches. Kernels are cached by device: the architecture."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0
