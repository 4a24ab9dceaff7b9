"""Tables from what Nsight's profilers write, on small files in their formats."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import nsight_report
from fused_spec.errors import InvalidInput
from nsight_lines import report_of
from nsight_tables import Event, read_capture
from round_bytes import Step, steps_of
from traced_rounds import Round

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "nsight"
GEMV = "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16>(cublasGemvParamsEx<int>)"
ROUND = ["--shape", "SmolLM2-135M-Instruct", "--draft", "ngram", "--num-draft-tokens", "3", "--context", "100"]


def near(value: float) -> Any:
    """`pytest.approx`, in the place of a number."""
    return pytest.approx(value)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return steps_of(Round("SmolLM2-135M-Instruct", "ngram", num_draft_tokens=3, max_length=173), 101)


def as_launched(steps: Sequence[Step], rounds: int, *, parts: str = "none") -> list[tuple[str, int]]:
    """(kernel, nanoseconds) of rounds as a GPU could run them; products of the shape `parts` take a second kernel."""
    launches = []
    for step in [*steps] * rounds:
        name = step.kernel or f"gemm_{step.product.partition(' -> ')[2]}"
        launches.append((name, max(step.num_bytes // 2000, 1000)))
        launches += [("splitKreduce_kernel", 500)] if step.product == parts else []
    return launches


def export(path: Path, launches: Sequence[tuple[str, int]], *, graphs: Sequence[int] = ()) -> Path:
    """A file as `nsys export --type=sqlite` makes it, with the columns that matter and some that do not."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        ids = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in launches))}
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in ids.items()])
        columns = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, demangledName INTEGER"
        columns += ", shortName INTEGER, registersPerThread INTEGER, graphNodeId INTEGER"
        rows, start = [], 10**9
        for position, (name, length) in enumerate(launches):
            rows.append((start, start + length, 0, 7, ids[name], ids[name], 64, position))
            start += length + 700
        if launches:
            database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
            rows.reverse()  # nothing says that rows are in order
            database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if graphs:
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, graphId INTEGER)"
            )
            database.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 3)", [(0, length) for length in graphs]
            )
        database.commit()
    return path


def test_summary_of_nsys() -> None:
    capture = read_capture(DATA / "cuda_gpu_kern_sum.csv")
    assert capture.events == [
        Event(GEMV, near(1.5e-3), 60),
        Event("rms_norm_kernel", near(4e-4), 40),
        Event("round_inputs_kernel", near(1e-4), 20),
    ]
    assert (capture.source, capture.ordered) == ("nsys stats", False)
    report = report_of(capture)
    assert report.rounds == 20
    assert [line.name for line in report.kernels] == [GEMV, "rms_norm_kernel", "round_inputs_kernel"]
    assert report.sums[-1].seconds == near(2e-3)
    assert report.sums[-1].num_bytes is None


@pytest.mark.parametrize(("unit", "seconds"), [("ns", 4e-7), ("us", 4e-4), ("ms", 0.4), ("s", 400.0)])
def test_units_of_nsys(unit: str, seconds: float, tmp_path: Path) -> None:
    file = tmp_path / "sum.csv"
    file.write_text(f"Time (%),Total Time ({unit}),Instances,Name\n100.0,400,1,a_kernel\n")
    assert read_capture(file).events == [Event("a_kernel", near(seconds))]


@pytest.mark.parametrize("file", ["ncu_raw.csv", "ncu_details.csv"])
def test_tables_of_ncu(file: str) -> None:
    capture = read_capture(DATA / file)
    assert capture.events[0] == Event("rms_norm_kernel", near(2e-6), 1, near(100_000))
    assert (capture.source, capture.ordered) == ("ncu", True)


def test_rates_are_bytes_by_time() -> None:
    report = report_of(read_capture(DATA / "ncu_raw.csv"))
    product, norm = report.kernels
    assert (norm.launches, norm.gigabytes_per_second) == (2, near(50.0))
    assert product.gigabytes_per_second == near(49e6 / 20e-6 / 1e9)
    (whole,) = report.sums
    assert whole.num_bytes == near(49.2e6)


