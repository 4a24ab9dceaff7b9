"""Compile a recorded launch for a GPU that is not there, and read from the machine code what it costs.

Triton's own just-in-time path derives types, alignment and constants from the arguments, so that what is compiled is
what a GPU of this architecture would run. Two things stand in for a GPU: the driver's answer to which target it has,
and addresses. A meta tensor's address reads 0 whatever its offset, which would promise 16-byte alignment that a slice
lacks. Here tensors lie at their offset in a storage that begins aligned, as CUDA's allocators make them (256 bytes).
"""

import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

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
        loads: instructions that load from global memory, by bits that a thread gets from one.
    """

    key: str
    registers: int
    local: int
    shared: int
    loads: dict[int, int]


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile for a compute capability, 90 for 9.0.

    Raises:
        CompilationFailed: the kernel does not compile, or needs more shared memory than there is.
    """
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
    usage, instructions = _dumps(kernel.asm["cubin"])
    return Compiled(kernel.hash, **resources(usage), shared=shared, loads=load_widths(instructions))


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
def _dumps(cubin: bytes) -> tuple[str, str]:
    """What the wheel's own tools say of the machine code: its resources, and its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ["cuobjdump", "--dump-resource-usage"], ["nvdisasm", "-c"]
        usage, instructions = (
            subprocess.run([_TOOLS / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in commands
        )
    return usage, instructions


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
