"""What MentoredDecoding, CascadeOpt and CascadeToken take from the whole pair of rows, for every slot at once.

    pi_x = (p_x if w_x >= cut else 0) clipped to [low q_x, high q_x], plus share q_x,   w_x = q_x / max q

    MentoredDecoding: low <= 1 <= high as kernels/pair_search.py finds them; pi_x = 0 where q_x = 0
    CascadeOpt:       low = high = 1 if max p < max q - alpha sum (q - p)+, else 0 and infinity
    CascadeToken:     cut = 1 - alpha, share = sum of p_x with w_x < cut or unknown to the verifier

Launches after the statistics: 2 for the cascades, 7 for MentoredDecoding. All but the last read each target row that
has a draft, and the draft's row, once and in their own dtype. Their programs, one per 2048 ids of a slot, read the
group statistics of the two rows besides, and MentoredDecoding's write 512 bytes and read all that the sweep before
wrote for their slot: 38 KB at V = 151936, five times a program's share of two rows in half precision. The last launch
merges each slot in one program. No probability is stored.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.errors import InvalidInput
from fused_spec.kernels.launch import launch
from fused_spec.kernels.pair_rows import draft_row, target_row
from fused_spec.kernels.pair_search import KNOTS, SUMS, SWEEPS, next_bracket, store_bracket, try_knots
from fused_spec.kernels.processed_rows import Laws, chunk_of_groups, law_arguments
from fused_spec.kernels.row_access import finite_base, parameter
from fused_spec.kernels.row_statistics import GroupStatistics, Rows, located
from fused_spec.rules import CascadeOpt, CascadeToken, MentoredDecoding, Rule

TILE = 2048
"""Ids that one program reads of two rows."""

TILES_AT_ONCE = 16
"""How many tiles' sums are merged at a time."""

DraftStats = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PairBounds(NamedTuple):
    """The scalars of pi, each [B, m] float64; no NaN among them, whatever the rows hold.

    Attributes:
        low, high: pi lies between low q and high q, but for the share.
        cut: what q_x / max q must reach for p_x to count.
        share: the multiple of q that is added.
    """

    low: torch.Tensor
    high: torch.Tensor
    cut: torch.Tensor
    share: torch.Tensor


@triton.jit
def _weight(below):
    """sum w of a tile as float64. The largest weights, 1, are counted apart: others are lost beside them in float32."""
    rest = tl.sum(tl.where(below < 0.0, tl.exp(below), 0.0), 0)
    return tl.sum((below >= 0.0).to(tl.int32), 0).to(tl.float64) + rest.to(tl.float64)


