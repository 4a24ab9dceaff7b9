"""Trace a call, compile its kernels for some architectures, and say what is wrong with it."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from aot import CompilationFailed, Compiled, compile_launch
from fused_spec.errors import InvalidInput
from fused_spec.kernels.launch import Launch
from meta_trace import Forbidden, place, traced

REGISTER_FILE = 64 * 1024
"""32-bit registers of one multiprocessor, on every architecture since compute capability 3.0."""

MULTIPROCESSORS = 108
"""Of an A100, which has the fewest of the data-centre GPUs."""

WARPS_AT_ONCE = 16
"""How many warps of a kernel should fit on a multiprocessor, if its grid has as many: some run while others wait for
memory. They leave 128 registers to a thread."""


class Kernel(NamedTuple):
    """Launches of a call that run the same machine code on grids of the same shape.

    Attributes:
        name: the function's; a second variant of it within the call ends in "#2".
        compiled: by compute capability, where it compiled.
    """

    name: str
    launches: int
    grid: tuple[int, ...]
    num_warps: int
    compiled: dict[int, Compiled]


class Examination(NamedTuple):
    """What a call launches and costs. Findings are what must not be: a host read, a spill, a kernel that is no good."""

    call: str
    launches: int
    products: int
    kernels: list[Kernel]
    findings: list[str]


def examine(name: str, call: Callable[[], object], architectures: Sequence[int]) -> Examination:
    """Trace and compile.

    Raises:
        InvalidInput: the call refuses its arguments.
    """
    try:
        trace = traced(call)
    except InvalidInput:
        raise
    except Forbidden as error:
        return Examination(name, 0, 0, [], [f"{name}: {error} ({place(error)})"])
    except Exception as error:  # a host read that torch itself refuses on meta tensors, or a fault of the call
        return Examination(name, 0, 0, [], [f"{name}: {type(error).__name__}: {error} ({place(error)})"])
    kernels, failures = _compile(trace.launches, architectures)
    findings = [*failures, *(fault for kernel in kernels for fault in _faults(kernel))]
    return Examination(
        name, len(trace.launches), len(trace.products), kernels, [f"{name}: {finding}" for finding in findings]
    )


def register_bound(grid: tuple[int, ...], num_warps: int) -> int:
    """Registers a thread may use so that enough of the grid runs at once; no thread can have more than 255."""
    programs = -(-math.prod(grid) // MULTIPROCESSORS)
    return min(255, REGISTER_FILE // (32 * min(programs * num_warps, WARPS_AT_ONCE)))


def table(examinations: Iterable[Examination]) -> str:
    """All kernels as text, a heading with the totals over each call's."""
    lines = []
    for call, launches, products, kernels, _ in examinations:
        matrix_products = f" and {products} matrix products" if products else ""
        lines.append(f"{call}: {launches} launches{matrix_products}")
        rows = [
            ["kernel", "launches", "grid", "warps", "target", "registers", "spilled", "shared", "global loads, of bits"]
        ]
        for kernel in kernels:
            grid = " x ".join(map(str, kernel.grid))
            for arch, compiled in kernel.compiled.items():
                loads = ", ".join(f"{count} of {bits}" for bits, count in compiled.loads.items())
                code = [f"sm_{arch}", str(compiled.registers), f"{compiled.local} B", f"{compiled.shared} B", loads]
                rows.append([kernel.name, str(kernel.launches), grid, str(kernel.num_warps), *code])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows if len(rows) > 1 else []:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def as_json(examination: Examination) -> dict[str, Any]:
    """For machines; architectures as "sm_90"."""
    kernels = [
        {**kernel._asdict(), "compiled": {f"sm_{arch}": code._asdict() for arch, code in kernel.compiled.items()}}
        for kernel in examination.kernels
    ]
    return {**examination._asdict(), "kernels": kernels}


def _compile(launches: list[Launch], architectures: Sequence[int]) -> tuple[list[Kernel], list[str]]:
    """(kernels in order of their first launch, what did not compile)"""
    found: dict[tuple[Any, ...], Kernel] = {}
    failures: list[str] = []
    for launch in launches:
        name = launch.kernel.__name__
        compiled: dict[int, Compiled] = {}
        for arch in architectures:
            try:
                compiled[arch] = compile_launch(launch, arch)
            except CompilationFailed as error:
                failures.append(f"{name} does not compile for sm_{arch}: {error}")
        key = name, launch.grid, launch.num_warps, tuple((arch, code.key) for arch, code in compiled.items())
        if key in found:
            found[key] = found[key]._replace(launches=found[key].launches + 1)
        else:
            variant = 1 + sum(other[0] == name for other in found)
            shown = name if variant == 1 else f"{name}#{variant}"
            found[key] = Kernel(shown, 1, launch.grid, launch.num_warps, compiled)
    return list(found.values()), failures


def _faults(kernel: Kernel) -> list[str]:
    bound = register_bound(kernel.grid, kernel.num_warps)
    faults = []
    for arch, compiled in kernel.compiled.items():
        if compiled.local > 0:
            faults.append(f"{kernel.name} spills {compiled.local} bytes of registers per thread on sm_{arch}")
        if compiled.registers > bound:
            faults.append(f"{kernel.name} uses {compiled.registers} registers on sm_{arch}, more than {bound}")
    return faults
