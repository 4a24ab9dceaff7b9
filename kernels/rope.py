"""Rotary position embedding on interleaved pairs: the pair (x_2i, x_2i+1) is turned by position * theta^(-2i/D).

Checkpoints are read with q and k rows in this order (models/checkpoint.py), which makes the rotation one complex
product. Scores do not change when q and k are permuted alike. Source: Su et al. 2021, arXiv 2104.09864.
"""

import torch


def rope_table(theta: float, head_dim: int, length: int) -> torch.Tensor:
    """Unit rotations [length, D/2] complex64 for positions 0..length-1.

    Angles are float32 products, as in transformers: the models were trained with those.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rope(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate heads.

    Args:
        x: [W, H, D], any floating dtype.
        rotations: [W, 1, D/2] complex64, rows of `rope_table`.

    Returns:
        [W, H, D] float32.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2)


def rope_reference(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Float64 oracle: x [W, H, D] turned pair by pair to positions [W]."""
    dim = x.shape[-1]
    angle = positions.double()[:, None, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
    even, odd = x.double()[..., 0::2], x.double()[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)
