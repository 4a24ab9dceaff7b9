"""Tokenizers: built from GGUF metadata, or read from a folder by transformers.

A GGUF file has no `tokenizer.json`; it lists a vocabulary with what its kind of tokenizer needs. The tokenizer is built
from these directly with the `tokenizers` library: transformers takes seconds to read the metadata, and has no rule for
"smollm", so that it splits spaces before digits differently from the original. transformers is imported inside
functions only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_spec.errors import InvalidInput
from fused_spec.models.byte_level_bpe import byte_level_bpe
from fused_spec.models.gguf_vocabulary import read_vocabulary
from fused_spec.models.sentencepiece_bpe import DEFAULT_ROLES, sentencepiece_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def tokenizer_from_gguf(fields: dict[str, Any], where: str = "GGUF file") -> PreTrainedTokenizerFast:
    """A tokenizer from the `tokenizer.*` metadata of a GGUF file: byte-level BPE, or BPE by SentencePiece.

    Control tokens become special, user-defined ones are matched whole but stay text, unused ones are left out.
    `add_bos_token` and `add_eos_token` hold; where they are absent, llama.cpp's defaults do. Decoding never cleans up
    spaces.

    Raises InvalidInput, naming `where`, for another kind of tokenizer, an unknown pre-tokenizer, or metadata that is
    missing, of the wrong type or inconsistent.
    """
    model = fields.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise InvalidInput(
            f"{where}: tokenizer.ggml.model is {model!r}; allowed: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)"
        )
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise InvalidInput(f"{where}: tokenizer.chat_template is a {type(template).__name__}; allowed: text")
    vocabulary = read_vocabulary(fields, where, DEFAULT_ROLES if model == "llama" else None)
    built = sentencepiece_bpe(vocabulary) if model == "llama" else byte_level_bpe(vocabulary)
    return _for_transformers(built, template, vocabulary.named)


def _for_transformers(built: Tokenizer, template: str | None, named: dict[str, str]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    build: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # its __init__ carries no types
    # transformers copies the tokenizer by way of JSON, which takes as long as building it; nobody else holds this one.
    vars(built)["__deepcopy__"] = lambda memo: built
    try:
        return build(
            tokenizer_object=built,
            chat_template=template,
            clean_up_tokenization_spaces=False,
            **{f"{role}_token": token for role, token in named.items()},
        )
    finally:
        del vars(built)["__deepcopy__"]


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
