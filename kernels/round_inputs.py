"""What a round of speculative decoding starts from: its last two committed tokens, and the cache slots of its block.

With L committed tokens and m drafts, a round works on m + 2 tokens at the slots L-2 .. L+m-1:

    slot     L-2       L-1       L       ...  L+m-1
    block    t[L-2]    t[L-1]    draft 1 ...  draft m

Everything else in the round takes slices of these two buffers. They are views, so that no launch is spent on indexing:
the first step of a draft model runs block[0:2] at positions[0:2], step i (from 1) block[1+i:2+i] at positions[1+i:2+i],
and the verifier block[1:m+2] at positions[1:m+2]. Each step writes its draft where the next one reads.
"""

import torch

from fused_spec.kernels.check import runs_on_triton


def round_inputs(
    tokens: torch.Tensor,
    length: torch.Tensor,
    block: torch.Tensor,
    positions: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Open a round; nothing is read on the host, so that it can be part of a captured graph.

    Args:
        tokens: [capacity] int64, the sequence.
        length: [1] int64, how many tokens are committed, at most capacity; at least 2 in any round that counts. With
            fewer, slots below 0 are 0.
        block: [m+2] int64: the first two entries are written, the drafts behind them are left as they are.
        positions: [m+2] int64, all written: length - 2, length - 1, ...
        backend: "triton", "torch", or None: Triton where the tokens are not on the CPU.

    Raises:
        InvalidInput: a tensor of the Triton path has another shape, dtype or stride than stated here, or is in pieces.
    """
    if runs_on_triton(backend, tokens.device):
        from fused_spec.kernels.round_inputs_triton import round_inputs_triton  # the torch path needs no Triton

        round_inputs_triton(tokens, length, block, positions)
        return
    torch.arange(-2, len(positions) - 2, out=positions)
    positions.add_(length).clamp_(min=0)
    torch.index_select(tokens, 0, positions[:2], out=block[:2])
