"""Prompt lookup: propose the tokens that followed the latest earlier occurrence of the current ending.

The match is the one that shares the most trailing tokens (at least `shortest`, counted up to `longest`), the latest
among equals. Source of the idea: Saxena 2023, "Prompt Lookup Decoding".
"""

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import check_tensor, check_unit_stride, runs_on_triton


def ngram_propose(
    tokens: torch.Tensor,
    length: torch.Tensor,
    count: int,
    *,
    shortest: int = 2,
    longest: int = 4,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Continue the latest match.

    Args:
        tokens: [C] int64 buffer whose first `length` entries are committed; others are not looked at.
        length: [1] int64, at most C; read where it is.
        count: m, how many tokens to propose.
        shortest, longest: how many trailing tokens a match shares at least, and up to how many they are counted.
        out: [m] int64 to write into, or None.
        backend: "triton", "torch", or None: Triton where the tokens are not on the CPU.

    Returns:
        [m] int64, `out` if given; -1 from the first slot on that has no committed token to copy.

    Raises:
        InvalidInput: an argument has another shape, dtype or range than stated here.
    """
    check_tensor("tokens", tokens, (tokens.numel(),), (torch.int64,))
    check_unit_stride("tokens", tokens)
    check_tensor("length", length, (1,), (torch.int64,))
    if not 1 <= shortest <= longest:
        raise InvalidInput(f"shortest, longest: expected 1 <= shortest <= longest, got {shortest} and {longest}")
    if out is None:
        out = torch.empty(count, dtype=torch.int64, device=tokens.device)
    check_tensor("out", out, (count,), (torch.int64,))
    check_unit_stride("out", out)
    if count and runs_on_triton(backend, tokens.device):
        from fused_spec.kernels.ngram_triton import ngram_triton  # not at the top: the torch path needs no Triton

        ngram_triton(tokens, length, out, shortest, longest)
        return out
    return out.copy_(_propose(tokens, length, count, shortest, longest))


def _propose(tokens: torch.Tensor, length: torch.Tensor, count: int, shortest: int, longest: int) -> torch.Tensor:
    ends = torch.arange(tokens.numel(), device=tokens.device)
    shared = torch.zeros_like(ends)
    alive = ends < length - 1  # an ending earlier than the current one, with a token after it
    for back in range(longest):
        current = tokens[(length - 1 - back).clamp(min=0)]
        alive = alive & (tokens.roll(back) == current) & (ends >= back) & (length > back)
        shared += alive
    score = torch.where(shared >= shortest, shared * tokens.numel() + ends, -1)
    best = score.max(0, keepdim=True)
    source = best.indices + 1 + torch.arange(count, device=tokens.device)
    found = (best.values >= 0) & (source < length)
    return torch.where(found, tokens[source.clamp(max=tokens.numel() - 1)], -1)


def ngram_propose_reference(tokens: list[int], count: int, *, shortest: int = 2, longest: int = 4) -> list[int]:
    """Oracle: the same search on a Python list of committed tokens."""
    best, best_end = shortest - 1, -1
    for end in range(len(tokens) - 1):
        shared = 0
        while shared < min(longest, end + 1) and tokens[end - shared] == tokens[len(tokens) - 1 - shared]:
            shared += 1
        if shared >= max(best, shortest):
            best, best_end = shared, end
    if best_end < 0:
        return [-1] * count
    copied = tokens[best_end + 1 : best_end + 1 + count]
    return copied + [-1] * (count - len(copied))
