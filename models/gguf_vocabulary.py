"""What a GGUF file says of its tokens, checked once for every kind of tokenizer.

Every inconsistency is an InvalidInput that names the file. All checks are linear in the size of the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fused_spec.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's numbers
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their types.

    Attributes:
        fields, where: the metadata and the name of the file.
        tokens, kinds: text and type by id.
        ids: id by text. Without unused tokens, which pad the vocabulary to the embedding, unless they have a role.
        named: text by role (bos, eos, unk, pad).
    """

    fields: Mapping[str, Any]
    where: str
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    named: dict[str, str]

    def flag(self, name: str, default: bool) -> bool:
        """The truth value `tokenizer.ggml.<name>`, or the default where the file has none."""
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{self.where}: tokenizer.ggml.{name} is {value!r}; allowed: true or false")
        return value


def read_vocabulary(
    fields: Mapping[str, Any], where: str, default_roles: Mapping[str, int] | None = None
) -> Vocabulary:
    """Tokens, types and roles of `tokenizer.ggml.*`; without types, every token is a normal one.

    `default_roles` are ids for roles that the file does not mention. They hold only if that token is no text.
    """
    tokens = strings(fields, "tokenizer.ggml.tokens", where)
    kinds = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise InvalidInput(f"{where}: tokenizer.ggml.token_type must hold one type for each of {len(tokens)} tokens")
    if set(map(type, kinds)) != {int} or not set(kinds) <= set(range(NORMAL, BYTE + 1)):
        wrong = next(kind for kind in kinds if type(kind) is not int or not NORMAL <= kind <= BYTE)
        raise InvalidInput(f"{where}: tokenizer.ggml.token_type holds {wrong!r}; allowed: {NORMAL} to {BYTE}")
    roles = {
        role: token_id
        for role, key in _ROLES.items()
        if (token_id := _token_id(fields, f"tokenizer.ggml.{key}_token_id", len(tokens), where)) is not None
    }
    for role, token_id in (default_roles or {}).items():
        if role not in roles and token_id < len(tokens) and kinds[token_id] in (CONTROL, UNKNOWN):
            roles[role] = token_id
    ids = _ids(tokens, kinds, set(roles.values()), where)
    return Vocabulary(fields, where, tokens, kinds, ids, {role: tokens[token_id] for role, token_id in roles.items()})


def strings(fields: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A list of texts with at least one entry."""
    value = fields.get(key)
    if not isinstance(value, list) or set(map(type, value)) != {str}:
        raise InvalidInput(f"{where}: {key} is missing or not a list of texts")
    return value


def add_whole_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens and the unknown one become special; user-defined tokens are matched whole, but stay text."""
    from tokenizers import AddedToken

    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        texts = [text for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind in kinds]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False, special=special) for text in texts])


def post_processor(vocabulary: Vocabulary, add_bos_default: bool) -> processors.PostProcessor:
    """Adds BOS and EOS where the file asks for it. Always set, since transformers replaces a missing one."""
    from tokenizers import processors

    pieces, special = ["$A"], []
    for role, default in (("bos", add_bos_default), ("eos", False)):
        if vocabulary.flag(f"add_{role}_token", default):
            if role not in vocabulary.named:
                raise InvalidInput(
                    f"{vocabulary.where}: tokenizer.ggml.add_{role}_token is true, but there is no {role} token"
                )
            token = vocabulary.named[role]
            pieces = [role, *pieces] if role == "bos" else [*pieces, role]
            special.append({"id": role, "ids": [vocabulary.ids[token]], "tokens": [token]})
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


def _ids(tokens: list[str], kinds: list[int], with_role: set[int], where: str) -> dict[str, int]:
    used = [
        (token, token_id)
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED or token_id in with_role
    ]
    ids = dict(used)
    if len(ids) != len(used):
        twice = next(token for token, token_id in used if ids[token] != token_id)
        raise InvalidInput(f"{where}: tokenizer.ggml.tokens holds {twice!r} twice")
    return ids


def _token_id(fields: Mapping[str, Any], key: str, num_tokens: int, where: str) -> int | None:
    token_id = fields.get(key)
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < num_tokens):
        raise InvalidInput(f"{where}: {key} is {token_id!r}; allowed: an integer from 0 to {num_tokens - 1}")
    return token_id
