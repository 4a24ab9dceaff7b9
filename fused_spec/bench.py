"""How fast an engine decodes, by the number of drafts, against plain decoding in the same run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_spec.engine import Engine
from fused_spec.errors import InvalidInput
from fused_spec.generation import GenerationOutput
from fused_spec.prompt import Prompt
from fused_spec.synthetic import SyntheticDrafter
from fused_spec.table import Table
from fused_spec.timing import Turns, machine, take_turns

PLAIN, AUTO = "plain", "auto"


@dataclass(frozen=True)
class Measured:
    """One way of decoding, median over quiet turns.

    Attributes:
        name: "plain", m, or "auto".
        tokens_per_second: of whole calls, prompt included. over_plain: the ratio to plain decoding, turn by turn.
        tokens_per_round, acceptance_length: of the last turn.
    """

    name: str
    tokens_per_second: float
    over_plain: float
    tokens_per_round: float | None
    acceptance_length: float | None


@dataclass(frozen=True)
class Benchmark:
    """What a run gave. `settings` says what was run, `foreign` how much of the CPU time others used."""

    settings: dict[str, Any]
    ways: list[Measured]
    foreign: float
    quiet_turns: int

    def as_text(self) -> str:
        """A table."""
        rows = [
            (
                way.name,
                f"{way.tokens_per_second:.1f}",
                f"{way.over_plain:.2f}",
                _shown(way.tokens_per_round),
                _shown(way.acceptance_length),
            )
            for way in self.ways
        ]
        table = Table(("drafts per round", "tokens/s", "of plain", "tokens per round", "accepted per round"), rows)
        return f"{table.text()}\nothers used {self.foreign:.1%} of the CPU time; {self.quiet_turns} quiet turns"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the machine."""
        ways = [vars(way) for way in self.ways]
        return {"machine": machine(), "settings": self.settings, "ways": ways, "foreign_cpu_share": self.foreign,
                "quiet_turns": self.quiet_turns}  # fmt: skip

    def plot(self, path: Path) -> None:
        """Tokens per second against the number of drafts, as a PNG.

        Raises:
            InvalidInput: matplotlib is not installed, or the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise InvalidInput("--plot needs matplotlib: pip install 'fused-spec[bench]'") from None
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="drafts per round", ylabel="tokens per second")
        by_name = {way.name: way.tokens_per_second for way in self.ways}
        sizes = [name for name in by_name if name.isdecimal()]
        axes.plot([int(name) for name in sizes], [by_name[name] for name in sizes], marker="o", label="fixed")
        for name, style in ((PLAIN, "--"), (AUTO, ":")):
            if name in by_name:
                axes.axhline(by_name[name], linestyle=style, color="gray", label=name)
        axes.set_ylim(bottom=0)
        axes.legend()
        try:
            figure.savefig(path, format="png", dpi=150)
        except OSError as error:
            raise InvalidInput(f"--plot {path}: {error.strerror or error}") from None


def prescribe_acceptance(engine: Engine, acceptance: float) -> None:
    """Let an engine accept drafts with a probability of our choosing; what it says means nothing from here on."""
    engine.use_drafter(SyntheticDrafter(engine.drafter, acceptance, engine.state))


def measure(
    plain: Engine, drafting: Engine | None, prompt: Prompt, *, turns: int, new_tokens: int, sampling: dict[str, Any]
) -> Benchmark:
    """Time texts of `new_tokens` tokens, end or no end, every way once per turn.

    Args:
        plain: an engine without drafts.
        drafting: one with drafts, measured with each of its round sizes, and "auto" if it has several; or None.
        prompt, sampling: as `Engine.generate` takes them.
        turns: how often each way is timed, after one call that is not.

    Raises:
        MachineBusy: no turn was quiet.
    """
    if turns < 1:
        raise InvalidInput(f"turns must be an integer >= 1, got {turns}")
    outputs: dict[str, GenerationOutput] = {}

    def way(name: str, engine: Engine, sizes: Sequence[int] | None) -> Callable[[], float]:
        def call() -> float:
            outputs[name] = engine.generate(
                prompt, max_new_tokens=new_tokens, ignore_eos=True, round_sizes=sizes, **sampling
            )
            return len(outputs[name].token_ids)

        return call

    calls = {PLAIN: way(PLAIN, plain, None)}
    if drafting is not None:
        calls |= {str(size): way(str(size), drafting, [size] * new_tokens) for size in drafting.round_sizes}
        if len(drafting.round_sizes) > 1:
            calls[AUTO] = way(AUTO, drafting, None)
    for call in calls.values():
        call()  # the first one pages weights in, or compiles and records
    timed = take_turns(calls, turns)
    settings = {"new_tokens": new_tokens, "turns": turns, **sampling}
    ways = [_measured(name, timed, outputs[name]) for name in calls]
    return Benchmark(settings, ways, timed.foreign, len(timed.quiet))


def _measured(name: str, timed: Turns, output: GenerationOutput) -> Measured:
    stats, drafts = output.stats, name != PLAIN
    return Measured(
        name=name,
        tokens_per_second=timed.rate(name),
        over_plain=timed.ratio(name, PLAIN),
        tokens_per_round=stats.tokens_per_round if drafts else None,
        acceptance_length=stats.acceptance_length if drafts else None,
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
