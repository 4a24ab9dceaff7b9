"""The weights that the last token of a round is drawn from: (h - p)+ over the row that decides, unnormalised.

    h_x = s q_x                                              most rules, with 0 or g at the drafted token itself
    h_x = clip(p_x where w_x >= cut, low q_x, high q_x) + share q_x    rules over pairs of rows (kernels/pair_rules.py)

Decisions are made in the second launch and the token is drawn in the third; a `Choice` carries what the third needs to
weigh one group of tokens again.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.kernels.acceptance_kernel import PAIR, PAIR_WITHIN_SUPPORT, clipped
from fused_spec.kernels.processed_rows import probability
from fused_spec.kernels.row_access import scaled_logits
from fused_spec.kernels.slot_probabilities import P_OF_ROW, P_ONE_HOT


class Choice(NamedTuple):
    """What the decisions leave for the draw.

    Attributes:
        numbers: [B, 4] int64: the slot that decides; its token where no draw is needed, else -1; the draft tested
            there, -1 without one; where p comes from (`NO_P`, `P_OF_ROW` or `P_ONE_HOT`).
        scalars: [B, 12] float32, what `residual_weights` takes from q_cutoff on.
        masses: [B, 2, G] float32, sums over groups of 1024 ids of the residual and of q.
    """

    numbers: torch.Tensor
    scalars: torch.Tensor
    masses: torch.Tensor


@triton.jit
def store_choice(
    numbers, scalars, slot, token, drafted, kind,
    q_cutoff, q_shift, q_offset, p_cutoff, p_shift, p_offset, scale, own_weight, low, high, cut, share,
):  # fmt: skip
    """Write a request's entries of a `Choice`; both pointers are the request's."""
    tl.store(numbers, slot.to(tl.int64))
    tl.store(numbers + 1, token.to(tl.int64))
    tl.store(numbers + 2, drafted.to(tl.int64))
    tl.store(numbers + 3, kind.to(tl.int64))
    tl.store(scalars, q_cutoff)
    tl.store(scalars + 1, q_shift)
    tl.store(scalars + 2, q_offset)
    tl.store(scalars + 3, p_cutoff)
    tl.store(scalars + 4, p_shift)
    tl.store(scalars + 5, p_offset)
    tl.store(scalars + 6, scale)
    tl.store(scalars + 7, own_weight)
    tl.store(scalars + 8, low)
    tl.store(scalars + 9, high)
    tl.store(scalars + 10, cut)
    tl.store(scalars + 11, share)


@triton.jit
def residual_weights(
    ids, inside, target_row, target_size, allowed_row, temperature, draft_row, draft_size, draft_temperature,
    drafted, kind, q_cutoff, q_shift, q_offset, p_cutoff, p_shift, p_offset, scale, own_weight, low, high, cut, share,
    RULE: tl.constexpr,
):  # fmt: skip
    """((h - p)+, q) of some tokens of the row that decides, float32, on one scale; `inside` marks the tokens."""
    z = scaled_logits(target_row, ids, inside, allowed_row, temperature)
    weight = tl.where(z >= q_cutoff, tl.exp(z - q_shift), 0.0)
    q = probability(z, q_cutoff, q_shift, q_offset)  # like p: equal rows have to leave nothing
    p = tl.zeros(z.shape, tl.float32)
    if draft_row is not None:
        there = inside & (ids < tl.where(kind == P_OF_ROW, draft_size, 0))
        p = probability(scaled_logits(draft_row, ids, there, None, draft_temperature), p_cutoff, p_shift, p_offset)
    if (RULE == PAIR) | (RULE == PAIR_WITHIN_SUPPORT):
        p = tl.where(ids == tl.where(kind == P_ONE_HOT, drafted, -1), 1.0, p)
        h = clipped(tl.where(weight >= cut, p, 0.0), q, low, high) + share * q
        h = tl.where(scale < 0, q, h)  # a bonus row, or one whose draft had no law
        if RULE == PAIR_WITHIN_SUPPORT:
            h = tl.where(q > 0, h, 0.0)
    else:
        h = q * scale
    residual = tl.maximum(h - p, 0.0)
    # A rejection means h_n < p_n, whatever rounding makes of the difference; nothing is taken from an impossible draft.
    residual = tl.where(ids == tl.where(own_weight >= 0, drafted, -1), own_weight, residual)
    return tl.where(inside, residual, 0.0), tl.where(inside, q, 0.0)


@triton.jit
def weights_of_choice(
    numbers, scalars, ids, inside, target_row, target_size, allowed_row, temperature,
    draft_row, draft_size, draft_temperature, RULE: tl.constexpr,
):  # fmt: skip
    """`residual_weights` with what `store_choice` left; both pointers are the request's."""
    return residual_weights(
        ids, inside, target_row, target_size, allowed_row, temperature, draft_row, draft_size, draft_temperature,
        tl.load(numbers + 2).to(tl.int32), tl.load(numbers + 3).to(tl.int32),
        tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4),
        tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7), tl.load(scalars + 8), tl.load(scalars + 9),
        tl.load(scalars + 10), tl.load(scalars + 11), RULE,
    )  # fmt: skip
