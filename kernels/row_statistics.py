"""GroupStatistics of rows of logits, read once in their own dtype and split over the vocabulary: the first launch.

For every group g of 1024 consecutive ids of a row, with z = l / T:

    m_g = max z,   s_g = sum exp(z - m_g),   e_g = sum exp(z - m_g) (z - m_g),   f_g = lowest id with z = m_g

and the maxima of subgroups of 128 ids, for filters. A row's log-sum-exp is log(sum_g s_g exp(m_g - max m)) + max m:
"online softmax", Milakov and Gimelshein 2018 (arXiv 1805.02867), split over programs. A NaN or +inf in a group makes
its s_g NaN; a group without any finite logit has m_g = -inf and s_g = 0.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.kernels.launch import launch
from fused_spec.kernels.processed_rows import INT_MAX
from fused_spec.kernels.row_access import GROUP, SUBGROUP, finite_base, parameter, scaled_logits

TILE = 2048
"""Logits one program reads: 4 KiB in half precision, enough programs for every multiprocessor at 6 rows."""


class Rows(NamedTuple):
    """Rows of logits of a batch.

    Attributes:
        logits: [B, R, V] float32, bfloat16 or float16, unit stride in V.
        allowed: [B, R, ceil(V/32)] int32 bitmask or None.
        temperature, top_k, top_p, min_p: numbers or tensors [B].
    """

    logits: torch.Tensor
    allowed: torch.Tensor | None
    temperature: float | torch.Tensor
    top_k: int | torch.Tensor = 0
    top_p: float | torch.Tensor = 1.0
    min_p: float | torch.Tensor = 0.0

    @property
    def filtered(self) -> bool:
        """Whether any request may cut tokens; what tensors hold is not looked at."""
        off = ((self.top_k, 0), (self.top_p, 1), (self.min_p, 0))
        return any(isinstance(value, torch.Tensor) or value != neutral for value, neutral in off)

    @property
    def greedy(self) -> bool:
        """Whether any request may have T = 0."""
        return isinstance(self.temperature, torch.Tensor) or self.temperature == 0


class GroupStatistics(NamedTuple):
    """Per group of 1024 ids, for B * R target rows and then B * m draft rows (row b, i is b * R + i).

    Rows are next to each other in memory: what merges many rows at once then has one of them per thread.

    Attributes:
        peak, mass: [rows, G] float32, m_g and s_g.
        weighted: [rows, G] float32, e_g, or None.
        first: [rows, G] int32, f_g, or None.
        maxima: [rows, 8 G] float32, of subgroups, or None.
    """

    peak: torch.Tensor
    mass: torch.Tensor
    weighted: torch.Tensor | None
    first: torch.Tensor | None
    maxima: torch.Tensor | None


@triton.jit
def _reduce_tile(
    row, size, allowed, temperature, peak, mass, weighted, first, maxima, tile, all_rows, TILE: tl.constexpr
):  # one program's share of one row; peak and its like point to the row's first group
    GROUPS: tl.constexpr = TILE // GROUP
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = scaled_logits(row, ids, ids < size, allowed, temperature)
    number = tl.where(z == z, z, -float("inf"))  # what max makes of a NaN differs between machines
    m = tl.max(number, 1)
    z -= finite_base(m)[:, None]
    w = tl.exp(z)
    tl.store(peak + groups * all_rows, m)
    tl.store(mass + groups * all_rows, tl.sum(w, 1))
    if weighted is not None:
        tl.store(weighted + groups * all_rows, tl.sum(w * tl.where(w > 0, z, 0.0), 1))  # 0 * -inf would be NaN
    if first is not None:
        tl.store(first + groups * all_rows, tl.min(tl.where(number == m[:, None], ids, INT_MAX), 1))
    if maxima is not None:
        PARTS: tl.constexpr = TILE // SUBGROUP
        parts = tl.max(tl.reshape(number, [PARTS, SUBGROUP]), 1)
        tl.store(maxima + tile * PARTS + tl.arange(0, PARTS), parts)


@triton.jit(do_not_specialize=["temperature", "draft_temperature"])
def row_statistics_kernel(
    target, target_stride_b, target_stride_r, target_size, target_rows,
    allowed, allowed_stride_b, allowed_stride_r, temperature,
    draft, draft_stride_b, draft_stride_r, draft_size, draft_rows, draft_temperature,
    peak, mass, weighted, first, maxima,
    batch, groups, TILE: tl.constexpr,
):  # fmt: skip
    tile, row, all_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if weighted is not None:
        weighted += row
    if first is not None:
        first += row
    if maxima is not None:
        maxima += row.to(tl.int64) * groups * (GROUP // SUBGROUP)
    if row < batch * target_rows:
        b, r = (row // target_rows).to(tl.int64), (row % target_rows).to(tl.int64)
        if allowed is not None:
            allowed += b * allowed_stride_b + r * allowed_stride_r
        _reduce_tile(
            target + b * target_stride_b + r * target_stride_r, target_size, allowed,
            parameter(temperature, b, tl.float32), peak + row, mass + row, weighted, first, maxima, tile,
            all_rows, TILE,
        )  # fmt: skip
    elif draft is not None:
        draft_row = row - batch * target_rows
        b, r = (draft_row // draft_rows).to(tl.int64), (draft_row % draft_rows).to(tl.int64)
        _reduce_tile(
            draft + b * draft_stride_b + r * draft_stride_r, draft_size, None,
            parameter(draft_temperature, b, tl.float32), peak + row, mass + row, weighted, first, maxima, tile,
            all_rows, TILE,
        )  # fmt: skip


def row_statistics(target: Rows, draft: Rows | None, *, entropy: bool = False) -> GroupStatistics:
    """Launch over all rows: one read of each logit.

    Args:
        target: the verifier's rows, or those to sample from.
        draft: the drafter's rows, or None where their statistics are known.
        entropy: whether e_g is wanted.
    """
    batch, rows, size = target.logits.shape
    draft_rows, draft_size = (0, 1) if draft is None else draft.logits.shape[1:]
    every = batch * (rows + draft_rows)
    groups = triton.cdiv(max(size, draft_size), TILE) * (TILE // GROUP.value)
    filtered = target.filtered or (draft is not None and draft.filtered)
    greedy = target.greedy or (draft is not None and draft.greedy)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=target.logits.device)

    statistics = GroupStatistics(
        peak=empty(groups, every).t(),
        mass=empty(groups, every).t(),
        weighted=empty(groups, every).t() if entropy else None,
        first=empty(groups, every, dtype=torch.int32).t() if greedy or entropy else None,
        maxima=empty(every, groups * (GROUP.value // SUBGROUP.value)) if filtered else None,
    )
    launch(
        row_statistics_kernel,
        (groups * GROUP.value // TILE, every),
        **located("target", target.logits),
        target_size=size,
        target_rows=rows,
        **located("allowed", target.allowed),
        temperature=target.temperature,
        **located("draft", None if draft is None else draft.logits),
        draft_size=draft_size,
        draft_rows=draft_rows,
        draft_temperature=1.0 if draft is None else draft.temperature,
        **statistics._asdict(),
        batch=batch,
        groups=groups,
        TILE=TILE,
    )
    return statistics


def located(name: str, tensor: torch.Tensor | None) -> dict[str, Any]:
    """A tensor [B, R, ...] or None as the arguments `name`, `name_stride_b` and `name_stride_r` of a kernel."""
    strides = (0, 0) if tensor is None else tensor.stride()[:2]
    return {name: tensor, f"{name}_stride_b": strides[0], f"{name}_stride_r": strides[1]}
