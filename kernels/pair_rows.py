"""The two rows of a slot inside a kernel, one tile of ids each: P = w / sum w with w = exp(below).

`below` is z minus the row's largest z, or ln P where the draft came with statistics of its own, and -inf where P = 0.
Sum w, float64, scales it: one reciprocal per row, in float32, keeps the digits that an offset inside exp would lose.
"""

import triton
import triton.language as tl

from fused_spec.kernels.processed_rows import INT_MAX, merged_first, row_laws
from fused_spec.kernels.row_access import scaled_logits


@triton.jit
def target_row(
    target, stride_b, stride_r, size, allowed, allowed_stride_b, allowed_stride_r, temperature, ids, b, i,
    peak, mass, first, law_peak, law_total, law_cutoff, row, groups, all_rows, CHUNK: tl.constexpr,
):  # fmt: skip
    """(below, sum w) of ids [TILE] of the verifier's row i of request b; `row` finds its statistics."""
    if allowed is not None:
        allowed += b * allowed_stride_b + i * allowed_stride_r
    z = scaled_logits(target + b * stride_b + i * stride_r, ids, ids < size, allowed, temperature)
    return _below_peak(
        z, ids, temperature, peak, mass, first, law_peak, law_total, law_cutoff, row, groups, all_rows, CHUNK
    )


@triton.jit
def draft_row(
    draft, stride_b, stride_r, size, draft_ids, draft_ids_stride_b, draft_ids_stride_r,
    lse, lse_stride_b, lse_stride_r, cutoff, cutoff_stride_b, cutoff_stride_r,
    logprob, logprob_stride_b, logprob_stride_r, temperature, ids, b, i,
    peak, mass, first, law_peak, law_total, law_cutoff, row, groups, all_rows, CHUNK: tl.constexpr,
):  # fmt: skip
    """(below, sum w) of the draft's row: one-hot at its token without logits, by draft_stats where there are any."""
    n = tl.load(draft_ids + b * draft_ids_stride_b + i * draft_ids_stride_r)
    n = tl.where((n >= 0) & (n < INT_MAX), n, -1).to(tl.int32)
    total = tl.full([], 1.0, tl.float64)
    if draft is None:
        below = tl.where(ids == n, 0.0, -float("inf"))
    else:
        draft += b * stride_b + i * stride_r
        z = scaled_logits(draft, ids, ids < size, None, temperature)
        if logprob is not None:
            below = _log_probability(
                draft, size, z, ids, n, temperature,
                tl.load(lse + b * lse_stride_b + i * lse_stride_r),
                tl.load(cutoff + b * cutoff_stride_b + i * cutoff_stride_r),
                tl.load(logprob + b * logprob_stride_b + i * logprob_stride_r),
            )  # fmt: skip
        else:
            below, total = _below_peak(
                z, ids, temperature, peak, mass, first, law_peak, law_total, law_cutoff, row, groups, all_rows, CHUNK
            )
    return below, total


@triton.jit
def _below(z, ids, shift, cutoff, sound, one_hot, token):
    """z - shift of kept tokens, -inf of all others; a one-hot law has 0 at its token."""
    cutoff = tl.where(sound, cutoff, float("nan"))  # nothing reaches it
    below = tl.where(z >= cutoff, z - tl.where(sound, shift, 0.0), -float("inf"))
    return tl.where(one_hot, tl.where(ids == token, 0.0, -float("inf")), below)


@triton.jit
def _below_peak(
    z, ids, temperature, peak, mass, first, law_peak, law_total, law_cutoff, row, groups, all_rows, CHUNK: tl.constexpr
):
    """(below, sum w) of a row with group statistics. All weights of a faulty row are 0."""
    rows = row + tl.zeros([1], tl.int64)
    inside = rows >= 0
    top, total, cutoff, _ = row_laws(
        peak, mass, None, law_peak, law_total, law_cutoff, None, rows, inside, groups, all_rows, CHUNK
    )
    token = -1
    if first is not None:
        token = tl.sum(merged_first(peak, first, top, rows, inside, groups, all_rows, CHUNK), 0)
    shift, total, cutoff = tl.sum(top, 0), tl.sum(total, 0), tl.sum(cutoff, 0)
    sound = (total > 0.0) & (total < float("inf"))
    one_hot = temperature == 0.0
    total = tl.where(sound & (temperature != 0.0), total, 1.0)
    return _below(z, ids, shift, cutoff, sound, one_hot, token), total


@triton.jit
def _log_probability(row, size, z, ids, n, temperature, lse, cutoff, logprob):
    """ln p by a draft's statistics: (z - z_n) + ln p_n, which keeps more digits than z - lse, unless p_n = 0."""
    z_n = scaled_logits(row, n, (n >= 0) & (n < size), None, temperature)
    possible = logprob > -float("inf")
    shift = tl.where(possible, z_n, lse)
    sound = (tl.abs(shift) < float("inf")) & (logprob <= 1e-3)
    one_hot = (temperature == 0.0) & (logprob == 0.0)
    return _below(z, ids, shift, cutoff, sound, one_hot, n) + tl.where(possible & sound, logprob, 0.0)
