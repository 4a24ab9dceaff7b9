"""Attention over a static cache by flash-attn, where that package is installed.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

The block's keys and values are in the cache already, so `flash_attn_with_kvcache` gets none to append, and its
`cache_seqlens` is the number of slots that are valid with the block in place. Its causal mask is aligned to the bottom
right corner: with L valid slots, row i of W sees the slots up to L - W + i, which is its position. How many parts it
splits the cache into follows from the capacity, so a captured graph may freeze that.

Source: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of github.com/Dao-AILab/flash-attention,
version 2; Dao 2023, arXiv 2307.08691. Oracle: `attention_reference` in kernels/attention.py.
"""

import functools
import warnings
from collections.abc import Callable
from importlib import import_module

import torch

from fused_spec.errors import InvalidInput

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
_ABSENT = "is not installed"
_AMPERE = (8, 0)


@functools.cache
def _imported() -> tuple[Callable[..., torch.Tensor] | None, str]:
    """(the function, or None and what is wrong with the package)"""
    try:
        return import_module("flash_attn").flash_attn_with_kvcache, ""
    except Exception as error:  # a package built for another torch raises whatever its loader does
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return None, _ABSENT
        return None, f"cannot be imported ({type(error).__name__}: {error}".splitlines()[0] + ")"


def available() -> bool:
    """Whether flash-attn can be imported; looked up once per process."""
    return _imported()[0] is not None


def usable(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether flash-attn is there for this dtype, head size and GPU. Warns if it is installed, but broken."""
    function, fault = _imported()
    if function is None and fault != _ABSENT and device.type == "cuda":
        warnings.warn(f"flash-attn is installed but not used: it {fault}", stacklevel=2)
    if function is None or _objection(dtype, head_dim) or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


def require(dtype: torch.dtype | None = None, head_dim: int | None = None) -> None:
    """Raise unless `flash_attention` can be called, as far as is known: None is for what is not.

    Raises:
        InvalidInput: flash-attn is absent or broken, or does not take this dtype or head size.
    """
    function, fault = _imported()
    if function is None:
        remedy = "pip install flash-attn --no-build-isolation" if fault == _ABSENT else "reinstall it for this torch"
        raise InvalidInput(
            f"attention='flash' needs flash-attn, which {fault}; {remedy}, or use attention='auto' or 'triton'"
        )
    objection = _objection(dtype, head_dim)
    if objection:
        raise InvalidInput(f"attention='flash' {objection}; use attention='auto' or 'triton'")


def _objection(dtype: torch.dtype | None, head_dim: int | None) -> str:
    if dtype is not None and dtype not in DTYPES:
        return f"takes float16 and bfloat16, got {str(dtype).removeprefix('torch.')}"
    # Other head sizes would be padded: a copy of the whole cache in every call.
    if head_dim is not None and (head_dim > MAX_HEAD_DIM or head_dim % 8):
        return f"takes heads of a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}"
    return ""


def flash_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
) -> None:
    """Attend to a cache that the block's own keys and values are already written to.

    Args:
        queries: [W, H, D] float16 or bfloat16, unit stride in D.
        keys, values: [capacity, Hkv, D] of the same dtype, one layer's cache, unit stride in D. H is a multiple of Hkv.
        lengths: [1] int32, number of valid slots, the block's own among them; looked at on the device.
        out: [W, H, D] of the same dtype, written.

    Raises:
        InvalidInput: as `require` does.
    """
    require(queries.dtype, queries.shape[2])
    function, _ = _imported()
    assert function is not None
    out.copy_(function(queries[None], keys[None], values[None], cache_seqlens=lengths, causal=True)[0])
