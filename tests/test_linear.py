"""Matrix products: the packed one against the plain one, the quantised ones against the exact sum, and fallbacks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_spec.models import linear as linear_module
from fused_spec.models import quantized_linear
from fused_spec.models.linear import DenseLinear, PackedLinear, linear
from fused_spec.models.quantized_linear import GROUP, Int4Linear, Int8Linear

BF16_EPS = torch.finfo(torch.bfloat16).eps


def without(monkeypatch: pytest.MonkeyPatch, module: Any, probe: str) -> None:
    monkeypatch.setattr(module, probe, lambda device: False)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 17])
@pytest.mark.parametrize(("out", "columns"), [(64, 32), (96, 576), (33, 70), (1024, 1000)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_product_is_the_plain_one(rows: int, out: int, columns: int, bias: bool) -> None:
    """Both round a sum of exact products, made in float32 in some order, to bfloat16, perhaps before the bias too."""
    weight = torch.randn(out, columns).bfloat16()
    extra = torch.randn(out).bfloat16() if bias else None
    x = torch.randn(rows, columns)
    packed, plain = PackedLinear(weight, extra)(x), DenseLinear(weight, extra)(x)
    assert packed.shape == plain.shape == (rows, out)
    assert packed.dtype == plain.dtype == torch.bfloat16
    exact = x.bfloat16().double() @ weight.double().T + (0 if extra is None else extra.double())
    terms = x.bfloat16().double().abs() @ weight.double().abs().T + (0 if extra is None else extra.double().abs())
    bound = exact.abs() * BF16_EPS + terms * columns * 2.0**-24 + terms * BF16_EPS * bias
    for product in (packed, plain):
        assert ((product.double() - exact).abs() <= bound).all()


def test_packing_loses_nothing() -> None:
    weight = torch.randn(100, 70).bfloat16()
    assert torch.equal(PackedLinear(weight).dense(), weight)


@pytest.mark.parametrize(("out", "columns"), [(960, 576), (576, 1536), (1024, 4864)])
def test_a_row_is_the_same_bits_among_any_rows(out: int, columns: int) -> None:
    """What makes greedy text independent of what was drafted; one row alone is multiplied as several for that."""
    product = PackedLinear((torch.randn(out, columns) / columns**0.5).bfloat16())
    x = torch.randn(9, columns)
    expected = product(x[4:5])[0]
    for rows in (2, 3, 5, 6, 9):
        for at in range(rows):
            others = torch.cat([x[:at], x[4:5], x[5 : 5 + rows - at - 1]])[:rows]
            assert torch.equal(product(others)[at], expected)


def test_which_product_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 32)
    assert isinstance(linear(weight), DenseLinear)
    assert isinstance(linear(weight.half()), DenseLinear)
    assert isinstance(linear(weight.bfloat16()), PackedLinear)
    without(monkeypatch, linear_module, "_has_packed_product")
    assert isinstance(linear(weight.bfloat16()), DenseLinear)


@pytest.mark.parametrize(
    ("probe", "operator"),
    [
        (linear_module._has_packed_product, (linear_module, "_packed_product")),
        (quantized_linear._has_int8_product, (quantized_linear, "_pack_int8")),
    ],
)
def test_a_product_that_torch_lacks_is_found_missing(
    probe: Any, operator: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators are private to torch: one that is gone raises AttributeError, one that errs gives other numbers."""

    def gone(*_: object) -> None:
        raise AttributeError

    probe.cache_clear()
    assert probe(torch.device("cpu"))
    assert not probe(torch.device("meta"))
    probe.cache_clear()
    monkeypatch.setattr(*operator, gone)
    assert not probe(torch.device("cpu"))
    probe.cache_clear()


def test_a_packed_product_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    linear_module._has_packed_product.cache_clear()
    monkeypatch.setattr(linear_module, "_packed_product", lambda x, *_: torch.zeros(len(x), 16, dtype=torch.bfloat16))
    assert not linear_module._has_packed_product(torch.device("cpu"))
    linear_module._has_packed_product.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("columns", [64, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_int8(dtype: torch.dtype, fused: bool, columns: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight moves by half a step of max|row| / 127; the product quantises x, 7 bits for its range, in one step."""
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
        bound = 3 * terms * torch.finfo(dtype).eps + terms * columns * 2.0**-23
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


@pytest.mark.parametrize("kind", [DenseLinear, PackedLinear, Int8Linear, Int4Linear])
def test_every_product_takes_any_float(kind: Callable[..., Any]) -> None:
    product = kind(torch.randn(32, 32).bfloat16())
    for dtype in (torch.float32, torch.bfloat16):
        assert product(torch.randn(2, 32, dtype=dtype)).shape == (2, 32)
