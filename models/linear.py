"""Weight matrices as callables, so that a transformer does not know how its products are made."""

import functools
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """y = x W^T for rows x [W, in]; gives [W, out] in x's dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def quantize_int8(self) -> "Linear": ...


class DenseLinear:
    """A weight [out, in] in the working dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def quantize_int8(self) -> "Int8Linear":
        """The same matrix in int8 with one scale per output channel."""
        return Int8Linear(self.weight)


class Int8Linear:
    """A weight [out, in] in int8 with one scale per output channel, multiplied without being expanded in memory.

    Symmetric: scale = max |row| / 127. torch's CPU product is fast for bfloat16 activations only, so that is what they
    are rounded to, whatever the working dtype. It reads past rows that are no multiple of 16 long and crashes on
    unaligned memory, neither of which it checks. Where it cannot be used, the weight is expanded for each product.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        rows = weight.float()
        scale = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.weight = (rows / scale[:, None]).round_().to(torch.int8)
        self.scale = scale.bfloat16()
        self.fused = weight.shape[1] % 16 == 0 and _has_int8_product(weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            rows = x.bfloat16().contiguous()
            if rows.data_ptr() % 64:
                rows = rows.clone()
            return torch._weight_int8pack_mm(rows, self.weight, self.scale).to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)

    def quantize_int8(self) -> "Int8Linear":
        """Itself."""
        return self


@functools.cache
def _has_int8_product(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 by int8 here; a private operator, so it is tried rather than assumed."""
    try:
        weight = torch.ones(32, 32, dtype=torch.int8, device=device)
        ones = torch.ones(32, dtype=torch.bfloat16, device=device)
        return bool((torch._weight_int8pack_mm(ones[None], weight, ones) == 32).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
