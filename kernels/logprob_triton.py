"""The Triton path of `token_logprobs`: two launches, the statistics of all rows and one small program for each row."""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.launch import launch
from fused_spec.kernels.processed_rows import chunk_of_groups, merged_peaks, merged_sums
from fused_spec.kernels.row_statistics import Rows, row_statistics


@triton.jit
def logprob_kernel(
    logits, logits_stride, size, token_ids, token_ids_stride, peak, mass, groups, out, out_stride, CHUNK: tl.constexpr
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    token = tl.load(token_ids + row * token_ids_stride)
    z = tl.load(logits + row * logits_stride + token, mask=(token >= 0) & (token < size), other=float("nan"))
    one = tl.zeros([1], tl.int64) + row
    top = merged_peaks(peak, one, one >= 0, groups, rows, CHUNK)
    total, _weighted_total = merged_sums(peak, mass, None, top, one, one >= 0, groups, rows, CHUNK)
    logprob = (z.to(tl.float64) - top.to(tl.float64)) - tl.log(total)  # -inf - -inf is NaN, of a row without any law
    tl.store(out + row * out_stride + tl.arange(0, 1), logprob.to(tl.float32))


def logprob_triton(logits: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Launch for arguments that were checked; writes out [W]."""
    statistics = row_statistics(Rows(logits[None], None, 1.0), None)
    launch(
        logprob_kernel,
        (len(logits),),
        logits=logits,
        logits_stride=logits.stride(0),
        size=logits.shape[1],
        token_ids=token_ids,
        token_ids_stride=token_ids.stride(0),
        peak=statistics.peak,
        mass=statistics.mass,
        groups=statistics.peak.shape[1],
        out=out,
        out_stride=out.stride(0),
        CHUNK=chunk_of_groups(1),
    )
