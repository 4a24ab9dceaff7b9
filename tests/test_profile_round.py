"""Rounds under a profiler: which parts are marked, that their shares add up, and that rounds know nothing of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_spec.drafters
import fused_spec.kernels.verify
import fused_spec.round
import fused_spec.runner
import profile_round
from fused_spec import Engine
from fused_spec.models.config import ModelConfig
from graphs import with_graphs
from profiled_engine import max_length_of, random_model, started
from toy import toy_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
PARTS = [
    "round",
    "round inputs",
    "draft",
    "draft step 0",
    "sample",
    "draft step 1",
    "verify forward",
    "verify",
    "commit",
]
"""In the order of their first call."""


def near(value: float) -> Any:
    """`pytest.approx`, in the place of a number."""
    return pytest.approx(value)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    """A model of which there is only a config, small enough for a test."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def arguments(shape: str, *more: str) -> list[str]:
    return ["--shape", shape, "--rounds", "3", "--warmup", "1", "--context", "40", "--num-draft-tokens", "2", *more]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shares_add_up(shape: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    options = arguments(shape, "--draft", shape, "--dtype", dtype, "--eager", "--json", "--trace", str(trace))
    assert profile_round.main(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["device"], found["rounds"]) == ("eager", "cpu", 3)
    ranges = {entry["name"]: entry for entry in found["ranges"]}
    assert [*ranges] == PARTS
    assert [ranges[name]["calls"] for name in PARTS] == [3, 3, 3, 3, 6, 3, 3, 3, 3]
    for entries in (found["ranges"], found["operators"]):
        assert sum(entry["share"] for entry in entries) == near(1)
        assert all(entry["seconds"] > 0 for entry in entries)
    # Both are the same time in other parts, and no more than what went by.
    of_ranges, of_operators = (sum(entry["seconds"] for entry in found[name]) for name in ("ranges", "operators"))
    assert of_ranges == near(of_operators)
    assert of_ranges <= 3 * found["seconds_per_round"]
    assert found["operators"] == sorted(found["operators"], key=lambda entry: -entry["seconds"])
    operators = {entry["name"] for entry in found["operators"]}
    assert profile_round.BETWEEN in operators
    assert any("linear" in name or "mm" in name for name in operators)
    assert not {*PARTS} & operators
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]
    assert names.count("verify forward") == 3


