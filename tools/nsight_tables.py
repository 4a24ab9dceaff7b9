"""What NVIDIA's profilers write, as launches of kernels: CSV and SQLite of Nsight Systems, CSV of Nsight Compute.

    nsys stats --report cuda_gpu_kern_sum --format csv REPORT       totals of each kernel
    nsys export --type sqlite REPORT                                every launch, in order; also of a graph's nodes
    ncu --csv [--page raw] --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum ...

Tables of Nsight Systems are described in its user guide ("Exporter"), those of Nsight Compute in that of its command
line ("Output pages"). Lines before a table, notes of the profilers between and thousands separators are let through;
what is cut off or belongs to something else is an `InvalidInput` that names the file, and the line where there is one.
"""

import csv
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from fused_spec.errors import InvalidInput

SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "nsecond": 1e-9,
    "usecond": 1e-6,
    "msecond": 1e-3,
    "second": 1.0,
}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
_METRICS = {TIME: SECONDS, READ: BYTES, WRITTEN: BYTES}

_REPORTS = {
    ".nsys-rep": "nsys export --type sqlite {path}",
    ".ncu-rep": f"ncu --import {{path}} --csv --page raw --print-units base --metrics {','.join(_METRICS)}",
}
_SQLITE = b"SQLite format 3\0"
_NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?|\d{1,3}(,\d{3})+(\.\d*)?", re.IGNORECASE)


class Event(NamedTuple):
    """One launch of a kernel, or all that a file has only the sum of.

    Attributes:
        name: as the profiler has it; C++ names with their arguments.
        seconds: in all `launches` together.
        num_bytes: read from memory and written to it, where that was measured.
    """

    name: str
    seconds: float
    launches: int = 1
    num_bytes: float | None = None


class Capture(NamedTuple):
    """What a file holds.

    Attributes:
        source: which kind of file it is.
        events: in the order of their launches if `ordered`.
        whole_graphs: that events are whole CUDA graphs (`nsys --cuda-graph-trace=graph`).
    """

    source: str
    events: list[Event]
    ordered: bool
    whole_graphs: bool = False


def read_capture(path: Path) -> Capture:
    """Read a file of any of these kinds.

    Raises:
        InvalidInput: it is none of them, is cut off, or has no kernels in it.
    """
    for suffix, command in _REPORTS.items():
        if path.name.endswith(suffix):
            raise InvalidInput(f"{path}: a report, of which this reads tables: {command.format(path=path)}")
    try:
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) == _SQLITE:
                return _read_sqlite(path)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: neither SQLite nor text") from None
    if not text.strip():
        raise InvalidInput(f"{path}: is empty")
    return _read_csv(path, text.splitlines())


def _read_csv(path: Path, lines: list[str]) -> Capture:
    # Notes of the profilers: what ncu says begins with ==.
    numbered = [(number, line) for number, line in enumerate(lines, 1) if not line.startswith("==")]
    for position, (_, line) in enumerate(numbered):
        columns = next(csv.reader([line]), [])
        for reader, wanted in ((_ncu_events, {"ID", "Kernel Name"}), (_nsys_events, {"Instances", "Name"})):
            if wanted <= {*columns}:
                rows = _rows(path, columns, numbered[position + 1 :])
                return reader(path, columns, rows)
    said = [line.strip() for line in lines if "ERROR" in line or line.startswith("SKIPPED")]
    reason = said[0] if said else "neither a kernel summary of nsys stats nor a table of ncu --csv"
    raise InvalidInput(f"{path}: no table of kernels: {reason}")


Row = tuple[str, dict[str, str]]
"""(where it stands, its cells by column)"""


def _rows(path: Path, columns: Sequence[str], numbered: Sequence[tuple[int, str]]) -> Iterator[Row]:
    """The rows of a table, up to an empty line."""
    for number, line in numbered:
        if not line.strip():
            return
        where = f"{path}, line {number}"
        try:
            (cells,) = csv.reader([line], strict=True)
        except csv.Error as error:
            raise InvalidInput(f"{where}: {error}; the file may be cut off") from None
        if len(cells) != len(columns):
            raise InvalidInput(f"{where}: {len(cells)} of {len(columns)} columns; the file may be cut off")
        yield where, dict(zip(columns, cells, strict=True))


