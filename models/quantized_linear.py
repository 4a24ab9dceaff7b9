"""Quantised copies of weight matrices, with which a model drafts for itself: one row at a time is what they are for.

Off the CPU the products are ours, of the activations as they are. On it they are torch's own, tried before they are
used; where they do not work the weight is expanded for every product, which is slow and gives the same up to rounding.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from fused_spec.kernels.check import runs_on_triton
from fused_spec.kernels.int4_linear import GROUP, int4_linear, int4_weight, pack_levels
from fused_spec.kernels.int8_linear import int8_linear

_ROWS_AT_ONCE = 4096
"""Quantising takes a few times as much memory as these rows do in float32."""


class Int8Linear:
    """A weight [out, in] in int8 with one scale per output channel, max |row| / 127.

    On a CPU activations are quantised as well, with one scale for all rows of a call, and multiplied as integers. They
    get 8 bits, or 7 on CPUs whose sums of two products overflow otherwise.
    """

    least_rows = 1

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._on_device = runs_on_triton(None, weight.device)
        self.dtype = weight.dtype if self._on_device else torch.float32
        self.fused = not self._on_device and weight.device.type == "cpu" and _has_int8_product()
        integers, scale = _int8(weight)
        self._weight: Any = _pack_int8(integers, scale) if self.fused else (integers, scale)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._on_device:
            integers, scale = self._weight
            return int8_linear(x, integers, scale, self.bias, out)
        if self.fused:
            y: torch.Tensor = torch.ops.quantized.linear_dynamic.default(x.float(), self._weight, _overflows())
        else:
            y = F.linear(x.float(), self.dense())
        return _result(y, self.bias, out)

    def dense(self) -> torch.Tensor:
        """The weight that the integers stand for, [out, in] float32."""
        if self.fused:
            restored: torch.Tensor = torch.ops.quantized.linear_unpack(self._weight)[0].dequantize()
            return restored
        integers, scale = self._weight
        dense: torch.Tensor = integers.float() * scale[:, None]
        return dense


class Int4Linear:
    """A weight [out, in] in 4 bits: 32 neighbours in a row share a scale, (max - min) / 15, and an offset.

    Scales and offsets are bfloat16, and so are the activations of the product on a CPU. There it needs `out` to be a
    multiple of 16. A row is filled up with zeros to whole groups.
    """

    least_rows = 1

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias, self._columns = bias, weight.shape[1]
        self._on_device = runs_on_triton(None, weight.device)
        self.dtype = weight.dtype if self._on_device else torch.bfloat16
        on_cpu = not self._on_device and weight.device.type == "cpu"
        self.fused = on_cpu and weight.shape[0] % 16 == 0 and _has_int4_product()
        levels, scale_and_middle = _int4(weight)
        if self.fused:
            self._levels = torch._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
            self._scale_and_middle = scale_and_middle.transpose(0, 1).contiguous()  # [groups, out, 2]
        else:
            self._levels, self._scale_and_middle = pack_levels(levels), scale_and_middle  # [out, groups, 2]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._on_device:
            return int4_linear(x, self._levels, self._scale_and_middle, self.bias, out)
        x = x.bfloat16()
        if self._columns % GROUP:
            x = F.pad(x, (0, -self._columns % GROUP))
        y = self._fused_product(x) if self.fused else F.linear(x, self._expanded().bfloat16())
        return _result(y, self.bias, out)

    def dense(self) -> torch.Tensor:
        """The weight that the levels stand for, [out, in] float32."""
        return self._expanded()[:, : self._columns]

    def _fused_product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, self._levels, GROUP, self._scale_and_middle)

    def _expanded(self) -> torch.Tensor:
        if self.fused:  # one product per column, each with a single term
            identity = torch.eye(len(self._scale_and_middle) * GROUP, dtype=torch.bfloat16)
            return self._fused_product(identity).t().float()
        return int4_weight(self._levels, self._scale_and_middle)


def _result(y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        y = y + bias
    return y if out is None else out.copy_(y)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [out, in] int8 and scales [out] float32 of a weight."""
    integers = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for part, target, scale in zip(*(each.split(_ROWS_AT_ONCE) for each in (weight, integers, scales)), strict=True):
        rows = part.float()
        scale.copy_((rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny))
        target.copy_((rows / scale[:, None]).round_())
    return integers, scales


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels [out, 32 G] uint8 and scales and middles [out, G, 2] bfloat16 of a weight, filled up to G whole groups."""
    parts = [_int4_rows(rows) for rows in weight.split(_ROWS_AT_ONCE)]
    levels, scale_and_middle = zip(*parts, strict=True)
    return torch.cat(levels), torch.cat(scale_and_middle)


def _int4_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = F.pad(rows.float(), (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
    middle = (low + 8 * scale.float()).bfloat16()
    levels = ((groups - middle.float()) / scale.float()).round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return levels.flatten(1), torch.cat([scale, middle], dim=-1)


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
