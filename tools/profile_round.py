"""Run rounds of an engine for a profiler, or under torch's and say where their time goes.

    python tools/profile_round.py MODEL [--draft DRAFT] [--num-draft-tokens M] [--rule RULE] [--rounds N] ...
    python tools/profile_round.py --shape Qwen3-8B --draft Qwen3-0.6B ...      random weights, nothing is downloaded

On a GPU rounds are replays of a CUDA graph (--graph, the default there). --eager runs the same function without graphs,
its parts marked: round inputs, draft, draft step i, sample, verify forward, verify, commit. A commit is a part of
verification's last launch on a GPU, and has a range of its own on a CPU.

--profiler torch (the default) prints a table per range and one per operator or kernel, with --trace FILE a trace for
chrome://tracing besides; ranges wait for the GPU at their end, so that their times are the device's. --profiler nsight
starts and stops the CUDA profiler around the rounds, behind prompt and capture, and marks the parts of eager rounds by
NVTX: tools/nsys_profile.sh and tools/ncu_profile.sh run that. Times include what the profiler costs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import fused_spec.drafters
import fused_spec.kernels.verify
import fused_spec.round
import fused_spec.runner
from fused_spec import Engine, GenerationError, InvalidInput
from fused_spec.drafters import ModelDrafter
from fused_spec.generation import Generation
from fused_spec.plan_report import Table
from profiled_engine import add_round_options, engine_of, one_by_one, started

Mark = Callable[[str], AbstractContextManager[Any]]
WHOLE, BETWEEN = "round", "(Python, outside of operators)"


class Share(NamedTuple):
    """What one range, operator or kernel took without what is inside of it and has a line of its own."""

    name: str
    calls: int
    seconds: float
    share: float


@contextmanager
def ranges(engine: Engine, mark: Mark) -> Iterator[None]:
    """Have the parts of eager rounds run inside of `mark(name)`; the round itself knows nothing of it."""
    steps: Iterator[int] = iter(())

    def marked(owner: Any, attribute: str, name: Callable[[], str]) -> AbstractContextManager[Any]:
        function = getattr(owner, attribute)

        def run(*arguments: Any, **options: Any) -> Any:
            with mark(name()):
                return function(*arguments, **options)

        return patch.object(owner, attribute, run)

    def draft() -> str:
        nonlocal steps
        steps = iter(range(sys.maxsize))
        return "draft"

    places: list[tuple[Any, str, Callable[[], str]]] = [
        (fused_spec.runner, "decode_round", lambda: WHOLE),
        (fused_spec.round, "round_inputs", lambda: "round inputs"),
        (engine.drafter, "propose", draft),
        (fused_spec.drafters, "sample", lambda: "sample"),
        (engine.target, "forward", lambda: "verify forward"),
        (fused_spec.round, "verify", lambda: "verify"),
        (fused_spec.kernels.verify, "commit", lambda: "commit"),
    ]
    if isinstance(engine.drafter, ModelDrafter):
        places.append((engine.drafter.model, "forward", lambda: f"draft step {next(steps)}"))
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(marked(*place))
        yield


def under_nsight(engine: Engine, generation: Generation, rounds: int, *, eager: bool) -> None:
    """Run rounds between start and stop of the CUDA profiler; what was launched before is over by then."""
    with ranges(engine, torch.cuda.nvtx.range) if eager else nullcontext():
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for _ in range(rounds):
            next(generation)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def under_torch(
    engine: Engine, generation: Generation, rounds: int, *, eager: bool, trace: Path | None = None
) -> dict[str, Any]:
    """Run rounds under torch's profiler: seconds per round, and shares of ranges and of operators or kernels."""
    cuda = engine.target.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        names.add(name)
        with record_function(name):
            yield
            wait()

    names: set[str] = set()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        next(generation)  # the first one under a profiler is slow
        wait()
        with ranges(engine, mark) if eager else nullcontext():
            begin = time.perf_counter()
            for _ in range(rounds):
                next(generation)
            wait()
            seconds = time.perf_counter() - begin
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = list(profiler.events() or [])
    found: dict[str, Any] = {"seconds_per_round": seconds / rounds}
    if eager:
        found["ranges"] = range_shares(events, names)
    if cuda:
        found["kernels"] = _kernel_shares(events)
    else:
        found["operators"] = operator_shares(events, names)
    return found


def range_shares(events: Sequence[Any], names: set[str]) -> list[Share]:
    """Ranges in the order of their first call, each without the ranges inside of it."""
    own: dict[int, float] = {}
    marked = [event for event in events if event.name in names]
    for event in marked:
        own[event.id] = event.time_range.elapsed_us()
    for event in marked:
        around = _around(event, names)
        if around is not None:
            own[around.id] -= event.time_range.elapsed_us()
    return _shares(((event.name, own[event.id]) for event in marked), by_time=False)