def test_an_export_of_nsys_beside_a_round(steps: list[Step], tmp_path: Path) -> None:
    """Every launch finds its step, products by their place, also where a library takes a second kernel for one."""
    file = export(tmp_path / "round.sqlite", as_launched(steps, 2, parts="4 x 1536 -> 576"))
    report = report_of(read_capture(file), steps)
    assert (report.rounds, report.notes) == (2, [])
    lines = {line.name: line for line in report.kernels}
    down = lines["gemm_576 [4 x 1536 -> 576]"]
    assert (down.launches, down.least) == (60, 60 * 2 * (4 * 1536 + 1536 * 576 + 4 * 576))
    assert lines["gemm_576 [4 x 576 -> 576]"].launches == 60
    assert lines["splitKreduce_kernel [4 x 1536 -> 576]"].least is None
    norm = sum(step.num_bytes for step in steps if step.kernel == "rms_norm_kernel")
    assert (lines["rms_norm_kernel"].launches, lines["rms_norm_kernel"].least) == (2 * 61, 2 * norm)
    products, whole = report.sums
    assert products.launches == 2 * (4 * 30 + 1 + 30)
    assert products.least == 2 * sum(step.num_bytes for step in steps if step.product)
    assert whole.least == 2 * sum(step.num_bytes for step in steps)
    assert whole.seconds == near(sum(line.seconds for line in report.kernels))


def test_a_summary_of_nsys_beside_a_round(steps: list[Step], tmp_path: Path) -> None:
    totals: dict[str, tuple[int, int]] = {}
    for name, length in as_launched(steps, 3):
        time, launches = totals.get(name, (0, 0))
        totals[name] = time + length, launches + 1
    rows = [f"1.0,{time},{launches},{name}" for name, (time, launches) in totals.items()]
    file = tmp_path / "sum.csv"
    file.write_text("\n".join(["Time (%),Total Time (ns),Instances,Name", *rows, ""]))
    report = report_of(read_capture(file), steps)
    assert (report.rounds, report.notes) == (3, [])
    lines = {line.name: line for line in report.kernels}
    assert lines["gemm_576"].least is None  # of two products
    attention = sum(step.num_bytes for step in steps if step.kernel == "split_attention_kernel")
    assert lines["split_attention_kernel"].least == near(3 * attention)
    products, whole = report.sums
    assert (products.launches, products.name) == (3 * 121, "matrix products")
    assert whole.least == 3 * sum(step.num_bytes for step in steps)


@pytest.mark.parametrize(
    "change", ["another kernel", "a kernel less", "not from the start", "no product", "one behind"]
)
def test_what_is_not_the_traced_round_is_said(change: str, steps: list[Step], tmp_path: Path) -> None:
    launches = as_launched(steps, 2)
    if change == "another kernel":
        launches.insert(9, ("at::native::copy_kernel", 900))
        launches.pop(10)
    elif change == "a kernel less":
        launches.remove(("decide_kernel", 1000))
    elif change == "not from the start":
        launches = launches[5:]
    elif change == "one behind":
        launches.append(("at::native::copy_kernel", 900))
    else:
        launches.pop(4)
    report = report_of(read_capture(export(tmp_path / "round.sqlite", launches)), steps)
    assert len(report.notes) == 1
    assert "not whole rounds of what was traced" in report.notes[0]
    lines = {line.name: line for line in report.kernels}
    assert all(line.least is None for line in report.sums)
    assert all(line.least is None for line in report.kernels if line.product)
    if change == "a kernel less":
        assert lines["decide_kernel"].least is None
        assert lines["silu_mul_kernel"].least is not None  # of these there are as many as there should be
        assert "pick_kernel where decide_kernel should be" in report.notes[0]


