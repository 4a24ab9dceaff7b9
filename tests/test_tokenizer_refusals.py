"""Metadata that no tokenizer can be built from is refused in one line that names the file."""

import time
from typing import Any

import pytest

from fused_spec.errors import InvalidInput
from fused_spec.models.tokenizer import tokenizer_from_gguf
from tokenizer_fields import BYTES, byte_level_fields, sentencepiece_fields

PRE = "allowed: default, gpt-2, llama-bpe, llama-v3, llama3, qwen2, deepseek-r1-qwen, smollm, tekken"
MODEL = "allowed: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)"
PIECES = {"a": -2.0, "b": -3.0, "ab": -1.0}
NUM_TOKENS = 263


def refusal(fields: dict[str, Any]) -> str:
    with pytest.raises(InvalidInput) as caught:
        tokenizer_from_gguf(fields, "x.gguf")
    name, _, message = str(caught.value).partition(": ")
    assert name == "x.gguf"
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, f"tokenizer.ggml.model is 't5'; {MODEL}"),
        ({"model": None}, f"tokenizer.ggml.model is None; {MODEL}"),
        ({"model": ["gpt2"]}, f"tokenizer.ggml.model is ['gpt2']; {MODEL}"),
        ({"pre": "gpt-4o"}, f"tokenizer.ggml.pre is 'gpt-4o'; {PRE}"),
        ({"pre": None}, f"tokenizer.ggml.pre is None; {PRE}"),
        ({"pre": ["qwen2"]}, f"tokenizer.ggml.pre is ['qwen2']; {PRE}"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or not a list of texts"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing or not a list of texts"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not a list of texts"),
        ({"merges": None}, "tokenizer.ggml.merges is missing or not a list of texts"),
        ({"merges": ["a b", "q q"]}, "tokenizer.ggml.merges holds 'q q', which does not join tokens to a token"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab', which does not join tokens to a token"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges holds 'a b c', which does not join tokens to a token"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type must hold one type for each of 265 tokens"),
        ({"token_type": [1] * 264 + ["3"]}, "tokenizer.ggml.token_type holds '3'; allowed: 1 to 6"),
        ({"token_type": [1] * 264 + [True]}, "tokenizer.ggml.token_type holds True; allowed: 1 to 6"),
        ({"token_type": [1] * 264 + [[]]}, "tokenizer.ggml.token_type holds []; allowed: 1 to 6"),
        ({"token_type": [1] * 264 + [7]}, "tokenizer.ggml.token_type holds 7; allowed: 1 to 6"),
        ({"bos_token_id": 265}, "tokenizer.ggml.bos_token_id is 265; allowed: an integer from 0 to 264"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2'; allowed: an integer from 0 to 264"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; allowed: true or false"),
        (
            {"add_bos_token": True, "bos_token_id": None},
            "tokenizer.ggml.add_bos_token is true, but there is no bos token",
        ),
    ],
)
def test_byte_level(changes: dict[str, Any], message: str) -> None:
    assert refusal(byte_level_fields(**changes)) == message


BYTE_TOKENS = "byte tokens are <0x00> to <0xFF>"
NOT_FINITE = "tokenizer.ggml.scores holds a number that is not finite"
SCORES = f"tokenizer.ggml.scores must hold one number for each of {NUM_TOKENS} tokens"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, SCORES),
        ({"scores": "text"}, SCORES),
        ({"scores": [0.0] * (NUM_TOKENS - 1)}, SCORES),
        ({"scores": [0.0] * (NUM_TOKENS - 1) + [0]}, SCORES),
        ({"scores": [0.0] * (NUM_TOKENS - 1) + ["0"]}, SCORES),
        (
            {"scores": [0.0] * (NUM_TOKENS - 1) + [float("nan")]},
            "tokenizer.ggml.scores holds a number that is not finite",
        ),
        ({"scores": [float("-inf")] * NUM_TOKENS}, "tokenizer.ggml.scores holds a number that is not finite"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or not a list of texts"),
        ({"token_type": [1]}, f"tokenizer.ggml.token_type must hold one type for each of {NUM_TOKENS} tokens"),
        ({"token_type": [0] * NUM_TOKENS}, "tokenizer.ggml.token_type holds 0; allowed: 1 to 6"),
        ({"token_type": [1] * NUM_TOKENS}, f"tokenizer.ggml.tokens lacks the byte token '<0x00>'; {BYTE_TOKENS}"),
        ({"add_space_prefix": "yes"}, "tokenizer.ggml.add_space_prefix is 'yes'; allowed: true or false"),
        ({"add_eos_token": 0}, "tokenizer.ggml.add_eos_token is 0; allowed: true or false"),
        ({"unknown_token_id": NUM_TOKENS}, "tokenizer.ggml.unknown_token_id is 263; allowed: an integer from 0 to 262"),
    ],
)
def test_sentencepiece(changes: dict[str, Any], message: str) -> None:
    assert refusal(sentencepiece_fields(PIECES, **changes)) == message


def test_sentencepiece_needs_types() -> None:
    fields = sentencepiece_fields(PIECES)
    del fields["tokenizer.ggml.token_type"]
    assert refusal(fields) == "tokenizer.ggml.token_type is missing; this kind of tokenizer needs it"


@pytest.mark.parametrize(
    ("token_id", "token", "kind", "message"),
    [
        (3 + 0x41, "<0xa1>", 6, f"lacks the byte token '<0x41>'; {BYTE_TOKENS}"),
        (3 + 0x41, BYTES[0x41], 5, f"lacks the byte token '<0x41>'; {BYTE_TOKENS}"),
        (262, "abc", 6, f"holds the byte token 'abc'; {BYTE_TOKENS}"),
        (262, "a", 1, "holds 'a' twice"),
        (262, BYTES[0], 1, "holds '<0x00>' twice"),
        (262, "a" * 257, 1, "holds 'aaaaaaaaaaaaaaaaaaaa'..., a token of 257 characters; allowed: at most 256"),
    ],
)
def test_sentencepiece_tokens(token_id: int, token: str, kind: int, message: str) -> None:
    fields = sentencepiece_fields(PIECES)
    fields["tokenizer.ggml.tokens"][token_id] = token
    fields["tokenizer.ggml.token_type"][token_id] = kind
    assert refusal(fields) == f"tokenizer.ggml.tokens {message}"


def test_sentencepiece_adds_bos_by_default_and_so_needs_one() -> None:
    fields = sentencepiece_fields(PIECES)
    del fields["tokenizer.ggml.bos_token_id"]
    assert tokenizer_from_gguf(fields)("ab").input_ids[0] == 1
    fields["tokenizer.ggml.token_type"][1] = 4
    assert refusal(fields) == "tokenizer.ggml.add_bos_token is true, but there is no bos token"


def test_duplicates_and_a_bad_template() -> None:
    fields = byte_level_fields()
    fields["tokenizer.ggml.tokens"][262] = "ab"
    assert refusal(fields) == "tokenizer.ggml.tokens holds 'ab' twice"
    assert (
        refusal(byte_level_fields() | {"tokenizer.chat_template": 3})
        == "tokenizer.chat_template is a int; allowed: text"
    )


def test_one_huge_token_takes_no_time() -> None:
    """10 MB of text in one token would be cut at 10^7 places, 10^14 characters to copy: hours. Checks take ~10 ms."""
    begin = time.process_time()
    assert "a token of 10000000 characters" in refusal(sentencepiece_fields({"a": 0.0, "a" * 10**7: 0.0}))
    assert time.process_time() - begin < 10
