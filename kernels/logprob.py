"""Natural log of the unprocessed softmax (T = 1, no filter) at given tokens."""

import torch


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """ln softmax(logits)[token] per row, one row at a time so that no [rows, V] float32 copy is made.

    Args:
        logits: [W, V] float32, bfloat16 or float16.
        token_ids: [W] int64; a negative id marks a row without a token.

    Returns:
        [W] float32, NaN for rows without a token.
    """
    if out is None:
        out = torch.empty(token_ids.shape, dtype=torch.float32, device=logits.device)
    out.fill_(float("nan"))
    for i in range(len(token_ids)):
        row = logits[i].float()
        at = row[token_ids[i].clamp(min=0)] - row.logsumexp(0)
        out[i] = torch.where(token_ids[i] < 0, out[i], at)
    return out
