"""The gated activation between the products of an MLP: silu(gate) * up with silu(x) = x / (1 + e^-x).

Source: SwiGLU of Shazeer 2020, arXiv 2002.05202.
"""

import torch
import torch.nn.functional as F

from fused_spec.kernels.check import runs_on_triton


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, *, backend: str | None = None) -> None:
    """Activate the rows of a product that holds gate and up side by side.

    Args:
        gate_up: [R, 2 inner] of any floating dtype, the gate first.
        out: where the result goes, [R, inner] of any floating dtype. The Triton path computes in float32 and rounds
            once, and wants unit stride in the last dimension of both.
        backend: "triton", "torch", or None: Triton where gate_up is not on the CPU.

    Raises:
        InvalidInput: a tensor of the Triton path has another shape, dtype or stride than stated here.
    """
    if runs_on_triton(backend, gate_up.device):
        from fused_spec.kernels.silu_mul_triton import silu_mul_triton  # not at the top: the torch path needs no Triton

        silu_mul_triton(gate_up, out)
        return
    gate, up = gate_up.chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=out)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Float64 oracle."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return gate / (1 + (-gate).exp()) * up
