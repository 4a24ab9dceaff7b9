"""SentencePiece's BPE (`tokenizer.ggml.model` is "llama") from GGUF metadata: Llama 2, TinyLlama, Mistral.

Text starts as characters; the neighbours whose union is the token with the highest score are joined, the leftmost of
equals first, until no union is a token. Characters that are no token become their UTF-8 bytes. Source:
https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc

`tokenizers` ranks pairs of tokens, not tokens. Every way to cut a token in two is given the rank of the token's score,
which amounts to the same: joins inside a stretch of text that ends up as one token do not depend on what is around it,
so that of all cuts of a token only one ever occurs, and the order among them does not matter. Where the score is equal,
the lower id comes first: ids follow rank, so a file whose scores are all alike (converters that find no SentencePiece
model write a constant) still reads as intended. SentencePiece would go from left to right there.

Joins are made of normal tokens only, as in SentencePiece; llama.cpp may also put control tokens together from pieces. A
token that contains a character which is no token itself never results; SentencePiece trains no such vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fused_spec.errors import InvalidInput
from fused_spec.models.gguf_vocabulary import BYTE, NORMAL, Vocabulary, add_whole_tokens, post_processor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_ROLES = {"unk": 0, "bos": 1, "eos": 2}  # llama.cpp's, for files that do not mention them
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MAX_LENGTH = 256  # of a normal token, which bounds the work for its cuts; SentencePiece trains at most 16 by default


def sentencepiece_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer. BOS is added by default, EOS is not; merges in the file play no part: all as in llama.cpp.

    Unless `add_space_prefix` is false, a space is put before the text and before whatever follows a token that is
    matched whole, even if it begins with a space. This follows llama.cpp ("legacy" is transformers' word for it).
    transformers reads GGUF files otherwise: it adds none after such a token, and none to text that begins with a
    space, where SentencePiece itself does. Decoding removes one leading space.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    _check_bytes(vocabulary)
    merges = _merges(vocabulary, _scores(vocabulary))
    unknown = vocabulary.named.get("unk")  # never the result of encoding, since every byte is a token
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    add_whole_tokens(tokenizer, vocabulary)
    tokenizer.post_processor = post_processor(vocabulary, add_bos_default=True)
    return tokenizer


def _check_bytes(vocabulary: Vocabulary) -> None:
    """All 256 byte tokens and no others: with some missing, text would be lost without a word."""
    if "tokenizer.ggml.token_type" not in vocabulary.fields:
        raise InvalidInput(f"{vocabulary.where}: tokenizer.ggml.token_type is missing; this kind of tokenizer needs it")
    expected = {f"<0x{byte:02X}>" for byte in range(256)}
    found = {token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == BYTE}
    if found != expected:
        missing, other = sorted(expected - found), sorted(found - expected)
        what = f"lacks the byte token {missing[0]!r}" if missing else f"holds the byte token {other[0]!r}"
        raise InvalidInput(f"{vocabulary.where}: tokenizer.ggml.tokens {what}; byte tokens are <0x00> to <0xFF>")


def _scores(vocabulary: Vocabulary) -> list[float]:
    where, scores, count = vocabulary.where, vocabulary.fields.get("tokenizer.ggml.scores"), len(vocabulary.tokens)
    if not isinstance(scores, list) or len(scores) != count or set(map(type, scores)) != {float}:
        raise InvalidInput(f"{where}: tokenizer.ggml.scores must hold one number for each of {count} tokens")
    if not all(map(math.isfinite, scores)):
        raise InvalidInput(f"{where}: tokenizer.ggml.scores holds a number that is not finite")
    return scores


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of normal tokens that joins to a normal token, the highest score of the result first."""
    tokens = vocabulary.tokens
    normal = {tokens[token_id]: token_id for token_id, kind in enumerate(vocabulary.kinds) if kind == NORMAL}
    longest = max(normal, key=len, default="")
    if len(longest) > _MAX_LENGTH:
        what = f"tokenizer.ggml.tokens holds {longest[:20]!r}..., a token of {len(longest)} characters"
        raise InvalidInput(f"{vocabulary.where}: {what}; allowed: at most {_MAX_LENGTH}")
    merges = []
    for token in sorted(normal, key=lambda token: -scores[normal[token]]):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                merges.append((left, right))
    return merges
