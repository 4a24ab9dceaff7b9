"""A stand-in for a GPU that records and replays: functions run when they are replayed, on the CPU.

What it shows is the host's side of captured rounds: that a function run again on the same buffers gives what a fresh
call gives, that reports come back in order, and that rounds launched ahead of an end change nothing.
"""

from collections.abc import Callable

from fused_spec import Engine
from fused_spec.runner import GraphRunner, Speculation


class Replayer:
    """Counts what is recorded, replayed and waited for."""

    pinned = False

    def __init__(self) -> None:
        self.recorded = self.launched = self.waited = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        self.recorded += 1
        return function

    def mark(self) -> Callable[[], None]:
        self.launched += 1
        number = self.launched

        def wait() -> None:
            self.waited = number

        return wait


def with_graphs(engine: Engine) -> Engine:
    """The same engine, its rounds run as graphs."""
    parts = Speculation(engine.target, engine.cache, engine.drafter, engine.state)
    engine.runner = GraphRunner(parts, engine.round_sizes, Replayer())
    return engine
