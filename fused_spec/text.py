"""From token ids to text as it grows: characters split over tokens, and stop strings split over tokens."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text that is final the moment it is given out.

    Text is held back while it ends in an incomplete character or in something that may become a stop string.
    `before` is the token that comes before the text, if any: some tokenizers strip the space that starts a text, and
    what follows a prompt does not start one.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", stop: tuple[str, ...] = (), before: int | None = None
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        if tokenizer is not None and before is not None and not self._decode([before]).endswith(_INCOMPLETE):
            self._ids.append(before)
        self._shown = len(self._ids)  # ids whose text was decoded completely
        self._context = 0  # first id decoded along with new ones, so that joining spaces come out right
        self._given = 0  # characters taken from the ids after _shown, all that precede an incomplete one
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token; returns the text that has become certain. After a stop string, `stopped` is True."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        new = self._decode_new()
        certain = new.rstrip(_INCOMPLETE)
        fresh, self._given = certain[self._given :], len(certain)
        if new and certain == new:  # a skipped special token is no context for the spaces after it
            self._context, self._shown, self._given = self._shown, len(self._ids), 0
        return self._release(fresh)

    def flush(self) -> str:
        """The rest of the text, once no more tokens will come."""
        if self._tokenizer is None or self.stopped:
            return ""
        text = self._release(self._decode_new()[self._given :])
        if not self.stopped:
            text, self._held = text + self._held, ""
        self._context, self._shown, self._given = len(self._ids), len(self._ids), 0
        return text

    def _decode_new(self) -> str:
        before = self._decode(self._ids[self._context : self._shown])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of the text that begins a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
