"""Prove and measure everything on a GPU, in at most eight minutes and without a network: python tools/gpu_check.py

Needs a CUDA device, torch and Triton, and nothing else that the package depends on. Each check prints a line: its name,
what became of it, seconds, and its key number. In the end there is a table, and a JSON file with all numbers, what they
were measured on, and the tracebacks of failures (perf/results/gpu-<device name>.json unless --json says where).

    kernels, attention   each kernel against its float64 oracle, at the sizes of Qwen3-0.6B, Qwen3-8B and Llama-3.1-8B
    sample, verify       against torch's path on the CPU, V = 151936: every rule, filters, masks, faults; repeated calls
    graphs               captured rounds against rounds one by one, token for token; launching them waits for nothing
    laws                 tokens over thousands of seeds, by chi-square
    times, peers         verification inside a graph, against the byte floor, a baseline that stores probabilities, and
                         FlashInfer where that is installed
    speed                engines on random weights of real shapes, with a prescribed acceptance

Checks that are not timed share the GPU, in processes of their own; those that are timed have it for themselves. What
the budget leaves no time for is reported as skipped. The status is 0 if everything that was asked for passed or has
nothing to look at here ("absent": flash-attn that is not installed, a model that does not fit), 1 if a check failed or
was skipped, 2 where the command line is wrong. `--cpu` runs a reduced version of everything under Triton's interpreter.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

if TYPE_CHECKING:
    from check_run import Check, Result, Setting

ROOT = Path(__file__).parents[1]
BUDGET = 480.0
LIMIT = 150.0
"""Seconds that one check may take in a process of its own."""

TIMED = ("times", "peers", "speed")
TOGETHER = 5
"""Checks of one process: it takes seconds to start, and neighbours share kernels that have to be compiled."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run and report."""
    options = _parser().parse_args(arguments)
    cores = os.cpu_count() or 1
    if options.jobs is None:
        options.jobs = 0 if options.cpu else max(1, min(4, cores // 2))
    prepare(options.cpu)
    if options.jobs:  # threads of one process would wait for those of another
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.jobs)))
    import torch  # behind the preparations, like all modules that define kernels

    import check_report as report
    from check_run import Setting, run_as_child

    checks = all_checks()
    names = selected(checks, options.only)
    unknown = [wanted for wanted in options.only if not selected(checks, [wanted])]
    if unknown:
        print(f"gpu_check: error: no check {unknown[0]!r}; known: {', '.join(checks)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(names))
        return 0
    if not options.cpu and not torch.cuda.is_available():
        print("gpu_check: error: torch sees no CUDA device; --cpu runs a reduced version without one", file=sys.stderr)
        return 2
    setting = Setting(torch.device("cpu" if options.cpu else "cuda:0"), reduced=options.cpu)
    if options.child:
        stream, sys.stdout = sys.stdout, sys.stderr  # results only
        return run_as_child(names, checks, setting, stream)
    begin = time.monotonic()
    results = run(names, checks, setting, options, begin + options.budget)
    seconds = time.monotonic() - begin
    print(f"\n{report.table(results)}\n\n{report.verdict(results)}")
    print(f"{seconds:.0f} s on {report.device_name(setting.device)}")
    path = options.json or (None if options.cpu else report.default_path(setting.device))
    if path is not None:
        others = {"reduced": options.cpu, "timings_meaningful": not options.cpu, "budget_seconds": options.budget,
                  "seconds": seconds}  # fmt: skip
        left_out = [name for name in checks if name not in names]
        report.write(path, report.document(report.machine(setting), results, left_out, **others))
        print(f"written to {path}")
    return 0 if report.passed(results) else 1


def prepare(cpu: bool) -> None:
    """Make the package importable wherever this runs, and choose between Triton's compiler and its interpreter."""
    if find_spec("fused_spec") is None:
        sys.path.append(str(ROOT))
    if cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    for package in ("gguf", "safetensors", "tqdm"):  # for reading files, which nothing here does
        if package not in sys.modules and find_spec(package) is None:
            sys.modules[package] = MagicMock(name=package)


def all_checks() -> "dict[str, Check]":
    """Every check by name, in the order in which they run."""
    import check_attention
    import check_decisions
    import check_graphs
    import check_kernels
    import check_laws
    import check_speed
    import check_times

    modules = check_kernels, check_attention, check_decisions, check_graphs, check_laws, check_times, check_speed
    return {name: check for module in modules for name, check in module.CHECKS.items()}


def selected(names: "dict[str, Check]", only: Sequence[str]) -> list[str]:
    """The checks of these names, or whose names begin with one of them and a slash; all without any."""
    return [name for name in names if not only or any(f"{name}/".startswith(f"{wanted}/") for wanted in only)]


def run(
    names: list[str], checks: "dict[str, Check]", setting: "Setting", options: argparse.Namespace, deadline: float
) -> "list[Result]":
    """Run the checks in processes of their own, or in this one if there are to be none."""
    from check_run import run_apart, run_here

    def say(result: "Result") -> None:
        print(result.line(), flush=True)

    if not options.jobs:
        return run_here(names, checks, setting, deadline, say)
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *(["--cpu"] if options.cpu else []), "--only"]

    def apart(part: list[str]) -> "list[Result]":
        return run_apart(part, command, deadline, LIMIT, say)

    timed = [name for name in names if name.partition("/")[0] in TIMED]
    others = [name for name in names if name not in timed]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(apart, _parts(others)))
    results += [apart(part) for part in _parts(timed)]
    return [result for part in results for result in part]


def _parts(names: list[str]) -> list[list[str]]:
    return [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]


def _jobs(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Prove and measure everything on a GPU.")
    add = parser.add_argument
    add("--cpu", action="store_true", help="a reduced version on the CPU, under Triton's interpreter; times nothing")
    add("--budget", type=float, default=BUDGET, metavar="SECONDS", help="what does not fit is skipped (%(default)g)")
    add("--only", nargs="+", default=[], metavar="NAME", help="checks, or what their names begin with, e.g. kernels")
    add("--list", action="store_true", help="print the names of the checks and stop")
    add("--json", type=Path, metavar="FILE", help="where the results go; with --cpu nowhere if it is not given")
    jobs = "processes at a time, of checks that are not timed; 0 runs all in this one (0 with --cpu, else up to 4)"
    add("--jobs", type=_jobs, default=None, metavar="N", help=jobs)
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
