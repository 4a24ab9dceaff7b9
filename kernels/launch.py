"""The one place through which Triton kernels are launched.

On a GPU, and on the CPU under Triton's interpreter, `launch` runs the kernel; on meta tensors it only notes the call,
so that launches can be counted and the kernel compiled ahead of time where there is no GPU (tools/dryrun.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from fused_spec.errors import InvalidInput

COMPILATION: dict[str, Any] = {"enable_fp_fusion": False, "maxnreg": 128}
"""How every kernel is compiled.

Products and sums are not fused: q - p must be exactly zero where both are computed alike, and the interpreter must do
the arithmetic that a GPU does. Given so many registers, ptxas does not spill; left alone it spills a value here and
there, to fit more programs on a multiprocessor than there will be.
"""


_LARGEST_GRID = 65_535  # of CUDA, along the second and third axis


class Launch(NamedTuple):
    """One call of `launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int


_recorders: list[list[Launch]] = []


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note every launch inside the `with` block, on whatever device, in a list."""
    launches: list[Launch] = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders[:] = [other for other in _recorders if other is not launches]


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, **arguments: Any) -> None:
    """Run a `triton.jit` function, or note it where its tensors are on the meta device.

    Args:
        kernel: the function.
        grid: programs along up to three axes.
        num_warps: warps of one program.
        arguments: every parameter of the kernel by name.

    Raises:
        InvalidInput: the tensors are on the CPU and the kernel was not imported under Triton's interpreter, or the grid
            is larger than CUDA allows.
    """
    for launches in _recorders:
        launches.append(Launch(kernel, grid, arguments, num_warps))
    if max(grid[1:], default=1) > _LARGEST_GRID:
        raise InvalidInput(f"the batch has too many rows for one call: {max(grid[1:])}, at most {_LARGEST_GRID}")
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    if device.type == "meta":
        return
    if device.type == "cpu" and not is_interpreted(kernel):
        raise InvalidInput(
            "backend 'triton' on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before Triton is "
            "imported, or use backend 'torch'"
        )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current one
        kernel[grid](**arguments, num_warps=num_warps, **COMPILATION)


def is_interpreted(kernel: Any) -> bool:
    """Whether the kernel was defined under TRITON_INTERPRET=1: it runs on the CPU then and cannot be compiled."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)
