"""Where sums are made in an order that does not depend on how many rows are multiplied."""

import torch

BITWISE = not torch.cpu._is_amx_tile_supported()
"""Bits of a row that do not depend on its block are known of CPUs with AVX2 or AVX-512; not of those with tiles."""


def assert_same_row(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal to the bit, or to `tolerance` relative to the largest entry where that is not known to hold."""
    if BITWISE:
        assert torch.equal(ours, expected)
    else:
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
