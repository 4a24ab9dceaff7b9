"""Every kernel in the settings that matter compiles, keeps everything in registers, and needs what the table says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import register_table
from aot import Compiled
from examination import Examination, Kernel, register_bound

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("architectures", "settings"),
    [("90", list(register_table.SETTINGS)), ("80,100", ["plain", "float32", "typical"])],
)
def test_table(architectures: str, settings: list[str], tmp_path: Path) -> None:
    """A finding is a host read, a spill, local memory, more registers than the bound, or another entry in the table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "dryrun.py"), "--json", "--arch", architectures, "--table"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    calls = json.loads(done.stdout)["calls"]
    assert {call["call"] for call in calls} == {f"{s}/{c}" for s in settings for c in ("sample", "verify")}
    for call in calls:
        assert call["launches"] == sum(kernel["launches"] for kernel in call["kernels"]) >= 2
        for kernel in call["kernels"]:
            assert set(kernel["compiled"]) == {f"sm_{arch}" for arch in architectures.split(",")}
            for code in kernel["compiled"].values():
                assert code["local"] == 0
                assert code["registers"] <= register_bound(tuple(kernel["grid"]), kernel["num_warps"]) <= 255


def test_committed_table() -> None:
    """Both ends of the range of Triton versions are there, with the same kernels on every architecture."""
    table = register_table.read()
    assert set(table) == {"3.6.0", "3.9.0"}
    kernels = [set(entries) for version in table.values() for entries in version.values()]
    assert [set(version) for version in table.values()] == [{"sm_80", "sm_90", "sm_100"}] * 2
    assert all(names == kernels[0] for names in kernels)


def examination(registers: int, shared: int) -> Examination:
    kernel = Kernel("x_kernel", 1, (1,), 4, {90: Compiled("", registers, 0, shared, {})})
    return Examination("plain/verify", 1, 0, [kernel], [])


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


def test_register_bound() -> None:
    """What runs at once on a multiprocessor shares 65,536 registers."""
    assert register_bound((75, 6), 4) == register_bound((1000, 1000), 4) == 65536 // (4 * 4 * 32)
    assert register_bound((75, 3), 4) == 65536 // (3 * 4 * 32)
    assert register_bound((75, 1), 4) == register_bound((1,), 8) == 255
    assert register_bound((109,), 8) == 128
