"""Every kernel in the settings that matter compiles, keeps everything in registers, and needs what the table says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import register_table
from aot import Compiled
from examination import Examination, Kernel, faults_of, warps_at_once

ROOT = Path(__file__).parents[1]
SOME = [name for name in register_table.SETTINGS if not name.endswith("-filters")]
"""All but rounds with filters, whose kernels are for the most part among them."""


@pytest.mark.parametrize(
    ("architectures", "settings"),
    [("90", SOME), ("80,100", ["plain", "float32", "typical"])],
)
def test_table(architectures: str, settings: list[str], tmp_path: Path) -> None:
    """A finding is a host read, a spill, local memory, more registers than the bound, or another entry in the table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "dryrun.py"), "--json", "--arch", architectures, "--table"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    calls = json.loads(done.stdout)["calls"]
    assert {call["call"] for call in calls} == {
        f"{s}/{c}" for s in settings for c in register_table.SETTINGS[s].calls()
    }
    for call in calls:
        assert call["launches"] == sum(kernel["launches"] for kernel in call["kernels"]) >= 2
        for kernel in call["kernels"]:
            assert set(kernel["compiled"]) == {f"sm_{arch}" for arch in architectures.split(",")}
            for code in kernel["compiled"].values():
                assert code["local"] == 0
                assert code["registers"] <= 128


def test_committed_table() -> None:
    """Both ends of the range of Triton versions are there, with the same kernels on every architecture."""
    table = register_table.read()
    assert set(table) == {"3.6.0", "3.9.0"}
    kernels = [set(entries) for version in table.values() for entries in version.values()]
    assert [set(version) for version in table.values()] == [{"sm_80", "sm_90", "sm_100"}] * 2
    assert all(names == kernels[0] for names in kernels)


def examination(registers: int, shared: int) -> Examination:
    kernel = Kernel("x_kernel", 1, (1,), 4, {90: code(registers, shared)})
    return Examination("plain/verify", 1, 0, None, [kernel], [])


def test_differences() -> None:
    table = {"3.9.0": register_table.entries([examination(40, 32)])}
    assert table == {"3.9.0": {"sm_90": {"plain/verify/x_kernel": {"registers": 40, "shared": 32}}}}
    assert register_table.differences(table, "3.9.0", table["3.9.0"]) == []
    for registers, shared in ((41, 32), (40, 64)):
        (line,) = register_table.differences(table, "3.9.0", register_table.entries([examination(registers, shared)]))
        assert line.startswith("plain/verify/x_kernel on sm_90, Triton 3.9.0: ")
    assert register_table.differences(table, "3.8.0", register_table.entries([examination(41, 32)])) == []


def test_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of other versions stay, those of this version are replaced, one kernel per line."""
    monkeypatch.setattr(register_table, "TABLE", tmp_path / "registers.json")
    first, second = (register_table.entries([examination(n, 32)]) for n in (40, 41))
    for version, entries in (("3.6.0", first), ("3.9.0", first), ("3.9.0", second)):
        monkeypatch.setattr(register_table.triton, "__version__", version)
        register_table.write(entries)
    assert register_table.read() == {"3.6.0": first, "3.9.0": second}
    assert '   "plain/verify/x_kernel": {"registers": 41, "shared": 32}\n' in register_table.TABLE.read_text()


def code(registers: int, shared: int, *, copies_ahead: bool = False) -> Compiled:
    return Compiled("", registers, 0, shared, copies_ahead, None)


def test_warps_at_once() -> None:
    """What runs at once on a multiprocessor shares 65,536 registers and, on sm_80, 164 KB of shared memory."""
    assert warps_at_once(code(128, 32), 4, 80) == warps_at_once(code(121, 32), 16, 80) == 16
    assert warps_at_once(code(128, 0), 32, 80) == 0
    assert warps_at_once(code(136, 0), 4, 80) == 12
    assert warps_at_once(code(136, 0), 8, 80) == 8
    assert [warps_at_once(code(64, 40 * 1024), 2, arch) for arch in (80, 86, 90)] == [8, 4, 10]
    assert warps_at_once(code(64, 81 * 1024), 4, 80) == 8
    assert warps_at_once(code(64, 81 * 1024 + 1), 4, 80) == 4


@pytest.mark.parametrize(
    ("grid", "num_warps", "needs", "found"),
    [
        ((75, 6), 4, code(128, 40 * 1024), False),  # 5 programs of a multiprocessor, of which 4 fit
        ((75, 6), 4, code(128, 40 * 1024 + 1), True),
        ((75, 3), 4, code(128, 40 * 1024 + 1), False),  # 3 programs
        ((1,), 8, code(255, 160 * 1024), False),
        ((1,), 32, code(128, 0), True),
        ((75, 6), 4, code(128, 70 * 1024, copies_ahead=True), False),  # 2 programs with 140 KB
        ((75, 6), 4, code(128, 41 * 1024, copies_ahead=True), False),
        ((1000,), 1, code(128, 16 * 1024), True),  # 10 programs, of which 9 fit
        ((1000, 1000), 2, code(255, 5 * 1024, copies_ahead=True), True),  # 8 warps by registers, which copy 20 KB
    ],
)
def test_room_on_a_multiprocessor(grid: tuple[int, ...], num_warps: int, needs: Compiled, found: bool) -> None:
    """16 warps, the whole of the grid, or copies of 64 KB."""
    faults = faults_of(Kernel("x_kernel", 1, grid, num_warps, {80: needs}))
    assert len(faults) == found
    assert all(fault.startswith("x_kernel leaves room for ") for fault in faults)
