"""The Triton path of `round_inputs`: one launch of one program."""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import check_tensor, check_unit_stride
from fused_spec.kernels.launch import launch


@triton.jit
def round_inputs_kernel(tokens, length, block, positions, count, SLOTS: tl.constexpr):
    slots = tl.arange(0, SLOTS)
    at = tl.maximum(tl.load(length) - 2 + slots, 0)
    tl.store(positions + slots, at, mask=slots < count)
    committed = slots < 2
    tl.store(block + slots, tl.load(tokens + at, mask=committed, other=0), mask=committed)


def round_inputs_triton(
    tokens: torch.Tensor, length: torch.Tensor, block: torch.Tensor, positions: torch.Tensor
) -> None:
    """Launch over block and positions [m+2]."""
    count = len(positions)
    for name, tensor, size in (
        ("tokens", tokens, len(tokens)),
        ("length", length, 1),
        ("block", block, count),
        ("positions", positions, count),
    ):
        check_tensor(name, tensor, (size,), (torch.int64,))
        check_unit_stride(name, tensor)
    launch(
        round_inputs_kernel,
        (1,),
        num_warps=1,
        tokens=tokens,
        length=length,
        block=block,
        positions=positions,
        count=count,
        SLOTS=triton.next_power_of_2(count),
    )
