"""The GPU check, reduced to what a CPU can do: everything runs and is reported, and planted faults are found.

The whole of it runs once, noting which kernels were launched; single checks run again with a fault in them.
"""

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import check_graphs
import check_report
import check_run
import fused_spec.kernels.rms_norm_triton
import fused_spec.kernels.verify_request
import fused_spec.kernels.verify_triton
import fused_spec.round
import gpu_check
from check_models import Replayer
from check_run import ABSENT, FAILED, OK, SKIPPED, Finding, Result, Setting
from fused_spec.kernels.launch import recorded
from fused_spec.kernels.philox import DRAFT

ROOT = Path(__file__).parents[1]
REDUCED = Setting(torch.device("cpu"), reduced=True)


class Run(NamedTuple):
    """What a run of the script gave."""

    status: int
    printed: str
    contents: dict[str, Any]
    kernels: set[str]

    def results(self) -> dict[str, str]:
        return {check["name"]: check["status"] for check in self.contents["checks"]}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("gpu_check") / "results.json"
    with redirect_stdout(io.StringIO()) as printed, recorded() as launches:
        status = gpu_check.main(["--cpu", "--json", str(path)])
    kernels = {launch.kernel.fn.__name__ for launch in launches}
    return Run(status, printed.getvalue(), json.loads(path.read_text()), kernels)


def run(tmp_path: Path, *flags: str) -> Run:
    path = tmp_path / "results.json"
    status = gpu_check.main(["--cpu", "--json", str(path), *flags])
    return Run(status, "", json.loads(path.read_text()), set())


def test_everything_passes_and_is_reported(everything: Run) -> None:
    names = list(gpu_check.all_checks())
    assert everything.status == 0
    assert list(everything.results()) == names
    absent = {name for name, status in everything.results().items() if status != OK}
    assert absent == {"attention/flash-attn", "peers/flashinfer", "speed/copy"}
    assert everything.contents["passed"]
    assert not everything.contents["timings_meaningful"]
    assert everything.contents["not_selected"] == []
    assert everything.contents["machine"]["torch"] == torch.__version__
    for name in names:
        assert len(re.findall(rf"^{re.escape(name)} ", everything.printed, re.MULTILINE)) == 2
    for check in everything.contents["checks"]:
        timed = check["name"].startswith(("times/", "speed/")) and check["status"] == OK
        assert timed == check["key"].endswith(check_report.NOT_MEANINGFUL)
        assert check["status"] == ABSENT or check["numbers"]


