"""RMS normalisation: x / sqrt(mean(x^2) + eps), times a weight per channel. Zhang & Sennrich 2019, arXiv 1910.07467."""

from typing import NamedTuple

import torch

from fused_spec.kernels.check import runs_on_triton


class RMSNorm(NamedTuple):
    """The weight of a normalisation, prepared for one that divides by the length of x and not by its mean square.

    With c = sqrt(n eps), n channels: x / sqrt(mean(x^2) + eps) = sqrt(n) x / hypot(|x|, c). A length is one
    call, where torch's own function is a chain of them on a CPU.

    Attributes:
        weight: [..., n] float32, sqrt(n) times the weight.
        floor: [] float32, c.
    """

    weight: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float) -> "RMSNorm":
        """For a weight [..., n] of any dtype."""
        channels = weight.shape[-1]
        floor = torch.tensor((channels * eps) ** 0.5, dtype=torch.float32, device=weight.device)
        return cls(weight.float() * channels**0.5, floor)


class NormBuffers(NamedTuple):
    """Room for what lies between x [..., n] and its normalisation."""

    length: torch.Tensor  # [..., 1] float32
    scaled: torch.Tensor  # [..., n] float32

    @classmethod
    def like(cls, x: torch.Tensor) -> "NormBuffers":
        """For normalising tensors of the shape of x."""
        return cls(torch.empty_like(x[..., :1]), torch.empty_like(x))


def rms_norm(
    x: torch.Tensor,
    norm: RMSNorm,
    buffers: NormBuffers | None,
    out: torch.Tensor,
    add: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Normalise over the last dimension; with `add`, x += add first, in place.

    Args:
        x: [..., n] float32; [R, n] with unit stride in n on the Triton path.
        norm: its weight broadcasts against x; [n] on the Triton path.
        buffers: for tensors of x's shape; None makes new ones on the torch path, and the Triton path needs none.
        out: where the result goes, [..., n] of any floating dtype; may be x if nothing is added.
        add: of x's shape and any floating dtype, or None: what a layer adds to the residual stream x.
        backend: "triton", "torch", or None: Triton where x is not on the CPU.

    Raises:
        InvalidInput: a tensor of the Triton path has another shape, dtype or stride than stated here.
    """
    if runs_on_triton(backend, x.device):
        from fused_spec.kernels.rms_norm_triton import rms_norm_triton  # not at the top: the torch path needs no Triton

        rms_norm_triton(x, norm, out, add)
        return
    if buffers is None:
        buffers = NormBuffers.like(x)
    if add is not None:
        x.add_(add)
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=buffers.length)
    torch.hypot(buffers.length, norm.floor, out=buffers.length)
    torch.div(x, buffers.length, out=buffers.scaled)
    torch.mul(buffers.scaled, norm.weight, out=out)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Float64 oracle."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
