"""p and q of the drafted tokens, all slots of a request at once, from row statistics and one logit per slot each.

These are the first half of the decisions in kernels/decide.py; a slot is a lane of a block [S], S >= m + 1. Logarithms
are rounded to float32 before they become probabilities, so that equal rows give equal numbers wherever they come from.
"""

import triton
import triton.language as tl

from fused_spec.kernels.processed_rows import merged_first, row_laws
from fused_spec.kernels.row_access import (
    DRAFT_IMPOSSIBLE,
    DRAFT_OUT_OF_RANGE,
    EMPTY_SUPPORT,
    NAN_DRAFT,
    NAN_TARGET,
    inverse,
)

NO_P, P_OF_ROW, P_ONE_HOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where the p of a residual comes from: nowhere, the draft's row, or the draft alone."""


@triton.jit
def bitwise_or(a, b):
    """For `tl.reduce`."""
    return a | b


@triton.jit
def at_slot(values, slots, slot):
    """Entry `slot` of a block [S]."""
    return tl.sum(tl.where(slots == slot, values, 0), 0)


@triton.jit
def drafted_probabilities(
    ids, slots, tested, request, target_size,
    draft, draft_stride_b, draft_stride_r, draft_size, temperature,
    lse, lse_stride_b, lse_stride_r, cutoff, cutoff_stride_b, cutoff_stride_r,
    logprob, logprob_stride_b, logprob_stride_r,
    peak, mass, first, law_peak, law_total, law_cutoff, first_row, groups, all_rows, CHUNK: tl.constexpr,
):  # fmt: skip
    """(p_n float64, error bits, cutoff, shift, offset, kind) of the drafts [S]; p as `probability` has it.

    first_row: index of the request's first draft row in the statistics.
    """
    inside = tested & (ids >= 0) & (ids < draft_size)
    error = tl.zeros(slots.shape, tl.int32)
    lowest = tl.full(slots.shape, -float("inf"), tl.float32)
    shift = tl.zeros(slots.shape, tl.float32)
    offset = shift
    if draft is None:
        p = tl.where(inside, 1.0, 0.0).to(tl.float64)
        kind = tl.where(inside, P_ONE_HOT, NO_P)
        error = tl.where(inside, 0, DRAFT_OUT_OF_RANGE)
    else:
        known = (ids >= 0) & (ids < tl.maximum(draft_size, target_size))
        row = draft + request * draft_stride_b + slots.to(tl.int64) * draft_stride_r
        z = tl.load(row + ids, mask=inside, other=-float("inf")).to(tl.float32) * inverse(temperature)
        if logprob is not None:
            log_p = tl.load(
                logprob + request * logprob_stride_b + slots * logprob_stride_r, mask=tested, other=-float("inf")
            )
            total = tl.load(lse + request * lse_stride_b + slots * lse_stride_r, mask=tested, other=0.0)
            lowest = tl.load(cutoff + request * cutoff_stride_b + slots * cutoff_stride_r, mask=tested, other=0.0)
            sound = log_p <= 1e-3  # above 0 by rounding at most; the statistics of a faulty row are NaN
            empty = total == -float("inf")
            p = tl.where(sound & inside, tl.exp(log_p.to(tl.float64)), 0.0)
            has_row = p > 0  # statistics that give their own draft no probability say nothing of p
            # Relative to the drafted token, which keeps more digits than lse.
            shift = tl.where(has_row, z, 0.0)
            offset = tl.where(has_row, log_p, 0.0)
            lowest = tl.where(has_row, lowest, 0.0)
        else:
            rows = first_row + slots
            top, mass_kept, lowest, _ = row_laws(
                peak, mass, None, law_peak, law_total, law_cutoff, None, rows, tested, groups, all_rows, CHUNK
            )
            empty = mass_kept == 0
            sound = (mass_kept > 0) & (mass_kept < float("inf")) & (top < float("inf"))
            usable = tl.where(sound, mass_kept, 1.0)
            offset = -tl.log(usable).to(tl.float32)
            shift = tl.where(sound, top, 0.0)
            log_p = ((z.to(tl.float64) - shift.to(tl.float64)) - tl.log(usable)).to(tl.float32)
            log_p = tl.where(sound & inside & (z >= lowest), log_p, -float("inf"))
            if first is not None:
                greedy = merged_first(peak, first, top, rows, tested, groups, all_rows, CHUNK)
                log_p = tl.where(temperature == 0, tl.where(sound & (ids == greedy), 0.0, -float("inf")), log_p)
            p = tl.exp(log_p.to(tl.float64))
            has_row = sound
        p = tl.where(known, p, 0.0)
        faulty = tl.where(empty, EMPTY_SUPPORT, NAN_DRAFT)
        error = tl.where(known, tl.where(sound, tl.where(p > 0, 0, DRAFT_IMPOSSIBLE), faulty), DRAFT_OUT_OF_RANGE)
        one_hot = temperature == 0
        kind = tl.where(one_hot, tl.where(p > 0, P_ONE_HOT, NO_P), tl.where(has_row, P_OF_ROW, NO_P))
    return p, error, lowest, shift, offset, kind