def test_every_kernel_is_run(everything: Run) -> None:
    sources = [file.read_text() for file in (ROOT / "kernels").glob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert len(kernels) > 15
    assert kernels <= everything.kernels


def stuttering(self: Replayer, function: Callable[[], None]) -> Callable[[], None]:
    """A graph that holds two rounds, of which the first one's report is lost."""

    def twice() -> None:
        function()
        function()

    return twice


def off_by(amount: float, launcher: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(x: torch.Tensor, norm: Any, out: torch.Tensor, add: Any) -> None:
        launcher(x, norm, out, add)
        out[0, -1] *= 1 + amount

    return wrapped


def other_token(pick: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any) -> None:
        pick(*arguments)
        token_ids = arguments[5]
        token_ids[0] = torch.where(token_ids[0] >= 0, (token_ids[0] + 1) % 600, token_ids[0])

    return wrapped


def waiting(decode: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(state: Any, *arguments: Any, **options: Any) -> None:
        decode(state, *arguments, **options)
        state.length.item()

    return wrapped


def plant_rms_norm(patch: pytest.MonkeyPatch) -> None:
    launcher = fused_spec.kernels.rms_norm_triton.rms_norm_triton
    patch.setattr(fused_spec.kernels.rms_norm_triton, "rms_norm_triton", off_by(1e-4, launcher))


def plant_token(patch: pytest.MonkeyPatch) -> None:
    pick = fused_spec.kernels.verify_triton.pick_and_commit
    patch.setattr(fused_spec.kernels.verify_triton, "pick_and_commit", other_token(pick))


def plant_two_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replayer, "record", stuttering)


def plant_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_spec.runner, "decode_round", waiting(fused_spec.runner.decode_round))


def plant_shared_noise(patch: pytest.MonkeyPatch) -> None:
    """Residuals are drawn from with the numbers that drafts were drawn with."""
    patch.setattr(fused_spec.kernels.verify_request, "RESAMPLE", DRAFT)


def plant_impossible_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("check_decisions.RELATIVE", 0.0)
    patch.setattr("check_decisions.ABSOLUTE", 1e-12)


@pytest.mark.parametrize(
    ("check", "plant", "said"),
    [
        ("kernels/rms_norm", plant_rms_norm, "times what rounding explains"),
        ("verify/float32", plant_token, "speculative, request 0: other than torch's path"),
        ("verify/float32", plant_impossible_bound, "times what rounding explains"),
        ("times/verify-6", plant_token, "fused: "),
        ("graphs/model", plant_two_rounds, "as graphs"),
        ("graphs/waiting", plant_waiting, "waits for the device"),
        ("laws/speculative", plant_shared_noise, "do not follow their law"),
    ],
)
def test_planted_faults_are_found(
    check: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch)
    found = run(tmp_path, "--only", check)
    assert found.status == 1
    assert found.results() == {check: FAILED}
    assert not found.contents["passed"]
    assert said in found.contents["checks"][0]["key"]
    assert "Traceback" in found.contents["checks"][0]["detail"]
    assert f"FAILED: {check}" in capsys.readouterr().out
    assert len(found.contents["not_selected"]) == len(gpu_check.all_checks()) - 1


def test_what_the_budget_does_not_allow_is_skipped_and_not_passed(tmp_path: Path) -> None:
    for jobs in ("0", "1"):
        found = run(tmp_path, "--budget", "0", "--jobs", jobs, "--only", "kernels/embed", "kernels/silu_mul")
        assert found.status == 1
        assert found.results() == dict.fromkeys(["kernels/silu_mul", "kernels/embed"], SKIPPED)
        assert not found.contents["passed"]


def test_checks_in_other_processes(tmp_path: Path) -> None:
    found = run(tmp_path, "--jobs", "2", "--only", "kernels/embed", "kernels/round_inputs", "peers", "speed/copy")
    assert found.status == 0
    statuses = {"kernels/embed": OK, "kernels/round_inputs": OK, "peers/flashinfer": ABSENT, "speed/copy": ABSENT}
    assert found.results() == statuses


FAULTY = """
import json, os, sys, time
names = sys.argv[1:]
for name in names:
    if name == "dies" or name == "peers/dies":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    status = "FAILED" if name == "breaks the device" else "ok"
    result = {"name": name, "status": status, "seconds": 0.0, "key": str(len(names)), "numbers": {}, "detail": ""}
    print(json.dumps(result), flush=True)
    if name == "breaks the device":
        sys.exit(75)
"""


def test_crashes_and_hangs_are_failures_and_the_others_go_on() -> None:
    names = ["a", "dies", "b", "breaks the device", "c", "peers/dies", "hangs", "d"]
    command = [sys.executable, "-c", FAULTY]
    said: list[Result] = []
    results = check_run.run_apart(names, command, math.inf, 2.0, said.append)
    assert results == said
    assert [result.name for result in results] == names
    assert [result.status for result in results] == [OK, FAILED, OK, FAILED, OK, ABSENT, FAILED, OK]
    assert results[1].key.startswith("its process ended with status -6")
    assert results[6].key == "its process gave no result within 2 s"
    assert [results[i].key for i in (0, 2, 4, 7)] == ["8", "6", "4", "1"]  # how many each process was given


def test_a_check_that_raises_what_it_likes_is_a_failure() -> None:
    def check(setting: Setting) -> Finding:
        raise KeyError("who\nknows")

    result = check_run.attempt("any", check, REDUCED)
    assert (result.status, result.key) == (FAILED, "KeyError: 'who\\nknows'")
    assert not check_report.passed([result])
    assert not check_report.passed([Result("any", ABSENT)])  # nothing ran


def script(*flags: str, blocked: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """The script as a program, where some packages are not installed."""
    blocking = (
        "import runpy, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {blocked!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name in {blocked!r} else find(name)\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        f"sys.argv = ['gpu_check.py', *{flags!r}]\n"
        f"runpy.run_path({str(ROOT / 'tools' / 'gpu_check.py')!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", blocking], capture_output=True, text=True, env=environment, check=False
    )


def test_torch_and_triton_are_enough() -> None:
    blocked = ("gguf", "safetensors", "tqdm", "transformers", "tokenizers", "huggingface_hub", "scipy", "pytest")
    done = script("--cpu", "--only", "kernels/embed", "graphs/none", blocked=blocked)
    assert done.returncode == 0, done.stderr
    assert "2 ok" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed() -> None:
    done = script("--only", "kernels/embed")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "torch sees no CUDA device; --cpu runs a reduced version" in done.stderr


def test_a_wait_is_noticed_by_the_stand_in() -> None:
    with pytest.raises(RuntimeError, match="waits for the device"), check_graphs.no_waiting(torch.device("cpu")):
        torch.ones(1).item()


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--cpu", "--list", "--only", "graphs/ngram", "times"]) == 0
    assert capsys.readouterr().out.split() == ["graphs/ngram", *(f"times/verify-{rows}" for rows in (6, 11, 21))]
    assert gpu_check.main(["--cpu", "--only", "kernels", "kernel"]) == 2
    assert "no check 'kernel'; known: kernels/rms_norm, " in capsys.readouterr().err
