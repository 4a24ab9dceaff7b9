"""The Triton path of `silu_mul`: one launch over rows and blocks of a row."""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import LOGIT_DTYPES, check_tensor, check_unit_stride
from fused_spec.kernels.launch import launch

BLOCK = 1024
"""Results of one program: in half precision each of its threads reads 16 bytes of gate and as many of up."""


@triton.jit
def silu_mul_kernel(gate_up, gate_up_stride, out, out_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate_up += row * gate_up_stride
    gate = tl.load(gate_up + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + inner + columns, mask=inside, other=0.0).to(tl.float32)
    # Where e^-gate is infinite the quotient is 0, as it should be; a division that is off by 2^-22 will do.
    tl.store(out + row * out_stride + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_mul_triton(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Launch over gate_up [R, 2 inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    check_tensor("gate_up", gate_up, (rows, 2 * inner), LOGIT_DTYPES)
    check_tensor("out", out, (rows, inner), LOGIT_DTYPES)
    check_unit_stride("gate_up", gate_up)
    check_unit_stride("out", out)
    launch(
        silu_mul_kernel,
        (rows, triton.cdiv(inner, BLOCK)),  # rows first: the other axes of a grid end at 65535
        gate_up=gate_up,
        gate_up_stride=gate_up.stride(0),
        out=out,
        out_stride=out.stride(0),
        inner=inner,
        BLOCK=BLOCK,
    )
