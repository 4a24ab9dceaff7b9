"""Natural log of the unprocessed softmax (T = 1, no filter) at given tokens."""

import torch

from fused_spec.kernels.check import check_logits, check_tensor, runs_on_triton


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """ln softmax(logits)[token] per row.

    Args:
        logits: [W, V] float32, bfloat16 or float16, unit stride in V.
        token_ids: [W] int64 < V; a negative id marks a row without a token.
        out: [W] float32 to write into, or None.
        backend: "triton", "torch", or None: Triton where the logits are not on the CPU.

    Returns:
        [W] float32, `out` if given; NaN for rows without a token, and for rows with a NaN or +inf or without any
        finite logit. Terms of exp and their sums over 1024 ids, in float32, put it off by 6e-6 at most; roundings of
        the result and, on the torch path, of the log-sum-exp to float32 come on top.

    Raises:
        InvalidInput: an argument has another shape or dtype than stated here.
    """
    check_logits("logits", logits, "[W, V]")
    check_tensor("token_ids", token_ids, (len(logits),), (torch.int64,))
    if out is None:
        out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    check_tensor("out", out, (len(logits),), (torch.float32,))
    if len(logits) and runs_on_triton(backend, logits.device):
        from fused_spec.kernels.logprob_triton import logprob_triton  # not at the top: the torch path needs no Triton

        logprob_triton(logits, token_ids, out)
        return out
    for i in range(len(token_ids)):  # one row at a time, so that no [W, V] float32 copy is made
        row = logits[i].float()
        lse = row.logsumexp(0)
        at = row[token_ids[i].clamp(min=0)] - lse
        out[i] = torch.where((token_ids[i] < 0) | lse.isposinf(), torch.nan, at)
    return out


def token_logprobs_reference(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Float64 oracle, for rows of which some logit is finite."""
    at = logits.double().log_softmax(-1).gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
    return at.masked_fill(token_ids < 0, torch.nan)
