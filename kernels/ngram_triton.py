"""The Triton path of `ngram_propose`: one launch of one program, which goes over the text in wide steps.

A step of 4096 endings has its loads in flight at once: 1000 tokens of text cost a quarter of a step, about as long as
memory takes to answer, and capacity that is not used costs nothing.
"""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.launch import launch

BLOCK = 4096
"""Endings looked at in one step: eight for each thread, with four loads each."""


@triton.jit
def ngram_kernel(
    tokens, length, out, count, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr
):
    last = tl.load(length) - 1
    best_shared = tl.full([BLOCK], SHORTEST - 1, tl.int32)
    best_end = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, last, BLOCK):
        ends = start + tl.arange(0, BLOCK).to(tl.int64)
        shared = tl.zeros([BLOCK], tl.int32)
        alive = ends < last
        for back in tl.static_range(LONGEST):
            alive = alive & (ends >= back)  # then last > back, too
            earlier = tl.load(tokens + ends - back, mask=(ends < last) & (ends >= back), other=-1)
            current = tl.load(tokens + tl.maximum(last - back, 0))
            alive = alive & (earlier == current)
            shared += alive.to(tl.int32)
        better = shared >= tl.maximum(best_shared, SHORTEST)  # among equals the later one
        best_end = tl.where(better, ends, best_end)
        best_shared = tl.where(better, shared, best_shared)
    most = tl.max(best_shared, 0)
    end = tl.max(tl.where(best_shared == most, best_end, -1), 0)
    slots = tl.arange(0, SLOTS)
    source = end + 1 + slots
    found = (source <= last) & (source > slots)  # where nothing is found, end is -1
    copied = tl.load(tokens + source, mask=found, other=-1)
    tl.store(out + slots, copied, mask=slots < count)


def ngram_triton(
    tokens: torch.Tensor, length: torch.Tensor, out: torch.Tensor, shortest: int, longest: int, *, block: int = BLOCK
) -> None:
    """Launch for arguments that were checked; writes out [m]. `block` is how many endings a step looks at."""
    count = len(out)
    launch(
        ngram_kernel,
        (1,),
        num_warps=max(1, min(16, block // 256)),
        tokens=tokens,
        length=length,
        out=out,
        count=count,
        SHORTEST=shortest,
        LONGEST=longest,
        BLOCK=block,
        SLOTS=triton.next_power_of_2(count),
    )
