"""Append the tokens of a round to their sequences, cut behind the first stop id and at the limit.

    emitted = min(accepted + 1, first stop id + 1, min(limit, capacity) - length), 0 once a sequence is done

On the torch path this is a function of its own; the Triton path does it inside the launch that draws the last token.
"""

from typing import NamedTuple

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import check_tensor, store


class Sequences(NamedTuple):
    """The state of B sequences on the device, written in place.

    Attributes:
        tokens: [B, capacity] int64, unit stride; the first `length` of a row are committed.
        length, limit: [B] int64, committed tokens and the length at which a sequence ends, the capacity at the latest.
        done: [B] bool; of a sequence that is done, tokens, length and done are left alone.
        stop_ids: [E] int64, tokens that end a sequence.
        emitted: [B] int64, how many tokens the last round committed.
        drafted: [B] int64, how many drafts the last round had.
    """

    tokens: torch.Tensor
    length: torch.Tensor
    limit: torch.Tensor
    done: torch.Tensor
    stop_ids: torch.Tensor
    emitted: torch.Tensor
    drafted: torch.Tensor

    def check(self, batch: int) -> None:
        """Raise unless every tensor has its shape and dtype."""
        if self.tokens.dim() != 2 or self.stop_ids.dim() != 1:
            raise InvalidInput(
                f"sequences: expected tokens [B, capacity] and stop_ids [E], got {tuple(self.tokens.shape)} and "
                f"{tuple(self.stop_ids.shape)}"
            )
        check_tensor("sequences tokens", self.tokens, (batch, self.tokens.shape[1]), (torch.int64,))
        check_tensor("sequences stop_ids", self.stop_ids, self.stop_ids.shape, (torch.int64,))
        check_tensor("sequences done", self.done, (batch,), (torch.bool,))
        for name in ("length", "limit", "emitted", "drafted"):
            check_tensor(f"sequences {name}", getattr(self, name), (batch,), (torch.int64,))


def commit(sequences: Sequences, token_ids: torch.Tensor, num_accepted: torch.Tensor, drafts: torch.Tensor) -> None:
    """Commit a round.

    Args:
        sequences: written in place.
        token_ids: [B, m+1] int64, as `verify` returns them.
        num_accepted: [B] int64.
        drafts: [B, m] integers, the drafts that were tested; -1 where there was none.
    """
    # Host reads, which only this path has: it runs on the CPU, where Python is quicker than many small operations.
    stop_ids = set(sequences.stop_ids.tolist())
    capacity = sequences.tokens.shape[1]
    state = zip(*(tensor.tolist() for tensor in (sequences.length, sequences.limit, sequences.done)), strict=True)
    for b, (length, limit, done) in enumerate(state):
        drafted = [*drafts[b].tolist(), -1].index(-1)
        tokens = token_ids[b, : int(num_accepted[b]) + 1].tolist()
        stop = next((slot + 1 for slot, token in enumerate(tokens) if token in stop_ids), len(tokens))
        limit = min(limit, capacity)
        emitted = 0 if done else max(min(stop, limit - length), 0)
        store(sequences.drafted, b, drafted)
        store(sequences.emitted, b, emitted)
        if emitted:
            sequences.tokens[b, length : length + emitted] = token_ids[b, :emitted]
            store(sequences.length, b, length + emitted)
        ended = length + emitted >= limit or (0 < emitted == stop and tokens[stop - 1] in stop_ids)
        store(sequences.done, b, done or ended)
