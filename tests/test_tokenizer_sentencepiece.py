"""SentencePiece's BPE from GGUF metadata: against a slow implementation of the algorithm, and against transformers."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fused_spec.models.tokenizer import check_same_tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from tokenizer_fields import sentencepiece_fields

SPACE = "▁"
CORPUS = [
    "the cat sat on the mat and the other cat sat on that mat",
    "def add(first, second):\n    return first + second  # the sum of both",
    "naïve café, Straße and 12345 + 67890 = 80235; 80235 - 12345",
    "世界你好、你好世界。 the      end",
]


def reference(fields: dict[str, Any], text: str) -> list[int]:
    """Ids by the definition of the algorithm, with nothing for speed; BOS excepted."""
    get = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    tokens, kinds = get["tokens"], get["token_type"]
    normal = {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] == 1}
    whole = {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] in (2, 3, 4)}
    ids = []
    for part in re.split("(" + "|".join(map(re.escape, whole)) + ")", text):
        if part in whole:
            ids.append(whole[part])
            continue
        prefix = " " if part and get.get("add_space_prefix", True) else ""
        symbols = list((prefix + part).replace(" ", SPACE))
        while True:
            unions = [left + right for left, right in pairwise(symbols)]
            best = max((get["scores"][normal[union]] for union in unions if union in normal), default=None)
            if best is None:
                break
            at = next(i for i, union in enumerate(unions) if union in normal and get["scores"][normal[union]] == best)
            symbols[at : at + 2] = [unions[at]]
        for symbol in symbols:
            as_bytes = [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
            ids += [normal[symbol]] if symbol in normal else as_bytes
    return ids


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, float]:
    """Any tokens, most of which training would never bring forth, with different scores in any order."""
    tokens = draw(st.lists(st.text(f"ab{SPACE}é", min_size=2, max_size=6), unique=True, max_size=25))
    tokens = list(dict.fromkeys([*tokens, *"".join(tokens), SPACE]))
    return dict(zip(tokens, map(float, draw(st.permutations(range(-len(tokens), 0)))), strict=True))


TEXTS = st.lists(st.sampled_from([*"aaaabbb   é🙂\n", SPACE, "<s>", "</s>", "<think>", "<0x41>"]), max_size=30).map(
    "".join
)


@settings(deadline=None, max_examples=400)
@given(pieces=vocabularies(), text=TEXTS, prefix=st.booleans())
def test_ids_of_the_slow_implementation(pieces: dict[str, float], text: str, prefix: bool) -> None:
    fields = sentencepiece_fields(pieces, add_space_prefix=prefix)
    assert tokenizer_from_gguf(fields)(text).input_ids == [1, *reference(fields, text)]


@settings(deadline=None, max_examples=200)
@given(pieces=vocabularies(), text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE)))
def test_text_comes_back(pieces: dict[str, float], text: str) -> None:
    for prefix in (True, False):
        tokenizer = tokenizer_from_gguf(sentencepiece_fields(pieces, add_space_prefix=prefix))
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@settings(deadline=None, max_examples=100)
@given(pieces=vocabularies(), text=TEXTS)
def test_equal_scores_rank_by_id(pieces: dict[str, float], text: str) -> None:
    by_id = {token: -float(rank) for rank, token in enumerate(pieces)}
    equal = tokenizer_from_gguf(sentencepiece_fields(dict.fromkeys(pieces, -1000.0)))
    assert equal(text).input_ids == tokenizer_from_gguf(sentencepiece_fields(by_id))(text).input_ids


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A vocabulary such as training gives: merges, then single characters, scores falling throughout."""
    model = Tokenizer(models.BPE())
    model.train_from_iterator(
        [SPACE + text.replace(" ", SPACE) for text in CORPUS], trainers.BpeTrainer(vocab_size=150, show_progress=False)
    )
    by_id = sorted(model.get_vocab(), key=lambda token: (len(token) == 1, model.token_to_id(token)))
    assert sum(len(token) > 1 for token in by_id) > 100
    return sentencepiece_fields({token: -float(rank) for rank, token in enumerate(by_id)})


def by_transformers(fields: dict[str, Any], path: Path) -> PreTrainedTokenizerBase:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return tokenizer


