"""Timing in turns: what counts, what is reported, and what a busy machine leads to."""

import pytest

from fused_spec import timing
from fused_spec.timing import MachineBusy, Sample, Turns, take_turns, timed


def turns(**foreign: list[float]) -> Turns:
    """Variant a takes 1, 2, ... seconds for 10 tokens, b twice as long."""
    speed = {"a": 1.0, "b": 2.0}
    return Turns(
        {
            name: [Sample(speed[name] * (i + 1), 10.0, share) for i, share in enumerate(shares)]
            for name, shares in foreign.items()
        }
    )


def test_only_turns_that_were_quiet_for_all_count() -> None:
    measured = turns(a=[0.0, 0.2, 0.04], b=[0.01, 0.0, 0.05])
    assert measured.quiet == [0, 2]
    assert measured.seconds("a") == 2.0  # of 1 and 3
    assert measured.ratio("a", "b") == 2.0
    assert measured.rate("b") == pytest.approx((10 / 2 + 10 / 6) / 2)


def test_a_busy_machine_is_no_regression() -> None:
    with pytest.raises(MachineBusy, match="machine busy: others used 30%"):
        turns(a=[0.3, 0.3], b=[0.3, 0.3]).ratio("a", "b")


def test_variants_take_turns() -> None:
    order: list[str] = []
    measured = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["b", "a"] * 3
    assert [len(samples) for samples in measured.samples.values()] == [3, 3]


def test_what_others_used_is_all_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds on two cores, of which three core-seconds were busy and one of these ours: half the machine."""
    monkeypatch.setattr(timing, "_busy_seconds", iter([100.0, 103.0]).__next__)
    monkeypatch.setattr(timing.os, "times", iter([(4.0, 1.0, 0.0, 0.0, 9.0), (4.5, 1.5, 0.0, 0.0, 9.0)]).__next__)
    monkeypatch.setattr(timing.time, "perf_counter", iter([7.0, 9.0]).__next__)
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
    assert timed(lambda: 5.0) == Sample(2.0, 5.0, 0.5)


def test_busy_time_of_the_machine_rises_with_work() -> None:
    before = timing._busy_seconds()
    while timing._busy_seconds() < before + 0.05:
        sum(range(100_000))
