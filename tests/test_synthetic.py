"""Prescribed acceptance: the rate is what was asked for, whatever the models think."""

from typing import Any

import pytest

from fused_spec import Engine, InvalidInput, SpeculativeSampling
from fused_spec.bench import prescribe_acceptance
from graphs import with_graphs
from toy import toy_model

VERIFIER = toy_model(1, vocab_size=64, sharpness=2.0, context=1024)
DRAFTS: dict[str, Any] = {"model": toy_model(2, vocab_size=64, sharpness=2.0, context=1024), "self-int8": "self-int8"}


def synthetic(draft: Any, acceptance: float) -> Engine:
    engine = Engine(VERIFIER, draft=draft, num_draft_tokens=4, max_length=1024, rule=SpeculativeSampling())
    prescribe_acceptance(engine, acceptance)
    return engine


@pytest.mark.parametrize("draft", DRAFTS)
def test_all_or_none(draft: str) -> None:
    options: dict[str, Any] = {"seed": 1, "temperature": 0.8}
    stats = synthetic(DRAFTS[draft], 1.0).generate([1, 2, 3], max_new_tokens=101, **options).stats
    assert (stats.rounds, stats.accepted) == (20, 80)
    stats = synthetic(DRAFTS[draft], 0.0).generate([1, 2, 3], max_new_tokens=51, **options).stats
    assert (stats.rounds, stats.accepted) == (50, 0)


def test_a_rate_in_between() -> None:
    """Tested drafts are accepted like throws of a coin: within five standard deviations."""
    stats = with_graphs(synthetic(DRAFTS["model"], 0.7)).generate([1, 2, 3], max_new_tokens=1000, seed=3).stats
    assert stats.tested > 500
    assert abs(stats.accepted / stats.tested - 0.7) < 5 * (0.7 * 0.3 / stats.tested) ** 0.5


def test_what_cannot_be_prescribed_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"acceptance must be a number from 0 to 1, got 1\.5"):
        synthetic(DRAFTS["model"], 1.5)
    with pytest.raises(InvalidInput, match="needs a drafter with logits"):
        synthetic("ngram", 0.5).generate([1, 2], max_new_tokens=9)
