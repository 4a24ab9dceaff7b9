"""The adapter to flash-attn, through a model of that package's documented contract: it cannot be installed here."""

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels import flash_attention as module
from fused_spec.kernels.attention import attention_reference
from fused_spec.kernels.flash_attention import available, flash_attention, require, usable

CUDA = torch.device("cuda")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def bottom_right(rows: int, slots: int) -> torch.Tensor:
    """1 1 1 1 0 / 1 1 1 1 1 for two rows and five slots."""
    return torch.ones(rows, slots).tril(slots - rows) != 0


def top_left(rows: int, slots: int) -> torch.Tensor:
    """1 0 0 0 0 / 1 1 0 0 0: what it was before version 2.1."""
    return torch.ones(rows, slots).tril() != 0


def modelled(
    mask: Callable[[int, int], torch.Tensor] = bottom_right,
) -> tuple[Callable[..., torch.Tensor], list[dict[str, Any]]]:
    """(`flash_attn_with_kvcache` as documented for a contiguous cache and nothing to append, its calls)"""
    calls: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: int | torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        batch, rows, heads, dim = q.shape
        _, capacity, kv_heads, _ = k_cache.shape
        assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
        assert k_cache.dtype == v_cache.dtype == q.dtype
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.shape == v_cache.shape == (batch, capacity, kv_heads, dim)
        assert heads % kv_heads == 0
        assert dim <= 256
        assert isinstance(cache_seqlens, torch.Tensor), "an int makes a new tensor in each call"
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == (batch,)
        assert cache_seqlens.is_contiguous()
        calls.append({"causal": causal, "cache_seqlens": cache_seqlens, "k_cache": k_cache, "v_cache": v_cache})
        scale = dim**-0.5 if softmax_scale is None else softmax_scale
        out = torch.empty(batch, rows, heads, dim, dtype=q.dtype)
        for b, length in enumerate(cache_seqlens.tolist()):
            k, v = (x[b, :length].double().repeat_interleave(heads // kv_heads, 1) for x in (k_cache, v_cache))
            scores = torch.einsum("whd,nhd->hwn", q[b].double(), k) * scale
            if causal:
                scores = scores.masked_fill(~mask(rows, length), -math.inf)
            weights = scores.softmax(-1).nan_to_num(0)  # a row that sees nothing is zero
            out[b] = torch.einsum("hwn,nhd->whd", weights, v).to(q.dtype)
        return out

    return flash_attn_with_kvcache, calls


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    module._imported.cache_clear()
    yield
    module._imported.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    package = ModuleType("flash_attn")
    package.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def block(width: int, length: int, shape: tuple[int, int, int], dtype: torch.dtype, capacity: int = 64) -> Case:
    """Queries, and a cache that is NaN behind the block."""
    heads, kv_heads, dim = shape
    keys, values = torch.randn(2, capacity, kv_heads, dim)
    keys[length:], values[length:] = math.nan, math.nan
    return torch.randn(width, heads, dim).to(dtype), keys.to(dtype), values.to(dtype)


def off(case: Case, length: int) -> torch.Tensor:
    """By how much more than the rounding of the result the adapter is off: [W, H, D]."""
    width, heads, dim = case[0].shape
    out = torch.full((width, heads * dim), math.nan, dtype=case[0].dtype).unflatten(1, (heads, dim))
    flash_attention(*case, torch.tensor([length], dtype=torch.int32), out)
    exact = attention_reference(*case, torch.arange(length - width, length))
    return (out - exact).abs() - ROUNDING[out.dtype] * exact.abs() - 1e-7  # the smallest float16 is 6e-8


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("shape", [(4, 4, 64), (6, 2, 80), (7, 1, 128)], ids=str)
@pytest.mark.parametrize(("width", "length"), [(w, n) for w in (1, 2, 6) for n in (1, 2, 6, 7, 40, 64) if n >= w])
def test_against_the_oracle(
    width: int, length: int, shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, calls = modelled()
    install(monkeypatch, function)
    assert (off(block(width, length, shape, dtype), length) <= 0).all()
    assert len(calls) == 1


@pytest.mark.parametrize(("width", "length"), [(2, 3), (6, 40), (6, 64)])
def test_a_mask_aligned_elsewhere_would_be_found(width: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, modelled(top_left)[0])
    assert not (off(block(width, length, (6, 2, 64), torch.float16), length) <= 0).all()


def test_no_copies_of_what_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a layer inside that of all layers, and the one tensor of lengths that a graph reads."""
    function, calls = modelled()
    install(monkeypatch, function)
    keys, values = torch.randn(2, 3, 2, 64, 16).bfloat16().transpose(2, 3)[:, 1]  # the slots of a head side by side
    lengths, out = torch.tensor([9], dtype=torch.int32), torch.empty(2, 4, 16, dtype=torch.bfloat16)
    flash_attention(torch.randn(2, 4, 16).bfloat16(), keys, values, lengths, out)
    (call,) = calls
    assert call["causal"] is True
    assert call["cache_seqlens"] is lengths
    assert call["k_cache"].data_ptr() == keys.data_ptr()
    assert call["k_cache"].stride()[1:] == keys.stride()
    assert call["v_cache"].data_ptr() == values.data_ptr()


def test_absence(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """One line that says what to do; no complaint where it is not asked for."""
    remove(monkeypatch)
    assert not available()
    assert not usable(torch.bfloat16, 128, CUDA)
    assert len(recwarn) == 0
    for call in (
        require,
        lambda: require(torch.bfloat16, 128),
        lambda: flash_attention(*block(1, 1, (2, 2, 8), torch.float16), torch.zeros(1), torch.zeros(1)),
    ):
        with pytest.raises(InvalidInput) as raised:
            call()
        assert str(raised.value) == (
            "attention='flash' needs flash-attn, which is not installed; "
            "pip install flash-attn --no-build-isolation, or use attention='auto' or 'triton'"
        )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore"), "(ImportError: flash_attn_2_cuda.so: "),
        (OSError("libcudart.so.12: cannot open shared object file"), "(OSError: libcudart.so.12: "),
        (
            ModuleNotFoundError("No module named 'einops'", name="einops"),
            "(ModuleNotFoundError: No module named 'einops'",
        ),
        (RuntimeError(), "(RuntimeError: )"),
    ],
    ids=str,
)
def test_a_broken_package(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is shown, on request as an error and otherwise as a warning."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise error if name == "flash_attn_with_kvcache" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "flash_attn", Broken("flash_attn"))
    assert not available()
    with pytest.raises(InvalidInput) as raised:
        require(torch.bfloat16, 128)
    assert f"which cannot be imported {said}" in str(raised.value)
    assert str(raised.value).endswith("reinstall it for this torch, or use attention='auto' or 'triton'")
    assert "\n" not in str(raised.value)
    with pytest.warns(UserWarning, match=r"flash-attn is installed but not used: it cannot be imported \("):
        assert not usable(torch.bfloat16, 128, CUDA)


def test_a_version_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(InvalidInput, match=r"AttributeError: .* 'flash_attn_with_kvcache'"):
        require(torch.bfloat16, 128)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "said"),
    [
        (torch.float32, 128, "takes float16 and bfloat16, got float32"),
        (torch.bfloat16, 264, "takes heads of a multiple of 8 up to 256, got 264"),
        (torch.bfloat16, 100, "takes heads of a multiple of 8 up to 256, got 100"),
    ],
    ids=str,
)
def test_what_it_does_not_take(dtype: torch.dtype, head_dim: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, modelled()[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not usable(dtype, head_dim, CUDA)
    require()
    with pytest.raises(InvalidInput) as raised:
        require(dtype, head_dim)
    assert str(raised.value) == f"attention='flash' {said}; use attention='auto' or 'triton'"


@pytest.mark.parametrize(
    ("capability", "device", "expected"),
    [((8, 0), "cuda", True), ((10, 0), "cuda", True), ((7, 5), "cuda", False), ((9, 0), "meta", False)],
)
def test_usable(capability: tuple[int, int], device: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, modelled()[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert available()
    assert usable(torch.bfloat16, 128, torch.device(device)) is expected
    require(torch.bfloat16, 128)