@triton.jit
def verified_probabilities(
    ids, slots, exists, request, target, target_stride_b, target_stride_r, target_size,
    allowed, allowed_stride_b, allowed_stride_r, temperature,
    peak, mass, weighted, first, law_peak, law_total, law_cutoff, law_weighted_total, first_row, groups, all_rows,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(q_n float64, weight relative to the largest, whether n may be accepted, error bits, cutoff, peak, offset,
    entropy, greedy token) of the slots [S]; the last two are 0 and -1 where they are not needed.

    first_row: index of the request's first row in the statistics.
    """
    rows = first_row + slots
    top, total, lowest, weighted_total = row_laws(
        peak, mass, weighted, law_peak, law_total, law_cutoff, law_weighted_total, rows, exists, groups, all_rows, CHUNK
    )
    sound = exists & (total > 0) & (total < float("inf")) & (top < float("inf"))
    error = tl.where(exists & (sound == 0), tl.where(total == 0, EMPTY_SUPPORT, NAN_TARGET), 0)
    inside = sound & (ids >= 0) & (ids < target_size)
    total = tl.where(sound, total, 1.0)
    top = tl.where(sound, top, 0.0)
    row = target + request * target_stride_b + slots.to(tl.int64) * target_stride_r
    z = tl.load(row + ids, mask=inside, other=-float("inf")).to(tl.float32)
    known = inside
    if allowed is not None:
        words = allowed + request * allowed_stride_b + slots.to(tl.int64) * allowed_stride_r
        word = tl.load(words + ids // 32, mask=inside, other=0)
        known = inside & (((word >> (ids % 32).to(tl.int32)) & 1) != 0)
    z = tl.where(known, z * inverse(temperature), -float("inf"))
    kept = known & (z >= lowest)
    log_total = tl.log(total)
    log_q = tl.where(kept, ((z.to(tl.float64) - top.to(tl.float64)) - log_total).to(tl.float32), -float("inf"))
    weight = tl.where(kept, tl.exp(z - top), 0.0)
    greedy = tl.full(slots.shape, -1, tl.int32)
    entropy = tl.zeros(slots.shape, tl.float64)
    if first is not None:
        greedy = merged_first(peak, first, top, rows, sound, groups, all_rows, CHUNK)
        hit = tl.where(known & (ids == greedy), 0.0, -float("inf"))
        log_q = tl.where(temperature == 0, hit, log_q)
        weight = tl.where(temperature == 0, tl.where(hit == 0, 1.0, 0.0), weight)
    if weighted is not None:
        entropy = tl.where(temperature == 0, 0.0, log_total - weighted_total * tl.exp(-log_total))
    q = tl.exp(log_q.to(tl.float64))
    return q, weight, known, error, lowest, top, -log_total.to(tl.float32), entropy, greedy
