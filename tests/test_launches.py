"""Rounds of whole models launch what tools/launches.json says, and a fault anywhere in one is found.

Rounds are traced here, a part of them, and nothing is compiled: `make dryrun` does both, for all.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import traced_rounds
from fused_spec import rules
from fused_spec.errors import InvalidInput
from meta_trace import Forbidden, Verified, traced
from planted import copy_kernel, meta, start
from traced_rounds import OTHERS, ROUNDS, Counts, Round, count, differences, read, selected, targets, write

SOME = [name for i, name in enumerate(ROUNDS) if i % 7 == 0 or name.split("/")[3] in OTHERS]
SMALL = Round("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", num_draft_tokens=2)


def test_rounds() -> None:
    """All rules are among them, and what is traced here is of all sorts."""
    assert {text.partition(":")[0] for text in traced_rounds.RULES.values()} == set(rules.RULES)
    for part in range(4):
        assert {name.split("/")[part] for name in SOME} == {name.split("/")[part] for name in ROUNDS}
    for draft in {name.split("/")[1] for name in ROUNDS} - {"none"}:
        assert {name.split("/")[2] for name in ROUNDS if name.split("/")[1] == draft} == set(traced_rounds.RULES)


@pytest.mark.parametrize("name", SOME)
def test_baseline(name: str) -> None:
    """No host read, no operator that nobody counted, and as many launches as ever."""
    assert differences(read(), {name: count(ROUNDS[name])}) == []


def test_verification() -> None:
    """3 launches, 1 more with filters, and 2 or 7 for rules over pairs of rows where there are drafts."""
    baseline = read()
    assert set(baseline) == set(ROUNDS)
    for name, numbers in baseline.items():
        _, draft, rule, kind = name.split("/")
        pairs = {"mentored": 7, "cascade_opt": 2, "cascade_token": 2}.get(rule, 0) if draft != "none" else 0
        assert numbers.verify == 3 + (kind in ("filters", "all")) + pairs, name


def test_a_layer_more() -> None:
    """What a round takes is what its layers take and a few launches more."""
    small, large = (
        read()["Qwen3-0.6B/none/speculative_sampling/plain"],
        read()["Qwen3-8B/none/speculative_sampling/plain"],
    )
    assert (large.launches - small.launches, large.products - small.products) == (8 * 6, 8 * 4)
    assert small.launches == 28 * 6 + 1 + 1 + 1 + 3  # round_inputs, embed, the last norm, verification


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "host read": (lambda: meta(1).item(), "aten._local_scalar_dense.default is a host read"),
    "copy to the host": (lambda: meta(1).cpu(), "aten._to_copy.default is a host read: it copies to cpu"),
    "number from the host": (lambda: meta(1).fill_(1.0), "aten.fill_.Scalar is not on the list of allowed operators"),
    "operator": (lambda: meta(3) + 1, "aten.add.Tensor is not on the list of allowed operators"),
    "launch": (lambda: start(copy_kernel, 16, 1), ""),
    "product": (lambda: meta(2, 3) @ meta(3, 4), ""),
}
PLACES = (
    "fused_spec.round.round_inputs",
    "fused_spec.drafters.sample",
    "fused_spec.models.transformer.rms_norm",
    "fused_spec.round.verify",
    "fused_spec.kernels.verify_triton.decide_and_weigh",
)


def plant(monkeypatch: pytest.MonkeyPatch, place: str, fault: Callable[[], object]) -> None:
    """A fault behind each call of a function."""
    module, _, name = place.rpartition(".")
    original = getattr(sys.modules[module], name)

    def planted(*arguments: Any, **options: Any) -> object:
        result = original(*arguments, **options)
        fault()
        return result

    monkeypatch.setattr(place, planted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = count(SMALL)
    fault, said = FAULTS[name]
    plant(monkeypatch, place, fault)
    if said:
        with pytest.raises(Forbidden, match=said):
            count(SMALL)
        return
    (finding,) = differences({SOME[0]: sound}, {SOME[0]: count(SMALL)})
    assert finding.startswith(f"{SOME[0]}: ")
    assert finding.endswith(f"says {sound.launches} launches and {sound.products} products, 3 launches in verification")


def test_launches_of_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is a finding; with filters there is one to spare."""
    plant(monkeypatch, "fused_spec.kernels.verify_triton.decide_and_weigh", lambda: start(copy_kernel, 16, 1))
    for options, launches, findings in (
        ({}, 4, ["verification takes 4 launches, more than 3"]),
        ({"rule": "cascade_opt:alpha=0.1"}, 6, ["verification takes 6 launches, more than 5"]),
        ({"rule": "mentored:kl=0.1"}, 11, ["verification takes 11 launches, more than 10"]),
        ({"top_k": 20}, 5, []),
    ):
        (call,) = Round(SMALL.model, SMALL.draft, num_draft_tokens=1, **options).calls().values()
        result = traced(call).result
        assert isinstance(result, Verified)
        assert (result.launches, result.findings()) == (launches, findings)


def test_differences() -> None:
    baseline = read()
    name = "Qwen3-8B/ngram/cactus/plain"
    assert differences(baseline, {name: baseline[name]}) == []
    (new,) = differences({k: v for k, v in baseline.items() if k != name}, {name: Counts(7, 5, 3)})
    assert new == (
        f"{name}: 7 launches and 5 products, 3 launches in verification, and tools/launches.json does not have it"
    )
    assert differences({**baseline, "old": Counts(1, 2, 3)}, {}) == ["old: in tools/launches.json, and no such round"]


def test_selection() -> None:
    assert selected(None) == selected([]) == ROUNDS
    name = "Qwen3-8B/ngram/cactus/plain"
    assert selected([name]) == {name: ROUNDS[name]}
    assert set(selected(["Qwen3-8B/ngram/cactus"])) == {
        f"Qwen3-8B/ngram/cactus/{k}" for k in ("plain", "filters", "greedy")
    }
    with pytest.raises(InvalidInput, match="no round is named 'Qwen3-8B/ngram/cact', or begins so"):
        selected([name, "Qwen3-8B/ngram/cact"])


def test_targets() -> None:
    """Every model, drafter, rule and kind is compiled for all architectures, though not in all combinations."""
    for architectures, one in (([80, 90, 100], [90]), ([80, 100], [80])):
        chosen = {name: list(targets(name, architectures)) for name in ROUNDS}
        everywhere = [name for name in ROUNDS if chosen[name] == architectures]
        assert len(ROUNDS) / 3 < len(everywhere) < len(ROUNDS)
        assert all(chosen[name] == one for name in ROUNDS if name not in everywhere)
        for part in range(4):
            assert {name.split("/")[part] for name in everywhere} == {name.split("/")[part] for name in ROUNDS}


def test_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round per line, in order of their names; the committed file is as it is written."""
    committed, baseline = traced_rounds.BASELINE.read_text(), read()
    monkeypatch.setattr(traced_rounds, "BASELINE", tmp_path / "launches.json")
    assert read() == {}
    write(dict(reversed(baseline.items())))
    assert traced_rounds.BASELINE.read_text() == committed
    assert list(json.loads(committed)) == sorted(baseline)
    assert committed.count("\n") == len(baseline) + 2