def _number(where: str, text: str) -> float:
    if not _NUMBER.fullmatch(text.strip()):
        raise InvalidInput(f"{where}: {text!r} is no number, as 1234.5 and 1,234.5 are")
    return float(text.replace(",", ""))


def _scaled(where: str, text: str, unit: str, units: dict[str, float]) -> float:
    if unit not in units:
        raise InvalidInput(f"{where}: unit {unit!r} is none of {', '.join(units)}")
    return _number(where, text) * units[unit]


def _checked(path: Path, capture: Capture) -> Capture:
    if not capture.events:
        raise InvalidInput(f"{path}: no kernels in it; did anything run between start and stop of the profiler?")
    return capture


def _nsys_events(path: Path, columns: Sequence[str], rows: Iterator[Row]) -> Capture:
    times = [(name, match[1]) for name in columns if (match := re.fullmatch(r"Total Time \((.+)\)", name))]
    if not times:
        raise InvalidInput(f"{path}: no column 'Total Time (ns)', as the report cuda_gpu_kern_sum has it")
    ((column, unit),) = times
    events = [
        Event(row["Name"], _scaled(where, row[column], unit, SECONDS), int(_number(where, row["Instances"])))
        for where, row in rows
    ]
    return _checked(path, Capture("nsys stats", events, ordered=False))


def _ncu_events(path: Path, columns: Sequence[str], rows: Iterator[Row]) -> Capture:
    by_metric = {"Metric Name", "Metric Unit", "Metric Value"} <= {*columns}
    metrics = _by_metric(rows) if by_metric else _by_launch(columns, rows)
    events = []
    for where, name, values in metrics:
        for metric in _METRICS:
            if metric not in values:
                raise InvalidInput(
                    f"{where}: no {metric} of {name}; ncu takes --metrics {','.join(_METRICS)}, or the file is cut off"
                )
        events.append(Event(name, values[TIME], 1, values[READ] + values[WRITTEN]))
    return _checked(path, Capture("ncu", events, ordered=True))


_Launch = tuple[str, str, dict[str, float]]
"""(where it stands, kernel, metrics)"""


def _by_launch(columns: Sequence[str], rows: Iterator[Row]) -> Iterator[_Launch]:
    """Of the page "raw": a row for each launch, below a row of units."""
    present = [metric for metric in _METRICS if metric in columns]
    units: dict[str, str] = {}
    for where, row in rows:
        if not row["ID"]:
            units = row
            continue
        yield (
            where,
            row["Kernel Name"],
            {metric: _scaled(where, row[metric], units.get(metric, ""), _METRICS[metric]) for metric in present},
        )


def _by_metric(rows: Iterator[Row]) -> Iterator[_Launch]:
    """Of the page "details": a row for each metric of a launch."""
    found: dict[str, _Launch] = {}
    for where, row in rows:
        _, _, values = found.setdefault(row["ID"], (where, row["Kernel Name"], {}))
        metric = row["Metric Name"]
        if metric in _METRICS:
            values[metric] = _scaled(where, row["Metric Value"], row["Metric Unit"], _METRICS[metric])
    yield from found.values()


def _read_sqlite(path: Path) -> Capture:
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as database:
            return _checked(path, _sqlite_events(path, database.execute))
    except sqlite3.Error as error:
        raise InvalidInput(f"{path}: cannot be read, it may be cut off: {error}") from None


def _sqlite_events(path: Path, execute: Callable[[str], sqlite3.Cursor]) -> Capture:
    tables = {name for (name,) in execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    kernels, graphs = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    if not tables & {kernels, graphs}:
        hint = "its profiler saw no kernels" if "StringIds" in tables else "it is no export of nsys"
        raise InvalidInput(f"{path}: no table {kernels}; {hint}")
    rows: list[tuple[int, int, str]] = []
    if kernels in tables:
        query = f"SELECT start, end, value FROM {kernels} LEFT JOIN StringIds ON StringIds.id = demangledName"
        rows += execute(query)
    whole = list(execute(f"SELECT start, end, graphId FROM {graphs}")) if graphs in tables else []
    rows += [(start, end, f"CUDA graph {number}") for start, end, number in whole]
    if any(value is None for row in rows for value in row):
        raise InvalidInput(f"{path}: kernels without name, start or end")
    events = [Event(name, (end - start) * SECONDS["ns"]) for start, end, name in sorted(rows)]
    return Capture("nsys export", events, ordered=True, whole_graphs=bool(whole))
