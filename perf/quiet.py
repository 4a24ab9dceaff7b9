"""Benchmarks take turns as fused_spec/timing.py has it; a busy machine skips them, which is not a regression."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

from fused_spec.timing import MachineBusy, Turns, timed


def take_turns(variants: Mapping[str, Callable[[], float | None]], turns: int, benchmark: Any) -> Turns:
    """Times the variants in turn; the first of them is what pytest-benchmark's fixture reports."""
    result = Turns({name: [] for name in variants})
    first, *others = variants

    def run(name: str) -> None:
        result.samples[name].append(timed(variants[name]))

    def others_first() -> None:
        for name in others:
            run(name)

    benchmark.pedantic(run, args=(first,), setup=others_first, rounds=turns)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skip what a busy machine kept from being measured."""
    try:
        return (yield)
    except MachineBusy as busy:
        pytest.skip(str(busy))