def test_ids_of_transformers(trained: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = tokenizer_from_gguf(trained), by_transformers(trained, tmp_path / "x.gguf")
    check_same_tokenizer(ours, theirs, "ours", "theirs")
    words = " ".join(CORPUS).split(" ")
    mixed = [" ".join(words[i::step]) for step in (3, 5, 7) for i in range(step)]
    for text in [*CORPUS, *(text.strip() for text in mixed), "unseen: Ω ñ 🙂\r\n\x00 q", "", "x" * 300]:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids == [1, *reference(trained, text)]
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == text


def test_where_transformers_puts_no_space(trained: dict[str, Any], tmp_path: Path) -> None:
    """transformers leaves out the space that SentencePiece puts before text that begins with one, and the one that
    llama.cpp puts after special tokens. Should this fail, the texts above may hold such cases."""
    ours, theirs = tokenizer_from_gguf(trained), by_transformers(trained, tmp_path / "x.gguf")
    for text, spaced, bare in [(" a", "▁▁a", "▁a"), ("</s>a", "</s>▁a", "</s>a"), ("a</s> a", "▁a</s>▁▁a", "▁a</s>▁a")]:
        assert "".join(ours.convert_ids_to_tokens(ours(text).input_ids)) == "<s>" + spaced
        assert "".join(theirs.convert_ids_to_tokens(theirs(text).input_ids)) == "<s>" + bare


def test_merges_of_the_file_play_no_part(trained: dict[str, Any]) -> None:
    for merges in ([], ["c a"], "none"):
        with_merges = tokenizer_from_gguf(trained | {"tokenizer.ggml.merges": merges})
        assert with_merges(CORPUS[0]).input_ids == tokenizer_from_gguf(trained)(CORPUS[0]).input_ids


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 262]),
        ({"add_bos_token": False}, [262]),
        ({"add_eos_token": True}, [1, 262, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [262, 2]),
    ],
)
def test_bos_by_default_and_as_the_file_says(changes: dict[str, Any], expected: list[int]) -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_fields({SPACE: -2.0, "a": -3.0, "▁a": -1.0}, **changes))
    assert tokenizer("a").input_ids == expected
    assert tokenizer("a", add_special_tokens=False).input_ids == [262]


def test_token_types_and_roles() -> None:
    fields = sentencepiece_fields({SPACE: -3.0, "a": -4.0, "▁a": -1.0, "aa": -2.0})
    fields["tokenizer.ggml.token_type"][263] = 5
    for role in ("bos", "eos", "unknown"):
        del fields[f"tokenizer.ggml.{role}_token_id"]
    tokenizer = tokenizer_from_gguf(fields)
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert "aa" not in tokenizer.get_vocab()
    ids = tokenizer("<think>aaa</s><unk>").input_ids
    assert ids == [1, 259, 262, 261, 261, 2, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> aaa"


def test_unknown_characters_become_bytes_and_join_when_decoded() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_fields({SPACE: -1.0}))
    ids = tokenizer("é🙂", add_special_tokens=False).input_ids
    assert ids == [260, *(3 + byte for byte in "é🙂".encode())]
    assert tokenizer.decode(ids) == "é🙂"
    assert tokenizer.decode(ids[:2]) == "\N{REPLACEMENT CHARACTER}"


def test_the_name_of_a_byte_stays_text() -> None:
    """Its pieces join as far as normal tokens go, but not to the byte token, though its score is the highest."""
    pieces = ["<0", "x4", "1>", "x41>", *"▁<0x41>"]
    fields = sentencepiece_fields({token: -1.0 - rank for rank, token in enumerate(pieces)}, add_bos_token=False)
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer.convert_ids_to_tokens(tokenizer("<0x41>").input_ids) == ["▁", "<0", "x41>"]
    assert tokenizer("<0x41>").input_ids == reference(fields, "<0x41>")


def test_saved_folder_reads_the_same(trained: dict[str, Any], tmp_path: Path) -> None:
    saved = tokenizer_from_gguf(trained)
    saved.save_pretrained(tmp_path)
    read = tokenizer_from_folder(tmp_path)
    assert read is not None
    check_same_tokenizer(saved, read, "saved", "read")
    for text in [*CORPUS, "  a</s> b<think>c", "🙂"]:
        assert read(text).input_ids == saved(text).input_ids
        assert read.decode(read(text).input_ids) == saved.decode(saved(text).input_ids)
