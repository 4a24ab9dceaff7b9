"""Checks of engine options that need no model, so that bad ones are refused before anything is loaded."""

import os

import torch

from fused_spec.errors import InvalidInput
from fused_spec.rules import Rule

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_DRAFT_TOKENS = 64
NAMED_DRAFTS = ("ngram", "self-int8", "self-int4")


def unknown_draft(draft: object) -> InvalidInput:
    """The error for a draft that is neither a model nor a known name."""
    names = ", ".join(map(repr, NAMED_DRAFTS))
    return InvalidInput(f"draft must be a model (a folder, a .gguf file or a hub id), {names} or None, got {draft!r}")


def check_draft_name(draft: object) -> None:
    """Raise for a bare word that is no known draft: a hub id has a slash, and a path exists."""
    known = draft is None or draft in NAMED_DRAFTS
    if not known and isinstance(draft, str) and "/" not in draft and not os.path.lexists(draft):
        raise unknown_draft(draft)


def check_engine_options(rule: Rule, num_draft_tokens: int, max_length: int, attention: str) -> None:
    """Raise unless these are legal, before anything is loaded."""
    if not isinstance(rule, Rule):
        raise InvalidInput(f"rule must be an acceptance rule such as SpeculativeSampling(), got {rule!r}")
    legal = isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool)
    if not legal or not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InvalidInput(
            f"num_draft_tokens must be an integer from 1 to {MAX_DRAFT_TOKENS}, got {num_draft_tokens!r}"
        )
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise InvalidInput(f"max_length must be an integer >= 2, got {max_length!r}")
    if attention not in ("auto", "sdpa"):
        raise InvalidInput(f"attention must be 'auto' or 'sdpa' in this version, got {attention!r}")


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device to use, checked to exist."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device must be 'cpu', 'cuda' or 'cuda:N', got {str(device)!r}")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device {str(device)!r} is not available: this torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return place


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    """The working dtype."""
    if dtype is None:
        return torch.bfloat16
    if dtype in DTYPES.values():
        assert isinstance(dtype, torch.dtype)
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise InvalidInput(f"dtype must be {', '.join(DTYPES)} or None, got {dtype!r}")
