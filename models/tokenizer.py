"""Tokenizers: built from GGUF metadata, or read from a folder by transformers.

A GGUF file has no `tokenizer.json`; it names a pre-tokenizer and lists vocabulary, merges and token types. The
tokenizer is built from these directly with the `tokenizers` library: transformers takes seconds to read the metadata,
and has no rule for "smollm", so that it splits spaces before digits differently from the original. transformers is
imported inside functions only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_spec.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # llama.cpp's token types; 5 pads the vocabulary to the embedding
# The splitting rules that the models' own tokenizer.json files carry; they differ in how digits are grouped.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _SPLIT.replace("{DIGITS}", r"\p{N}{1,3}")
_QWEN2_SPLIT = _SPLIT.replace("{DIGITS}", r"\p{N}")
PRE_TOKENIZERS = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")


def tokenizer_from_gguf(fields: dict[str, Any], where: str = "GGUF file") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the `tokenizer.*` metadata of a GGUF file.

    Control tokens (type 3) become special, user-defined ones (4) are matched whole but stay text, unused ones (5) are
    left out. `add_bos_token` and `add_eos_token` hold; where the former is absent only "llama-bpe" adds BOS, as in
    llama.cpp, which also ignores `add_space_prefix` for this kind of tokenizer. Decoding never cleans up spaces.

    Raises InvalidInput, naming `where`, for another kind of tokenizer, an unknown pre-tokenizer, or metadata that is
    missing, of the wrong type or inconsistent.
    """
    from transformers import PreTrainedTokenizerFast

    model = fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise InvalidInput(f"{where}: tokenizer.ggml.model is {model!r}; allowed: 'gpt2' (byte-level BPE)")
    tokens = _strings(fields, "tokenizer.ggml.tokens", where)
    named = {
        role: tokens[token_id]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := _token_id(fields, f"tokenizer.ggml.{key}_token_id", len(tokens), where)) is not None
    }
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise InvalidInput(f"{where}: tokenizer.chat_template is a {type(template).__name__}; allowed: text")
    build: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # its __init__ carries no types
    return build(
        tokenizer_object=_byte_level_bpe(fields, tokens, named, where),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in named.items()},
    )


def tokenizer_from_folder(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face folder, or None when the folder has none. Never runs code from the folder.

    Raises InvalidInput when transformers cannot read it.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise InvalidInput(f"{folder}: the tokenizer cannot be read: {reason[0]}") from error
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def check_fits(tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str) -> None:
    """Raises InvalidInput when the tokenizer can produce an id that an embedding of `vocab_size` rows lacks."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1], default=("", -1))
    if highest >= vocab_size:
        raise InvalidInput(f"{where}: token {token!r} has id {highest}, but the embedding has {vocab_size} rows")


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Raises InvalidInput, with the first difference, unless both map the same tokens to the same ids.

    Sizes of the embeddings play no part: models of one family pad the same vocabulary to different sizes.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = {token_id: token for token, token_id in ours.items() if theirs.get(token) != token_id}
    differing |= {token_id: token for token, token_id in theirs.items() if ours.get(token) != token_id}
    token = differing[min(differing)]
    raise InvalidInput(
        f"draft {draft_name} and target {target_name} have different tokenizers: token {token!r} is "
        f"{_id_text(theirs, token)} in the draft and {_id_text(ours, token)} in the target; they must agree"
    )


def _id_text(vocab: dict[str, int], token: str) -> str:
    return f"id {vocab[token]}" if token in vocab else "absent"


def _byte_level_bpe(fields: dict[str, Any], tokens: list[str], named: dict[str, str], where: str) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = fields.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise InvalidInput(f"{where}: tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PRE_TOKENIZERS)}")
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise InvalidInput(f"{where}: tokenizer.ggml.token_type must hold one type for each of {len(tokens)} tokens")
    used = [(token, kind) for token, kind in zip(tokens, types, strict=True)]
    vocab = {token: token_id for token_id, (token, kind) in enumerate(used) if kind != _UNUSED}
    if len(vocab) != sum(kind != _UNUSED for kind in types):
        twice = next(
            token for token_id, (token, kind) in enumerate(used) if kind != _UNUSED and vocab[token] != token_id
        )
        raise InvalidInput(f"{where}: tokenizer.ggml.tokens holds {twice!r} twice")
    merges = _merges(fields, vocab, where)
    # llama-bpe: a word that is a token is taken whole even if no sequence of merges leads to it
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in used if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in used if k == _USER_DEFINED])
    tokenizer.post_processor = _post_processor(fields, vocab, named, pre == "llama-bpe", where)
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if pre in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = Regex(_QWEN2_SPLIT if pre == "qwen2" else _LLAMA3_SPLIT)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(split, behavior="isolated"), byte_level])


def _post_processor(
    fields: dict[str, Any], vocab: dict[str, int], named: dict[str, str], add_bos_default: bool, where: str
) -> Any:
    """Adds BOS and EOS where the file asks for it. Always set, since transformers replaces a missing one."""
    from tokenizers import processors

    pieces, special = ["$A"], []
    for role, default in (("bos", add_bos_default), ("eos", False)):
        wanted = fields.get(f"tokenizer.ggml.add_{role}_token", default)
        if not isinstance(wanted, bool):
            raise InvalidInput(f"{where}: tokenizer.ggml.add_{role}_token is {wanted!r}; allowed: true or false")
        if wanted:
            if named.get(role) not in vocab:
                raise InvalidInput(f"{where}: tokenizer.ggml.add_{role}_token is true, but there is no {role} token")
            pieces = [role, *pieces] if role == "bos" else [*pieces, role]
            special.append({"id": role, "ids": [vocab[named[role]]], "tokens": [named[role]]})
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


def _strings(fields: dict[str, Any], key: str, where: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise InvalidInput(f"{where}: {key} is missing or not a list of texts")
    return value


def _token_id(fields: dict[str, Any], key: str, num_tokens: int, where: str) -> int | None:
    token_id = fields.get(key)
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < num_tokens):
        raise InvalidInput(f"{where}: {key} is {token_id!r}; allowed: an integer from 0 to {num_tokens - 1}")
    return token_id


def _merges(fields: dict[str, Any], vocab: dict[str, int], where: str) -> list[tuple[str, str]]:
    """Pairs, in order of rank; each half and the result must be tokens, or the tokenizer would refuse the list."""
    merges = []
    for text in _strings(fields, "tokenizer.ggml.merges", where):
        left, space, right = text.partition(" ")
        if not space or any(part not in vocab for part in (left, right, left + right)):
            raise InvalidInput(f"{where}: tokenizer.ggml.merges holds {text!r}, which does not join tokens to a token")
        merges.append((left, right))
    return merges
