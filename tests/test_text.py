"""TextStream against decoding the whole: nothing lost, nothing halved, nothing taken back, stops found at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from checkpoint_files import tokenizer_of
from fused_spec.text import TextStream

HALF = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "Hello, world! It's a fine day,  isn't it?\n\n\tdef f(x): return x ** 2 .",
    "emoji 🙂🚀 and 👩‍👩‍👧 family, flags 🇩🇪🇯🇵, keycap 1️⃣",
    "你好、世界。こんにちは 안녕하세요 𠮷野家 𒀀",
    "cafe\u0301 nai\u0308ve Straße ẹ\u0323\u0302 हिन्दी ภาษาไทย עברית",
    "a character that is really there: \ufffd, at the end too: \ufffd",
    " ",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return tokenizer_of(smollm2_path)


@pytest.fixture(scope="module")
def partial_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of tokens that are no whole characters: single bytes, and pieces such as " \\xf0\\x9f"."""
    return [token for token in range(len(tokenizer)) if HALF in decode(tokenizer, [token])]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def follow(tokenizer: PreTrainedTokenizerBase, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[str, int]:
    """Push ids as the engine does, checking each step against a decode of all ids so far: (text, tokens used)."""
    stream = TextStream(tokenizer, stops)
    shown = ""
    for used in range(1, len(ids) + 1):
        shown += stream.push(ids[used - 1])
        whole = decode(tokenizer, ids[:used]).rstrip(HALF)
        found = [at for at in map(whole.find, stops) if at >= 0]
        assert stream.stopped is bool(found)
        if found:
            assert shown == whole[: min(found)]
            assert stream.flush() == ""
            return shown, used
        # All is shown but what may still become a stop string.
        may_begin = [n for stop in stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
        assert shown == whole[: len(whole) - max(may_begin, default=0)]
    return shown + stream.flush(), len(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_chunks_make_up_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = list(tokenizer.encode(text))
    assert follow(tokenizer, ids) == (text, len(ids))


def test_a_character_split_over_tokens_appears_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = list(tokenizer.encode("a🙂b"))
    assert [decode(tokenizer, [token]) for token in ids[:1] + ids[-1:]] == ["a", "b"]
    assert len(ids) > 3
    stream = TextStream(tokenizer)
    chunks = [stream.push(token) for token in ids]
    assert [chunk for chunk in chunks if chunk] == ["a", "🙂", "b"]
    assert chunks.index("🙂") == len(ids) - 2
    assert stream.flush() == ""


def test_an_incomplete_character_at_the_end_is_flushed(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = list(tokenizer.encode("a🙂"))[:-1]
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in ids) == "a"
    assert stream.flush() == decode(tokenizer, ids)[1:] == HALF
    assert stream.flush() == ""


def test_special_tokens_are_not_text(tokenizer: PreTrainedTokenizerBase) -> None:
    start, end = (tokenizer.get_vocab()[name] for name in ("<|im_start|>", "<|im_end|>"))
    smile = list(tokenizer.encode("🙂"))
    ids = [start, *tokenizer.encode("Hi "), end, *smile[:1], start, *smile[1:], end]
    assert follow(tokenizer, ids) == ("Hi 🙂", len(ids))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_make_up_their_decoding(
    tokenizer: PreTrainedTokenizerBase, partial_ids: list[int], data: st.DataObject
) -> None:
    """Whole tokens, special ones, and pieces of characters in any order."""
    token = st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(partial_ids), st.integers(0, 16))
    ids = data.draw(st.lists(token, max_size=24))
    assert follow(tokenizer, ids) == (decode(tokenizer, ids), len(ids))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_stops_end_any_text(tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    text = data.draw(st.text("ab \n🙂é", max_size=24))
    stops = tuple(data.draw(st.lists(st.text("ab \n🙂é", min_size=1, max_size=4), max_size=3)))
    ids = list(tokenizer.encode(text))
    ends = [at for at in map(text.find, stops) if at >= 0]
    shown, used = follow(tokenizer, ids, stops)
    if not ends:
        assert (shown, used) == (text, len(ids))
    else:
        # Text that is out cannot be taken back: the stop that is complete first ends it, and of these the earliest.
        first = next(n for n in range(len(ids) + 1) if any(stop in decode(tokenizer, ids[:n]) for stop in stops))
        known = decode(tokenizer, ids[:first])
        assert (shown, used) == (known[: min(at for at in map(known.find, stops) if at >= 0)], first)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("Hello, world!", ("Hello",), ""),
        ("Hello, world!", ("H",), ""),
        ("Hello, world!", ("o, wor",), "Hell"),
        ("Hello, world!", ("world", ", "), "Hello"),
        ("Hello, world!", (", ", "world"), "Hello"),
        ("Hello, world!", ("!",), "Hello, world"),
        ("Hello, world!", ("world!!", "worl", "or!"), "Hello, "),
        ("Hello, world!", ("world!", "world"), "Hello, "),
        ("xaaab", ("aab",), "xa"),
        ("x abababac", ("ababac",), "x ab"),
        ("one\n\n\ntwo", ("\n\n",), "one"),
        ("a 🙂 b", ("🙂",), "a "),
        ("a 🙂 b", (" b",), "a 🙂"),
    ],
)
@pytest.mark.parametrize("per_character", [False, True])
def test_text_ends_before_the_first_stop(
    tokenizer: PreTrainedTokenizerBase, text: str, stops: tuple[str, ...], expected: str, per_character: bool
) -> None:
    pieces = list(text) if per_character else [text]
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    shown, _ = follow(tokenizer, ids, stops)
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("Hello, wor", ("world",), "wor"),
        ("Hello, wor", ("world", "o, world", "r!"), "o, wor"),
        ("aaaa", ("aab",), "aa"),
        ("a\n", ("\n\n", "\nb"), "\n"),
        ("ab ab", ("ab abc",), "ab ab"),
    ],
)
def test_part_of_a_stop_at_the_end_is_flushed(
    tokenizer: PreTrainedTokenizerBase, text: str, stops: tuple[str, ...], held: str
) -> None:
    stream = TextStream(tokenizer, stops)
    assert "".join(stream.push(token) for token in tokenizer.encode(text)) == text.removesuffix(held)
    assert stream.flush() == held
    assert not stream.stopped
    assert stream.flush() == ""


