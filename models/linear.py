"""Weight matrices as callables, so that a transformer does not know how its products are made."""

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from fused_spec.kernels.attention import NARROW


class Linear(Protocol):
    """y = x W^T + b for rows x [R, in]; gives [R, out], in `out` if that is given.

    Attributes:
        bias: [out] or None.
        dtype: what x should be in.
        least_rows: how many rows x must have; what is not needed may be anything finite.
    """

    bias: torch.Tensor | None
    dtype: torch.dtype
    least_rows: int

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...
    def dense(self) -> torch.Tensor:
        """The weight [out, in] as a plain matrix, of any dtype."""


def linear(
    weight: torch.Tensor, bias: torch.Tensor | None, few_rows: bool, in_file: Sequence[torch.Tensor] = ()
) -> Linear:
    """The fastest product there is for a weight [out, in] in the working dtype, mostly with few rows or with more.

    `in_file` are the parts that lie on top of each other in the weight, where they stayed in their file.
    """
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        if few_rows and _has_half_product() and max(map(abs, torch.aminmax(weight))) < torch.finfo(torch.float16).max:
            return HalfLinear(weight, bias, in_file)
        if _has_packed_product():
            return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


class DenseLinear:
    """A weight [out, in] and perhaps a bias [out] in the working dtype."""

    least_rows = 1

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias, self.dtype = weight, bias, weight.dtype

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def dense(self) -> torch.Tensor:
        """The weight itself."""
        return self.weight


class PackedLinear:
    """A bfloat16 weight [out, in] in the order in which oneDNN reads it: for a handful of rows, and for many.

    oneDNN multiplies one row by other code than several, which is slower and may round differently. With five, a row's
    result is the same bits whether one token is decoded or a block is verified.
    """

    dtype = torch.bfloat16
    least_rows = 5

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.least_rows)
        self.bias = bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")
        return y if out is None else out.copy_(y)

    def dense(self) -> torch.Tensor:
        """The weight in its plain order, a copy."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight


class HalfLinear:
    """A bfloat16 weight [out, in] kept in float16 for products in float32: for one row, or a few.

    float16 has more digits than bfloat16 and less range: weights below 2^-14 move by 2^-25 at most, those of 65520 and
    more do not fit. Nothing else is rounded, so that results are closer to the exact ones than those of a bfloat16
    product. Rows are kept in pieces of 512, the last one filled up, which takes memory where `in` is small.

    For many rows bfloat16 products are faster. Those of a long prompt go to the file's own weights where these can be
    mapped: what is read of them is in the system's file cache anyway and takes no memory of its own.
    """

    dtype = torch.float32
    least_rows = 1

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, in_file: Sequence[torch.Tensor] = ()
    ) -> None:
        self.bias, self._in_file = bias, in_file
        floats = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16.default(weight.float(), floats)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) > NARROW and self._in_file:
            y = torch.cat([F.linear(x.bfloat16(), part) for part in self._in_file], dim=1)
            y = y if self.bias is None else y.add_(self.bias)
        else:
            y = torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
        return y if out is None else out.copy_(y)

    def dense(self) -> torch.Tensor:
        """The weight in its plain order, a copy in float32."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16.default(self._packed)[0]
        return weight


@functools.cache
def _has_packed_product() -> bool:
    return _works(PackedLinear)


@functools.cache
def _has_half_product() -> bool:
    # With matrix tiles, a long prompt goes through bfloat16 so much faster that it outweighs the single rows.
    return not torch.cpu._is_amx_tile_supported() and _works(HalfLinear)


def _works(kind: type[PackedLinear] | type[HalfLinear]) -> bool:
    """Whether torch has the private operators of a product and gets a small one right: tried rather than assumed."""
    try:
        x, weight = torch.eye(16, dtype=kind.dtype), torch.arange(256.0).view(16, 16).bfloat16()
        product = kind(weight, torch.ones(16, dtype=torch.bfloat16))
        return torch.equal(product(x).float(), weight.t().float() + 1) and torch.equal(
            product.dense().bfloat16(), weight
        )
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
