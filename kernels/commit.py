"""Append the tokens of a round to their sequences, cut behind the first stop id and at the limit.

    emitted = min(accepted + 1, first stop id + 1, min(limit, capacity) - length), 0 once a sequence is done

On the torch path this is a function of its own; the Triton path does it inside the launch that draws the last token.
"""

from typing import NamedTuple

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import check_tensor


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
    tokens, length, limit, done, stop_ids, emitted, drafted = sequences
    slots = torch.arange(token_ids.shape[1], device=tokens.device)
    drafted.copy_((drafts != -1).cumprod(1).sum(1))
    stops = torch.isin(token_ids, stop_ids) & (slots <= num_accepted[:, None])
    up_to_stop = torch.where(stops, slots + 1, token_ids.shape[1]).amin(1)
    limit = limit.clamp(max=tokens.shape[1])
    room = (limit - length).clamp(min=0)
    emitted.copy_(torch.minimum(torch.minimum(num_accepted + 1, up_to_stop), room) * ~done)
    written = slots < emitted[:, None]
    request, slot = written.nonzero(as_tuple=True)  # a host read, which only this path has: it runs on the CPU
    tokens[request, length[request] + slot] = token_ids[request, slot]
    length.add_(emitted)
    done.logical_or_((stops & written).any(1))
    done.logical_or_(length >= limit)
