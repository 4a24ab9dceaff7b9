"""The dry run finds what a GPU or a captured graph would not take, and counts launches and widths of loads."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import KernelParam

import dryrun
import traced_rounds
from aot import StandIn, load_widths, resources, seen
from meta_trace import Forbidden, Verified, traced
from planted import FORBIDDEN, copy_kernel, meta, start
from traced_calls import DTYPES, Setting
from traced_rounds import Counts, read

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which kernels are compiled, away from the user's cache."""
    paths = os.pathsep.join([str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    changes = {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes


def run(environment: dict[str, str], script: str, *flags: str) -> tuple[int, Any, str]:
    """(status, the JSON it printed, standard error) of a script of ours."""
    command = [sys.executable, str(ROOT / script), *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "item": "aten._local_scalar_dense.default is a host read",
        "truth": "aten.gt.Scalar is not on the list",
        "tolist": "aten._to_copy.default is a host read: it copies to cpu",
        "nonzero": "aten.nonzero.default is a host read",
        "masked": "aten.index.Tensor is a host read",
        "equal": "aten.equal.default is a host read",
        "printed": "printing a tensor is a host read",
        "numpy": "Tensor.numpy is a host read",
        "asarray": "a conversion to numpy is a host read",
        "to the CPU": "aten._to_copy.default is a host read: it copies to cpu",
        "into the CPU": "aten.copy_.default mixes devices or copies between them: an operand is on cpu",
        "from the CPU": "aten.copy_.default mixes devices or copies between them: an operand is on cpu",
        "moved": "aten._to_copy.default mixes devices or copies between them: an operand is on cpu",
        "mixed devices": "aten.add.Tensor mixes devices or copies between them: an operand is on cpu",
        "list": "torch.tensor copies host data",
        "number": "torch.tensor copies host data",
        "as_tensor": "torch.as_tensor copies host data",
        "new_tensor": "Tensor.new_tensor copies host data",
        "list as index": "aten.index.Tensor is a host read",
        "new from list": "aten.lift_fresh.default mixes devices",
        "on the CPU": "makes a tensor on cpu",
        "CPU tensor in a launch": "copy_kernel gets target on cpu",
        "rand": "aten.rand.default uses a random generator",
        "exponential": "aten.exponential_.default uses a random generator",
        "multinomial": "aten.multinomial.default uses a random generator",
        "elementwise": "aten.add.Tensor is not on the list",
        "fill": "aten.fill_.Scalar is not on the list",
        "full": "aten.full.default is not on the list",
        "assignment": "is not on the list",
        "copy": "aten.clone.default is not on the list",
    }.items(),
)
def test_forbidden(name: str, said: str) -> None:
    with pytest.raises(Forbidden) as raised:
        traced(FORBIDDEN[name])
    assert said in str(raised.value)
    assert "allowed are kernels started by kernels/launch.py, views, " in str(raised.value)


def test_every_planted_fault_is_tested() -> None:
    marks = [mark for mark in test_forbidden.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {name for name, _ in marks[0].args[1]} == set(FORBIDDEN)


def test_allowed() -> None:
    """Views and allocations are free; launches and matrix products are counted."""

    def call() -> None:
        x = meta(6, 4).view(2, 3, 4).transpose(0, 1)[1:, 0].unsqueeze(0).expand(5, 2, 4)
        torch.empty_like(x)
        meta(2, 3) @ meta(3, 4)
        start(copy_kernel, 16, 1)
        start(copy_kernel, 16, 2)

    trace = traced(call)
    assert [(launch.kernel.__name__, launch.num_warps) for launch in trace.launches] == [
        ("copy_kernel", n) for n in (1, 2)
    ]
    assert trace.products == ["aten.mm.default"]


@pytest.mark.parametrize("name", ["item", "rand", "to the CPU", "list"])
def test_status_of_a_forbidden_call(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is compiled here, so the kernels may be interpreted ones."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(Setting, "calls", lambda self: {"planted": FORBIDDEN[name]})
    assert dryrun.main(["--arch", "90"]) == 1
    printed, error = capsys.readouterr()
    assert "planted: 0 launches" in printed
    assert error.startswith("dryrun: planted: ")
    assert "(tests/planted.py:" in error or "planted.py:" in error


def test_status_of_a_verification(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(Setting, "calls", lambda self: {"planted": lambda: Verified(4, 3)})
    assert dryrun.main([]) == 1
    printed, error = capsys.readouterr()
    assert "planted: 0 launches, verification 4 launches" in printed
    assert error == "dryrun: planted: verification takes 4 launches, more than 3\n"


def test_status_of_committed_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are written where nothing is wrong, and compared."""

    class Planted(NamedTuple):
        call: Callable[[], object]

        def calls(self) -> dict[str, Callable[[], object]]:
            return {"round": self.call}

    def status(*flags: str, **calls: Callable[[], object]) -> tuple[int, list[str]]:
        monkeypatch.setattr(traced_rounds, "ROUNDS", {f"m/d/r/{name}": Planted(call) for name, call in calls.items()})
        return dryrun.main(flags), capsys.readouterr().err.splitlines()

    def product() -> object:
        meta(2, 3) @ meta(3, 4)
        return Verified(3, 3)

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(traced_rounds, "BASELINE", tmp_path / "launches.json")
    fine, item = {"a": lambda: Verified(3, 3), "b": product}, FORBIDDEN["item"]
    status_of_a_fault, (line,) = status("--write-rounds", **fine, c=item)
    assert status_of_a_fault == 1
    assert line.startswith("dryrun: m/d/r/c: aten._local_scalar_dense.default is a host read; ")
    assert not traced_rounds.BASELINE.exists()
    assert status("--write-rounds", **fine) == (0, [])
    assert read() == {"m/d/r/a": Counts(0, 0, 3), "m/d/r/b": Counts(0, 1, 3)}
    assert status("--rounds", **fine) == (0, [])
    assert status("--rounds", a=product, b=product) == (
        1,
        [
            "dryrun: m/d/r/a: 0 launches and 1 products, 3 launches in verification, and tools/launches.json says "
            "0 launches and 0 products, 3 launches in verification"
        ],
    )
    assert status("--rounds", a=item, b=item)[1][0].startswith("dryrun: m/d/r/a and 1 more: aten._local_scalar_dense")
    assert status("--rounds", a=fine["a"]) == (1, ["dryrun: m/d/r/b: in tools/launches.json, and no such round"])


def test_refused_under_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert dryrun.main([]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error == "dryrun: error: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled\n"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--top-p 1.5", "top_p must be in (0, 1]"),
        ("--rule cactus2", "unknown rule 'cactus2'"),
        ("--arch 90,70", "'90,70' is not a list of compute capabilities out of 80, "),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--vocab 0", "'0' is not a positive integer"),
        ("--num-draft-tokens -1", "'-1' is not an integer >= 0"),
        ("model.gguf", "model.gguf: no such file or folder; known by name: HuggingFaceTB/SmolLM2-135M-Instruct, "),
        ("Qwen3-0.6B --draft stats", "stats: no such file or folder; known by name: "),
        ("Qwen3-0.6B --draft ngram --num-draft-tokens 65", "num_draft_tokens must be an integer from 1 to 64"),
        ("Qwen3-0.6B --max-length 50000", "max_length 50000 is more than the target's context of 40960 tokens"),
        ("Qwen3-0.6B --top-p 0", "top_p must be in (0, 1]"),
        ("Qwen3-0.6B --rule cactus", "cactus: delta is required"),
        ("Qwen3-0.6B --tensors --batch 2", "error: --batch, --tensors: not together with a MODEL"),
        ("--logprobs", "error: --logprobs: only together with a MODEL"),
        ("--draft ngram", "error: --draft: without a MODEL stats, logits, none, got 'ngram'"),
        ("--rounds Qwen3-0.6B/none/cactus", "no round is named 'Qwen3-0.6B/none/cactus', or begins so"),
        ("--top-k 3 --rounds Qwen3-0.6B", "error: --top-k: not together with committed rounds or settings"),
        ("--rounds --table", "argument --table: not allowed with argument --rounds"),
    ],
)
def test_wrong_arguments(
    flags: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    try:
        status: object = dryrun.main(flags.split())
    except SystemExit as exit:  # argparse leaves by itself
        status = exit.code
    assert status == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert named in error.splitlines()[-1]


def test_planted_kernels(compiling: dict[str, str]) -> None:
    """All but the sound one are found. sm_86 has the least shared memory."""
    status, report, error = run(compiling, "tests/planted.py", "kernels", "--arch", "86")
    assert status == 1
    assert [call["launches"] for call in report["calls"]] == [1, 1, 1, 1]
    spill, broken, shared = report["findings"]
    assert re.fullmatch(r"spilling: centre_kernel spills \d+ bytes of registers per thread on sm_86", spill)
    assert broken.startswith("broken: mismatched_kernel does not compile for sm_86: ")
    assert "64 and 128" in broken
    assert shared.startswith("shared: product_kernel does not compile for sm_86: ")
    assert shared.endswith("it needs 131072 bytes of shared memory, and there are 101376")
    assert all(f"dryrun: {finding}\n" in error for finding in report["findings"])


def test_loads_of_logits(compiling: dict[str, str]) -> None:
    """16 bytes at a time where address and row stride allow it, else one logit at a time.

    A program of 4 warps reads 2048 logits: 16 a thread.
    """
    status, report, error = run(compiling, "tests/planted.py", "loads")
    assert (status, error) == (0, ""), error
    found = {
        (call["call"], arch): code["loads"]
        for call in report["calls"]
        for arch, code in call["kernels"][0]["compiled"].items()
    }
    assert len(found) == 3 * 3 * 3
    for (call, _), loads in found.items():
        bits = 32 if call.startswith("float32") else 16
        assert loads == ({"128": 16 * bits // 128} if call.endswith("aligned") else {str(bits): 16}), call


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 16])
def test_stand_in_for_a_tensor(dtype: torch.dtype, offset: int) -> None:
    """Triton takes it as it takes a tensor at the same offset. A meta tensor's own address reads 0."""
    tensor = torch.zeros(64, dtype=dtype)[offset:]
    assert tensor.untyped_storage().data_ptr() % 16 == 0
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def taken(argument: object) -> object:
        return native_specialize_impl(backend, argument, False, True, True)

    assert taken(StandIn(torch.empty(64, dtype=dtype, device="meta")[offset:])) == taken(tensor)


@pytest.mark.parametrize("specialised", [True, False])
def test_signature(specialised: bool) -> None:
    """It tells apart what Triton tells apart, and nothing else."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    numbers = [-(2**31) - 16, -(2**31), -16, -1, 0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 1, 2**63, 2**63 + 1]
    tensors = [torch.empty(64, dtype=dtype, device="meta")[i:] for dtype in DTYPES.values() for i in (0, 1, 4, 8)]
    values = [*numbers, *tensors, 0.0, 0.5, 1.0, True, False, None]
    kind = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameter = KernelParam(0, kind, not specialised, False)
    for a, b in itertools.product(values, repeat=2):
        arguments = [StandIn(value) if isinstance(value, torch.Tensor) else value for value in (a, b)]
        taken = [native_specialize_impl(backend, argument, False, specialised, True) for argument in arguments]
        assert (seen(parameter, a) == seen(parameter, b)) == (taken[0] == taken[1]), (a, b)
    constant = KernelParam(0, kind.replace(annotation=tl.constexpr), False, False)
    assert len({seen(constant, value) for value in (0, 1, 2, 16, 32, 0.0, 1.0, True, False, None, "x")}) == 11


def test_command(compiling: dict[str, str]) -> None:
    """The package's own calls, of several requests."""
    flags = ["--arch", "90", "--vocab", "32000", "--num-draft-tokens", "1", "--batch", "2", "--draft", "none"]
    status, report, error = run(compiling, "tools/dryrun.py", *flags, "--rule", "cactus:delta=0.1")
    assert (status, error) == (0, ""), error
    assert {call["call"]: (call["launches"], call["products"]) for call in report["calls"]} == {
        "sample": (2, 0),
        "verify": (3, 0),
    }
    assert [kernel["grid"] for call in report["calls"] for kernel in call["kernels"]] == [
        [16, 2],
        [2],
        [16, 4],
        [16, 2],
        [2],
    ]


def test_round(compiling: dict[str, str]) -> None:
    """A whole one, of a model that is a shape only."""
    flags = ["SmolLM2-135M-Instruct", "--draft", "ngram", "--num-draft-tokens", "2", "--top-k", "20", "--logprobs"]
    status, report, error = run(compiling, "tools/dryrun.py", *flags, "--arch", "90")
    assert (status, error) == (0, ""), error
    (call,) = report["calls"]
    layers = 30 * 6  # two norms, rope, attention in two steps, activation
    assert call["launches"] == 2 + layers + 2 + 4 + 2  # inputs and drafts, the model's ends, verification, logprobs
    assert (call["products"], call["verification"]) == (30 * 4 + 1, 4)
    assert sum(kernel["launches"] for kernel in call["kernels"]) == call["launches"]
    kernels = {kernel["name"]: kernel for kernel in call["kernels"]}
    assert (kernels["rms_norm_kernel#2"]["grid"], kernels["rms_norm_kernel#2"]["launches"]) == ([3], 60)
    attention = kernels["split_attention_kernel"]["compiled"]["sm_90"]
    assert attention["copies_ahead"]
    assert attention["loads"].keys() == {"32", "128"}  # the position; keys, values and queries


def test_committed_rounds(compiling: dict[str, str]) -> None:
    """Compared with the committed launches, by name."""
    name = "SmolLM2-135M-Instruct/none/speculative_sampling/plain"
    status, report, error = run(compiling, "tools/dryrun.py", "--arch", "90", "--rounds", name)
    assert (status, error) == (0, ""), error
    (call,) = report["calls"]
    assert (call["call"], call["verification"], call["findings"]) == (name, 3, [])
    assert Counts(call["launches"], call["products"], call["verification"]) == read()[name]


def test_reading_of_resources() -> None:
    usage = """
Resource usage:
 Common:
  GLOBAL:0
 Function x:
  REG:255 STACK:96 SHARED:0 LOCAL:8 CONSTANT[0]:448 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert resources(usage) == {"registers": 255, "local": 104}


def test_reading_of_loads() -> None:
    instructions = """
        /*0100*/  @!P0 LDG.E.128 R4, [R2] ;
        /*0110*/  LDG.E.EF.LTC128B.64 R4, [R2] ;
        /*0120*/  @P1 LDG.E.STRONG.GPU R4, desc[UR4][R2.64+0x80] ;
        /*0130*/  LDG.E.U16.CONSTANT R4, [R2] ;
        /*0140*/  LDGSTS.E.BYPASS.LTC128B.128 [R4], [R2.64] ;
        /*0150*/  LDS.128 R4, [R2] ;
        /*0160*/  LDGDEPBAR ;
"""
    assert load_widths(instructions) == {16: 1, 32: 1, 64: 1, 128: 2}
