"""The third launch of verification: one program per request draws the last token and commits the round.

The group is picked from the masses of the second launch, the token inside it from its weights, computed again; both by
inverse CDF with one 53-bit number (kernels/inverse_cdf.py). A residual without mass, or with one that is not finite, is
replaced by q. What a commit is, says kernels/commit.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import Scalar
from fused_spec.kernels.commit import Sequences
from fused_spec.kernels.decide import Drafts, row_arguments
from fused_spec.kernels.inverse_cdf_kernel import pick
from fused_spec.kernels.launch import launch
from fused_spec.kernels.residual_weights import Choice, weights_of_choice
from fused_spec.kernels.row_access import GROUP, RESAMPLE_STREAM, ZERO_RESIDUAL, parameter, sampling_uniform
from fused_spec.kernels.row_statistics import Rows, located


@triton.jit
def _drawn(
    numbers, scalars, masses, mass_groups, uniform, target_row, target_size, allowed_row, temperature, draft_row,
    draft_size, draft_temperature, RULE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """(token, whether the residual had no mass)"""
    groups = tl.arange(0, GROUPS)
    residual = tl.load(masses + groups, mask=groups < mass_groups, other=0.0)
    law = tl.load(masses + mass_groups + groups, mask=groups < mass_groups, other=0.0)
    total = tl.sum(residual.to(tl.float64), 0)
    fallback = ((total > 0) & (total < float("inf"))) == 0
    mass = tl.where(fallback, law, residual)
    goal = uniform * tl.sum(mass.to(tl.float64), 0)
    group, before = pick(mass, goal, GROUPS)
    ids = group * GROUP + tl.arange(0, GROUP)
    from_residual, from_law = weights_of_choice(
        numbers, scalars, ids, ids < target_size, target_row, target_size, allowed_row, temperature,
        draft_row, draft_size, draft_temperature, RULE,
    )  # fmt: skip
    index, _ = pick(tl.where(fallback, from_law, from_residual), goal - before, GROUP)
    return group * GROUP + index, fallback


@triton.jit
def _commit(
    b, token_ids, slots, slot, present, tokens, tokens_stride_b, capacity, length, limit, done, stop_ids,
    num_stop_ids, emitted, drafted,
):  # fmt: skip
    """Append token_ids [S], of which slots 0..slot count."""
    stops = tl.zeros(slots.shape, tl.int32)
    for i in range(num_stop_ids):
        stops = tl.where(token_ids == tl.load(stop_ids + i), 1, stops)
    stops = tl.where(slots <= slot, stops, 0)
    start, end = tl.load(length + b), tl.minimum(tl.load(limit + b), capacity)
    was_done = tl.load(done + b).to(tl.int1)
    up_to_stop = tl.min(tl.where(stops != 0, slots, slot), 0) + 1
    count = tl.minimum(up_to_stop.to(tl.int64), tl.maximum(end - start, 0))
    count = tl.where(was_done, 0, count)
    written = slots < count
    tl.store(tokens + b * tokens_stride_b + start + slots, token_ids, mask=written)
    stopped = tl.max(tl.where(written, stops, 0), 0) != 0
    tl.store(length + b, start + count)
    tl.store(emitted + b, count)
    tl.store(drafted + b, present.to(tl.int64))
    tl.store(done + b, was_done | stopped | (start + count >= end))


@triton.jit(do_not_specialize=["temperature", "draft_temperature", "seed", "position", "num_stop_ids"])
def pick_kernel(
    target, target_stride_b, target_stride_r, target_size,
    allowed, allowed_stride_b, allowed_stride_r, temperature,
    ids, ids_stride_b, ids_stride_r,
    draft, draft_stride_b, draft_stride_r, draft_size, draft_temperature,
    seed, position, numbers, scalars, masses,
    token_ids, token_ids_stride_b, token_ids_stride_r, error,
    tokens, tokens_stride_b, capacity, length, limit, done, stop_ids, num_stop_ids, emitted, drafted,
    num_drafts, mass_groups, RULE: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    numbers += b * 4
    slot, token = tl.load(numbers), tl.load(numbers + 1)
    if token < 0:
        uniform = sampling_uniform(
            parameter(seed, b, tl.int64), parameter(position, b, tl.int64) + slot, RESAMPLE_STREAM
        )
        draft_row, allowed_row = draft, allowed
        if draft is not None:
            draft_row = draft + b * draft_stride_b + slot * draft_stride_r
        if allowed is not None:
            allowed_row = allowed + b * allowed_stride_b + slot * allowed_stride_r
        drawn, fallback = _drawn(
            numbers, scalars + b * 12, masses + b * 2 * mass_groups, mass_groups, uniform,
            target + b * target_stride_b + slot * target_stride_r, target_size, allowed_row,
            parameter(temperature, b, tl.float32), draft_row, draft_size, parameter(draft_temperature, b, tl.float32),
            RULE, GROUPS,
        )  # fmt: skip
        token = drawn.to(tl.int64)
        if fallback:
            tl.store(error + b, tl.load(error + b) | ZERO_RESIDUAL)
    slots = tl.arange(0, SLOTS)
    there = slots < num_drafts
    n = tl.load(ids + b * ids_stride_b + slots * ids_stride_r, mask=there, other=-1).to(tl.int64)
    out = tl.where(slots < slot, n, tl.where(slots == slot, token, -1))
    tl.store(token_ids + b * token_ids_stride_b + slots * token_ids_stride_r, out, mask=slots <= num_drafts)
    if tokens is not None:
        present = tl.min(tl.where(there & (n == -1), slots, num_drafts), 0)
        _commit(b, out, slots, slot, present, tokens, tokens_stride_b, capacity, length, limit, done,
                stop_ids, num_stop_ids, emitted, drafted)  # fmt: skip


def pick_and_commit(
    branch: int,
    target: Rows,
    drafts: Drafts,
    choice: Choice,
    key: tuple[Scalar, Scalar],
    token_ids: torch.Tensor,
    error: torch.Tensor,
    sequences: Sequences | None,
) -> None:
    """Launch one program per request; branch is the rule's, as `decide` had it, key is (seed, position)."""
    batch, rows, _ = target.logits.shape
    mass_groups = choice.masses.shape[2]
    at: dict[str, Any] = dict.fromkeys(Sequences._fields) if sequences is None else sequences._asdict()
    launch(
        pick_kernel,
        (batch,),
        num_warps=8,
        **row_arguments(target, drafts),
        seed=key[0],
        position=key[1],
        **choice._asdict(),
        **located("token_ids", token_ids),
        error=error,
        **at,
        capacity=0 if sequences is None else sequences.tokens.shape[1],
        tokens_stride_b=0 if sequences is None else sequences.tokens.stride(0),
        num_stop_ids=0 if sequences is None else len(sequences.stop_ids),
        num_drafts=rows - 1,
        mass_groups=mass_groups,
        RULE=branch,
        SLOTS=triton.next_power_of_2(rows),
        GROUPS=triton.next_power_of_2(mass_groups),
    )
