"""Product of a few rows with a weight in int8, one scale per output channel: y = x (scale * weight)^T + bias.

Only the weight is quantised. Integers are multiplied as they are and a whole sum is scaled, in float32. With so few
rows the time is that of reading the weight, which is half of what bfloat16 takes. Source of row-wise scales:
Dettmers et al. 2022, "LLM.int8()" (arXiv 2208.07339).
"""

import torch
import torch.nn.functional as F

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import LOGIT_DTYPES, check_tensor, check_unit_stride, runs_on_triton


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply rows.

    Args:
        x: [R, in] float32, bfloat16 or float16, unit stride in the last dimension.
        weight: [out, in] int8, contiguous.
        scale: [out] float32, contiguous.
        bias: [out] of any floating dtype, contiguous, or None.
        out: where the result goes, or None.
        backend: "triton", "torch", or None: Triton where x is not on the CPU.

    Returns:
        [R, out] in the dtype of x; `out` if given. Sums are float32, in an order that depends on the shapes only.

    Raises:
        InvalidInput: an argument has another shape, dtype or stride than stated here.
    """
    check_rows(x)
    outs = len(weight)
    check_tensor("weight", weight, (outs, x.shape[1]), (torch.int8,))
    check_tensor("scale", scale, (outs,), (torch.float32,))
    out = checked_output(x, (weight, scale), bias, outs, out)
    if len(x) and runs_on_triton(backend, x.device):
        from fused_spec.kernels.int8_linear_triton import int8_linear_triton  # the torch path needs no Triton

        int8_linear_triton(x, weight, scale, bias, out)
        return out
    dense = weight.float() * scale[:, None]
    return out.copy_(F.linear(x.float(), dense, None if bias is None else bias.float()))


def check_rows(x: torch.Tensor) -> None:
    """Raise unless x is rows [R, in] of a product."""
    if x.dim() != 2 or x.dtype not in LOGIT_DTYPES:
        raise InvalidInput(f"x: expected [R, in] float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype}")
    check_unit_stride("x", x)


def checked_output(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    outs: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Where a product of rows x [R, in] goes, [R, out] in x's dtype, after a look at what is left to check."""
    if not all(part.is_contiguous() for part in weights):
        raise InvalidInput("weight: expected contiguous tensors")
    if bias is not None:
        check_tensor("bias", bias, (outs,), LOGIT_DTYPES)
        check_unit_stride("bias", bias)
    if out is None:
        return x.new_empty(len(x), outs)
    check_tensor("out", out, (len(x), outs), (x.dtype,))
    check_unit_stride("out", out)
    return out


def int8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Float64 oracle."""
    y = x.double() @ weight.double().T * scale.double()
    return y if bias is None else y + bias.double()
