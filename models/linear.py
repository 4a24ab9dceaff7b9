"""Weight matrices as callables, so that a transformer does not know how its products are made."""

import functools
from typing import Protocol

import torch
import torch.nn.functional as F

_LEAST_ROWS = 5
"""oneDNN multiplies one row by other code than several, which is slower and may round differently."""


class Linear(Protocol):
    """y = x W^T + b for rows x [W, in] of any dtype; gives [W, out].

    Attributes:
        bias: [out] or None.
    """

    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def dense(self) -> torch.Tensor:
        """The weight [out, in] as a plain matrix."""


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest product there is for a weight [out, in] in the working dtype."""
    packs = weight.dtype == torch.bfloat16 and _has_packed_product(weight.device)
    return PackedLinear(weight, bias) if packs else DenseLinear(weight, bias)


class DenseLinear:
    """A weight [out, in] and perhaps a bias [out] in the working dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def dense(self) -> torch.Tensor:
        """The weight itself."""
        return self.weight


class PackedLinear:
    """A bfloat16 weight [out, in] in the order in which oneDNN reads it: twice as fast for few rows.

    A single row is multiplied as five equal ones. That is faster, and makes a row's result the same bits whether one
    token is decoded or a block is verified.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LEAST_ROWS)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if rows == 1:
            x = x.expand(_LEAST_ROWS, -1)
        x = x.to(torch.bfloat16, memory_format=torch.contiguous_format)
        out: torch.Tensor = _packed_product(x, self._packed, self.bias, "none", [], "")
        return out[:rows]

    def dense(self) -> torch.Tensor:
        """The weight in its plain order, a copy."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight


def _packed_product(*arguments: object) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(*arguments)
    return out


@functools.cache
def _has_packed_product(device: torch.device) -> bool:
    """Whether torch has these private operators, and gets a small product right: tried rather than assumed."""
    if device.type != "cpu":
        return False
    try:
        x, weight = torch.eye(16, dtype=torch.bfloat16), torch.arange(256.0).view(16, 16).bfloat16()
        product = PackedLinear(weight, torch.ones(16, dtype=torch.bfloat16))
        return torch.equal(product(x), F.linear(x, weight) + 1) and torch.equal(product.dense(), weight)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
