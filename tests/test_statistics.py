"""Statistics: figures worked out by hand, and the standard error of a ratio against numpy."""

import json
import math

import numpy as np
import pytest

from fused_spec.statistics import Statistics

NAN = math.nan


def counted(statistics: Statistics) -> dict[str, object]:
    names = ("rounds", "round_sizes", "drafted", "tested", "accepted", "accepted_per_position", "emitted")
    return {name: getattr(statistics, name) for name in names}


def test_no_rounds() -> None:
    statistics = Statistics(verifier_forwards=1, prefill_seconds=0.5)
    assert statistics.as_dict() == {
        "rounds": 0,
        "round_sizes": [],
        "drafted": 0,
        "tested": 0,
        "accepted": 0,
        "accepted_per_position": [],
        "emitted": 0,
        "verifier_forwards": 1,
        "prefill_seconds": 0.5,
        "decode_seconds": 0.0,
        "tokens_per_round": None,
        "acceptance_length": None,
        "gain_is_variation": True,
        "total_variation": None,
        "total_variation_error": None,
        "total_variation_per_draft": None,
        "tokens_per_second": None,
    }


def test_rounds_by_hand() -> None:
    statistics = Statistics()
    statistics.add_round(3, 3, 3, 4, [0.25, 0.5, 0.0])  # all accepted, a bonus token
    assert statistics.total_variation_error is None
    statistics.add_round(3, 3, 1, 2, [0.125, 0.25, NAN])  # the second rejected
    statistics.add_round(3, 3, 0, 1, [0.5, NAN, NAN])  # the first rejected
    statistics.add_round(3, 2, 2, 3, [0.125, 0.125, NAN])  # only two drafts found
    statistics.decode_seconds = 4.0
    assert counted(statistics) == {
        "rounds": 4,
        "round_sizes": [3, 3, 3, 3],
        "drafted": 11,
        "tested": 8,
        "accepted": 6,
        "accepted_per_position": [3, 2, 1],
        "emitted": 10,
    }
    assert statistics.tokens_per_round == 2.5
    assert statistics.acceptance_length == 1.5
    assert statistics.total_variation == 1.875 / 10
    assert statistics.total_variation_per_draft == 1.875 / 8
    assert statistics.tokens_per_second == 2.5


@pytest.mark.parametrize(
    ("accepted", "emitted", "drafted", "per_position", "gain", "tested"),
    [
        (4, 1, 1, [1, 0, 0, 0], 1, 1),
        (4, 2, 2, [1, 1, 0, 0], 3, 2),
        (4, 4, 4, [1, 1, 1, 1], 15, 4),
        (4, 5, 4, [1, 1, 1, 1], 15, 4),
        (2, 1, 1, [1, 0, 0, 0], 1, 1),
        (2, 2, 2, [1, 1, 0, 0], 3, 2),
        (2, 3, 4, [1, 1, 0, 0], 7, 3),
        (0, 1, 4, [0, 0, 0, 0], 1, 1),
    ],
)
def test_a_round_cut_short_counts_up_to_the_cut(
    accepted: int, emitted: int, drafted: int, per_position: list[int], gain: int, tested: int
) -> None:
    """Gains are powers of two, so that their sum tells which were taken."""
    statistics = Statistics()
    gains = [2.0**slot if slot <= accepted else NAN for slot in range(4)]
    statistics.add_round(4, 4, accepted, emitted, gains)
    assert counted(statistics) == {
        "rounds": 1,
        "round_sizes": [4],
        "drafted": drafted,
        "tested": tested,
        "accepted": min(accepted, emitted),
        "accepted_per_position": per_position,
        "emitted": emitted,
    }
    assert statistics.total_variation == gain / emitted
    assert statistics.total_variation_per_draft == gain / tested


def test_fewer_drafts_than_slots_and_none() -> None:
    statistics = Statistics()
    statistics.add_round(4, 0, 0, 1, [NAN] * 4)
    assert statistics.total_variation == 0.0
    assert statistics.total_variation_per_draft is None
    statistics.add_round(4, 2, 2, 1, [0.5, 0.25, NAN, NAN])
    assert counted(statistics) == {
        "rounds": 2,
        "round_sizes": [4, 4],
        "drafted": 1,
        "tested": 1,
        "accepted": 1,
        "accepted_per_position": [1, 0, 0, 0],
        "emitted": 2,
    }
    assert statistics.total_variation_per_draft == 0.5


def test_rounds_of_several_sizes() -> None:
    statistics = Statistics()
    statistics.add_round(2, 2, 2, 3, [0.0, 0.0])
    statistics.add_round(4, 4, 4, 5, [0.0] * 4)
    statistics.add_round(1, 1, 1, 2, [0.0])
    statistics.add_round(0, 0, 0, 1, [])
    assert statistics.round_sizes == [2, 4, 1, 0]
    assert statistics.accepted_per_position == [3, 2, 1, 1]
    assert statistics.total_variation == statistics.total_variation_error == 0.0


def test_standard_error_of_a_ratio() -> None:
    """The linearised estimator: deviations x - r y of every round, their standard deviation over the mean of y."""
    rng = np.random.default_rng(3)
    gains = np.where(np.arange(5) < rng.integers(1, 6, (200, 1)), rng.uniform(0, 0.4, (200, 5)), NAN)
    emitted = (~np.isnan(gains)).sum(1) + (rng.random(200) < 0.3)
    statistics = Statistics()
    for row, count in zip(gains, emitted, strict=True):
        statistics.add_round(5, 5, int(count) - 1, int(count), row.tolist())
    x = np.nansum(gains, 1)
    ratio = x.sum() / emitted.sum()
    error = (x - ratio * emitted).std(ddof=1) / 200**0.5 / emitted.mean()
    # A sum of 200 positive terms is off by at most 200 * 2^-53 = 2e-14 of itself; the squares cancel to no less than a
    # fiftieth of their terms.
    assert statistics.total_variation == pytest.approx(ratio, rel=1e-12)
    assert statistics.total_variation_error == pytest.approx(error, rel=1e-12)


def test_standard_error_is_never_a_root_of_a_negative_number() -> None:
    """Equal rounds have no spread, but their squares cancel to rounding error of either sign."""
    for gain in (0.1, 0.3, 0.7, 1e-9):
        statistics = Statistics()
        for _ in range(50):
            statistics.add_round(1, 1, 0, 1, [gain])
        # Three sums of 50 terms, four in all with the factor 2, each off by at most 50 * 2^-53 of 50 gain^2:
        # sqrt(4 * 50 * 2^-53 * 50) / 50 = 2.1e-8.
        error = statistics.total_variation_error
        assert error is not None
        assert 0 <= error < 2.2e-8 * gain


def test_everything_public_is_json() -> None:
    statistics = Statistics()
    statistics.add_round(3, 3, 1, 2, [0.125, 0.25, NAN])
    assert statistics.as_dict()["tokens_per_second"] is None
    statistics.decode_seconds = 0.5
    figures = statistics.as_dict()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert not any(name.startswith("_") for name in figures)
    properties = {name for name, value in vars(Statistics).items() if isinstance(value, property)}
    fields = {name for name in vars(statistics) if not name.startswith("_")}
    assert set(figures) == properties | fields
    assert figures["tokens_per_second"] == 4.0
