"""How many tokens to draft in the next round.

The choice may look at committed tokens and at drafts that were tested, never at a draft beyond the first rejection:
its noise is drawn again for the token that takes its place, and a choice that saw it would bias the text.
"""

from collections.abc import Sequence
from typing import Protocol

from fused_spec.errors import InvalidInput

AUTO_SIZES = (1, 2, 3, 4, 6, 8)
"""What "auto" chooses from; there is a captured graph for each."""

_FADING = 0.97
"""Weight of what is known after another tested draft: about the last thirty count."""
_FIRST_GUESS, _ITS_WEIGHT = 0.7, 4.0
"""Acceptance to begin with, and how many tested drafts that guess is worth."""
_ROW_COST = 0.02
"""What another row is taken to cost a verifier's forward pass, as a share of a plain step: an assumption, not measured.
Where a pass waits for its weights it is less."""


def possible_sizes(drafting: bool, num_draft_tokens: int | str) -> tuple[int, ...]:
    """Every m that rounds may have, ascending. None is 0 with a draft model, whose first step fills a hole."""
    if not drafting:
        return (0,)
    return AUTO_SIZES if isinstance(num_draft_tokens, str) else (num_draft_tokens,)


class RoundSize(Protocol):
    """Chooses m, round by round."""

    def next(self) -> int:
        """The size of the next round to be launched."""

    def learn(self, tested: int, accepted: int) -> None:
        """Take in the outcome of a round: how many drafts were tested, and how many of them were accepted."""


class FixedSize:
    """Always the same m."""

    def __init__(self, size: int) -> None:
        self._size = size

    def next(self) -> int:
        """m."""
        return self._size

    def learn(self, tested: int, accepted: int) -> None:
        """Nothing to learn."""


class AdaptiveSize:
    """The m of `AUTO_SIZES` that promises most tokens per time, given how many of the last drafts were accepted.

    With a probability a of acceptance per draft, independent of the others, a round of m drafts gives
    (1 - a^(m+1)) / (1 - a) tokens and costs 1 + m (draft cost + row cost) plain steps. Times are not measured: the same
    text is drafted in the same way on every run.
    """

    def __init__(self, draft_cost: float) -> None:
        """`draft_cost`: a draft step's share of a plain step of the verifier."""
        self._cost = draft_cost + _ROW_COST
        self._accepted, self._tested = _FIRST_GUESS * _ITS_WEIGHT, _ITS_WEIGHT

    @property
    def acceptance(self) -> float:
        """Share of tested drafts that were accepted of late."""
        return self._accepted / self._tested

    def next(self) -> int:
        """The best size for the acceptance seen so far."""
        return max(AUTO_SIZES, key=lambda size: tokens_per_round(self.acceptance, size) / (1 + size * self._cost))

    def learn(self, tested: int, accepted: int) -> None:
        """Old outcomes fade, draft by draft."""
        kept = _FADING**tested
        self._accepted = kept * self._accepted + accepted
        self._tested = kept * self._tested + tested


class PrescribedSizes:
    """The sizes of an earlier run, to replay it; whatever comes after them is chosen by another."""

    def __init__(self, sizes: Sequence[int], afterwards: RoundSize) -> None:
        self._left, self._afterwards = list(reversed(sizes)), afterwards

    def next(self) -> int:
        """The next one of the list."""
        return self._left.pop() if self._left else self._afterwards.next()

    def learn(self, tested: int, accepted: int) -> None:
        """For what comes after the list."""
        self._afterwards.learn(tested, accepted)


def tokens_per_round(acceptance: float, size: int) -> float:
    """Expected tokens of a round of `size` drafts, each accepted with the same probability, the extra one included."""
    return sum(acceptance**i for i in range(size + 1))


def size_chooser(sizes: tuple[int, ...], draft_cost: float, replayed: Sequence[int] | None) -> RoundSize:
    """Who chooses the sizes of a text's rounds.

    Args:
        sizes: those that rounds may have.
        draft_cost: see `AdaptiveSize`.
        replayed: sizes of the first rounds, from an earlier text, or None.

    Raises:
        InvalidInput: one of the replayed sizes is not among those that rounds may have.
    """
    chosen = FixedSize(sizes[0]) if len(sizes) == 1 else AdaptiveSize(draft_cost)
    if replayed is None:
        return chosen
    if not isinstance(replayed, Sequence) or any(type(size) is not int or size not in sizes for size in replayed):
        raise InvalidInput(f"round_sizes must be a list of sizes out of {sizes}, got {replayed!r}")
    return PrescribedSizes(replayed, chosen)