def test_text(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_round.main(arguments(shape, "--draft", "ngram", "--rows", "2")) == 0
    text = capsys.readouterr().out
    assert text.startswith("3 rounds, eager, on cpu: ")
    ranges, operators, rest = text.split("\n\n")[1:]
    assert [line.split("  ")[0] for line in ranges.splitlines()] == [
        *("range", "round", "round inputs", "draft", "verify forward", "verify", "commit")
    ]
    assert len(operators.splitlines()) == 3
    assert "other operators" in rest


def test_self_drafts_and_plain_decoding(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    for draft, steps in ((["--draft", "self-int8"], 2), ([], 0)):
        assert profile_round.main(arguments(shape, "--json", *draft)) == 0
        names = [entry["name"] for entry in json.loads(capsys.readouterr().out)["ranges"]]
        assert sum(name.startswith("draft step") for name in names) == steps


class Times:
    """Stands in for an event of torch's profiler."""

    is_user_annotation = True

    def __init__(self, number: int, name: str, parent: Any, inclusive: float, own: float) -> None:
        self.id, self.name, self.cpu_parent, self.self_cpu_time_total = number, name, parent, own
        self.time_range = self
        self.elapsed_us = lambda: inclusive


def test_shares_by_hand() -> None:
    """round 100 = own 10 + draft 60 (own 5 + step 55, of which mm 50) + verify 30, of which exp 20."""
    outside = Times(0, "aten::copy_", None, 500, 500)
    whole = Times(1, "round", None, 100, 10)
    draft = Times(2, "draft", whole, 60, 5)
    step = Times(3, "draft step 0", draft, 55, 5)
    matmul = Times(4, "aten::matmul", step, 50, 0)
    product = Times(5, "aten::mm", matmul, 50, 50)
    verify = Times(6, "verify", whole, 30, 10)
    exponential = Times(7, "aten::exp", verify, 20, 20)
    events = [outside, whole, draft, step, matmul, product, verify, exponential]
    names = {"round", "draft", "draft step 0", "verify"}
    ranges = profile_round.range_shares(events, names)
    assert [(share.name, share.share) for share in ranges] == [
        ("round", near(0.1)),
        ("draft", near(0.05)),
        ("draft step 0", near(0.55)),
        ("verify", near(0.3)),
    ]
    operators = profile_round.operator_shares(events, names)
    assert [(share.name, share.calls, share.share) for share in operators] == [
        ("aten::mm", 1, near(0.5)),
        (profile_round.BETWEEN, 4, near(0.3)),
        ("aten::exp", 1, near(0.2)),
        ("aten::matmul", 1, 0.0),
    ]


def toy_engine() -> Engine:
    return Engine(toy_model(1), draft=toy_model(2), num_draft_tokens=2, max_length=200)


def test_marking_changes_nothing_and_leaves_nothing_behind() -> None:
    functions = [
        fused_spec.runner.decode_round,
        fused_spec.round.verify,
        fused_spec.round.round_inputs,
        fused_spec.drafters.sample,
        fused_spec.kernels.verify.commit,
    ]
    expected = toy_engine().generate([3, 1, 4], max_new_tokens=30, seed=1).token_ids
    engine, seen, depth = toy_engine(), [], 0

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        nonlocal depth
        seen.append((depth, name))
        depth += 1
        yield
        depth -= 1

    generation = engine.stream([3, 1, 4], max_new_tokens=30, seed=1)
    next(generation)
    with profile_round.ranges(engine, mark):
        next(generation)
    rest = len(seen)
    for _ in generation:
        pass
    assert generation.output.token_ids == expected
    assert len(seen) == rest
    assert seen == [
        *((0, "round"), (1, "round inputs"), (1, "draft"), (2, "draft step 0"), (2, "sample"), (2, "draft step 1")),
        *((2, "sample"), (1, "verify forward"), (1, "verify"), (2, "commit")),
    ]
    assert functions == [
        fused_spec.runner.decode_round,
        fused_spec.round.verify,
        fused_spec.round.round_inputs,
        fused_spec.drafters.sample,
        fused_spec.kernels.verify.commit,
    ]
    assert not {"forward", "propose"} & (vars(engine.target).keys() | vars(engine.drafter).keys())


class CudaLog:
    """Stands in for torch.cuda where a profiler is driven."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: self.log.append("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: self.log.append("stop"))
        monkeypatch.setattr(torch.cuda.nvtx, "range", self._range)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self.log.append(f"begin {name}")
        yield
        self.log.append(f"end {name}")


def test_nsight_sees_graph_replays_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there should be, though one is always launched ahead; the device is waited for at both ends."""
    options = profile_round.parser().parse_args(["m", "--context", "10", "--warmup", "2", "--num-draft-tokens", "2"])
    engine = with_graphs(toy_engine())
    generation = started(engine, options)
    cuda = CudaLog(monkeypatch)
    launch = engine.runner.launch

    def logged(size: int) -> None:
        cuda.log.append("replay")
        launch(size)

    monkeypatch.setattr(engine.runner, "launch", logged)
    profile_round.under_nsight(engine, generation, 4, eager=False)
    assert cuda.log == ["synchronize", "start", *["replay"] * 4, "synchronize", "stop"]


def test_nsight_sees_the_parts_of_eager_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    options = profile_round.parser().parse_args(["m", "--context", "10", "--warmup", "1", "--num-draft-tokens", "2"])
    engine = toy_engine()
    generation = started(engine, options)
    cuda = CudaLog(monkeypatch)
    profile_round.under_nsight(engine, generation, 2, eager=True)
    begun = [line.removeprefix("begin ") for line in cuda.log if line.startswith("begin")]
    assert [*dict.fromkeys(begun)] == PARTS
    assert begun.count("round") == 2
    assert cuda.log[:3] == ["synchronize", "start", "begin round"]
    assert cuda.log[-3:] == ["end round", "synchronize", "stop"]


def test_a_text_has_room_for_rounds_that_are_accepted_whole() -> None:
    options = profile_round.parser().parse_args(
        ["m", "--context", "10", "--warmup", "2", "--num-draft-tokens", "3", "--temperature", "0", "--rounds", "7"]
    )
    model = toy_model(1)
    engine = with_graphs(Engine(model, draft=model, num_draft_tokens=3, max_length=max_length_of(options)))
    generation = started(engine, options)
    for _ in range(options.rounds + 1):  # one more than is profiled under torch
        assert next(generation).num_accepted == 3
    assert generation.output.finish_reason is None


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_keep_activations_in_bounds(tied: bool) -> None:
    config = ModelConfig.from_hf(CONFIG | {"tie_word_embeddings": tied}, None, "test")
    model = random_model(config, torch.float32, torch.device("cpu"), 1)
    with torch.inference_mode():
        logits = model.forward(torch.arange(50), torch.arange(50), model.new_cache(50))
    assert 0.1 < logits.std() < 10
    assert len(logits.argmax(1).unique()) > 10
    assert torch.equal(logits, random_model(config, torch.float32, torch.device("cpu"), 1).forward(
        torch.arange(50), torch.arange(50), model.new_cache(50)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of MODEL and --shape NAME is needed"),
        (["m", "--shape", "Qwen3-8B"], "not both"),
        (["/nowhere/at all"], "no such file or folder"),
        (["--shape", "Nothing"], "known by name: HuggingFaceTB"),
        (["--shape", "Qwen3-8B", "--rule", "nonsense"], "rule"),
        (["--shape", "Qwen3-8B", "--temperature", "-1"], "temperature"),
        (["--shape", "Qwen3-8B", "--profiler", "nsight", "--json"], "--trace and --json are for --profiler torch"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_round.main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--graph"], ["--profiler", "nsight"], ["--profiler", "nsight", "--eager"]], ids=str)
def test_what_needs_a_gpu_says_so(flags: list[str], shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_round.main(arguments(shape, "--device", "cpu", *flags)) == 2
    assert "needs a CUDA device, and this runs on cpu" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--rounds", "--warmup", "--context", "--num-draft-tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_counts_are_positive(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile_round.main(["m", flag, value])
    assert "expected" in capsys.readouterr().err
