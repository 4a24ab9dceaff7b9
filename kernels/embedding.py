"""Rows of the embedding matrix of given tokens, whatever their ids are."""

import torch
import torch.nn.functional as F

from fused_spec.kernels.check import runs_on_triton


def embed(tokens: torch.Tensor, embedding: torch.Tensor, out: torch.Tensor, *, backend: str | None = None) -> None:
    """Look tokens up.

    An id outside the vocabulary is moved to its nearest end. A missing draft has the id -1, and a drafter with a
    padded vocabulary may name ids that this model lacks: they are rejected, so that what follows from their rows is
    never used, but nothing outside the matrix may be read for them.

    Args:
        tokens: [W] int64, of any value.
        embedding: [V, n] of any floating dtype.
        out: where the rows go, [W, n], float32 as the first of the residual stream; any floating dtype will do. The
            Triton path wants unit stride in n of both.
        backend: "triton", "torch", or None: Triton where the tokens are not on the CPU.

    Raises:
        InvalidInput: a tensor of the Triton path has another shape, dtype or stride than stated here.
    """
    if runs_on_triton(backend, tokens.device):
        from fused_spec.kernels.embedding_triton import embed_triton  # not at the top: the torch path needs no Triton

        embed_triton(tokens, embedding, out)
        return
    out.copy_(F.embedding(tokens.clamp(0, len(embedding) - 1), embedding))