def test_whole_graphs(steps: list[Step], tmp_path: Path) -> None:
    capture = read_capture(export(tmp_path / "round.sqlite", [], graphs=[400_000, 600_000]))
    assert report_of(capture).sums[0].num_bytes is None
    report = report_of(capture, steps)
    each = sum(step.num_bytes for step in steps)
    assert report.kernels == [report.kernels[0]._replace(name="CUDA graph 3", launches=2, least=2 * each)]
    assert report.rounds == 2
    assert report.kernels[0].gigabytes_per_second == near(2 * each / 1e-3 / 1e9)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: list[Step]) -> None:
    """Its bytes are those of the rounds that profile_round runs with the same arguments."""
    file = str(export(tmp_path / "round.sqlite", as_launched(steps, 2)))
    arguments = [file, "--gpu", "h200", "--", *ROUND]
    assert nsight_report.main(arguments) == 0
    text = capsys.readouterr().out
    assert "nsys export, 2 rounds; peak of H200: 4800 GB/s" in text
    assert "computed, not measured" in text
    assert "gemm_1536" not in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("matrix", "all"))] == ["matrix", "all"]
    assert nsight_report.main([file, "--gpu", "h200", "--json", "--", *ROUND]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(kernel["share"] for kernel in found["kernels"]) == near(1)
    whole = found["sums"][-1]
    assert whole["least_bytes"] == 2 * sum(step.num_bytes for step in steps)
    assert whole["share_of_peak"] == near(whole["least_bytes"] / whole["seconds"] / 4800e9)
    assert whole["measured_bytes"] is None


def test_the_command_without_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert nsight_report.main([str(DATA / "ncu_raw.csv")]) == 0
    text = capsys.readouterr().out
    assert "Bytes: measured by ncu" in text
    assert "of peak" not in text
    assert nsight_report.main([str(DATA / "cuda_gpu_kern_sum.csv"), "--gpu", "A100"]) == 0
    text = capsys.readouterr().out
    assert "20 rounds" in text
    assert "Nsight Systems measures none" in text


HEADER = "Time (%),Total Time (ns),Instances,Name\n"
NCU = '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"\n'
UNITS = '"","","byte","byte","ns"\n'
BAD = {
    "": "is empty",
    " \n": "is empty",
    "a,b\n1,2\n": "no table of kernels: neither",
    "SKIPPED: x.sqlite does not contain CUDA kernel data.\n": "does not contain CUDA kernel data",
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n": "ERR_NVGPUCTRPERM",
    HEADER: "no kernels in it",
    f"{HEADER}75.0,150": "line 2: 2 of 4 columns; the file may be cut off",
    f'{HEADER}75.0,150,1,"a<b': "line 2: unexpected end of data; the file may be cut off",
    f"{HEADER}75.0,1.500.000,1,a\n": "line 2: '1.500.000' is no number",
    f"{HEADER}75.0,-5,1,a\n": "line 2: '-5' is no number",
    HEADER.replace("(ns)", "(fortnights)") + "75.0,5,1,a\n": "unit 'fortnights' is none of ns",
    "Time (%),Instances,Name\n1,1,a\n": "no column 'Total Time (ns)'",
    NCU + UNITS: "no kernels in it",
    f'{NCU}{UNITS}"0","a","1","2"': "line 3: 4 of 5 columns",
    f'{NCU}{UNITS}"0","a","1","2","n/a"\n': "line 3: 'n/a' is no number",
    f'{NCU}"0","a","1","2","3"\n': "line 2: unit '' is none of",
    '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","a","1"\n': "no dram__bytes_read.sum of a",
}


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_text_that_is_no_table_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.csv"
    file.write_text(content)
    with pytest.raises(InvalidInput) as caught:
        read_capture(file)
    assert str(file) in str(caught.value)
    assert BAD[content] in str(caught.value)
    assert nsight_report.main([str(file)]) == 2
    assert capsys.readouterr().err.startswith("nsight_report: error: ")


def test_a_launch_without_its_metrics_is_refused(tmp_path: Path) -> None:
    """The end of a table with a row per metric."""
    file = tmp_path / "details.csv"
    lines = (DATA / "ncu_details.csv").read_text().splitlines()
    file.write_text("\n".join(lines[:4]))
    with pytest.raises(InvalidInput, match=r"line 3: no gpu__time_duration.sum of rms_norm_kernel"):
        read_capture(file)


def test_other_files_are_refused(tmp_path: Path, steps: list[Step]) -> None:
    whole = export(tmp_path / "round.sqlite", as_launched(steps, 1)).read_bytes()
    others: dict[str, tuple[bytes | None, str]] = {
        "cut.sqlite": (whole[: len(whole) // 2], "cannot be read, it may be cut off"),
        "binary.bin": (bytes(range(256)), "neither SQLite nor text"),
        "missing.csv": (None, "No such file"),
        "round.nsys-rep": (b"x", "nsys export --type sqlite"),
        "kernels.ncu-rep": (b"x", "ncu --import"),
    }
    for name, (content, message) in others.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInput, match=message):
            read_capture(tmp_path / name)
    for table, message in (("other", "it is no export of nsys"), ("StringIds", "its profiler saw no kernels")):
        with closing(sqlite3.connect(tmp_path / f"{table}.sqlite")) as database:
            database.execute(f"CREATE TABLE {table} (id INTEGER)")
        with pytest.raises(InvalidInput, match=message):
            read_capture(tmp_path / f"{table}.sqlite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.csv", "--gpu", "H9000"], "gpu must be one of H100"),
        ([str(DATA / "ncu_raw.csv"), "--"], "one of MODEL and --shape NAME is needed"),
        ([str(DATA / "ncu_raw.csv"), "--", "--shape", "Qwen3-8B", "--rule", "x"], "rule"),
    ],
)
def test_options_are_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nsight_report.main(arguments) == 2
    assert message in capsys.readouterr().err
