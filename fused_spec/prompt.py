"""From what a user calls a prompt to checked token ids."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fused_spec.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages {"role", "content"}."""


def encode_prompt(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int, max_length: int
) -> list[int]:
    """Token ids of a prompt: at least one, fewer than max_length, each from 0 to vocab_size - 1."""
    ids = _token_ids(prompt, tokenizer)
    if not ids:
        raise InvalidInput("the prompt is empty; at least one token is needed")
    if len(ids) >= max_length:
        raise InvalidInput(f"the prompt has {len(ids)} tokens; it must have fewer than max_length = {max_length}")
    for token in ids:
        if isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InvalidInput(f"prompt token ids must be integers from 0 to {vocab_size - 1}, got {token!r}")
    return ids


def _token_ids(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase | None") -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidInput("a text prompt needs a tokenizer, and this checkpoint has none; pass token ids")
        _check_text(prompt)
        return [int(token) for token in tokenizer.encode(prompt)]
    # bytes are a sequence of integers, but hardly ever meant as token ids
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    items = list(prompt) if listed else [prompt]
    messages = [item for item in items if isinstance(item, Mapping)]
    ids = [item for item in items if isinstance(item, int)]
    if not listed or len(items) not in (len(messages), len(ids)):
        kinds = sorted({type(item).__name__ for item in items})
        raise InvalidInput(f"prompt must be a string, a list of token ids or of chat messages, got {', '.join(kinds)}")
    return _chat_ids(messages, tokenizer) if messages else ids


def _chat_ids(messages: list[Mapping[str, str]], tokenizer: "PreTrainedTokenizerBase | None") -> list[int]:
    for message in messages:
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise InvalidInput(f"a chat message must have exactly 'role' and 'content' strings, got {message!r}")
        _check_text(message["content"])
    if tokenizer is None or not tokenizer.chat_template:
        raise InvalidInput("this checkpoint has no chat template; pass the prompt as text or token ids")
    conversation = [dict(message) for message in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer.encode(str(text), add_special_tokens=False)]


def _check_text(text: str) -> None:
    """Tokenizers take UTF-8; half a surrogate pair is how Python represents input bytes that are not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the prompt is not valid Unicode: {text[error.start]!a} at {error.start}") from None
