"""Cutoffs of rows under top-k, top-p and min-p, and what is left above them: one launch, one program per row.

    top-k: z >= the k-th largest z;   top-p: mass strictly above z < top_p * mass;   min-p: z >= max z + ln(min_p)

in this order, each over the survivors of the one before, as kernels/filter.py defines them, with z = l * (1 / T).

The short way reads little of the row a second time. The largest z lie in those subgroups of 128 ids that have the
largest maxima, which the first launch left. A bound is chosen that 64 to 128 of the maxima exceed, or 32 to 64 for a
top_k up to 32; the logits of these subgroups are read, and those above the bound are searched in registers. At
V = 151936 that is 3 to 11 % of the bytes of a row, besides the maxima (2 %) and the scratch. It does where k tokens lie
above the bound, or top_p of the mass, or what min-p keeps: top_k <= 64, unless more than 64 maxima are equal, and the
usual nucleus.

Otherwise (flat rows, large k) the program goes the slow way: it loops over the row, up to 11 times each for top-k and
top-p and once or twice more for sums. In distinct bytes that is the row once again, mostly from cache, but one program
does it all alone: the price of one launch without waiting between programs.
"""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.launch import launch
from fused_spec.kernels.processed_rows import Laws, chunk_of_groups, merged_peaks, merged_sums
from fused_spec.kernels.row_access import GROUP, SUBGROUP, parameter, scaled_logits
from fused_spec.kernels.row_search import (
    LOWEST,
    block_sums,
    mass_above,
    ordered,
    row_sums,
    search_block,
    search_row,
    unordered,
)
from fused_spec.kernels.row_statistics import GroupStatistics, Rows, located

TILE = 2048
"""Logits that are read at a time."""

FEW = tl.constexpr(128)
"""Room for the subgroups that the short way looks at."""

ROOM = tl.constexpr(4096)
"""Room for the tokens above the bound: 32 whole subgroups."""


