"""The Triton path of `sample`: two launches, and two more where filters are on.

    1  row_statistics   every row once, split over the vocabulary
    2  pick_tokens      group by its mass, then the token inside it, by one program per row

With filters `row_cutoffs` finds the cutoff between the two, and `kept_masses` sums what it keeps, group by group.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import Scalar
from fused_spec.kernels.inverse_cdf_kernel import lowest_allowed, pick
from fused_spec.kernels.launch import launch
from fused_spec.kernels.processed_rows import Laws, chunk_of_groups, law_arguments, merged_first, row_laws
from fused_spec.kernels.row_access import (
    EMPTY_SUPPORT,
    GROUP,
    NAN_TARGET,
    finite_base,
    parameter,
    sampling_uniform,
    scaled_logits,
)
from fused_spec.kernels.row_cutoff import row_cutoffs
from fused_spec.kernels.row_statistics import Rows, row_statistics

TILE = 2048


@triton.jit(do_not_specialize=["temperature"])
def kept_masses_kernel(
    logits, logits_stride_b, size, allowed, allowed_stride_b, temperature, law_peak, law_cutoff, masses, groups,
    TILE: tl.constexpr,
):  # fmt: skip
    """masses [B, G] float32: sum exp(z - peak) over the kept tokens of every group."""
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUPS: tl.constexpr = TILE // GROUP
    own = tile * GROUPS + tl.arange(0, GROUPS)
    ids = own[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    allowed_row = allowed
    if allowed is not None:
        allowed_row = allowed + b * allowed_stride_b
    z = scaled_logits(logits + b * logits_stride_b, ids, ids < size, allowed_row, parameter(temperature, b, tl.float32))
    peak = finite_base(tl.load(law_peak + b))
    weights = tl.where(z >= tl.load(law_cutoff + b), tl.exp(z - peak), 0.0)
    tl.store(masses + b * groups + own, tl.sum(weights, 1))


@triton.jit(do_not_specialize=["temperature", "seed", "position", "purpose"])
def pick_tokens_kernel(
    logits, logits_stride_b, size, allowed, allowed_stride_b, temperature, seed, position, purpose,
    peak, mass, first, law_peak, law_total, law_cutoff, masses, groups, mass_groups,
    token_ids, logprob, lse, cutoff, error,
    token_ids_stride, logprob_stride, lse_stride, cutoff_stride, error_stride,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = parameter(temperature, b, tl.float32)
    one = tl.zeros([1], tl.int64) + b
    tops, totals, lowests, _weighted_totals = row_laws(
        peak, mass, None, law_peak, law_total, law_cutoff, None, one, one >= 0, groups, tl.num_programs(0), CHUNK
    )
    top, total, lowest = tl.max(tops, 0), tl.sum(totals, 0), tl.max(lowests, 0)
    row, allowed_row = logits + b * logits_stride_b, allowed
    if allowed is not None:
        allowed_row = allowed + b * allowed_stride_b
    token = tl.full([], -1, tl.int32)
    log_p = tl.full([], float("nan"), tl.float32)
    bits = tl.full([], 0, tl.int32)
    if total == 0:
        bits = tl.full([], EMPTY_SUPPORT, tl.int32)
        token = lowest_allowed(allowed_row, size)
        total, lowest = total + 1.0, top
    elif ((total < float("inf")) & (top < float("inf"))) == 0:
        bits = tl.full([], NAN_TARGET, tl.int32)
        token = lowest_allowed(allowed_row, size)
        lowest = tl.full([], -float("inf"), tl.float32)
    elif t == 0:
        if first is not None:
            token = tl.max(merged_first(peak, first, tops, one, one >= 0, groups, tl.num_programs(0), CHUNK), 0)
        log_p = tl.full([], 0.0, tl.float32)
        total, lowest = tl.full([], 1.0, tl.float64), top
    else:
        g = tl.arange(0, GROUPS)
        if masses is not None:
            weights = tl.load(masses + b * mass_groups + g, mask=g < mass_groups, other=0.0)
        else:
            m = tl.load(peak + g * tl.num_programs(0) + b, mask=g < groups, other=-float("inf"))
            weights = tl.load(mass + g * tl.num_programs(0) + b, mask=g < groups, other=0.0) * tl.exp(m - top)
        uniform = sampling_uniform(parameter(seed, b, tl.int64), parameter(position, b, tl.int64), purpose)
        goal = uniform * tl.sum(weights.to(tl.float64), 0)
        group, before = pick(weights, goal, GROUPS)
        ids = group * GROUP + tl.arange(0, GROUP)
        z = scaled_logits(row, ids, ids < size, allowed_row, t)
        index, _mass = pick(tl.where(z >= lowest, tl.exp(z - top), 0.0), goal - before, GROUP)
        token = group * GROUP + index
        drawn = tl.max(tl.where(ids == token, z, -float("inf")), 0)
        log_p = ((drawn.to(tl.float64) - top.to(tl.float64)) - tl.log(total)).to(tl.float32)
    tl.store(token_ids + b * token_ids_stride, token.to(tl.int64))
    tl.store(logprob + b * logprob_stride, log_p)
    tl.store(lse + b * lse_stride, (top.to(tl.float64) + tl.log(total)).to(tl.float32))
    tl.store(cutoff + b * cutoff_stride, lowest)
    tl.store(error + b * error_stride, bits)


def sample_triton(rows: Rows, key: tuple[Scalar, Scalar], stream: int, out: Any) -> None:
    """Draw one token per row [B, 1, V] of arguments that were checked; `out` is a `Sample`, key is (seed, position)."""
    statistics = row_statistics(rows, None)
    laws = row_cutoffs(rows, None, statistics) if rows.filtered else None
    masses = None if laws is None else _kept_masses(rows, laws)
    batch, groups = rows.logits.shape[0], statistics.peak.shape[1]
    mass_groups = groups if masses is None else masses.shape[1]
    results = {name: getattr(out, name) for name in ("token_ids", "logprob", "lse", "cutoff", "error")}
    launch(
        pick_tokens_kernel,
        (batch,),
        num_warps=8,
        **_one_row_each(rows),
        seed=key[0],
        position=key[1],
        purpose=stream,  # Triton keeps the name `stream` to itself
        peak=statistics.peak,
        mass=statistics.mass,
        first=statistics.first,
        **law_arguments(laws, "peak", "total", "cutoff"),
        masses=masses,
        groups=groups,
        mass_groups=mass_groups,
        **results,
        **{f"{name}_stride": tensor.stride(0) for name, tensor in results.items()},
        CHUNK=chunk_of_groups(1),
        GROUPS=triton.next_power_of_2(mass_groups),
    )


def _kept_masses(rows: Rows, laws: Laws) -> torch.Tensor:
    batch, _, size = rows.logits.shape
    groups = triton.cdiv(size, TILE) * (TILE // GROUP.value)
    masses = torch.empty(batch, groups, dtype=torch.float32, device=rows.logits.device)
    launch(
        kept_masses_kernel,
        (groups * GROUP.value // TILE, batch),
        **_one_row_each(rows),
        law_peak=laws.peak,
        law_cutoff=laws.cutoff,
        masses=masses,
        groups=groups,
        TILE=TILE,
    )
    return masses


def _one_row_each(rows: Rows) -> dict[str, Any]:
    return {
        "logits": rows.logits,
        "logits_stride_b": rows.logits.stride(0),
        "size": rows.logits.shape[2],
        "allowed": rows.allowed,
        "allowed_stride_b": 0 if rows.allowed is None else rows.allowed.stride(0),
        "temperature": rows.temperature,
    }
