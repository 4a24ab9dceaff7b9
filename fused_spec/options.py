"""Checks of options that need no model, so that bad ones are refused before anything is loaded."""

import os
import secrets
from collections.abc import Sequence

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import check_processing, runs_on_triton
from fused_spec.kernels.flash_attention import require
from fused_spec.rules import Rule

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_DRAFT_TOKENS = 64
SELF_DRAFT_BITS = {"self-int8": 8, "self-int4": 4}
NAMED_DRAFTS = ("ngram", *SELF_DRAFT_BITS)


def unknown_draft(draft: object) -> InvalidInput:
    """The error for a draft that is neither a model nor a known name."""
    names = ", ".join(map(repr, NAMED_DRAFTS))
    return InvalidInput(f"draft must be a model (a folder, a .gguf file or a hub id), {names} or None, got {draft!r}")


def check_draft_name(draft: object) -> None:
    """Raise for a bare word that is no known draft: a hub id has a slash, and a path exists."""
    known = draft is None or draft in NAMED_DRAFTS
    if not known and isinstance(draft, str) and "/" not in draft and not os.path.lexists(draft):
        raise unknown_draft(draft)


def check_engine_options(rule: Rule, num_draft_tokens: int | str, max_length: int) -> None:
    """Raise unless these are legal, before anything is loaded."""
    if not isinstance(rule, Rule):
        raise InvalidInput(f"rule must be an acceptance rule such as SpeculativeSampling(), got {rule!r}")
    number = isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool)
    legal = number and 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS  # type: ignore[operator]
    if not legal and num_draft_tokens != "auto":
        raise InvalidInput(
            f"num_draft_tokens must be an integer from 1 to {MAX_DRAFT_TOKENS} or 'auto', got {num_draft_tokens!r}"
        )
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise InvalidInput(f"max_length must be an integer >= 2, got {max_length!r}")


def check_attention(attention: str, device: torch.device) -> None:
    """Raise unless this kind of attention works on the device."""
    known = ("auto", *(("triton", "flash") if runs_on_triton(None, device) else ("sdpa",)))
    if attention not in known:
        names = " or ".join(map(repr, known))
        raise InvalidInput(f"attention must be {names} on the device {str(device)!r}, got {attention!r}")
    if attention == "flash":
        require()


def check_sampling(temperature: float, top_k: int, top_p: float, min_p: float, max_new_tokens: int) -> None:
    """Raise unless these numbers of a request are legal."""
    for name, value in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise InvalidInput(f"{name} must be {'an integer' if name == 'top_k' else 'a number'}, got {value!r}")
    check_processing(temperature, top_k, top_p, min_p)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise InvalidInput(f"max_new_tokens must be an integer >= 0, got {max_new_tokens!r}")


def check_stops(stop: str | Sequence[str], tokenizer: bool) -> tuple[str, ...]:
    """The stop strings of a request, which need a tokenizer."""
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else tuple(stop)
    if any(not isinstance(text, str) or not text for text in stops):
        raise InvalidInput(f"stop must be non-empty strings, got {stop!r}")
    if stops and not tokenizer:
        raise InvalidInput("stop strings need a tokenizer, and this checkpoint has none")
    return stops


def check_seed(seed: int | None) -> int:
    """The seed of a request; None draws one."""
    if seed is None:
        return secrets.randbits(63)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidInput(f"seed must be an integer, 0 <= seed < 2^63, got {seed!r}")
    return seed


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
