"""Quantised copies of weight matrices, with which a model drafts for itself: one row at a time is what they are for.

The products are torch's own for CPUs. They are tried before they are used; where they do not work the weight is
expanded for every product, which is slow and gives the same up to rounding.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F

GROUP = 32
"""Columns of a row that share a scale and an offset in int4."""


class Int8Linear:
    """A weight [out, in] in int8 with one scale per output channel, max |row| / 127.

    Activations are quantised as well, with one scale for all rows of a call, and multiplied as integers. They get 8
    bits, or 7 on CPUs whose sums of two products overflow otherwise.
    """

    dtype = torch.float32
    least_rows = 1

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        rows = weight.float()
        scale = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        integers = (rows / scale[:, None]).round_().to(torch.int8)
        self.fused = weight.device.type == "cpu" and _has_int8_product()
        self._weight: Any = _pack_int8(integers, scale) if self.fused else (integers, scale)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.fused:
            y: torch.Tensor = torch.ops.quantized.linear_dynamic.default(x.float(), self._weight, _overflows())
        else:
            y = F.linear(x.float(), self.dense())
        y = y if self.bias is None else y + self.bias
        return y if out is None else out.copy_(y)

    def dense(self) -> torch.Tensor:
        """The weight that the integers stand for, [out, in] float32."""
        if self.fused:
            restored: torch.Tensor = torch.ops.quantized.linear_unpack(self._weight)[0].dequantize()
            return restored
        integers, scale = self._weight
        return integers.float() * scale[:, None]


class Int4Linear:
    """A weight [out, in] in 4 bits: 32 neighbours in a row share a scale, (max - min) / 15, and an offset.

    Scales, offsets and the activations of the product are bfloat16. It needs `out` to be a multiple of 16; a row is
    filled up with zeros to whole groups.
    """

    dtype = torch.bfloat16
    least_rows = 1

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias, self._columns = bias, weight.shape[1]
        groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        middle = (low + 8 * scale.float()).bfloat16()
        levels = ((groups - middle.float()) / scale.float()).round_().add_(8).clamp_(0, 15).to(torch.int32)
        self._scale_and_middle = torch.cat([scale, middle], dim=-1).transpose(0, 1).contiguous()  # [groups, out, 2]
        self.fused = weight.shape[0] % 16 == 0 and weight.device.type == "cpu" and _has_int4_product()
        levels = levels.flatten(1)
        self._levels = torch._convert_weight_to_int4pack_for_cpu(levels, 1) if self.fused else levels.to(torch.uint8)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        x = x.bfloat16()
        if self._columns % GROUP:
            x = F.pad(x, (0, -self._columns % GROUP))
        y = self._fused_product(x) if self.fused else F.linear(x, self._expanded().bfloat16())
        y = y if self.bias is None else y + self.bias
        return y if out is None else out.copy_(y)

    def dense(self) -> torch.Tensor:
        """The weight that the levels stand for, [out, in] float32."""
        return self._expanded()[:, : self._columns]

    def _fused_product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, self._levels, GROUP, self._scale_and_middle)

    def _expanded(self) -> torch.Tensor:
        if self.fused:  # one product per column, each with a single term
            identity = torch.eye(len(self._scale_and_middle) * GROUP, dtype=torch.bfloat16)
            return self._fused_product(identity).t().float()
        scale, middle = self._scale_and_middle.float().transpose(0, 1).split(1, dim=-1)
        return ((self._levels.unflatten(1, (-1, GROUP)).float() - 8) * scale + middle).flatten(1)


def _pack_int8(integers: torch.Tensor, scale: torch.Tensor) -> object:
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch means to remove quantised tensors, and has no other way to its packed integer product yet.
        warnings.simplefilter("ignore")
        quantised = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)


@functools.cache
def _overflows() -> bool:
    """Whether a product of 8-bit activations saturates when two neighbouring terms are added in 16 bits."""
    packed = _pack_int8(torch.full((16, 32), 127, dtype=torch.int8), torch.ones(16))
    out = torch.ops.quantized.linear_dynamic.default(torch.ones(1, 32), packed, False)
    return bool(((out - 127 * 32).abs() > 127).any())


@functools.cache
def _has_int8_product() -> bool:
    try:
        packed = _pack_int8(torch.full((16, 32), 2, dtype=torch.int8), torch.ones(16))
        out = torch.ops.quantized.linear_dynamic.default(torch.ones(1, 32), packed, True)
        return bool(((out - 64).abs() < 1).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


@functools.cache
def _has_int4_product() -> bool:
    try:
        packed = torch._convert_weight_to_int4pack_for_cpu(torch.full((16, GROUP), 9, dtype=torch.int32), 1)
        ones = torch.ones(1, 16, 2, dtype=torch.bfloat16)
        out = torch.ops.aten._weight_int4pack_mm_for_cpu.default(ones.view(1, GROUP), packed, GROUP, ones)
        return bool((out == 2 * GROUP).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
