"""Prompt lookup under Triton's interpreter: exactly the tokens of the oracle, and nothing read beyond the text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_spec.errors import InvalidInput
from fused_spec.kernels.launch import recorded
from fused_spec.kernels.ngram import ngram_propose, ngram_propose_reference
from fused_spec.kernels.ngram_triton import ngram_triton
from traffic import traffic


def looked_up(text: list[int], stale: list[int], count: int, shortest: int, longest: int, block: int) -> list[int]:
    out = torch.full((count,), -7)
    buffer, length = torch.tensor(text + stale, dtype=torch.int64), torch.tensor([len(text)])
    ngram_triton(buffer, length, out, shortest, longest, block=block)
    return out.tolist()


@settings(max_examples=150, deadline=None)
@given(
    text=st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(-1, kinds - 2), min_size=1, max_size=70)),
    repeats=st.integers(0, 8),
    count=st.integers(1, 8),
    shortest=st.integers(1, 3),
    more=st.integers(0, 2),
    block=st.sampled_from([8, 16, 32, 128]),
)
def test_same_as_the_oracle(text: list[int], repeats: int, count: int, shortest: int, more: int, block: int) -> None:
    """Small alphabets, in which -1 is nothing special; what lies beyond the text would make for longer matches."""
    stale = (text * 3)[: 10 * repeats]
    expected = ngram_propose_reference(text, count, shortest=shortest, longest=shortest + more)
    assert looked_up(text, stale, count, shortest, shortest + more, block) == expected


@pytest.mark.parametrize("at", [0, 1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 21, 22, 23])
@pytest.mark.parametrize("length", [31, 32, 33, 34])
def test_matches_on_the_edges_of_a_block(at: int, length: int) -> None:
    """Five tokens, once anywhere in a text that has nothing twice and once at its end; blocks are eight wide."""
    marker = [901, 902, 903, 904, 905]
    text = list(range(length - 5)) + marker
    text[at : at + 5] = marker
    for longest in (2, 4, 6):
        copied = looked_up(text, marker * 3, 3, 2, longest, 8)
        assert copied == ngram_propose_reference(text, 3, longest=longest) == text[at + 5 : at + 8]


def test_of_equal_matches_the_latest_and_of_all_the_longest() -> None:
    once, twice = [1, 2, 3, 50], [9, 2, 3, 60, 8, 2, 3, 70]
    for block in (8, 16, 64):
        assert looked_up([*twice, 5, 2, 3], [], 1, 2, 4, block) == [70]
        assert looked_up([*once, *twice, 1, 2, 3], [], 1, 2, 4, block) == [50]
        assert looked_up([*once, *twice, 1, 2, 3], [], 1, 2, 2, block) == [70]
        assert looked_up([*twice, 5, 2, 3], [], 1, 3, 4, block) == [-1]


def test_only_the_text_is_read() -> None:
    """Its tokens once over, whatever the capacity, and the length; in one launch."""
    tokens, length, out = torch.randint(0, 3, (5000,)), torch.tensor([300]), torch.empty(6, dtype=torch.int64)
    for backend in ("triton", "torch"):
        with traffic(tokens=tokens, length=length, out=out) as seen:
            assert ngram_propose(tokens, length, 6, out=out, backend=backend) is out
        assert out.tolist() == ngram_propose_reference(tokens[:300].tolist(), 6)
        if backend == "triton":
            assert len(seen.launches) == 1
            assert seen.loaded == {"tokens": 300 * 8, "length": 8, "out": 0}
            assert seen.stored == {"tokens": 0, "length": 0, "out": 6 * 8}


def test_a_text_longer_than_a_step() -> None:
    tokens = torch.arange(9000)
    tokens[8990:8994] = tokens[4093:4097]
    ours = ngram_propose(tokens, torch.tensor([8994]), 5, backend="triton")
    assert ours.tolist() == [4097, 4098, 4099, 4100, 4101]


def test_nothing_to_propose() -> None:
    tokens = torch.zeros(20, dtype=torch.int64)
    for length in (0, 1, 2):
        assert ngram_propose(tokens, torch.tensor([length]), 3, backend="triton").tolist() == [-1, -1, -1]
    with recorded() as launches:
        assert ngram_propose(tokens, torch.tensor([9]), 0, backend="triton").shape == (0,)
    assert not launches


def test_what_is_refused() -> None:
    tokens, length = torch.zeros(20, dtype=torch.int64), torch.tensor([9])
    for arguments, options, message in (
        ((tokens.int(), length, 3), {}, "tokens: expected int64"),
        ((tokens[::2], length, 3), {}, "tokens: expected unit stride"),
        ((tokens, torch.tensor(9), 3), {}, "length: expected shape"),
        ((tokens, length, 3), {"shortest": 0}, "expected 1 <= shortest <= longest, got 0 and 4"),
        ((tokens, length, 3), {"shortest": 5}, "expected 1 <= shortest <= longest, got 5 and 4"),
        ((tokens, length, 3), {"out": tokens[:2]}, "out: expected shape"),
    ):
        with pytest.raises(InvalidInput, match=message):
            ngram_propose(*arguments, **options)
