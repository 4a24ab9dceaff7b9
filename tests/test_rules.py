"""Rules as values: ranges, tensors, text."""

import math
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fused_spec as fs
from fused_spec.rules import RULES, Rule

EXAMPLES: list[Rule] = [
    fs.SpeculativeSampling(),
    fs.Cactus(0.25),
    fs.Cactus(1e-7, solver="exact"),
    fs.TypicalAcceptance(),
    fs.TypicalAcceptance(0.01, 0.1),
    fs.Lenience(0.3),
    fs.Ensemble(1 / 3),
    fs.MentoredDecoding(2),
    fs.CascadeOpt(-1.5),
    fs.CascadeToken(0),
]


@pytest.mark.parametrize("rule", EXAMPLES, ids=str)
def test_text_round_trip(rule: Rule) -> None:
    assert fs.parse_rule(str(rule)) == rule
    assert hash(fs.parse_rule(str(rule))) == hash(rule)
    assert rule != fs.Cactus(0.75)


def test_every_rule_has_an_example() -> None:
    assert {type(rule) for rule in EXAMPLES} == set(RULES.values())


@given(st.floats(0, 1e6))
def test_any_number_survives_the_text(delta: float) -> None:
    parsed = fs.parse_rule(str(fs.Cactus(delta)))
    assert isinstance(parsed, fs.Cactus)
    assert parsed.delta == delta


def test_defaults_may_be_left_out() -> None:
    assert fs.parse_rule("typical") == fs.TypicalAcceptance(0.09, 0.3)
    assert fs.parse_rule("cactus:delta=1") == fs.Cactus(1.0, "taylor")


BAD_TEXT = [
    ("", "unknown rule ''; known: cactus, cascade_opt, cascade_token, ensemble, lenience, mentored"),
    ("Cactus:delta=1", "unknown rule 'Cactus'"),
    ("cactus", "cactus: delta is required"),
    ("lenience", "lenience: lenience is required"),
    ("cactus:0.25", "cactus: unknown parameter '0.25'; known: delta, solver (as name=value)"),
    ("cactus:delta=1,delta=2", "cactus: delta is given twice"),
    ("cactus:delta=1,gamma=2", "cactus: unknown parameter 'gamma=2'"),
    ("cactus:delta=x", "cactus: delta must be a number, got 'x'"),
    ("cactus:delta=nan", "cactus: delta must be a finite number"),
    ("cactus:delta=1,solver=newton", "cactus: solver must be 'taylor' or 'exact', got 'newton'"),
    ("speculative_sampling:delta=1", "speculative_sampling: unknown parameter 'delta=1'; known: none"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXT)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(fs.InvalidInput, match=f"^{re.escape(message)}") as caught:
        fs.parse_rule(text)
    assert "\n" not in str(caught.value)


RANGES: list[tuple[type[Rule], str, list[float], list[float], str]] = [
    (fs.Cactus, "delta", [0, 0.5, 100], [-1e-9], "[0, inf)"),
    (fs.TypicalAcceptance, "epsilon", [0, 1], [-0.1, 1.1], "[0, 1]"),
    (fs.TypicalAcceptance, "alpha", [0, 7], [-0.1], "[0, inf)"),
    (fs.Lenience, "lenience", [1e-9, 1], [0, -1, 1.1], "(0, 1]"),
    (fs.Ensemble, "weight", [0, 1], [-0.1, 1.1], "[0, 1]"),
    (fs.MentoredDecoding, "kl", [0, 9], [-0.1], "[0, inf)"),
    (fs.CascadeOpt, "alpha", [-5, 0, 5], [], "(-inf, inf)"),
    (fs.CascadeToken, "alpha", [0, 1], [-0.1, 1.1], "[0, 1]"),
]


@pytest.mark.parametrize(("kind", "parameter", "legal", "illegal", "interval"), RANGES)
def test_ranges(kind: type[Rule], parameter: str, legal: list[float], illegal: list[float], interval: str) -> None:
    make: Any = kind
    for value in legal:
        make(**{parameter: value})
        make(**{parameter: torch.tensor([float(value)] * 2)})
    for bad in [*illegal, math.nan, math.inf, -math.inf, "1", None, True, torch.tensor(0.5), torch.tensor([1])]:
        with pytest.raises(fs.InvalidInput, match=re.escape(f"{parameter} must be a finite number")) as caught:
            make(**{parameter: bad})
        assert interval in str(caught.value)
        assert "\n" not in str(caught.value)
    for bad in illegal:
        with pytest.raises(fs.InvalidInput):
            make(**{parameter: torch.tensor([0.5, bad])})


def test_every_parameter_has_its_range_tested() -> None:
    known = {(rule, f.name) for rule in RULES.values() for f in fields(rule) if f.name != "solver"}
    assert {(kind, parameter) for kind, parameter, *_ in RANGES} == known


@pytest.mark.parametrize(("kind", "parameter", "legal", "illegal", "interval"), RANGES)
def test_tensor_parameters_are_one_value_per_request(
    kind: type[Rule], parameter: str, legal: list[float], illegal: list[float], interval: str
) -> None:
    """A batch whose requests have their own parameter is the same as one call per request."""
    make: Any = kind
    values = torch.tensor([0.2, 0.5, 0.9])
    target, draft = torch.randn(3, 3, 40) * 2, torch.randn(3, 2, 40) * 2
    ids = draft.argmax(-1)
    together = fs.verify(target, ids, draft, rule=make(**{parameter: values}), seed=4, position=0)
    for b in range(3):
        rule = make(**{parameter: values[b].item()})
        alone = fs.verify(target[b : b + 1], ids[b : b + 1], draft[b : b + 1], rule=rule, seed=4, position=0)
        assert torch.equal(alone.token_ids[0], together.token_ids[b])
        assert torch.equal(alone.accept_prob[0].nan_to_num(-1), together.accept_prob[b].nan_to_num(-1))


def test_equality_of_tensor_parameters() -> None:
    assert fs.Cactus(torch.tensor([0.1, 0.2])) == fs.Cactus(torch.tensor([0.1, 0.2]))
    assert fs.Cactus(torch.tensor([0.1, 0.2])) != fs.Cactus(torch.tensor([0.1, 0.3]))
    assert hash(fs.Cactus(torch.tensor([0.1, 0.2]))) == hash(fs.Cactus(torch.tensor([0.1, 0.2])))
    assert fs.Cactus(torch.tensor([0.1])) != fs.Cactus(0.1)
    assert fs.Cactus(0.1) != fs.Lenience(0.1)
