"""Rotary position embedding on interleaved pairs: the pair (x_2i, x_2i+1) is turned by position * theta^(-2i/D).

Checkpoints are read with q and k rows in this order (models/checkpoint.py), which makes the rotation one complex
product. Scores do not change when q and k are permuted alike. Source: Su et al. 2021, arXiv 2104.09864.
"""

import torch


def rope_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, [D/2] float32: the models were trained with angles of this precision."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rope_table(frequencies: torch.Tensor, length: int, amplitude: float = 1.0) -> torch.Tensor:
    """Rotations [length, D/2] complex64 of positions 0..length-1, all of absolute value `amplitude`."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.full_like(angles, amplitude), angles)


def as_pairs(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] float32 as its pairs [..., D/2] complex64: a view, so that what is written to it lands in x."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rope(pairs: torch.Tensor, rotations: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate heads.

    Args:
        pairs: [W, ..., D/2] complex64.
        rotations: rows of `rope_table`, [W, ..., D/2] complex64 with ones for the other dimensions.
        out: where the result goes, of the shape of `pairs`, any strides.
    """
    torch.mul(pairs, rotations, out=out)


def rope_reference(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Float64 oracle: x [W, H, D] turned pair by pair to positions [W]."""
    dim = x.shape[-1]
    angle = positions.double()[:, None, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
    even, odd = x.double()[..., 0::2], x.double()[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)
