"""Prompt lookup: propose the tokens that followed the latest earlier occurrence of the current ending.

The match is the one that shares the most trailing tokens (at least `shortest`, counted up to `longest`), the latest
among equals. Source of the idea: Saxena 2023, "Prompt Lookup Decoding".
"""

import torch


def ngram_propose(
    tokens: torch.Tensor,
    length: torch.Tensor,
    count: int,
    *,
    shortest: int = 2,
    longest: int = 4,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Continue the latest match.

    Args:
        tokens: [C] int64 buffer whose first `length` entries are committed.
        length: [1] int64.
        count: m, how many tokens to propose.

    Returns:
        [m] int64; -1 from the first slot on that has no committed token to copy.
    """
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
    found_tokens = torch.where(found, tokens[source.clamp(max=tokens.numel() - 1)], -1)
    return found_tokens if out is None else out.copy_(found_tokens)


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