@triton.jit
def _choose(maxima, chosen, parts, top, wanted, MAXIMA: tl.constexpr):
    """Write the subgroups with a maximum above some bound to `chosen`, in order; (bound, how many)."""
    part = tl.arange(0, MAXIMA)
    key = ordered(tl.load(maxima + part, mask=part < parts, other=-float("inf")))
    rows = tl.reshape(key, [MAXIMA // SUBGROUP, SUBGROUP])
    lowest = tl.full([], LOWEST, tl.int64)
    whole = mass_above(rows, 1.0, lowest) <= ROOM // SUBGROUP
    high = tl.where(whole, lowest, ordered(top).to(tl.int64))
    _, bound = search_block(rows, 1.0, lowest, high, FEW + 1, wanted, 2 * wanted)
    there = (key > bound.to(tl.int32)).to(tl.int32)
    tl.store(chosen + tl.cumsum(there, 0) - 1, part, mask=there != 0)
    tl.debug_barrier()  # other threads of the program read what this one wrote
    return bound, tl.sum(there, 0)


@triton.jit
def _collect(row, size, allowed, temperature, chosen, count, bound, survivors, TILE: tl.constexpr):
    """Write the keys above the bound to `survivors`, in order, as far as there is room; how many there are."""
    PARTS: tl.constexpr = TILE // SUBGROUP
    found = count * 0
    for start in range(0, count, PARTS):
        slot = start + tl.arange(0, PARTS)
        part = tl.load(chosen + slot, mask=slot < count, other=0)
        ids = part[:, None] * SUBGROUP + tl.arange(0, SUBGROUP)[None, :]
        z = scaled_logits(row, ids, (slot < count)[:, None] & (ids < size), allowed, temperature)
        key = tl.reshape(ordered(z), [TILE])
        above = (key > bound.to(tl.int32)).to(tl.int32)
        at = found + tl.cumsum(above, 0) - 1
        tl.store(survivors + at, key, mask=(above != 0) & (at < ROOM))
        found += tl.sum(above, 0)
    tl.debug_barrier()
    return found


@triton.jit
def _cut(
    row, size, allowed, temperature, top_k, top_p, min_p, by_k, by_p, maxima, chosen, survivors, parts, top, total,
    MAXIMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(key above which tokens are kept, total, weighted_total, lowest kept key) of a sampled row without a fault."""
    wanted = tl.where(by_k, tl.minimum(tl.maximum(top_k, 32), 64), 64)
    bound, count = _choose(maxima, chosen, parts, top, wanted, MAXIMA)
    found = _collect(row, size, allowed, temperature, chosen, count, bound, survivors, TILE)
    at = tl.arange(0, ROOM // SUBGROUP)[:, None] * SUBGROUP + tl.arange(0, SUBGROUP)[None, :]
    key = tl.load(survivors + at, mask=at < found, other=LOWEST)
    weight = tl.exp(unordered(key) - top)
    cut = tl.full([], LOWEST, tl.int64)
    high = ordered(top).to(tl.int64)
    floor = cut
    if min_p > 0:
        floor = ordered((top.to(tl.float64) + tl.log(min_p.to(tl.float64))).to(tl.float32)).to(tl.int64) - 1
    if by_k:
        enough = mass_above(key, 1.0, bound) >= top_k
    elif by_p:
        enough = mass_above(key, weight, bound) >= top_p * total
    else:
        enough = floor >= bound
    if (found <= ROOM) & (enough | (bound == LOWEST)):
        if by_k:
            cut, _ = search_block(key, 1.0, bound, high, top_k, top_k, top_k)
            total = mass_above(key, weight, cut)
        if by_p:
            cut, _ = search_block(key, weight, tl.maximum(cut, bound), high, top_p * total, 1, 0)
        cut = tl.maximum(cut, floor)
        total, weighted_total, lowest = block_sums(key, weight, top, cut)
    else:
        if by_k:
            cut = search_row(row, size, allowed, temperature, top, cut, high, top_k, True, TILE)
        if by_p:
            if by_k:
                total, _, _ = row_sums(row, size, allowed, temperature, top, cut, TILE)
            cut = search_row(row, size, allowed, temperature, top, cut, high, top_p * total, False, TILE)
        cut = tl.maximum(cut, floor)
        total, weighted_total, lowest = row_sums(row, size, allowed, temperature, top, cut, TILE)
    return cut, total, weighted_total, lowest


@triton.jit
def _reduce_row(
    row, size, allowed, temperature, top_k, top_p, min_p, index,
    peak, mass, weighted, maxima, chosen, survivors, groups, law_peak, law_total, law_cutoff, law_weighted_total,
    CHUNK: tl.constexpr, MAXIMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: the law of row number `index` (int64), whose first logit `row` points to."""
    rows = tl.zeros([1], tl.int64) + index
    tops = merged_peaks(peak, rows, rows >= 0, groups, tl.num_programs(0), CHUNK)
    totals, weighted_totals = merged_sums(
        peak, mass, weighted, tops, rows, rows >= 0, groups, tl.num_programs(0), CHUNK
    )
    top, total, weighted_total = tl.max(tops, 0), tl.sum(totals, 0), tl.sum(weighted_totals, 0)
    cutoff = tl.full([], -float("inf"), tl.float32)
    top_p = tl.maximum(top_p, 1.1754943508222875e-38)  # float32 may have made 0 of it, which no mass stays below
    by_k = (top_k > 0) & (top_k < size)
    by_p = top_p < 1
    if total > 0:  # neither empty nor NaN
        if temperature == 0:
            cutoff = top
            total = tl.full([], 1.0, tl.float64)
            weighted_total = tl.full([], 0.0, tl.float64)
        elif by_k | by_p | (min_p > 0):
            parts = groups * (GROUP // SUBGROUP)
            cut, kept_total, kept_weighted_total, lowest = _cut(
                row, size, allowed, temperature, top_k, top_p, min_p, by_k, by_p,
                maxima + index * parts, chosen + index * FEW, survivors + index * ROOM,
                parts, top, total, MAXIMA, TILE,
            )  # fmt: skip
            if cut > LOWEST:  # fewer tokens than k are cut by nothing, and their sums stay as they were
                cutoff, total, weighted_total = unordered(lowest), kept_total, kept_weighted_total
    tl.store(law_peak + index, top)
    tl.store(law_total + index, total)
    tl.store(law_cutoff + index, cutoff)
    if law_weighted_total is not None:
        tl.store(law_weighted_total + index, weighted_total)


@triton.jit(
    do_not_specialize=[
        "temperature", "top_k", "top_p", "min_p", "draft_temperature", "draft_top_k", "draft_top_p", "draft_min_p",
    ]
)  # fmt: skip
def row_cutoff_kernel(
    target, target_stride_b, target_stride_r, target_size, target_rows,
    allowed, allowed_stride_b, allowed_stride_r, temperature, top_k, top_p, min_p,
    draft, draft_stride_b, draft_stride_r, draft_size, draft_rows,
    draft_temperature, draft_top_k, draft_top_p, draft_min_p,
    peak, mass, weighted, maxima, chosen, survivors, batch, groups, law_peak, law_total, law_cutoff, law_weighted_total,
    CHUNK: tl.constexpr, MAXIMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = index.to(tl.int64)
    if index < batch * target_rows:
        b, r = (index // target_rows).to(tl.int64), (index % target_rows).to(tl.int64)
        if allowed is not None:
            allowed += b * allowed_stride_b + r * allowed_stride_r
        _reduce_row(
            target + b * target_stride_b + r * target_stride_r, target_size, allowed,
            parameter(temperature, b, tl.float32), parameter(top_k, b, tl.int64), parameter(top_p, b, tl.float32),
            parameter(min_p, b, tl.float32), row, peak, mass, weighted, maxima, chosen, survivors, groups,
            law_peak, law_total, law_cutoff, law_weighted_total, CHUNK, MAXIMA, TILE,
        )  # fmt: skip
    elif draft is not None:
        draft_row = index - batch * target_rows
        b, r = (draft_row // draft_rows).to(tl.int64), (draft_row % draft_rows).to(tl.int64)
        _reduce_row(
            draft + b * draft_stride_b + r * draft_stride_r, draft_size, None,
            parameter(draft_temperature, b, tl.float32), parameter(draft_top_k, b, tl.int64),
            parameter(draft_top_p, b, tl.float32), parameter(draft_min_p, b, tl.float32),
            row, peak, mass, weighted, maxima, chosen, survivors, groups,
            law_peak, law_total, law_cutoff, law_weighted_total, CHUNK, MAXIMA, TILE,
        )  # fmt: skip


def row_cutoffs(target: Rows, draft: Rows | None, statistics: GroupStatistics, *, entropy: bool = False) -> Laws:
    """Launch over all rows, after `row_statistics` of the same rows.

    Args:
        target, draft: as given to `row_statistics`; `filtered` is true of one of them.
        statistics: what it returned.
        entropy: whether `Laws.weighted_total` is wanted; `statistics.weighted` is needed for it.
    """
    every, groups = statistics.peak.shape

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=target.logits.device)

    laws = Laws(
        peak=empty(every, dtype=torch.float32),
        total=empty(every, dtype=torch.float64),
        cutoff=empty(every, dtype=torch.float32),
        weighted_total=empty(every, dtype=torch.float64) if entropy else None,
    )
    launch(
        row_cutoff_kernel,
        (every,),
        num_warps=16,
        **located("target", target.logits),
        **_shape("target_", target),
        **_processing("", target),
        **located("allowed", target.allowed),
        **located("draft", None if draft is None else draft.logits),
        **_shape("draft_", draft or target),
        **_processing("draft_", draft or target),
        peak=statistics.peak,
        mass=statistics.mass,
        weighted=statistics.weighted if entropy else None,
        maxima=statistics.maxima,
        chosen=empty(every, FEW.value, dtype=torch.int32),
        survivors=empty(every, ROOM.value, dtype=torch.int32),
        batch=target.logits.shape[0],
        groups=groups,
        **{f"law_{name}": value for name, value in laws._asdict().items()},
        CHUNK=chunk_of_groups(1),
        MAXIMA=max(SUBGROUP.value, triton.next_power_of_2(groups * (GROUP.value // SUBGROUP.value))),
        TILE=TILE,
    )
    return laws


def _shape(prefix: str, rows: Rows) -> dict[str, object]:
    return {f"{prefix}rows": rows.logits.shape[1], f"{prefix}size": rows.logits.shape[2]}


def _processing(prefix: str, rows: Rows) -> dict[str, object]:
    return {f"{prefix}{name}": getattr(rows, name) for name in ("temperature", "top_k", "top_p", "min_p")}