@triton.jit(do_not_specialize=["temperature", "draft_temperature", "setting"])
def pair_sums_kernel(
    target, target_stride_b, target_stride_r, target_size,
    allowed, allowed_stride_b, allowed_stride_r, temperature,
    draft, draft_stride_b, draft_stride_r, draft_size, draft_temperature,
    draft_ids, draft_ids_stride_b, draft_ids_stride_r,
    lse, lse_stride_b, lse_stride_r, cutoff, cutoff_stride_b, cutoff_stride_r,
    logprob, logprob_stride_b, logprob_stride_r,
    peak, mass, first, law_peak, law_total, law_cutoff,
    setting, last_bracket, last_partials, bracket, partials,
    groups, all_rows, RULE: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, i, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    tiles, m, batch = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    slot, ids = b * m + i, tile * TILE + tl.arange(0, TILE)
    value = parameter(setting, b, tl.float64)
    if RULE == "mentored":
        low, low_step, high, high_step = next_bracket(last_bracket, last_partials, slot, tiles, value, TILES)
    below_q, total_q = target_row(
        target, target_stride_b, target_stride_r, target_size, allowed, allowed_stride_b, allowed_stride_r,
        parameter(temperature, b, tl.float32), ids, b, i,
        peak, mass, first, law_peak, law_total, law_cutoff, b * (m + 1) + i, groups, all_rows, CHUNK,
    )  # fmt: skip
    below_p, total_p = draft_row(
        draft, draft_stride_b, draft_stride_r, draft_size, draft_ids, draft_ids_stride_b, draft_ids_stride_r,
        lse, lse_stride_b, lse_stride_r, cutoff, cutoff_stride_b, cutoff_stride_r,
        logprob, logprob_stride_b, logprob_stride_r, parameter(draft_temperature, b, tl.float32), ids, b, i,
        peak, mass, first, law_peak, law_total, law_cutoff, batch * (m + 1) + slot, groups, all_rows, CHUNK,
    )  # fmt: skip
    w = tl.exp(below_q)
    q = w * (1.0 / total_q).to(tl.float32)
    p = tl.exp(below_p) * (1.0 / total_p).to(tl.float32)
    at = slot * tiles + tile
    if RULE == "cascade_token":
        outside = (w < (1.0 - value).to(tl.float32)) | (ids >= target_size)
        tl.store(partials + at, tl.sum(tl.where(outside, p, 0.0), 0))
    elif RULE == "cascade_opt":
        tl.store(partials + at * 3, tl.sum(tl.maximum(q - p, 0.0), 0))
        tl.store(partials + at * 3 + 1, _weight(below_q))
        if logprob is None:
            tl.store(partials + at * 3 + 2, _weight(below_p))
        else:
            tl.store(partials + at * 3 + 2, tl.max(below_p, 0))
    else:
        log_ratio = (below_p - finite_base(below_q)) + (tl.log(total_q) - tl.log(total_p)).to(tl.float32)
        try_knots(p, q, log_ratio, low, low_step, partials + at * SUMS, 1)
        try_knots(p, q, log_ratio, high, high_step, partials + at * SUMS + 2 * KNOTS, -1)
        if tile == 0:
            store_bracket(bracket, slot, low, low_step, high, high_step)


@triton.jit
def _over_tiles(partials, step, tiles, CHUNK: tl.constexpr):
    """(sum, largest) as float64 of every `step`-th number, merged in order."""
    total = tl.full([], 0.0, tl.float64)
    largest = tl.full([], -float("inf"), tl.float64)
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        part = tl.load(partials + tile * step, mask=tile < tiles, other=-float("inf"))
        total += tl.sum(tl.where(tile < tiles, part, 0.0), 0)
        largest = tl.maximum(largest, tl.max(part, 0))
    return total, largest


@triton.jit(do_not_specialize=["setting"])
def pair_bounds_kernel(
    setting, bracket, partials, low, high, cut, share, tiles,
    RULE: tl.constexpr, BY_LOGPROB: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    slot = b * tl.num_programs(0) + tl.program_id(0)
    value = parameter(setting, b, tl.float64)
    zero = tl.full([], 0.0, tl.float64)
    least, most, needed, added = zero, zero + float("inf"), zero, zero
    if RULE == "cascade_token":
        outside, _ = _over_tiles(partials + slot * tiles, 1, tiles, TILES)
        needed = (1.0 - value).to(tl.float32).to(tl.float64)  # as the tiles compared it
        added = tl.where(outside < float("inf"), outside, 0.0)  # NaN and inf come from faulty rows
    elif RULE == "cascade_opt":
        partials += slot * tiles * 3
        variation, _ = _over_tiles(partials, 3, tiles, TILES)
        weight_q, _ = _over_tiles(partials + 1, 3, tiles, TILES)
        weight_p, log_p = _over_tiles(partials + 2, 3, tiles, TILES)
        highest = tl.exp(tl.minimum(log_p, 0.0)) if BY_LOGPROB else 1.0 / tl.maximum(weight_p, 1.0)
        follows_q = highest < 1.0 / tl.maximum(weight_q, 1.0) - value * variation
        least, most = tl.where(follows_q, zero + 1.0, least), tl.where(follows_q, zero + 1.0, most)
    else:
        log_low, low_step, log_high, high_step = next_bracket(bracket, partials, slot, tiles, value, TILES)
        middle = 0.5 * (KNOTS - 1)
        least = tl.where(value == 0.0, 1.0, tl.exp(log_low + middle * low_step))
        most = tl.where(value == 0.0, 1.0, tl.exp(log_high + middle * high_step))
    tl.store(low + slot, least)
    tl.store(high + slot, most)
    tl.store(cut + slot, needed)
    tl.store(share + slot, added)


def pair_bounds(
    rule: Rule,
    target: Rows,
    draft: Rows | None,
    draft_ids: torch.Tensor,
    statistics: GroupStatistics,
    laws: Laws | None,
    draft_stats: DraftStats | None,
) -> PairBounds:
    """The scalars of every slot, tested later or not.

    Args:
        rule: MentoredDecoding, CascadeOpt or CascadeToken; its parameter is a number or a tensor [B].
        target: [B, m+1, V]; the last row is left alone.
        draft: [B, m, Vd], or None for a deterministic drafter.
        draft_ids: [B, m] int32 or int64.
        statistics: of the target rows and, where there are draft rows without draft_stats, of these.
        laws: of the same rows where filters are on.
        draft_stats: (lse, cutoff, logprob), each [B, m], or None.
    """
    batch, m = draft_ids.shape
    device = draft_ids.device
    bounds = PairBounds(*(torch.empty(batch, m, dtype=torch.float64, device=device) for _ in PairBounds._fields))
    mentored, setting, numbers = _rule_arguments(rule)
    if bounds.low.numel() == 0:
        return bounds
    tiles = triton.cdiv(max(target.logits.shape[2], 0 if draft is None else draft.logits.shape[2]), TILE)
    common: dict[str, Any] = {
        "num_warps": 8 if mentored else 4,
        "setting": setting,
        "RULE": rule.name,
        "TILES": TILES_AT_ONCE,
    }
    rows = _row_arguments(target, draft, draft_ids, statistics, laws, draft_stats)
    partial_dtype = torch.float32 if mentored else torch.float64
    last: dict[str, Any] = {"bracket": None, "partials": None}
    for _ in range(SWEEPS if mentored else 1):
        now: dict[str, Any] = {
            "bracket": torch.empty(batch, m, 4, dtype=torch.float64, device=device),
            "partials": torch.empty(batch, m, tiles, numbers, dtype=partial_dtype, device=device),
        }
        launch(
            pair_sums_kernel,
            (tiles, m, batch),
            **rows,
            last_bracket=last["bracket"],
            last_partials=last["partials"],
            **now,
            **common,
            CHUNK=chunk_of_groups(1),
            TILE=TILE,
        )
        last = now
    launch(
        pair_bounds_kernel,
        (m, batch),
        **last,
        **bounds._asdict(),
        **common,
        tiles=tiles,
        BY_LOGPROB=draft_stats is not None,
    )
    return bounds


def _rule_arguments(rule: Rule) -> tuple[bool, float | torch.Tensor, int]:
    """(whether it takes sweeps, its parameter, numbers that a tile sums up)."""
    if isinstance(rule, MentoredDecoding):
        return True, rule.kl, SUMS.value
    if isinstance(rule, CascadeOpt):
        return False, rule.alpha, 3
    if isinstance(rule, CascadeToken):
        return False, rule.alpha, 1
    raise InvalidInput(f"rule must be MentoredDecoding, CascadeOpt or CascadeToken, got {type(rule).__name__}")


def _row_arguments(
    target: Rows,
    draft: Rows | None,
    draft_ids: torch.Tensor,
    statistics: GroupStatistics,
    laws: Laws | None,
    draft_stats: DraftStats | None,
) -> dict[str, Any]:
    lse, cutoff, logprob = draft_stats or (None, None, None)
    return {
        **located("target", target.logits),
        "target_size": target.logits.shape[2],
        **located("allowed", target.allowed),
        "temperature": target.temperature,
        **located("draft", None if draft is None else draft.logits),
        "draft_size": 0 if draft is None else draft.logits.shape[2],
        "draft_temperature": 1.0 if draft is None else draft.temperature,
        **located("draft_ids", draft_ids),
        **located("lse", lse),
        **located("cutoff", cutoff),
        **located("logprob", logprob),
        "peak": statistics.peak,
        "mass": statistics.mass,
        "first": statistics.first,
        **law_arguments(laws, "peak", "total", "cutoff"),
        "groups": statistics.peak.shape[1],
        "all_rows": statistics.peak.shape[0],
    }
