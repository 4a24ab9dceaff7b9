"""A capture of Nsight beside the launches of a traced round: which launches are whose, and what they move at least."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from nsight_tables import Capture, Event
from round_bytes import Step

FIRST = "round_inputs_kernel"
"""The kernel that begins a round, and is launched once in it."""


class Line(NamedTuple):
    """A kernel, or several.

    Attributes:
        name: with the shape of the matrix product that it is for, where that is known.
        launches: how many of them the rest is of.
        seconds: in all of them together.
        measured: bytes from memory and to it, by the profiler.
        least: bytes that they move at least, by their arguments.
        product: whether it is a library's, for a matrix product.
    """

    name: str
    launches: int
    seconds: float
    measured: float | None = None
    least: float | None = None
    product: bool = False

    @property
    def num_bytes(self) -> float | None:
        """Measured, or else the least that there can be."""
        return self.least if self.measured is None else self.measured

    @property
    def gigabytes_per_second(self) -> float | None:
        """10^9 bytes per second of the kernels' own time."""
        return None if self.num_bytes is None or self.seconds <= 0 else self.num_bytes / self.seconds / 1e9


class Report(NamedTuple):
    """A capture in lines.

    Attributes:
        source: which kind of file it is from.
        rounds: how many it has; 0 if that cannot be told.
        kernels: a line for each, by falling time.
        sums: of several of them.
        notes: what is not known, and why.
    """

    source: str
    rounds: int
    kernels: list[Line]
    sums: list[Line]
    notes: list[str]


class _Mismatch(Exception):
    """A capture is not of the traced round; the message says where they differ."""


def report_of(capture: Capture, steps: Sequence[Step] = ()) -> Report:
    """The lines of a capture; with the launches of its rounds, of all or some of which it is, also their bytes."""
    rounds = sum(event.launches for event in capture.events if capture.whole_graphs or event.name == FIRST)
    lines = [_line(event) for event in capture.events]
    notes: list[str] = []
    known = False  # whether it is whole rounds of these steps
    if steps and capture.whole_graphs:
        known, each = True, sum(step.num_bytes for step in steps)
        lines = [line._replace(least=each * line.launches) for line in lines]
    elif steps:
        try:
            lines, known = _matched(capture, steps, rounds), True
        except _Mismatch as difference:
            notes.append(
                f"not whole rounds of what was traced, so the bytes of some kernels are not computed: {difference}"
            )
            lines = _by_name(capture.events, steps, rounds)
    return Report(capture.source, rounds, _merged(lines), _sums(lines, steps, rounds if known else 0), notes)


def _line(event: Event, least: float | None = None, product: str | None = None) -> Line:
    name = f"{event.name} [{product}]" if product else event.name
    return Line(name, event.launches, event.seconds, event.num_bytes, least, product is not None)


def _matched(capture: Capture, steps: Sequence[Step], rounds: int) -> list[Line]:
    """Lines with bytes, of whole rounds.

    Raises:
        _Mismatch: they are not these rounds.
    """
    if capture.ordered:
        starts = [index for index, event in enumerate(capture.events) if event.name == FIRST]
        if not starts or starts[0] > 0:
            raise _Mismatch(f"the first launch is not of {FIRST}")
        bounds = zip(starts, [*starts[1:], None], strict=True)
        return [line for start, end in bounds for line in _in_order(capture.events[start:end], steps)]
    lines = _by_name(capture.events, steps, rounds)
    expected, found = Counter(step.kernel for step in steps), Counter[str]()
    for event in capture.events:
        found[event.name] += event.launches
    for name, count in expected.items():
        if name is not None and found[name] != rounds * count:
            raise _Mismatch(f"{found[name]} launches of {name} in {rounds} rounds, not {count} in each")
    others = sum(line.launches for line in lines if line.product)
    if others < rounds * expected[None]:
        raise _Mismatch(f"{others} launches for the {rounds * expected[None]} matrix products of {rounds} rounds")
    return lines


def _by_name(events: Sequence[Event], steps: Sequence[Step], rounds: int) -> list[Line]:
    """Lines with bytes for our kernels that were launched as often as in so many rounds; all others are products'."""
    counts, found = Counter(step.kernel for step in steps), Counter[str]()
    each: dict[str | None, int] = defaultdict(int)
    for step in steps:
        each[step.kernel] += step.num_bytes
    for event in events:
        found[event.name] += event.launches
    lines = []
    for event in events:
        ours = event.name in counts
        whole = ours and found[event.name] == rounds * counts[event.name]
        least = each[event.name] * event.launches / counts[event.name] if whole else None
        lines.append(_line(event, least, None if ours else ""))
    return lines


def _in_order(events: Sequence[Event], steps: Sequence[Step]) -> Iterator[Line]:
    """The lines of one round, every launch beside its step; between our kernels are those of matrix products."""
    ours = {step.kernel for step in steps}
    rest = list(events)
    for is_product, group in groupby(steps, key=lambda step: step.kernel is None):
        expected = list(group)
        if is_product:
            count = next((i for i, event in enumerate(rest) if event.name in ours), len(rest))
            yield from _products(rest[:count], expected)
        else:
            count = len(expected)
            for step, event in zip(expected, [*rest[:count], *[None] * (count - len(rest))], strict=True):
                if event is None or event.name != step.kernel:
                    raise _Mismatch(f"{'nothing' if event is None else event.name} where {step.kernel} should be")
                yield _line(event, step.num_bytes)
        rest = rest[count:]
    if rest:
        raise _Mismatch(f"{rest[0].name} behind the last kernel of a round")


def _products(events: Sequence[Event], steps: Sequence[Step]) -> Iterator[Line]:
    """A product may take a second kernel, which adds up its parts: the bytes are the longest one's."""
    if not events or (len(steps) > 1 and len(events) != len(steps)):
        raise _Mismatch(f"{len(events)} kernels for {len(steps)} matrix products, {steps[0].product} the first")
    longest = max(events, key=lambda event: event.seconds)
    of_events = [*steps] * len(events) if len(steps) == 1 else steps
    for event, step in zip(events, of_events, strict=True):
        yield _line(event, step.num_bytes if len(steps) > 1 or event is longest else None, step.product)


def _merged(lines: Sequence[Line]) -> list[Line]:
    by_name: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_name[line.name].append(line)
    return sorted((_sum(name, same) for name, same in by_name.items()), key=lambda line: -line.seconds)


def _sum(name: str, lines: Sequence[Line]) -> Line:
    """Of several lines; bytes only where all have them."""

    def total(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) > 0 else None

    return Line(
        name,
        sum(line.launches for line in lines),
        sum(line.seconds for line in lines),
        total([line.measured for line in lines]),
        total([line.least for line in lines]),
        all(line.product for line in lines),
    )


def _sums(lines: Sequence[Line], steps: Sequence[Step], rounds: int) -> list[Line]:
    """The matrix products, where they are told from other kernels, and everything; `rounds` is 0 if it is not whole."""
    whole = _sum("all kernels", lines)
    products = _sum("matrix products", [line for line in lines if line.product])
    if rounds:
        whole = whole._replace(least=rounds * sum(step.num_bytes for step in steps))
        least = rounds * sum(step.num_bytes for step in steps if step.kernel is None)
        products = products._replace(least=least)
    return [products, whole] if products.launches else [whole]