def operator_shares(events: Sequence[Any], names: set[str]) -> list[Share]:
    """Operators by time, each without those that it calls, and what rounds did outside of any."""
    inside = [event for event in events if event.name in names or _around(event, names) is not None]
    own = ((BETWEEN if event.name in names else event.name, event.self_cpu_time_total) for event in inside)
    return _shares(own, by_time=True)


def _kernel_shares(events: Sequence[Any]) -> list[Share]:
    on_device = (event for event in events if event.device_type != torch.autograd.DeviceType.CPU)
    kernels = (event for event in on_device if not event.is_user_annotation)
    return _shares(((event.name, event.time_range.elapsed_us()) for event in kernels), by_time=True)


def _around(event: Any, names: set[str]) -> Any:
    """The innermost range that an event is inside of; None if there is none."""
    parent = event.cpu_parent
    while parent is not None and parent.name not in names:
        parent = parent.cpu_parent
    return parent


def _shares(times: Iterator[tuple[str, float]], *, by_time: bool) -> list[Share]:
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, microseconds in times:
        calls[name] = calls.get(name, 0) + 1
        seconds[name] = seconds.get(name, 0.0) + microseconds * 1e-6
    total = sum(seconds.values()) or 1.0
    shares = [Share(name, calls[name], time, time / total) for name, time in seconds.items()]
    return sorted(shares, key=lambda share: -share.seconds) if by_time else shares


def as_text(found: dict[str, Any], rows: int) -> str:
    """The tables; of operators and kernels the `rows` that take most."""
    rounds, mode, device = found["rounds"], found["mode"], found["device"]
    each = found["seconds_per_round"] * 1e3
    parts = [f"{rounds} rounds, {mode}, on {device}: {each:.3f} ms per round, under torch's profiler"]
    for title, own in (("ranges", "range"), ("operators", "operator"), ("kernels", "kernel")):
        shares = found.get(title, [])
        most = shares if title == "ranges" else shares[:rows]
        if most:
            table = [
                [name, str(calls), f"{seconds / rounds * 1e3:.3f}", f"{share:.1%}"]
                for name, calls, seconds, share in most
            ]
            parts.append(Table([own, "calls", "ms per round", "share"], table).text())
        if len(most) < len(shares):
            rest = sum(share.share for share in shares[rows:])
            parts.append(f"{len(shares) - len(most)} other {title}: {rest:.1%}")
    return "\n\n".join(parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="profile_round", description=(__doc__ or "").partition("\n")[0])
    add_round_options(made)
    modes = made.add_mutually_exclusive_group()
    modes.add_argument("--graph", action="store_true", help="replay CUDA graphs; the default on a GPU")
    modes.add_argument("--eager", action="store_true", help="run rounds without graphs, their parts marked")
    made.add_argument("--profiler", choices=("torch", "nsight"), default="torch")
    made.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace; --profiler torch")
    made.add_argument("--rows", type=int, default=20, metavar="N", help="most lines of operators (%(default)s)")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(options: argparse.Namespace) -> dict[str, Any] | None:
    """What was found; None where another profiler looks on.

    Raises:
        InvalidInput: an option is not usable, or not on this machine.
    """
    nsight = options.profiler == "nsight"
    if nsight and (options.trace is not None or options.json):
        raise InvalidInput("--trace and --json are for --profiler torch: with nsight another program writes the report")
    engine = engine_of(options)
    cuda = engine.target.device.type == "cuda"
    for flag, given in (("--graph", options.graph), ("--profiler nsight", nsight)):
        if given and not cuda:
            raise InvalidInput(f"{flag} needs a CUDA device, and this runs on {engine.target.device}")
    eager = options.eager or not cuda
    if eager:
        one_by_one(engine)
    generation = started(engine, options)
    if nsight:
        under_nsight(engine, generation, options.rounds, eager=eager)
        return None
    found = under_torch(engine, generation, options.rounds, eager=eager, trace=options.trace)
    mode = "eager" if eager else "graphs"
    return {"mode": mode, "device": str(engine.target.device), "rounds": options.rounds, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run and print."""
    options = parser().parse_args(arguments)
    try:
        found = run(options)
    except (InvalidInput, OSError) as error:
        print(f"profile_round: error: {error}", file=sys.stderr)
        return 2
    except GenerationError as error:
        print(f"profile_round: error: {error}", file=sys.stderr)
        return 1
    if found is not None:
        shares = {
            name: [share._asdict() for share in value] for name, value in found.items() if isinstance(value, list)
        }
        print(json.dumps(found | shares, indent=1) if options.json else as_text(found, options.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
