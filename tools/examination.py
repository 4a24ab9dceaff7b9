"""Trace calls, compile their kernels for some architectures, and say what is wrong with them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aot import SHARED_LIMIT, CompilationFailed, Compiled, compile_all, compile_launch, signature
from fused_spec.errors import InvalidInput
from fused_spec.kernels.launch import Launch
from meta_trace import Forbidden, Verified, place, traced

MULTIPROCESSORS = 108
"""Of an A100, which has the fewest of the data-centre GPUs."""

WARPS_AT_ONCE = 16
"""How many warps of a kernel should fit on a multiprocessor, if its grid has as many: some run while others wait for
memory. Registers always leave room for them, as kernels are compiled (128 a thread); shared memory may not."""

BYTES_AT_ONCE = 64 * 1024
"""Or how much of shared memory they should take, where they copy to it ahead: half of it is on its way, and 30 KB are
under way at any time on a multiprocessor of an H200 at full speed (4.8 TB/s, about 0.8 microseconds for a load)."""


class Kernel(NamedTuple):
    """Launches of a call that run the same machine code on grids of the same shape.

    Attributes:
        name: the function's; its second machine code within the call is "#2".
        compiled: by compute capability, where it compiled.
    """

    name: str
    launches: int
    grid: tuple[int, ...]
    num_warps: int
    compiled: dict[int, Compiled]


class Examination(NamedTuple):
    """What a call launches and costs.

    Attributes:
        products: matrix products besides.
        verification: how many of the launches verify drafts, where the call says so.
        findings: what must not be: a host read, a spill, a kernel that is no good, too many launches.
    """

    call: str
    launches: int
    products: int
    verification: int | None
    kernels: list[Kernel]
    findings: list[str]


class _Traced(NamedTuple):
    """A traced call, with one launch for all that run the same code on a grid, and how many these are."""

    launches: int
    products: int
    verified: Verified | None
    sorts: list[tuple[Launch, int]]
    findings: list[str]


def examine(
    calls: Mapping[str, Callable[[], object]], architectures: Mapping[str, Sequence[int]], *, loads: bool = True
) -> list[Examination]:
    """Trace calls and compile each for its architectures; to count loads takes a quarter of a second for each kernel.

    Raises:
        InvalidInput: a call refuses its arguments.
    """
    everything = {name: _trace(call) for name, call in calls.items()}
    sorts = ((launch, arch) for n, call in everything.items() for launch, _ in call.sorts for arch in architectures[n])
    compile_all(sorts, loads=loads)
    examinations = []
    for name, (launches, products, verified, kinds, findings) in everything.items():
        kernels, failures = _kernels(kinds, architectures[name], loads)
        findings = [*findings, *failures, *(fault for kernel in kernels for fault in faults_of(kernel))]
        findings += [] if verified is None else verified.findings()
        count = None if verified is None else verified.launches
        examinations.append(Examination(name, launches, products, count, kernels, findings))
    return examinations


def findings_of(examinations: Iterable[Examination]) -> list[str]:
    """A line for each finding, with the first call that has it and how many others do."""
    calls: dict[str, list[str]] = {}
    for examination in examinations:
        for finding in dict.fromkeys(examination.findings):
            calls.setdefault(finding, []).append(examination.call)
    return [
        f"{first}{f' and {len(others)} more' if others else ''}: {finding}"
        for finding, (first, *others) in calls.items()
    ]


def heading(examination: Examination) -> str:
    """The totals of a call."""
    text = f"{examination.call}: {examination.launches} launches"
    if examination.products:
        text += f" and {examination.products} matrix products"
    return text if examination.verification is None else f"{text}, verification {examination.verification} launches"


def table(examinations: Iterable[Examination]) -> str:
    """All kernels as text, the totals over each call's."""
    lines = []
    for examination in examinations:
        lines.append(heading(examination))
        rows = []
        for name, launches, grid, num_warps, compiled in examination.kernels:
            for arch, code in compiled.items():
                row = [name, str(launches), " x ".join(map(str, grid)), str(num_warps), f"sm_{arch}"]
                loads = [f"{count} of {bits}" for bits, count in (code.loads or {}).items()]
                rows.append([*row, str(code.registers), f"{code.local} B", f"{code.shared} B", ", ".join(loads)])
        titles = ["kernel", "launches", "grid", "warps", "target", "registers", "spilled", "shared"]
        lines += _aligned([*titles, "global loads, of bits"], rows)
    return "\n".join(lines)


