"""Weight matrices as callables, so that a transformer does not know how its products are made."""

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

    Symmetric: scale = max |row| / 127. Activations stay in the working dtype.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        rows = weight.float()
        scale = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.weight = (rows / scale[:, None]).round_().to(torch.int8)
        self.scale = scale.to(weight.dtype)
        self.fused = _has_int8_product(weight.dtype, weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return torch._weight_int8pack_mm(x, self.weight, self.scale)
        return F.linear(x, self.weight.to(x.dtype)) * self.scale

    def quantize_int8(self) -> "Int8Linear":
        """Itself."""
        return self


def _has_int8_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies by an int8 weight here; a private operator, so it is tried rather than assumed."""
    try:
        weight = torch.ones(32, 32, dtype=torch.int8, device=device)
        ones = torch.ones(32, dtype=dtype, device=device)
        return bool((torch._weight_int8pack_mm(ones[None], weight, ones) == 32).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
