"""Byte-level BPE (`tokenizer.ggml.model` is "gpt2") from GGUF metadata: SmolLM2, Llama 3, Mistral's Tekken, Qwen.

The file names the rule by which text is split into words before merges apply. The rules here are the ones that the
models' own tokenizer.json files carry; llama.cpp rewrites some for its own regex engine, "tekken" only roughly. Names
that llama.cpp treats alike are alike here (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fused_spec.errors import InvalidInput
from fused_spec.models.gguf_vocabulary import Vocabulary, add_whole_tokens, post_processor, strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = _SPLIT.replace("{DIGITS}", r"\p{N}{1,3}")
QWEN2_SPLIT = _SPLIT.replace("{DIGITS}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Rule:
    split: str | None = None  # None: GPT-2's regex, which `tokenizers` has built in
    single_digits: bool = False
    nfc: bool = False
    # A word that is a token is taken whole even if no sequence of merges leads to it, and BOS is added by default.
    like_tiktoken: bool = False


_GPT2, _LLAMA3 = _Rule(), _Rule(LLAMA3_SPLIT, like_tiktoken=True)
_RULES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Rule(QWEN2_SPLIT, nfc=True),
    # Qwen2's tokenizer.json normalises; llama.cpp normalises neither, and that is all that is known of this one.
    "deepseek-r1-qwen": _Rule(QWEN2_SPLIT),
    "smollm": _Rule(single_digits=True),
    "tekken": _Rule(TEKKEN_SPLIT, like_tiktoken=True),
}
PRE_TOKENIZERS = tuple(_RULES)


def byte_level_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer. `add_space_prefix` plays no part for this kind, as in llama.cpp."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = vocabulary.fields.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _RULES:
        raise InvalidInput(f"{vocabulary.where}: tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PRE_TOKENIZERS)}")
    rule = _RULES[pre]
    model = models.BPE(vocab=vocabulary.ids, merges=_merges(vocabulary), ignore_merges=rule.like_tiktoken)
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    add_whole_tokens(tokenizer, vocabulary)
    tokenizer.post_processor = post_processor(vocabulary, add_bos_default=rule.like_tiktoken)
    return tokenizer


def _pre_tokenizer(rule: _Rule) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None)
    if rule.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    if rule.split is None:
        return to_bytes
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule.split), behavior="isolated"), to_bytes])


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs, in order of rank; each half and the result must be tokens, or the tokenizer would refuse the list."""
    ids, merges = vocabulary.ids, []
    for text in strings(vocabulary.fields, "tokenizer.ggml.merges", vocabulary.where):
        left, space, right = text.partition(" ")
        if not (space and left in ids and right in ids and left + right in ids):
            raise InvalidInput(
                f"{vocabulary.where}: tokenizer.ggml.merges holds {text!r}, which does not join tokens to a token"
            )
        merges.append((left, right))
    return merges
