"""Tables for terminals and for GitHub."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A header, and rows of as many cells; the first column is text, the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """In columns."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells)).rstrip()
            for cells in (zip(line, widths, strict=True) for line in lines)
        )

    def markdown(self) -> str:
        """As GitHub renders it."""
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.rows))