def test_a_stop_is_found_in_a_token_that_also_begins_a_character(
    tokenizer: PreTrainedTokenizerBase, partial_ids: list[int]
) -> None:
    """Tokens such as " \\xf0\\x9f" complete a stop that ends in a space."""
    spaced = [token for token in partial_ids if decode(tokenizer, [token]) == " " + HALF]
    assert spaced
    stream = TextStream(tokenizer, ("end ",))
    assert [stream.push(token) for token in (*tokenizer.encode("The end"), spaced[0])][-1] == ""
    assert stream.stopped
    assert stream.flush() == ""


def test_spaces_that_depend_on_what_came_before() -> None:
    """SentencePiece's decoder drops the space before the first word of whatever it is given."""
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "!": 2, "▁": 3}, unk_token="!"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert follow(tokenizer, [0, 1, 2, 3, 0]) == ("one two!  one", 5)
    assert follow(tokenizer, [4, 0, 4, 4, 1, 4, 2]) == ("one two!", 7)
    assert follow(tokenizer, [0, 4, 1, 1], ("two two",)) == ("one ", 4)


def test_a_text_that_follows_a_prompt_keeps_its_first_space() -> None:
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "!": 2}, unk_token="!"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)

    def text(before: int | None) -> str:
        stream = TextStream(tokenizer, before=before)
        return "".join(map(stream.push, [0, 1, 2])) + stream.flush()

    assert text(None) == text(3) == "one two!"  # nothing before, or a special token, which begins a text of its own
    assert text(1) == text(2) == " one two!"


def test_half_a_character_before_the_text_is_no_context(
    tokenizer: PreTrainedTokenizerBase, partial_ids: list[int]
) -> None:
    stream = TextStream(tokenizer, before=partial_ids[0])
    ids = tokenizer("a b")["input_ids"]
    assert "".join(map(stream.push, ids)) + stream.flush() == "a b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert [stream.push(3), stream.push(4), stream.flush()] == ["", "", ""]
    assert not stream.stopped
