"""The second launch of verification: accept or reject every draft, then weigh the one row that must be resampled.

Every program repeats the decisions, which are cheap: with the row statistics of the first launch they need two logits
per slot. The first slot that rejects, or the one behind the last draft, gives the row; each program then sums, over its
own share of that row and per group of 1024 ids, the residual (h - p)+ and q itself, so that a residual without mass
costs no further launch. The rules are in kernels/acceptance_kernel.py, what a zero p_n or a faulty row does in
kernels/verify_request.py, whose decisions these are.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.kernels.acceptance_kernel import (
    CACTUS,
    CACTUS_EXACT,
    PAIR,
    PAIR_WITHIN_SUPPORT,
    TYPICAL,
    rule_arguments,
    threshold_and_scale,
)
from fused_spec.kernels.check import Scalar
from fused_spec.kernels.inverse_cdf_kernel import lowest_allowed
from fused_spec.kernels.launch import launch
from fused_spec.kernels.pair_bounds import PairBounds
from fused_spec.kernels.processed_rows import INT_MAX, Laws, chunk_of_groups, law_arguments
from fused_spec.kernels.residual_weights import Choice, residual_weights, store_choice
from fused_spec.kernels.row_access import GROUP, acceptance_uniform, parameter
from fused_spec.kernels.row_statistics import GroupStatistics, Rows, located
from fused_spec.kernels.slot_probabilities import (
    NO_P,
    at_slot,
    bitwise_or,
    drafted_probabilities,
    verified_probabilities,
)
from fused_spec.rules import Rule, SpeculativeSampling

TILE = 2048
"""Logits one program weighs: 75 programs share a row of 151,936."""

_WIDE = tl.constexpr(2.0**100)


@triton.jit
def _prices(p, q, g, q_error, needed):
    """[S] float32 acceptance probability and what of it is gained over speculative sampling, NaN where not needed."""
    # A division would be a call, around which registers spill. 2^100 keeps the inverse of the smallest p finite.
    inverse_p = tl.exp(-tl.log(tl.where(p > 0, p, 1.0) * _WIDE))
    accept = tl.where(p > 0, tl.minimum(g * _WIDE * inverse_p, 1.0), 0.0)
    gain = tl.where((p > 0) & (q_error == 0), accept - tl.minimum(q * _WIDE * inverse_p, 1.0), 0.0)
    nothing = float("nan")
    return tl.where(needed, accept, nothing).to(tl.float32), tl.where(needed, gain, nothing).to(tl.float32)


@triton.jit(
    do_not_specialize=["temperature", "draft_temperature", "first_parameter", "second_parameter", "seed", "position"]
)
def decide_kernel(
    target, target_stride_b, target_stride_r, target_size,
    allowed, allowed_stride_b, allowed_stride_r, temperature,
    ids, ids_stride_b, ids_stride_r,
    draft, draft_stride_b, draft_stride_r, draft_size, draft_temperature,
    lse, lse_stride_b, lse_stride_r, cutoff, cutoff_stride_b, cutoff_stride_r,
    logprob, logprob_stride_b, logprob_stride_r,
    first_parameter, second_parameter, pair_low, pair_high, pair_cut, pair_share,
    seed, position, uniforms, uniforms_stride_b, uniforms_stride_r,
    peak, mass, weighted, first, law_peak, law_total, law_cutoff, law_weighted_total,
    num_accepted, accept_prob, accept_prob_stride_b, accept_prob_stride_r,
    tv_gain, tv_gain_stride_b, tv_gain_stride_r, error,
    numbers, scalars, masses,
    batch, num_drafts, groups, all_rows, mass_groups,
    RULE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    in_range = slots < num_drafts
    n = tl.load(ids + b * ids_stride_b + slots * ids_stride_r, mask=in_range, other=-1).to(tl.int64)
    present = tl.min(tl.where(in_range & (n == -1), slots, num_drafts), 0)
    tested = slots < present
    t, t_draft = parameter(temperature, b, tl.float32), parameter(draft_temperature, b, tl.float32)
    q, weight, known, q_error, q_cutoff, q_peak, q_offset, entropy, greedy = verified_probabilities(
        n, slots, slots <= num_drafts, b, target, target_stride_b, target_stride_r, target_size,
        allowed, allowed_stride_b, allowed_stride_r, t,
        peak, mass, weighted, first, law_peak, law_total, law_cutoff, law_weighted_total,
        b * (num_drafts + 1), groups, all_rows, CHUNK,
    )  # fmt: skip
    p, p_error, p_cutoff, p_shift, p_offset, kind = drafted_probabilities(
        n, slots, tested, b, target_size, draft, draft_stride_b, draft_stride_r, draft_size, t_draft,
        lse, lse_stride_b, lse_stride_r, cutoff, cutoff_stride_b, cutoff_stride_r,
        logprob, logprob_stride_b, logprob_stride_r,
        peak, mass, first, law_peak, law_total, law_cutoff, batch * (num_drafts + 1) + b * num_drafts, groups, all_rows,
        CHUNK,
    )  # fmt: skip
    low, high, cut, share = q, q, q, q
    if pair_low is not None:
        at = b * num_drafts + slots
        low, high = tl.load(pair_low + at, mask=tested, other=1.0), tl.load(pair_high + at, mask=tested, other=1.0)
        cut, share = tl.load(pair_cut + at, mask=tested, other=0.0), tl.load(pair_share + at, mask=tested, other=0.0)
    g, scale = threshold_and_scale(
        p, q, parameter(first_parameter, b, tl.float64), parameter(second_parameter, b, tl.float64), entropy, weight,
        low, high, cut, share, RULE,
    )  # fmt: skip
    g = tl.where(known, g, 0.0)  # no rule accepts an id that the verifier lacks or a mask excludes
    scale = tl.where(known, scale, 1.0)
    if uniforms is not None:
        u = tl.load(uniforms + b * uniforms_stride_b + slots * uniforms_stride_r, mask=tested, other=0.0).to(tl.float64)
    else:
        u = acceptance_uniform(parameter(seed, b, tl.int64), parameter(position, b, tl.int64) + slots)
    accepts = tested & (p > 0) & (u * p < g)
    slot = tl.min(tl.where(accepts, INT_MAX, slots), 0)
    rejected = slot < present
    fault = at_slot(q_error, slots, slot)
    needed = slots < tl.minimum(slot + 1, present)
    if tile == 0:
        accept, gain = _prices(p, q, g, q_error, needed)
        tl.store(accept_prob + b * accept_prob_stride_b + slots * accept_prob_stride_r, accept, mask=in_range)
        tl.store(tv_gain + b * tv_gain_stride_b + slots * tv_gain_stride_r, gain, mask=in_range)
        tl.store(num_accepted + b, slot.to(tl.int64))
        bits = tl.where(slots <= slot, q_error, 0) | tl.where(needed, p_error, 0)
        tl.store(error + b, tl.reduce(bits, 0, bitwise_or))

    drafted = tl.where(rejected, at_slot(n, slots, slot), -1)
    drafted = tl.where((drafted >= 0) & (drafted < target_size), drafted, -1).to(tl.int32)
    p_kind = tl.where(rejected, at_slot(kind, slots, slot), NO_P)
    p_n = at_slot(p, slots, slot)
    own_weight = tl.full([], -1.0, tl.float64)
    if (RULE == CACTUS) | (RULE == CACTUS_EXACT):
        own_weight = tl.where(at_slot(known.to(tl.int32), slots, slot) != 0, at_slot(g, slots, slot), -1.0)
    own_weight = tl.where(rejected, tl.where(p_n > 0, 0.0, own_weight), -1.0).to(tl.float32)
    q_offset = at_slot(q_offset, slots, slot)
    row_scale = tl.where(rejected, at_slot(scale, slots, slot), 1.0)
    if (RULE == PAIR) | (RULE == PAIR_WITHIN_SUPPORT):
        has_target = rejected & (at_slot(known.to(tl.int32), slots, slot) != 0) & (p_kind != NO_P)
        row_scale = tl.where(has_target, 1.0, -1.0)
    row_scale = row_scale.to(tl.float32)
    q_shift, q_cutoff = at_slot(q_peak, slots, slot), at_slot(q_cutoff, slots, slot)
    p_cutoff, p_shift = at_slot(p_cutoff, slots, slot), at_slot(p_shift, slots, slot)
    p_offset = at_slot(p_offset, slots, slot)
    low, high = at_slot(low, slots, slot).to(tl.float32), at_slot(high, slots, slot).to(tl.float32)
    cut, share = at_slot(cut, slots, slot).to(tl.float32), at_slot(share, slots, slot).to(tl.float32)
    token = tl.full([], -1, tl.int32)
    if first is not None:
        fixed = t == 0
        if RULE == TYPICAL:
            fixed = fixed | rejected
        token = tl.where(fixed, at_slot(greedy, slots, slot), -1)
    allowed_row = allowed
    if allowed is not None:
        allowed_row = allowed + b * allowed_stride_b + slot.to(tl.int64) * allowed_stride_r
    if fault != 0:
        token = lowest_allowed(allowed_row, target_size)
    if tile == 0:
        store_choice(
            numbers + b * 4, scalars + b * 12, slot, token, drafted, p_kind, q_cutoff, q_shift, q_offset,
            p_cutoff, p_shift, p_offset, row_scale, own_weight, low, high, cut, share,
        )  # fmt: skip

    GROUPS: tl.constexpr = TILE // GROUP
    own_groups = tile * GROUPS + tl.arange(0, GROUPS)
    tokens = own_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    draft_row = draft
    if draft is not None:
        draft_row = draft + b * draft_stride_b + slot.to(tl.int64) * draft_stride_r
    residual, law = residual_weights(
        tokens, tokens < tl.where(token < 0, target_size, 0),  # nothing is weighed where the token is known
        target + b * target_stride_b + slot.to(tl.int64) * target_stride_r, target_size, allowed_row, t,
        draft_row, draft_size, t_draft, drafted, p_kind, q_cutoff, q_shift, q_offset,
        p_cutoff, p_shift, p_offset, row_scale, own_weight, low, high, cut, share, RULE,
    )  # fmt: skip
    tl.store(masses + b * 2 * mass_groups + own_groups, tl.sum(residual, 1))
    tl.store(masses + (b * 2 + 1) * mass_groups + own_groups, tl.sum(law, 1))


class Drafts(NamedTuple):
    """What was drafted, and how.

    Attributes:
        token_ids: [B, m] int64 or int32.
        rows: the drafter's logits [B, m, Vd], or None.
        statistics: (lse, cutoff, logprob), each [B, m], or None.
    """

    token_ids: torch.Tensor
    rows: Rows | None
    statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


class DecisionBuffers(NamedTuple):
    """Where the decisions are written: [B], [B, m], [B, m], [B], as in `Verification`."""

    num_accepted: torch.Tensor
    accept_prob: torch.Tensor
    tv_gain: torch.Tensor
    error: torch.Tensor


def decide_and_weigh(
    rule: Rule,
    target: Rows,
    drafts: Drafts,
    statistics: GroupStatistics,
    laws: Laws | None,
    bounds: PairBounds | None,
    key: tuple[Scalar, Scalar],
    uniforms: torch.Tensor | None,
    out: DecisionBuffers,
) -> Choice:
    """Launch over the groups of the deciding rows; key is (seed, position)."""
    batch, rows, size = target.logits.shape
    mass_groups = triton.cdiv(size, TILE) * (TILE // GROUP.value)
    device = target.logits.device
    choice = Choice(
        numbers=torch.empty(batch, 4, dtype=torch.int64, device=device),
        scalars=torch.empty(batch, 12, dtype=torch.float32, device=device),
        masses=torch.empty(batch, 2, mass_groups, dtype=torch.float32, device=device),
    )
    branch, first, second = rule_arguments(rule if rows > 1 else SpeculativeSampling())
    slots = triton.next_power_of_2(rows)
    lse, cutoff, logprob = drafts.statistics or (None, None, None)
    low, high, cut, share = bounds or (None, None, None, None)
    launch(
        decide_kernel,
        (mass_groups * GROUP.value // TILE, batch),
        num_warps=8,
        **row_arguments(target, drafts),
        **located("lse", lse),
        **located("cutoff", cutoff),
        **located("logprob", logprob),
        first_parameter=first,
        second_parameter=second,
        pair_low=low,
        pair_high=high,
        pair_cut=cut,
        pair_share=share,
        seed=key[0],
        position=key[1],
        **located("uniforms", uniforms),
        peak=statistics.peak,
        mass=statistics.mass,
        weighted=statistics.weighted,
        first=statistics.first,
        **law_arguments(laws, "peak", "total", "cutoff", "weighted_total"),
        num_accepted=out.num_accepted,
        **located("accept_prob", out.accept_prob),
        **located("tv_gain", out.tv_gain),
        error=out.error,
        **choice._asdict(),
        batch=batch,
        num_drafts=rows - 1,
        groups=statistics.peak.shape[1],
        all_rows=statistics.peak.shape[0],
        mass_groups=mass_groups,
        RULE=branch,
        SLOTS=slots,
        CHUNK=chunk_of_groups(slots),
        TILE=TILE,
    )
    return choice


def rule_branch(rule: Rule, target: Rows) -> int:
    """Which branch of the kernels the rule takes; without drafts none is tested, whatever the rule."""
    return rule_arguments(rule if target.logits.shape[1] > 1 else SpeculativeSampling())[0]


def row_arguments(target: Rows, drafts: Drafts) -> dict[str, Any]:
    """The kernel arguments that say where logits and drafts are and how rows are processed."""
    rows = drafts.rows
    return {
        **located("target", target.logits),
        "target_size": target.logits.shape[2],
        **located("allowed", target.allowed),
        "temperature": target.temperature,
        **located("ids", drafts.token_ids),
        **located("draft", None if rows is None else rows.logits),
        "draft_size": target.logits.shape[2] if rows is None else rows.logits.shape[2],
        "draft_temperature": 1.0 if rows is None else rows.temperature,
    }
