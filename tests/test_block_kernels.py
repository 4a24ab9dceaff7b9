"""The kernels around a transformer's products, under Triton's interpreter: against oracles, and what they touch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.embedding import embed
from fused_spec.kernels.launch import recorded
from fused_spec.kernels.rms_norm import NormBuffers, RMSNorm, rms_norm, rms_norm_reference
from fused_spec.kernels.rope import rope_frequencies, rope_table
from fused_spec.kernels.rope_store import rope_store, rope_store_reference
from fused_spec.kernels.round_inputs import round_inputs
from fused_spec.kernels.silu_mul import silu_mul, silu_mul_reference
from traffic import traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = 2.0**-24  # of one float32 operation, relative
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])
FAR = 1_100_000_000  # entries: twice as many are more than 32 bits count


pytestmark = pytest.mark.usefixtures("bfloat16_as_on_a_gpu")


def last_rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a step of `dtype` at most; below its smallest normal number, steps become no smaller."""
    info = torch.finfo(dtype)
    return (exact.abs() * (1 + 2.0**-10)).clamp(min=info.tiny) * info.eps / 2


class Framed:
    """A tensor [rows, size] inside a larger one of NaN, so that its rows lie apart and begin anywhere."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, scale: float | None = None) -> None:
        self._whole = torch.full((rows + 2, size + 9), math.nan, dtype=dtype)
        self.inner = self._whole[1:-1, 5 : 5 + size]
        if scale is not None:
            self.inner.copy_(torch.randn(rows, size) * scale)

    def frame_is_nan(self) -> bool:
        frame = self._whole.clone()
        frame[1:-1, 5 : 5 + self.inner.shape[1]] = math.nan
        return bool(frame.isnan().all())


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 48, 576, 577, 5120])
@pytest.mark.parametrize("add", [None, *DTYPES])
def test_rms_norm(backend: str, dtype: torch.dtype, size: int, add: torch.dtype | None) -> None:
    """A length of n terms, summed in any order, is off by n/2 roundings; a dozen operations add one each."""
    x, out, weight = Framed(3, size, torch.float32), Framed(3, size, dtype), torch.randn(size)
    for row, scale in zip(x.inner, (1.0, 1e-3, 300.0), strict=True):  # eps is small, about half, and nothing
        row.copy_(torch.randn(size) * scale)
    added = None if add is None else Framed(3, size, add, 1e-3)
    before = x.inner.clone()
    expected = before if added is None else before + added.inner.float()
    room = NormBuffers.like(before) if backend == "torch" else None
    summand = None if added is None else added.inner
    rms_norm(x.inner, RMSNorm.of(weight, 1e-6), room, out.inner, summand, backend=backend)
    assert torch.equal(x.inner, expected)
    exact = rms_norm_reference(expected, weight, 1e-6)
    bound = exact.abs() * (size / 2 + 12) * ROUNDING + last_rounding(exact, dtype)
    assert ((out.inner.double() - exact).abs() <= bound).all()
    assert x.frame_is_nan()
    assert out.frame_is_nan()


def test_rms_norm_in_place() -> None:
    x, norm = torch.randn(2, 100), RMSNorm.of(torch.randn(100), 1e-5)
    out = torch.empty_like(x)
    rms_norm(x, norm, None, out, backend="triton")
    rms_norm(x, norm, None, x, backend="triton")
    assert torch.equal(x, out)


@pytest.mark.parametrize("added", [True, False])
def test_rms_norm_moves_each_byte_once(added: bool) -> None:
    x, add, out = torch.randn(2, 576), torch.randn(2, 576).bfloat16(), torch.empty(2, 576, dtype=torch.bfloat16)
    with traffic(x=x, add=add, out=out) as seen:
        rms_norm(x, RMSNorm.of(torch.randn(576), 1e-5), None, out, add if added else None, backend="triton")
    assert seen.loaded == {"x": 2 * 576 * 4, "add": 2 * 576 * 2 * added, "out": 0}
    assert seen.stored == {"x": 2 * 576 * 4 * added, "add": 0, "out": 2 * 576 * 2}


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 77, 1536, 2100])
def test_silu_mul(backend: str, dtype: torch.dtype, inner: int) -> None:
    """Five operations and exp, good to two roundings; torch rounds silu to `dtype` besides."""
    gate_up, out = Framed(3, 2 * inner, dtype, 4.0), Framed(3, inner, dtype)
    silu_mul(gate_up.inner, out.inner, backend=backend)
    exact, up = silu_mul_reference(gate_up.inner), gate_up.inner[:, inner:].double()
    bound = exact.abs() * 7 * ROUNDING + last_rounding(exact, dtype)
    if backend == "torch":
        bound += last_rounding(exact / up, dtype) * up.abs() * (1 + 2.0**-7)
    assert ((out.inner.double() - exact).abs() <= bound).all()
    assert out.frame_is_nan()


@BACKENDS
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_large_numbers(backend: str) -> None:
    gate, out = torch.tensor([-1e30, -200.0, -60.0, 0.0, 200.0, 1e30, math.inf, math.nan]), torch.empty(1, 8)
    silu_mul(torch.cat([gate, torch.full((8,), 2.0)])[None], out, backend=backend)
    expected = torch.tensor([0.0, 0.0, -120 * math.exp(-60), 0.0, 400.0, 2e30, math.inf, math.nan])
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-37, equal_nan=True)


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 513, 576, 1100])
def test_embed(backend: str, dtype: torch.dtype, size: int) -> None:
    embedding = Framed(40, size, dtype, 1.0)
    ids = [-1, 0, 7, 39, 40, 2**31 + 3, 2**40, 2**63 - 1, -(2**31) - 5, -(2**63)]
    out = Framed(len(ids), size, torch.float32)
    tokens = torch.full((len(ids), 2), 3)
    tokens[:, 1] = torch.tensor(ids)
    embed(tokens[:, 1], embedding.inner, out.inner, backend=backend)
    expected = embedding.inner[torch.tensor([0, 0, 7, 39, 39, 39, 39, 39, 0, 0])].float()
    assert torch.equal(out.inner, expected)
    assert out.frame_is_nan()


def test_rows_of_an_embedding_further_apart_than_32_bits_count() -> None:
    """4.4 GB of addresses, of which a few pages are touched; likewise below."""
    embedding = torch.empty(2 * FAR + 64, dtype=torch.bfloat16).as_strided((3, 64), (FAR, 1))
    embedding.copy_(torch.randn(3, 64))
    out = torch.empty(2, 64)
    embed(torch.tensor([2, 0]), embedding, out, backend="triton")
    assert torch.equal(out, embedding[[2, 0]].float())


def cache(layout: str, capacity: int, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """One layer of keys or values [capacity, Hkv, D], all NaN."""
    if layout == "heads first":
        return torch.full((kv_heads, capacity, dim), math.nan, dtype=dtype).transpose(0, 1)
    return torch.full((2, capacity, kv_heads, dim), math.nan, dtype=dtype)[1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "layout"),
    [(9, 3, 64, "slots first"), (2, 1, 8, "heads first"), (5, 5, 80, "slots first"), (4, 2, 128, "heads first"),
     (1, 1, 2, "slots first")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store(heads: int, kv_heads: int, dim: int, layout: str, dtype: torch.dtype, normed: bool) -> None:
    """A turn is three operations on numbers as large as the pair; a norm adds D/2 roundings and a few."""
    capacity, width, frequencies = 40, 3, rope_frequencies(10000.0, dim)
    rotations = rope_table(frequencies, capacity, amplitude=1.25)
    norm = RMSNorm.of(torch.randn(heads + kv_heads, dim), 1e-3) if normed else None
    qkv = Framed(width, (heads + 2 * kv_heads) * dim, dtype, 1.0)
    keys, values = (cache(layout, capacity, kv_heads, dim, dtype) for _ in range(2))
    queries = torch.full((width + 1, heads + 1, dim), math.nan, dtype=dtype)
    positions = torch.arange(10, 20)[4 : 4 + width]
    used = torch.zeros(2, dtype=torch.int32)
    rope_store(qkv.inner, positions, rotations, norm, queries[:width, 1:], keys, values, used[:1])
    assert used.tolist() == [17, 0]
    q, k, v = rope_store_reference(qkv.inner, positions, rotations, norm, heads, dim)
    for ours, exact in ((queries[:width, 1:], q), (keys[positions], k)):
        pair = exact.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
        roundings = 3 + (dim / 2 + 8) * normed
        bound = pair * math.sqrt(2) * roundings * ROUNDING + last_rounding(exact, dtype)
        assert ((ours.double() - exact).abs() <= bound).all()
    assert torch.equal(values[positions].double(), v)
    others = torch.ones(capacity, dtype=torch.bool)
    others[positions] = False
    assert keys[others].isnan().all()
    assert values[others].isnan().all()
    assert queries[width].isnan().all()
    assert queries[:, 0].isnan().all()


def test_cache_slots_further_apart_than_32_bits_count() -> None:
    memory = torch.empty(2 * FAR + 64, dtype=torch.bfloat16)
    for strides in ((FAR, 8, 1), (8, FAR - 8, 1)):
        keys, values = memory.as_strided((3, 3, 8), strides), torch.zeros(3, 3, 8, dtype=torch.bfloat16)
        for k, v in ((keys, values), (values, keys)):
            keys[2] = math.nan
            qkv, queries = torch.randn(1, 7 * 8).bfloat16(), torch.empty(1, 1, 8, dtype=torch.bfloat16)
            used = torch.zeros(1, dtype=torch.int32)
            rope_store(qkv, torch.tensor([2]), torch.ones(3, 4) + 0j, None, queries, k, v, used)  # turned by nothing
            assert torch.equal(torch.cat([k[2], v[2]]), qkv.view(7, 8)[1:])


@BACKENDS
@pytest.mark.parametrize("m", [0, 1, 5, 30])
def test_round_inputs(backend: str, m: int) -> None:
    capacity = 64
    tokens = torch.randint(0, 2**40, (capacity,))
    for length in (0, 1, 2, 3, 17, capacity):
        buffers = torch.full((2, m + 4), -7)
        block, positions = buffers[0, 1:-1], buffers[1, 1:-1]
        round_inputs(tokens, torch.tensor([length]), block, positions, backend=backend)
        assert positions.tolist() == [max(length - 2 + i, 0) for i in range(m + 2)]
        assert block.tolist() == [tokens[max(length - 2, 0)], tokens[max(length - 1, 0)]] + [-7] * m
        assert (buffers[:, [0, -1]] == -7).all()


def calls() -> dict[str, Callable[..., Any]]:
    """Every kernel with tensors of its own on some device."""

    def on(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def store(device: str, qk_norm: RMSNorm | None = None, dtype: torch.dtype = torch.float32) -> None:
        rope_store(
            on(device, 2, 32, dtype=dtype), on(device, 2, dtype=torch.int64), on(device, 9, 4, dtype=torch.complex64),
            qk_norm, on(device, 2, 2, 8), on(device, 9, 1, 8), on(device, 9, 1, 8), on(device, 1, dtype=torch.int32),
        )  # fmt: skip

    def norm(device: str, size: int = 8) -> None:
        weight = RMSNorm(on(device, 8), torch.ones((), device=device))
        rms_norm(on(device, 2, size), weight, None, on(device, 2, 8), on(device, 2, 8), backend="triton")

    def activate(device: str, size: int = 16) -> None:
        silu_mul(on(device, 2, size), on(device, 2, 8), backend="triton")

    def look_up(device: str, size: int = 8) -> None:
        embed(on(device, 2, dtype=torch.int64), on(device, 5, size), on(device, 2, 8), backend="triton")

    def begin(device: str, size: int = 4) -> None:
        places = [on(device, count, dtype=torch.int64) for count in (9, 1, size, 4)]
        round_inputs(places[0], places[1], places[2], places[3], backend="triton")

    return {"rms_norm": norm, "silu_mul": activate, "embed": look_up, "rope_store": store, "round_inputs": begin}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", calls())
def test_one_launch(name: str, device: str) -> None:
    with recorded() as launches:
        calls()[name](device)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("rms_norm", {"size": 9}), ("silu_mul", {"size": 15}), ("embed", {"size": 9}), ("round_inputs", {"size": 5}),
     ("rope_store", {"dtype": torch.float64}), ("rope_store", {"qk_norm": RMSNorm(torch.zeros(2, 8), torch.ones(()))})],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        calls()[name]("cpu", **wrong)


def test_entries_that_lie_apart_are_refused() -> None:
    with pytest.raises(InvalidInput, match="gate_up: expected unit stride"):
        silu_mul(torch.zeros(4, 2).t(), torch.zeros(2, 2), backend="triton")