def overview(examinations: Sequence[Examination]) -> str:
    """The totals of all calls, and what the variants of each kernel need in them."""
    variants: dict[tuple[str, int], dict[str, Compiled]] = {}
    for kernel in (kernel for examination in examinations for kernel in examination.kernels):
        for arch, code in kernel.compiled.items():
            variants.setdefault((kernel.name.partition("#")[0], arch), {})[code.key] = code
    rows = []
    for (name, arch), codes in sorted(variants.items()):
        needs = zip(*((code.registers, code.local, code.shared) for code in codes.values()), strict=True)
        spans = [f"{min(need)} to {max(need)}" if len({*need}) > 1 else str(need[0]) for need in needs]
        rows.append([name, f"sm_{arch}", str(len(codes)), *spans])
    titles = ["kernel", "target", "variants", "registers", "bytes spilled", "bytes shared"]
    return "\n".join([*map(heading, examinations), *_aligned(titles, rows)])


def as_json(examination: Examination) -> dict[str, Any]:
    """For machines; architectures as "sm_90"."""
    kernels = [
        {**kernel._asdict(), "compiled": {f"sm_{arch}": code._asdict() for arch, code in kernel.compiled.items()}}
        for kernel in examination.kernels
    ]
    return {**examination._asdict(), "kernels": kernels}


def _aligned(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table; none without rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


def warps_at_once(code: Compiled, num_warps: int, arch: int) -> int:
    """Warps of a kernel that fit on a multiprocessor by their registers and shared memory; whole programs only.

    Each of four schedulers has 16,384 registers and gives them to warps by 256. A program takes 1 KB of shared memory
    more than it asks for, and a multiprocessor has 1 KB more than a program may have.
    """
    by_registers = 4 * (16384 // (32 * 8 * -(-code.registers // 8)))
    by_shared = (SHARED_LIMIT[arch] + 1024) // (code.shared + 1024)
    return num_warps * min(by_registers // num_warps, by_shared)


def faults_of(kernel: Kernel) -> list[str]:
    """What is wrong with a kernel: spilled registers, or too little room for its programs on a multiprocessor."""
    faults = []
    needed = min(-(-math.prod(kernel.grid) // MULTIPROCESSORS) * kernel.num_warps, WARPS_AT_ONCE)
    for arch, code in kernel.compiled.items():
        if code.local > 0:
            faults.append(f"{kernel.name} spills {code.local} bytes of registers per thread on sm_{arch}")
        warps = warps_at_once(code, kernel.num_warps, arch)
        copied = warps // kernel.num_warps * code.shared if code.copies_ahead else 0
        if warps < needed and copied < BYTES_AT_ONCE:
            faults.append(
                f"{kernel.name} leaves room for {warps} warps on a multiprocessor of sm_{arch}, fewer than {needed}: "
                f"{code.registers} registers, {code.shared} bytes of shared memory"
            )
    return faults


def _trace(call: Callable[[], object]) -> _Traced:
    try:
        trace = traced(call)
    except InvalidInput:
        raise
    except Forbidden as error:
        return _Traced(0, 0, None, [], [f"{error} ({place(error)})"])
    except Exception as error:  # a host read that torch itself refuses on meta tensors, or a fault of the call
        return _Traced(0, 0, None, [], [f"{type(error).__name__}: {error} ({place(error)})"])
    sorts: dict[tuple[Any, ...], tuple[Launch, int]] = {}
    for launch in trace.launches:
        key = launch.grid, signature(launch)
        first, count = sorts.get(key, (launch, 0))
        sorts[key] = first, count + 1
    verified = trace.result if isinstance(trace.result, Verified) else None
    return _Traced(len(trace.launches), len(trace.products), verified, list(sorts.values()), [])


def _kernels(
    sorts: list[tuple[Launch, int]], architectures: Sequence[int], loads: bool
) -> tuple[list[Kernel], list[str]]:
    """(kernels in order of their first launch, what did not compile)"""
    found: dict[tuple[Any, ...], Kernel] = {}
    names: dict[tuple[Any, ...], str] = {}
    failures: list[str] = []
    for launch, count in sorts:
        name = launch.kernel.__name__
        compiled: dict[int, Compiled] = {}
        for arch in architectures:
            try:
                compiled[arch] = compile_launch(launch, arch, loads=loads)
            except CompilationFailed as error:
                failures.append(f"{name} does not compile for sm_{arch}: {error}")
        code = name, launch.num_warps, tuple((arch, code.key) for arch, code in compiled.items())
        if code not in names:
            variant = 1 + sum(other[0] == name for other in names)
            names[code] = name if variant == 1 else f"{name}#{variant}"
        before = found.get((launch.grid, code))
        total = count if before is None else before.launches + count
        found[launch.grid, code] = Kernel(names[code], total, launch.grid, launch.num_warps, compiled)
    return list(found.values()), failures
