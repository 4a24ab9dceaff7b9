"""Attention of a few tokens of one sequence over a long static cache on a GPU: two launches.

    out_i = softmax(q_i K^T / sqrt(D)) V over the cache slots 0..position_i

One sequence has too few heads to keep a GPU busy, so the slots are cut into chunks, with a program for each. With
s_j = q_i k_j log2(e) / sqrt(D), a chunk c gives a row

    m_c = max_j s_j,   l_c = sum_j 2^(s_j - m_c),   a_c = sum_j 2^(s_j - m_c) v_j

by online softmax, and a second launch merges: out_i = sum_c 2^(m_c - m) a_c / sum_c 2^(m_c - m) l_c with m = max_c m_c.
Sources: "Flash-Decoding for long-context inference", Dao, Haziza, Massa and Sizov 2023; softmax over tiles, Dao et al.
2022, arXiv 2205.14135; grouped heads, Ainslie et al. 2023, arXiv 2305.13245.

A tile's rows are (token, query head) pairs of one key/value head, token by token: the heads of a group read a key once.
Tiles have as many rows for every block, chunks depend on the capacity alone, and a row merges the chunks up to its own
position: the same machine code does the same arithmetic for it wherever in a block it stands and however wide that is.
A block of more rows than a tile has reads its keys and values once for each tile; the tiles of a chunk start together,
so all but one of them find these in the L2 cache.

Shapes: W tokens, H query heads, Hkv key/value heads, G = H / Hkv, D head size, C chunks. Oracle: `attention_reference`
in kernels/attention.py.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import LOGIT_DTYPES, check_tensor, check_unit_stride
from fused_spec.kernels.launch import is_interpreted, launch
from fused_spec.kernels.row_access import finite_base

ROWS = 16
"""Rows of a tile: as few as a matrix instruction takes. Four heads of four tokens, say."""

MAX_CHUNKS = 64
_SLOTS = 64  # a chunk is a multiple of this, and so of every block
_IN_FLIGHT = 64 * 1024


class Choice(NamedTuple):
    """How the first kernel is compiled.

    Attributes:
        block: slots per step.
        num_warps: of a program.
        stages: of the pipeline; two blocks are on their way with three.
    """

    block: int
    num_warps: int
    stages: int


def launch_choice(head_dim: int, dtype: torch.dtype, chunk: int) -> Choice:
    """Two blocks of keys and values take 64 KiB of shared memory at most, so that any GPU has room for a program.

    A thread has 128 registers, so wide heads are shared by more warps, and float32, which is multiplied without tensor
    cores, by twice as many. A chunk of one block needs no room for the next.
    """
    columns = _columns(head_dim)
    block = min(_SLOTS, _IN_FLIGHT // (4 * columns * dtype.itemsize))
    num_warps = max(4, columns // 32) * (2 if dtype == torch.float32 else 1)
    return Choice(block, num_warps, 2 if chunk == block else 3)


def chunk_size(capacity: int) -> int:
    """Slots of a chunk: the smallest multiple of 64 that leaves at most 64 chunks."""
    return _SLOTS * -(-capacity // (_SLOTS * MAX_CHUNKS))


def _columns(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


class SplitBuffers(NamedTuple):
    """Scratch for a cache's capacity and for blocks of up to `width` tokens. What it holds between calls never matters.

    Attributes:
        sums: [width * H, C, D] float32, a_c of every token and head.
        peak, mass: [width * H, C] float32, m_c and l_c.
    """

    sums: torch.Tensor
    peak: torch.Tensor
    mass: torch.Tensor

    @classmethod
    def empty(
        cls, capacity: int, max_width: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> "SplitBuffers":
        """Scratch for `split_attention`.

        Raises:
            InvalidInput: the query heads cannot be shared out evenly.
        """
        if num_heads % num_kv_heads:
            raise InvalidInput(f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
        shape = max_width * num_heads, -(-capacity // chunk_size(capacity))
        peak, mass = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return cls(torch.empty(*shape, head_dim, dtype=torch.float32, device=device), peak, mass)


@triton.jit(do_not_specialize=["width"])
def split_attention_kernel(
    queries, queries_stride, queries_stride_h, keys, keys_stride, keys_stride_h, values, values_stride, values_stride_h,
    positions, sums, peak, mass, width, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """m_c, l_c and a_c of one tile of one key/value head for one chunk.

    WIDEN: the interpreter multiplies bfloat16 as if it were integers, so there the factors become float32, exactly.
    """
    tile, chunk, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.load(positions).to(tl.int32)
    begin, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, first + width)
    if begin >= end:
        return
    rows, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (tokens < width)[:, None] & (columns < HEAD_DIM)[None, :]
    places = tokens.to(tl.int64) * queries_stride + heads * queries_stride_h
    q = tl.load(queries + places[:, None] + columns[None, :], mask=real, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        slots = start + tl.arange(0, BLOCK)
        there = (slots < end)[:, None]  # what lies behind may be NaN, and no weight hides that
        if HEAD_DIM < COLUMNS:
            there = there & (columns < HEAD_DIM)[None, :]
        own = slots.to(tl.int64)[:, None]
        k = tl.load(keys + kv_head * keys_stride_h + own * keys_stride + columns[None, :], mask=there, other=0.0)
        v = tl.load(values + kv_head * values_stride_h + own * values_stride + columns[None, :], mask=there, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(slots[None, :] <= (first + tokens)[:, None], s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = finite_base(higher)  # a row may see nothing of a chunk that a later one sees
        weights = tl.exp2(s - base[:, None]).to(v.dtype)  # rounded before they are summed: they still add up to one
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights.to(tl.float32), 1)
        if WIDEN:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    at = (tokens.to(tl.int64) * (GROUP * tl.num_programs(2)) + heads) * tl.num_programs(1) + chunk
    tl.store(sums + at[:, None] * HEAD_DIM + columns[None, :], acc, mask=real)
    tl.store(peak + at, top, mask=tokens < width)
    tl.store(mass + at, total, mask=tokens < width)


@triton.jit
def merge_chunks_kernel(
    positions, sums, peak, mass, out, out_stride, out_stride_h, chunks,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One head of one token, from the chunks that it sees something of."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    seen = (tl.load(positions) + token) // CHUNK + 1
    each, columns = tl.arange(0, CHUNKS), tl.arange(0, COLUMNS)
    at = (token * tl.num_programs(1) + head) * chunks + each
    tops = tl.load(peak + at, mask=each < seen, other=-float("inf"))
    weights = tl.exp2(tops - finite_base(tl.max(tops, 0)))
    total = tl.sum(tl.load(mass + at, mask=each < seen, other=0.0) * weights, 0)
    inside = (each < seen)[:, None] & (columns < HEAD_DIM)[None, :]
    parts = tl.load(sums + at[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    result = (tl.sum(parts * weights[:, None], 0) / total).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + head * out_stride_h + columns, result, mask=columns < HEAD_DIM)


_INTERPRETED = is_interpreted(split_attention_kernel)


def split_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    buffers: SplitBuffers,
) -> None:
    """Attend to a cache that the block's own keys and values are already written to.

    Args:
        queries: [W, H, D] float32, bfloat16 or float16, unit stride in D as all others. Made for multiples of 8 as D:
            at some others registers spill.
        keys, values: [capacity, Hkv, D] of the same dtype, one layer's cache. What the block sees of it must be finite;
            slots behind the block are not read.
        positions: [W] int64, consecutive cache slots; looked at on the device.
        out: [W, H, D] of the same dtype, written.
        buffers: scratch for this capacity, and for W tokens or more.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit.
    """
    width, heads, head_dim = queries.shape
    capacity, kv_heads, _ = keys.shape
    chunk = chunk_size(capacity)
    chunks = -(-capacity // chunk)
    _check(queries, keys, values, positions, out, buffers, chunks)
    block, num_warps, stages = launch_choice(head_dim, queries.dtype, chunk)
    common = {
        "positions": positions,
        **{name: scratch[: width * heads] for name, scratch in buffers._asdict().items()},
        "HEAD_DIM": head_dim,
        "COLUMNS": _columns(head_dim),
        "CHUNK": chunk,
    }
    launch(
        split_attention_kernel,
        (-(-width * heads // kv_heads // ROWS), chunks, kv_heads),
        num_warps=num_warps,
        **_located("queries", queries),
        **_located("keys", keys),
        **_located("values", values),
        **common,
        width=width,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        GROUP=heads // kv_heads,
        BLOCK=block,
        ROWS=ROWS,
        STAGES=stages,
        WIDEN=_INTERPRETED and queries.dtype == torch.bfloat16,
    )
    launch(
        merge_chunks_kernel,
        (width, heads),
        num_warps=8 if _columns(head_dim) * chunks > 4096 else 4,
        **_located("out", out),
        **common,
        chunks=chunks,
        CHUNKS=triton.next_power_of_2(chunks),
    )


def _check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    buffers: SplitBuffers,
    chunks: int,
) -> None:
    width, heads, head_dim = queries.shape
    cache = keys.shape[0], keys.shape[1], head_dim
    if queries.dtype not in LOGIT_DTYPES:
        raise InvalidInput(f"queries: expected float32, bfloat16 or float16, got {queries.dtype}")
    if heads % keys.shape[1]:
        raise InvalidInput(f"queries: expected a multiple of {keys.shape[1]} heads, which the keys have, got {heads}")
    expected = {"queries": (queries, queries.shape), "keys": (keys, cache), "values": (values, cache)}
    for name, (tensor, shape) in {**expected, "out": (out, queries.shape)}.items():
        check_tensor(name, tensor, shape, (queries.dtype,))
        check_unit_stride(name, tensor)
    check_tensor("positions", positions, (width,), (torch.int64,))
    check_unit_stride("positions", positions)
    if buffers.sums.shape[0] < width * heads or buffers.sums.shape[1:] != (chunks, head_dim):
        raise InvalidInput(
            f"buffers: expected at least {width * heads} rows of {chunks} chunks of {head_dim}, "
            f"got {tuple(buffers.sums.shape)}"
        )


def _located(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor [W or capacity, heads, D] as the arguments `name`, `name_stride` and `name_stride_h` of a kernel."""
    return {name: tensor, f"{name}_stride": tensor.stride(0), f"{name}_stride_h": tensor.stride(1)}
