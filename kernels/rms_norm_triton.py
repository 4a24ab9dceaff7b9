"""The Triton path of `rms_norm`: one launch, one program per row, each row read once."""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import LOGIT_DTYPES, check_tensor, check_unit_stride
from fused_spec.kernels.launch import launch
from fused_spec.kernels.rms_norm import RMSNorm


@triton.jit
def rms_norm_kernel(x, x_stride, add, add_stride, weight, floor, out, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # Four next to each other for a thread: 16 bytes of float32, and the same threads have the same ones of any dtype.
    channels = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = channels < size
    x += row * x_stride
    value = tl.load(x + channels, mask=inside, other=0.0)
    scale = tl.load(weight + channels, mask=inside, other=0.0)  # before the sum, which it would have to wait for
    if add is not None:
        value += tl.load(add + row * add_stride + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + channels, value, mask=inside)
    least = tl.load(floor)
    inverse = tl.rsqrt(tl.sum(value * value) + least * least)  # good to 2^-22, and the same for the whole row
    tl.store(out + row * out_stride + channels, value * inverse * scale, mask=inside)


def rms_norm_triton(x: torch.Tensor, norm: RMSNorm, out: torch.Tensor, add: torch.Tensor | None) -> None:
    """Launch over rows x [R, n] float32; the weight is [n]."""
    rows, size = x.shape
    check_tensor("x", x, (rows, size), (torch.float32,))
    check_tensor("weight", norm.weight, (size,), (torch.float32,))
    check_tensor("out", out, (rows, size), LOGIT_DTYPES)
    if add is not None:
        check_tensor("add", add, (rows, size), LOGIT_DTYPES)
    for name, tensor in (("x", x), ("weight", norm.weight), ("out", out), ("add", add)):
        check_unit_stride(name, tensor)
    block = max(triton.next_power_of_2(size), 4)
    launch(
        rms_norm_kernel,
        (rows,),
        num_warps=min(max(block // 256, 1), 16),  # 8 channels a thread; 16 warps leave each of them 128 registers
        x=x,
        x_stride=x.stride(0),
        add=add,
        add_stride=0 if add is None else add.stride(0),
        weight=norm.weight,
        floor=norm.floor,
        out=out,
        out_stride=out.stride(0),
        size=size,
        BLOCK=block,
    )
