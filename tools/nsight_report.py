"""One table per kernel from what NVIDIA's profilers wrote: launches, time, share, GB/s and share of the GPU's peak.

    python tools/nsight_report.py FILE [--gpu H200] [--json] [-- ARGUMENTS OF tools/profile_round.py]

FILE is the SQLite export or the kernel summary (CSV) of Nsight Systems, or what `ncu --csv` prints (nsight_tables.py).
Bytes are what ncu measured between the GPU and its memory. Nsight Systems has none: there they are what the launches of
a round move at least (round_bytes.py), if what was profiled is told behind `--`; a kernel that is launched more or less
often than by these has none. Matrix products are found by their place among our kernels where the file has launches in
order, and otherwise have bytes all together only. A rate above the peak: some of it was in the L2 cache.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import profile_round
from fused_spec.errors import InvalidInput
from fused_spec.gpus import GPU, gpu_of
from fused_spec.plan_report import Table
from nsight_lines import Line, Report, report_of
from nsight_tables import read_capture
from profiled_engine import check_round_options, max_length_of
from round_bytes import Step, steps_of
from traced_rounds import Round

_WIDEST = 64  # of a kernel's name in text

MEASURED = "Bytes: measured by ncu, read from the GPU's memory and written to it."
LEAST = (
    "Bytes: computed, not measured: the least that the launches read and write, every byte once. A matrix product has "
    "its weights, activations and result."
)
NONE = "No bytes: Nsight Systems measures none; what was profiled can be told behind --."


def steps_for(options: argparse.Namespace) -> list[Step]:
    """The launches of the rounds that `profile_round` runs with these options.

    Raises:
        InvalidInput: an option is not usable.
    """
    check_round_options(options)
    setting = Round(
        model=options.shape or options.model,
        draft=options.draft or "none",
        num_draft_tokens=options.num_draft_tokens,
        rule=options.rule,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        dtype=options.dtype,
        max_length=max_length_of(options),
    )
    return steps_of(setting, options.context + 1)  # the first round's: later ones have more to attend to


def as_dict(report: Report, gpu: GPU | None) -> dict[str, Any]:
    """For machines; seconds and bytes are totals."""
    total = report.sums[-1].seconds

    def entry(line: Line) -> dict[str, Any]:
        rate = line.gigabytes_per_second
        return {
            "name": line.name,
            "launches": line.launches,
            "seconds": line.seconds,
            "share": line.seconds / total if total else None,
            "measured_bytes": line.measured,
            "least_bytes": line.least,
            "gb_per_s": rate,
            "share_of_peak": None if rate is None or gpu is None else rate / gpu.bandwidth,
        }

    return {
        "source": report.source,
        "rounds": report.rounds or None,
        "gpu": gpu and gpu.name,
        "peak_gb_per_s": gpu and gpu.bandwidth,
        "kernels": [entry(line) for line in report.kernels],
        "sums": [entry(line) for line in report.sums],
        "notes": report.notes,
    }


def as_text(report: Report, gpu: GPU | None) -> str:
    """The table, and what its bytes are."""
    found = as_dict(report, gpu)
    entries = found["kernels"] + found["sums"]
    measured = any(entry["measured_bytes"] is not None for entry in entries)
    least = any(entry["least_bytes"] is not None for entry in entries)
    header = ["kernel", "launches", "time us", "us each", "share"]
    header += ["MB", *(["least MB"] if measured and least else []), "GB/s", *(["of peak"] if gpu else [])]
    rows = []
    for entry in entries:
        microseconds = entry["seconds"] * 1e6
        sizes = [entry[name] for name in ("measured_bytes", "least_bytes")]
        shown = sizes if measured and least else [sizes[0] if measured else sizes[1]]
        row = [_short(entry["name"]), str(entry["launches"]), f"{microseconds:.1f}"]
        row += [f"{microseconds / entry['launches']:.2f}", _cell(entry["share"], ".1%")]
        row += [_cell(size and size / 1e6, ".2f") for size in shown] + [_cell(entry["gb_per_s"], ".0f")]
        rows.append([*row, *([_cell(entry["share_of_peak"], ".0%")] if gpu else [])])
    peak = f"; peak of {gpu.name}: {gpu.bandwidth} GB/s" if gpu else ""
    rounds = f"{report.rounds} rounds" if report.rounds else "an unknown number of rounds"
    notes = [MEASURED if measured else LEAST if least else NONE, *report.notes]
    return "\n\n".join(
        [f"{report.source}, {rounds}{peak}", Table(header, rows).text(), *(textwrap.fill(note, 100) for note in notes)]
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(name: str) -> str:
    half = (_WIDEST - 3) // 2
    return name if len(name) <= _WIDEST else f"{name[:half]}...{name[-half:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, read and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="nsight_report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="SQLite or CSV of nsys, CSV of ncu")
    parser.add_argument("--gpu", metavar="NAME", help="whose peak to compare with: H100, H200, A100, L40S, RTX 4090")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(given[:split])
    profiled = profile_round.parser().parse_args(given[split + 1 :]) if split < len(given) else None
    try:
        gpu = None if options.gpu is None else gpu_of(options.gpu)
        capture = read_capture(options.file)
        report = report_of(capture, [] if profiled is None else steps_for(profiled))
    except InvalidInput as error:
        print(f"nsight_report: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_dict(report, gpu), indent=1) if options.json else as_text(report, gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
