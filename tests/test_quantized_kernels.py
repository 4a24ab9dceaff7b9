"""Products with int8 and int4 weights, on both paths, against float64; the Triton path under Triton's interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import default_backend
from fused_spec.kernels.int4_linear import GROUP, int4_linear, int4_linear_reference, pack_levels, unpack_levels
from fused_spec.kernels.int4_linear_triton import int4_linear_triton, int4_tile
from fused_spec.kernels.int8_linear import int8_linear, int8_linear_reference
from fused_spec.kernels.int8_linear_triton import Tile, int8_linear_triton, int8_tile
from fused_spec.kernels.launch import recorded
from fused_spec.models.linear import Linear
from fused_spec.models.quantized_linear import Int4Linear, Int8Linear
from traffic import traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 10, 64, True), (1, 7, 4500, False), (2, 6, 33, False), (3, 5, 576, True)]
"""R, out, in, and whether there is a bias: whole tiles and parts of them, one step along a row and more."""


def int8_weight(outs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-128, 128, (outs, columns), dtype=torch.int8), torch.rand(outs) + 0.1


def int4_weight(outs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels are random beyond the last column, too."""
    groups = -(-columns // GROUP)
    levels = torch.randint(0, 16, (outs, groups * GROUP))
    return pack_levels(levels), torch.randn(outs, groups, 2).bfloat16()


def int8_terms(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sum of |x| |weight| scale."""
    return x.double().abs() @ weight.double().abs().T * scale.double()


def int4_terms(x: torch.Tensor, levels: torch.Tensor, scale_and_middle: torch.Tensor) -> torch.Tensor:
    """Sum of |x| (|level - 8| |scale| + |middle|): the two parts of a weight are summed apart."""
    columns = x.shape[1]
    scale, middle = (part.double().abs() for part in scale_and_middle.unbind(2))
    centred = (unpack_levels(levels).double() - 8).abs().unflatten(1, (-1, GROUP))
    parts = (centred * scale[..., None] + middle[..., None]).flatten(1)[:, :columns]
    return x.double().abs() @ parts.T


def assert_product(y: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, columns: int) -> None:
    """A float32 sum in any order, of products that are rounded once or twice, then rounded to y's dtype.

    Triton's interpreter cuts off what bfloat16 has no room for, so that a whole step is allowed.
    """
    bound = terms * (columns + 4) * 2.0**-24
    bound += (exact.abs() + bound) * torch.finfo(y.dtype).eps
    assert ((y.double() - exact).abs() <= bound).all()


KINDS: dict[str, tuple[Any, ...]] = {
    "int8": (int8_linear, int8_linear_reference, int8_weight, int8_terms, int8_linear_triton),
    "int4": (int4_linear, int4_linear_reference, int4_weight, int4_terms, int4_linear_triton),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outs", "columns", "bias"), SHAPES)
def test_products(kind: str, backend: str, dtype: torch.dtype, rows: int, outs: int, columns: int, bias: bool) -> None:
    """Rows that lie in wider ones: nothing but NaN is around x, and what is around the result stays as it was."""
    product, reference, make, bound_terms, _ = KINDS[kind]
    weight = make(outs, columns)
    extra = torch.randn(outs).to(dtype) if bias else None
    wide = torch.full((rows + 1, columns + 40), math.nan, dtype=dtype)
    x = wide[:rows, 16 : 16 + columns]
    x.copy_(torch.randn(rows, columns))
    around = torch.full((rows + 1, outs + 3), 7.0, dtype=dtype)
    out = around[:rows, 1 : 1 + outs]
    assert product(x, *weight, extra, out, backend=backend) is out
    exact = reference(x, *weight, extra)
    terms = bound_terms(x, *weight) + (0 if extra is None else extra.double().abs())
    assert_product(out, exact, terms, columns)
    out.fill_(7)
    assert (around == 7).all()
    assert_product(product(x, *weight, extra, backend=backend), exact, terms, columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tile", [Tile(1, 1, 128, 1), Tile(1, 8, 64, 1), Tile(2, 4, 32, 1), Tile(4, 2, 128, 1)], ids=str
)
def test_tiles(kind: str, tile: Tile) -> None:
    """Every number of outputs and rows in a program, and several steps along a row of the weight."""
    _, reference, make, bound_terms, launcher = KINDS[kind]
    weight, x, extra = make(9, 130), torch.randn(3, 130), torch.randn(9)
    out = torch.full((3, 9), math.nan)
    launcher(x, *weight, extra, out, tile)
    assert_product(out, reference(x, *weight, extra), bound_terms(x, *weight) + extra.double().abs(), 130)


def test_every_integer_and_level_is_exact() -> None:
    """One column at a time: a product with a unit vector is the weight to the bit, or to the one rounding of int4."""
    integers = torch.arange(-128, 128).to(torch.int8).view(8, 32)
    y = int8_linear(torch.eye(32), integers, torch.full((8,), 0.5), None, backend="triton")
    assert torch.equal(y, integers.float().T / 2)
    levels = torch.stack([torch.arange(32) % 16, torch.arange(32).flip(0) // 2])
    scale_and_middle = torch.tensor([[0.5, 3.0], [2.0, -1.0]]).bfloat16()[:, None]
    y = int4_linear(torch.eye(32), pack_levels(levels), scale_and_middle, None, backend="triton")
    assert torch.equal(y, ((levels - 8) * scale_and_middle[:, :, 0] + scale_and_middle[:, :, 1]).float().T)


def test_levels_are_packed_as_said() -> None:
    levels = torch.randint(0, 16, (5, 96))
    packed = pack_levels(levels)
    assert packed.shape == (5, 48)
    assert torch.equal(unpack_levels(packed).long(), levels)
    words = packed.view(torch.int32).long().view(5, 3, 4)
    for column in range(96):
        group, place = divmod(column, GROUP)
        nibble, word = divmod(place, 4)
        assert torch.equal(words[:, group, word] >> 4 * nibble & 15, levels[:, column])


@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_reads_the_weight_once(kind: str) -> None:
    """Every byte of what is given, and none of what lies behind it."""
    product, _, make, _, _ = KINDS[kind]
    weight, scales = (part[:9] for part in make(12, 150))
    x, bias, out = torch.randn(5, 150)[:3], torch.randn(12)[:9], torch.empty(3, 9)
    with traffic(weight=weight, scales=scales, x=x, bias=bias, out=out) as seen:
        product(x, weight, scales, bias, out, backend="triton")
    assert len(seen.launches) == 1
    assert seen.loaded == {
        "weight": weight.nbytes, "scales": scales.nbytes, "x": x.nbytes, "bias": bias.nbytes, "out": 0
    }  # fmt: skip
    assert seen.stored["out"] == out.nbytes


@pytest.mark.parametrize("tile_of", [int8_tile, int4_tile])
def test_tiles_fill_a_gpu(tile_of: Callable[[int, int, int], Tile]) -> None:
    """Three programs for each of 132 multiprocessors from 1024 outputs on, and every thread has a load of 128 bits."""
    weights_of_load = 16 if tile_of is int8_tile else 32
    for outs in (576, 1024, 2048, 4096, 6144, 8192, 12288, 24576, 49152, 128256, 151936, 152064, 262144):
        for columns in (576, 1024, 2048, 3072, 4096, 9216, 12288, 14336):
            for rows in (1, 2, 7, 16):
                tile = tile_of(rows, outs, columns)
                assert tile.columns % (weights_of_load * 32 * tile.warps) == 0
                assert tile.outs * tile.columns <= 4 * weights_of_load * 32 * tile.warps
                assert tile.rows * tile.outs <= 8
                assert outs < 1024 or -(-outs // tile.outs) >= 3 * 132
                assert tile.columns < 2 * columns


def test_what_is_refused() -> None:
    x, (weight, scale), (levels, groups) = torch.randn(2, 64), int8_weight(6, 64), int4_weight(6, 64)
    for arguments, message in (
        ((x[0], weight, scale, None), r"x: expected \[R, in\]"),
        ((x.double(), weight, scale, None), r"x: expected \[R, in\]"),
        ((x.T, weight, scale, None), "x: expected unit stride"),
        ((x, weight[:, :60], scale, None), r"weight: expected shape \(6, 64\)"),
        ((x, weight.float(), scale, None), "weight: expected int8"),
        ((x, weight.T.contiguous().T, scale, None), "weight: expected contiguous"),
        ((x, weight, scale.half(), None), "scale: expected float32"),
        ((x, weight, scale, scale[:5]), "bias: expected shape"),
        ((x, weight, scale, None, torch.empty(2, 6).half()), "out: expected float32"),
    ):
        with pytest.raises(InvalidInput, match=message):
            int8_linear(*arguments)
    with pytest.raises(InvalidInput, match="levels: expected shape"):
        int4_linear(torch.randn(2, 65), levels, groups, None)
    with pytest.raises(InvalidInput, match="scale_and_middle: expected bfloat16"):
        int4_linear(x, levels, groups.float(), None)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_on_a_device(kind: Callable[..., Linear], dtype: torch.dtype, bias: bool) -> None:
    """Activations keep the dtype of the weight, and the weight is quantised as on a CPU."""
    weight, extra = torch.randn(16, 70).to(dtype), torch.randn(16).to(dtype) if bias else None
    on_cpu = kind(weight, extra)
    with default_backend("triton"):
        product = kind(weight, extra)
        assert (product.dtype, product.least_rows) == (dtype, 1)
        x = torch.randn(1, 70).to(dtype)
        y, out = product(x), torch.empty(1, 16, dtype=dtype)
        assert product(x, out=out) is out
    assert torch.equal(y, out)
    assert y.dtype == dtype
    torch.testing.assert_close(product.dense(), on_cpu.dense(), rtol=2.0**-7 if kind is Int4Linear else 0, atol=0)
    dense = product.dense().double()
    exact = x.double() @ dense.T + (0 if extra is None else extra.double())
    # a group's scale is 2 max |w| / 15 at most, so that |level - 8| scale + |middle| stays below 2.2 max |w|
    terms = x.double().abs().sum() * weight.double().abs().max() * (2.2 if kind is Int4Linear else 1) + exact.abs()
    assert_product(y, exact, terms, 70)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_layers_of_nothing_but_shapes(kind: Callable[..., Linear]) -> None:
    """Made and used where no number can be read: one launch, and nothing besides."""
    weight = torch.empty(151936, 1024, dtype=torch.bfloat16, device="meta")
    product = kind(weight)
    assert product.dense().shape == weight.shape
    with recorded() as launches:
        y = product(torch.empty(1, 1024, dtype=torch.bfloat16, device="meta"))
    assert (len(launches), y.shape, y.dtype) == (1, (1, 151936), torch.bfloat16)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_on_a_cpu_write_where_they_are_told(kind: Callable[..., Linear], bias: bool) -> None:
    product = kind(torch.randn(32, 64), torch.randn(32) if bias else None)
    x = torch.randn(2, 64).to(product.dtype)
    y, out = product(x), torch.empty(2, 32)
    assert product(x, out=out) is out
    assert torch.equal(out, y.float())
