"""The scripts that run Nsight's profilers: what they print, what they run, and what they say without a profiler."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NSYS = [
    *("--trace=cuda,nvtx,cublas", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"),
    *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--output=round", "--force-overwrite=true"),
]
NCU_FLAGS = [
    *("--profile-from-start off", "--graph-profiling node", "--clock-control none", "--cache-control none"),
    *("--kernel-name regex:.", "--launch-skip 0", "--target-processes all", "--export kernels"),
    "--metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum",
]
ARGUMENTS = ["some model", "--draft", "self-int4", "--rule", "cactus:delta=0.25"]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with what the scripts need of a system, and no profiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "sed"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def script(programs: Path, name: str, *arguments: str, cwd: Path | None = None) -> Any:
    environment = {"PATH": str(programs), "PYTHON": "python"} | {"LOG": os.environ.get("LOG", "")}
    command = [str(programs / "bash"), str(ROOT / "tools" / name), *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_nsys_print(programs: Path) -> None:
    done = script(programs, "nsys_profile.sh", "--print", "--gpu", "H200", "--", *ARGUMENTS)
    assert (done.returncode, done.stderr) == (0, "")
    profile, export_, report = (shlex.split(line) for line in done.stdout.splitlines())
    assert profile[:2] == ["nsys", "profile"]
    assert {*NSYS} <= {*profile[2 : profile.index("python")]}
    tool = str(ROOT / "tools" / "profile_round.py")
    assert profile[profile.index("python") :] == ["python", tool, "--profiler", "nsight", "--graph", *ARGUMENTS]
    assert export_[:2] == ["nsys", "export"]
    assert {"--type=sqlite", "--output=round.sqlite", "round.nsys-rep"} <= {*export_}
    assert report[1:] == [
        str(ROOT / "tools" / "nsight_report.py"),
        *("round.sqlite", "--gpu", "H200", "--", *ARGUMENTS),
    ]


def test_nsys_print_of_other_kinds(programs: Path) -> None:
    whole = script(
        programs, "nsys_profile.sh", "--print", "--graph-trace", "graph", "--output", "a b", "--", "m"
    ).stdout
    assert "--cuda-graph-trace=graph" in shlex.split(whole)
    assert "a b.sqlite" in shlex.split(whole)
    eager = script(programs, "nsys_profile.sh", "--print", "--eager", "--", "m").stdout
    assert "--profiler nsight --eager m" in eager
    assert "--report=nvtx_gpu_proj_sum" in eager


def test_ncu_print(programs: Path) -> None:
    done = script(programs, "ncu_profile.sh", "--print", "--", *ARGUMENTS)
    assert (done.returncode, done.stderr) == (0, "")
    profile, table, report = done.stdout.splitlines()
    assert profile.startswith("ncu ")
    assert all(f" {flag} " in profile for flag in NCU_FLAGS)
    assert "--launch-count" not in profile
    assert shlex.split(profile)[-len(ARGUMENTS) - 2 :] == [*ARGUMENTS, "--rounds", "1"]
    assert "ncu --import kernels.ncu-rep --csv --page raw --print-units base > kernels.csv" in table
    assert shlex.split(report)[2] == "kernels.csv"
    flags = ["--kernels", "rms_norm|silu", "--skip", "7", "--count", "3", "--set", "full"]
    chosen = shlex.split(script(programs, "ncu_profile.sh", "--print", *flags, "--", "m").stdout)
    for flag, value in {"--kernel-name": "regex:rms_norm|silu", "--launch-skip": "7", "--launch-count": "3"}.items():
        assert chosen[chosen.index(flag) + 1] == value
    assert chosen[chosen.index("--set") + 1] == "full"
    assert chosen[chosen.index("--cache-control") + 1] == "all"


@pytest.mark.parametrize("name", ["nsys", "ncu"])
def test_a_missing_profiler(name: str, programs: Path) -> None:
    """What to install, and the commands that would run: those that --print prints."""
    printed = script(programs, f"{name}_profile.sh", "--print", "--", *ARGUMENTS).stdout
    done = script(programs, f"{name}_profile.sh", "--", *ARGUMENTS)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{name} is not installed" in done.stderr
    assert {"nsys": "nsight-systems", "ncu": "nsight-compute"}[name] in done.stderr
    assert done.stderr.endswith(printed)


@pytest.mark.parametrize("name", ["nsys", "ncu"])
@pytest.mark.parametrize("flags", [[], ["--eager"]], ids=str)
def test_what_is_printed_is_run(
    name: str, flags: list[str], programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    for program in (name, "python"):
        (programs / program).write_text(f'#!{programs}/bash\nprintf "%q " {program} "$@" >>"$LOG"; echo >>"$LOG"\n')
        (programs / program).chmod(0o755)
    done = script(programs, f"{name}_profile.sh", *flags, "--", *ARGUMENTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = script(programs, f"{name}_profile.sh", "--print", *flags, "--", *ARGUMENTS).stdout
    assert done.stderr == printed
    expected = [line.partition(" > ")[0].removeprefix("env LC_ALL=C ") for line in printed.splitlines()]
    assert [*map(shlex.split, log.read_text().splitlines())] == [*map(shlex.split, expected)]
    assert name == "nsys" or (tmp_path / "kernels.csv").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nsys_profile.sh", ["--print"], "what to profile is missing"),
        ("nsys_profile.sh", ["--graph-trace", "nodes", "--", "m"], "must be node or graph, got nodes"),
        ("nsys_profile.sh", ["m"], "unknown option m"),
        ("ncu_profile.sh", ["--print", "--"], "what to profile is missing"),
        ("ncu_profile.sh", ["--count"], "--count needs a value"),
        ("ncu_profile.sh", ["--skip", "x", "--", "m"], "--skip needs a number, got x"),
    ],
)
def test_usage_errors_of_the_scripts(name: str, arguments: list[str], message: str, programs: Path) -> None:
    done = script(programs, name, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("name", ["nsys_profile.sh", "ncu_profile.sh"])
def test_help_of_the_scripts(name: str, programs: Path) -> None:
    done = script(programs, name, "--help")
    assert done.returncode == 0
    assert "--print" in done.stdout
    assert "set -euo" not in done.stdout
