"""GGUF metadata of small tokenizers of either kind."""

from typing import Any

from tokenizers import pre_tokenizers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_fields(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """All bytes (0 to 255), merges (256 "ab", 257 "abc", 258 "12", 259 "é"), then tokens that no merge produces."""
    merges = [("a", "b"), ("ab", "c"), ("1", "2"), ("Ã", "©")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in merges), "<s>", "</s>", "<think>", "[PAD0]", "xyz"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 3, 4, 5, 1],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
    }
    return fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece_fields(pieces: dict[str, float], **changes: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, the bytes (3 to 258), the user-defined <think> (259), then the pieces with their scores."""
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, "<think>", *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 260 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
