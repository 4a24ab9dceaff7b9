"""Matrix products: the packed one against the plain one, the quantised ones against the exact sum, and fallbacks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitwise import assert_same_row
from fused_spec.kernels.attention import NARROW
from fused_spec.models import linear as linear_module
from fused_spec.models import quantized_linear
from fused_spec.models.linear import DenseLinear, HalfLinear, Linear, PackedLinear, linear
from fused_spec.models.quantized_linear import GROUP, Int4Linear, Int8Linear

BF16_EPS = torch.finfo(torch.bfloat16).eps


def without(monkeypatch: pytest.MonkeyPatch, module: Any, probe: str) -> None:
    monkeypatch.setattr(module, probe, lambda: False)


@pytest.mark.parametrize("kind", [DenseLinear, PackedLinear, HalfLinear])
@pytest.mark.parametrize("rows", [5, 6, 17])
@pytest.mark.parametrize(("out", "columns"), [(64, 32), (96, 576), (33, 70), (1024, 1000)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_bfloat16_weights(
    kind: Callable[..., Linear], rows: int, out: int, columns: int, bias: bool
) -> None:
    """A sum of exact products in float32, in any order. Two kinds round it to bfloat16, perhaps also before a bias."""
    weight = torch.randn(out, columns).bfloat16()
    extra = torch.randn(out).bfloat16() if bias else None
    product = kind(weight, extra)
    x = torch.randn(rows, columns).to(product.dtype)
    y = product(x)
    exact = x.double() @ weight.double().T + (0 if extra is None else extra.double())
    terms = x.double().abs() @ weight.double().abs().T + (0 if extra is None else extra.double().abs())
    rounding = 0.0 if kind is HalfLinear else BF16_EPS
    bound = exact.abs() * rounding + terms * ((columns + 1) * 2.0**-24 + rounding * bias)
    bound += x.double().abs().sum(1, keepdim=True) * 2.0**-25  # weights too small for float16
    assert y.shape == (rows, out)
    assert ((y.double() - exact).abs() <= bound).all()


def test_packing_loses_nothing() -> None:
    """float16 holds a bfloat16 number exactly from 2^-14 on, and to 2^-25 below."""
    weight = torch.randn(100, 70).bfloat16()
    weight[0] = torch.tensor([1e-5, -1e-6, 1e-7, 0.0, 3e4, -6e4, 2.0**-14]).repeat(10)
    assert torch.equal(PackedLinear(weight).dense(), weight)
    kept = HalfLinear(weight).dense().double()
    assert ((kept - weight.double()).abs() <= 2.0**-25).all()
    normal = weight.abs() >= 2.0**-14
    assert torch.equal(kept[normal], weight.double()[normal])


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_are_multiplied_by_the_weights_in_the_file(bias: bool) -> None:
    """A few are not: a block that is decoded must give the bits of single tokens."""
    weight, x = torch.randint(-1, 2, (80, 70)), torch.randint(-1, 2, (NARROW + 1, 70))
    extra = torch.randint(-9, 10, (80,))
    elsewhere = (weight * 2).bfloat16().split([48, 32])  # so that what comes of them shows; all sums are exact
    product = HalfLinear(weight.bfloat16(), extra.bfloat16() if bias else None, elsewhere)
    exact = x @ weight.T
    assert torch.equal(product(x[:NARROW].float()), (exact[:NARROW] + bias * extra).float())
    assert torch.equal(product(x.float()).float(), (2 * exact + bias * extra).float())
    out = torch.empty(NARROW + 1, 80)
    assert product(x.float(), out) is out
    assert torch.equal(out, (2 * exact + bias * extra).float())


@pytest.mark.parametrize("kind", [PackedLinear, HalfLinear])
@pytest.mark.parametrize(("out", "columns"), [(960, 576), (576, 1536), (1024, 4864)])
def test_a_row_is_the_same_bits_among_any_rows(kind: Callable[..., Linear], out: int, columns: int) -> None:
    """What makes greedy text independent of what was drafted, and of how much."""
    product = kind((torch.randn(out, columns) / columns**0.5).bfloat16())
    x = torch.randn(9, columns).to(product.dtype)
    expected = product(x[4:].contiguous())[0]
    for rows in range(product.least_rows, 10):
        for at in range(rows):
            others = x.roll(at - 4, 0)[:rows].contiguous()
            assert_same_row(product(others)[at], expected, 2 * BF16_EPS)


def test_which_product_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 32)
    assert isinstance(linear(weight, None, few_rows=True), DenseLinear)
    assert isinstance(linear(weight.half(), None, few_rows=True), DenseLinear)
    assert isinstance(linear(weight.bfloat16(), None, few_rows=False), PackedLinear)
    monkeypatch.setattr(linear_module, "_has_half_product", lambda: True)
    assert isinstance(linear(weight.bfloat16(), None, few_rows=True), HalfLinear)
    assert isinstance(linear(weight.bfloat16() * 1e5, None, few_rows=True), PackedLinear)  # beyond float16
    without(monkeypatch, linear_module, "_has_half_product")
    assert isinstance(linear(weight.bfloat16(), None, few_rows=True), PackedLinear)
    without(monkeypatch, linear_module, "_has_packed_product")
    assert isinstance(linear(weight.bfloat16(), None, few_rows=True), DenseLinear)


@pytest.mark.parametrize("kind", [PackedLinear, HalfLinear])
def test_a_product_that_torch_lacks_or_that_errs_is_not_used(
    kind: type[PackedLinear] | type[HalfLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators are private to torch: one may be gone, or mean something else one day."""

    def gone(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    assert linear_module._works(kind)
    monkeypatch.setattr(kind, "__call__", gone)
    assert not linear_module._works(kind)
    monkeypatch.setattr(kind, "__call__", lambda self, x: torch.zeros(len(x), 16))
    assert not linear_module._works(kind)


def test_a_quantised_product_that_torch_lacks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked anew, past what was found before."""

    def gone(*_: object) -> None:
        raise AttributeError("no such operator")

    for probe, owner, operator in (
        (quantized_linear._has_int8_product, quantized_linear, "_pack_int8"),
        (quantized_linear._has_int4_product, torch, "_convert_weight_to_int4pack_for_cpu"),
    ):
        assert probe.__wrapped__()
        with monkeypatch.context() as patch:
            patch.setattr(owner, operator, gone)
            assert not probe.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("columns", [64, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_int8(dtype: torch.dtype, fused: bool, columns: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight moves by half a step of max|row| / 127; the product quantises x, with 7 or 8 bits for its range."""
    if not fused:
        without(monkeypatch, quantized_linear, "_has_int8_product")
    weight = torch.randn(96, columns).to(dtype)
    weight[5] = 0
    extra = torch.randn(96).to(dtype) if bias else None
    product = Int8Linear(weight, extra)
    assert product.fused == fused
    restored = product.dense().double()
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert ((restored - weight.double()).abs() <= step * (0.5 + 127 * 2.0**-22) + 1e-30).all()
    x = torch.randn(3, columns)
    exact = x.double() @ restored.T + (0 if extra is None else extra.double())
    terms = x.double().abs() @ restored.abs().T + (0 if extra is None else extra.double().abs())
    if fused:  # levels of x are (max - min) / 127 apart, and zero is one of them
        coarse = (x.max().clamp(min=0) - x.min().clamp(max=0)).double() / 127 * restored.abs().sum(1)
        bound = coarse + terms * columns * 2.0**-22
    else:
        bound = terms * columns * 2.0**-22
    assert ((product(x).double() - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("out", "columns"), [(96, 64), (48, 100), (50, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_int4(
    dtype: torch.dtype, fused: bool, out: int, columns: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight moves by half a step of its group; scale and offset, rounded to bfloat16, add what they are off by."""
    if not fused:
        without(monkeypatch, quantized_linear, "_has_int4_product")
    weight = torch.randn(out, columns).to(dtype)
    weight[5] = 0
    extra = torch.randn(out).to(dtype) if bias else None
    product = Int4Linear(weight, extra)
    assert product.fused == (fused and out % 16 == 0)
    restored = product.dense().double()
    groups = F.pad(weight.double(), (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step, middle = (high - low) / 15, (low + 8 * (high - low) / 15)
    # the highest level is cut off by up to what eight rounded steps and the rounded middle fall short of it
    bound = step * 0.5 + (8 * step + middle.abs()) * BF16_EPS + groups.abs() * BF16_EPS
    bound = bound.expand_as(groups).flatten(1)[:, :columns]
    assert ((restored - weight.double()).abs() <= bound + 1e-30).all()
    x = torch.randn(3, columns)
    exact = x.bfloat16().double() @ restored.T + (0 if extra is None else extra.double())
    terms = x.bfloat16().double().abs() @ restored.abs().T + (0 if extra is None else extra.double().abs())
    assert ((product(x).double() - exact).abs() <= 4 * BF16_EPS * terms + 1e-30).all()


def test_int4_holds_sixteen_levels_exactly() -> None:
    """Weights that lie on a grid of 16 levels, as those of a Q4_1 file do, are kept to the bit."""
    levels = torch.randint(0, 16, (32, 4, GROUP))
    levels[..., 0], levels[..., 1] = 0, 15
    weight = ((levels - 8) * 0.125 + 0.5).flatten(1)
    assert torch.equal(Int4Linear(weight).dense(), weight)
