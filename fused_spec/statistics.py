"""What a generation counted. Every figure is cut at the same place as the text."""

import math
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counters of one generation. The token sampled from the prefill belongs to no round.

    Attributes:
        gain_is_variation: whether the rule's acceptance gain is a total variation; if not, those figures are None.
        rounds: rounds that emitted a token.
        round_sizes: m of each round.
        drafted: drafts proposed (in a round cut short by an end of text: up to the cut).
        tested: drafts that were accepted or rejected, no draft before them having been rejected (likewise).
        accepted: accepted drafts that were emitted.
        accepted_per_position: the same by slot, 0..m-1.
        emitted: tokens emitted by rounds.
        verifier_forwards: forward passes of the verifier, prefill chunks included.
        prefill_seconds: until the first token was known. decode_seconds: all rounds, without the caller's time.
    """

    gain_is_variation: bool = True
    rounds: int = 0
    round_sizes: list[int] = field(default_factory=list)
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    emitted: int = 0
    verifier_forwards: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _gain: float = 0.0
    # Sums over rounds of x^2, x y and y^2, x the gain and y the tokens of a round: for the standard error of a ratio.
    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0

    def add_round(self, size: int, drafted: int, accepted: int, emitted: int, gains: list[float]) -> None:
        """Count one round of `emitted` tokens, of which it could have emitted accepted + 1."""
        cut = emitted <= accepted
        self.rounds += 1
        self.round_sizes.append(size)
        self.drafted += min(drafted, emitted) if cut else drafted
        self.accepted += min(accepted, emitted)
        self.accepted_per_position += [0] * (size - len(self.accepted_per_position))
        for slot in range(min(accepted, emitted)):
            self.accepted_per_position[slot] += 1
        self.emitted += emitted
        tested = [gain for gain in gains[:emitted] if not math.isnan(gain)]
        gain = sum(tested)
        self.tested += len(tested)
        self._gain += gain
        self._xx += gain * gain
        self._xy += gain * emitted
        self._yy += emitted * emitted

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens emitted per round, the resampled or bonus token included."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def acceptance_length(self) -> float | None:
        """Accepted drafts per round, without the extra token (AL in papers)."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def total_variation(self) -> float | None:
        """Estimated total variation paid per emitted token: tv_gain over emitted tokens; 0 for a lossless rule."""
        return self._gain / self.emitted if self.emitted and self.gain_is_variation else None

    @property
    def total_variation_error(self) -> float | None:
        """Standard error of total_variation, a ratio over rounds; None below two rounds."""
        if self.rounds < 2 or not self.gain_is_variation:
            return None
        ratio = self._gain / self.emitted
        squares = self._xx - 2 * ratio * self._xy + ratio * ratio * self._yy
        return math.sqrt(max(squares, 0.0) * self.rounds / (self.rounds - 1)) / self.emitted

    @property
    def total_variation_per_draft(self) -> float | None:
        """Estimated total variation paid per tested draft."""
        return self._gain / self.tested if self.tested and self.gain_is_variation else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens emitted by rounds per second of decoding; None before any was timed."""
        return self.emitted / self.decode_seconds if self.decode_seconds else None

    def as_dict(self) -> dict[str, object]:
        """Every public figure, for JSON."""
        derived = (
            "tokens_per_round",
            "acceptance_length",
            "total_variation",
            "total_variation_error",
            "total_variation_per_draft",
            "tokens_per_second",
        )
        counted = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return counted | {name: getattr(self, name) for name in derived}
