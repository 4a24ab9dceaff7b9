"""From the product for q, k and v to attention's inputs in one launch: norm, rotation, and the writes to the cache.

Each query and key head is normalised (Qwen3) and its pairs (x_2i, x_2i+1) are turned by the rotation r of their
position, the complex product x r of kernels/rope.py:

    y_2i = x_2i Re r_i - x_2i+1 Im r_i,    y_2i+1 = x_2i Im r_i + x_2i+1 Re r_i

Values are copied. All of it in float32, rounded once. For devices; a CPU takes torch's operations one by one.
"""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import LOGIT_DTYPES, check_tensor, check_unit_stride
from fused_spec.kernels.launch import launch
from fused_spec.kernels.rms_norm import RMSNorm

HEADS = 4
"""Heads of one program: 16 bytes of half precision for each thread of two warps, at D = 128."""


@triton.jit
def rope_store_kernel(
    qkv, qkv_stride, positions, rotations, rotations_stride, weight, weight_stride, floor,
    queries, queries_stride_w, queries_stride_h, keys, keys_stride_s, keys_stride_h,
    values, values_stride_s, values_stride_h, used,
    num_heads, num_kv_heads, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside, turned_heads = channel < D, num_heads + num_kv_heads
    x = tl.load(qkv + token * qkv_stride + head * D + channel, mask=inside & (head < turned_heads + num_kv_heads),
                other=0.0).to(tl.float32)  # fmt: skip
    # Once for every head, though it is the same: each thread gets what its own channels are turned by.
    turn = tl.load(rotations + position * rotations_stride + head * 0 + channel, mask=inside, other=0.0)
    unit = x
    if weight is not None:
        least = tl.load(floor)
        scale = tl.load(weight + head * weight_stride + channel, mask=inside & (head < turned_heads), other=0.0)
        unit = x * tl.rsqrt(tl.sum(x * x, 1) + least * least)[:, None] * scale
    even, odd = tl.split(tl.reshape(unit, [HEADS, BLOCK // 2, 2]))
    real, imaginary = tl.split(tl.reshape(turn, [HEADS, BLOCK // 2, 2]))
    turned = tl.join(even * real - odd * imaginary, even * imaginary + odd * real)
    turned = tl.reshape(turned, [HEADS, BLOCK])
    tl.store(queries + token * queries_stride_w + head * queries_stride_h + channel, turned,
             mask=inside & (head < num_heads))  # fmt: skip
    head -= num_heads
    tl.store(keys + position * keys_stride_s + head * keys_stride_h + channel, turned,
             mask=inside & (head >= 0) & (head < num_kv_heads))  # fmt: skip
    head -= num_kv_heads
    tl.store(values + position * values_stride_s + head * values_stride_h + channel, x,
             mask=inside & (head >= 0) & (head < num_kv_heads))  # fmt: skip
    if (token == tl.num_programs(0) - 1) & (tl.program_id(1) == 0):
        tl.store(used, (position + 1).to(tl.int32))


def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor,
    qk_norm: RMSNorm | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    used: torch.Tensor,
) -> None:
    """Make the queries of a block, and write its keys and values into one layer's cache.

    Args:
        qkv: [W, (H + 2 Hkv) D], the heads of q, then of k, then of v, in rotary pairs. This and all that follows,
            where not said otherwise: float32, bfloat16 or float16, unit stride in the last dimension.
        positions: [W] int64, the cache slots, below the cache's capacity; one named twice may hold either token's.
        rotations: rows of `rope_table` for every slot, [capacity, D/2] complex64.
        qk_norm: weight [H + Hkv, D] float32 for every head of q and k, or None where these are not normalised.
        queries: [W, H, D], written.
        keys, values: [capacity, Hkv, D], written at `positions`, any strides in the first two dimensions.
        used: [1] int32, becomes positions[-1] + 1: how many slots are valid once the block is written.

    Raises:
        InvalidInput: a tensor has another shape, dtype or stride than stated here.
    """
    width, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    _check(qkv, positions, rotations, qk_norm, queries, keys, values, used)
    block = triton.next_power_of_2(dim)
    turns = torch.view_as_real(rotations)
    launch(
        rope_store_kernel,
        (width, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)),
        num_warps=max(HEADS * block // 256, 1),
        qkv=qkv,
        qkv_stride=qkv.stride(0),
        positions=positions,
        rotations=turns,
        rotations_stride=turns.stride(0),
        weight=None if qk_norm is None else qk_norm.weight,
        weight_stride=0 if qk_norm is None else qk_norm.weight.stride(0),
        floor=None if qk_norm is None else qk_norm.floor,
        queries=queries,
        queries_stride_w=queries.stride(0),
        queries_stride_h=queries.stride(1),
        keys=keys,
        keys_stride_s=keys.stride(0),
        keys_stride_h=keys.stride(1),
        values=values,
        values_stride_s=values.stride(0),
        values_stride_h=values.stride(1),
        used=used,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        D=dim,
        HEADS=HEADS,
        BLOCK=block,
    )


def _check(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor,
    qk_norm: RMSNorm | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    used: torch.Tensor,
) -> None:
    width, heads, dim = queries.shape
    capacity, kv_heads, _ = keys.shape
    expected: dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "qkv": (qkv, (width, (heads + 2 * kv_heads) * dim), LOGIT_DTYPES),
        "positions": (positions, (width,), (torch.int64,)),
        "rotations": (rotations, (capacity, dim // 2), (torch.complex64,)),
        "queries": (queries, (width, heads, dim), LOGIT_DTYPES),
        "keys": (keys, (capacity, kv_heads, dim), LOGIT_DTYPES),
        "values": (values, (capacity, kv_heads, dim), LOGIT_DTYPES),
        "used": (used, (1,), (torch.int32,)),
    }
    if qk_norm is not None:
        expected["qk_norm"] = (qk_norm.weight, (heads + kv_heads, dim), (torch.float32,))
    for name, (tensor, shape, dtypes) in expected.items():
        check_tensor(name, tensor, shape, dtypes)
        check_unit_stride(name, tensor)


def rope_store_reference(
    qkv: torch.Tensor, positions: torch.Tensor, rotations: torch.Tensor, qk_norm: RMSNorm | None, heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float64 oracle: queries [W, H, D], and keys and values [W, Hkv, D] for the slots `positions`."""
    x = qkv.double().unflatten(1, (-1, dim))
    kv_heads = (x.shape[1] - heads) // 2
    qk, v = x.split((heads + kv_heads, kv_heads), dim=1)
    if qk_norm is not None:
        qk = qk / torch.hypot(qk.norm(dim=-1, keepdim=True), qk_norm.floor.double()) * qk_norm.weight.double()
    turns = rotations[positions].to(torch.complex128)[:, None]
    turned = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
    q, k = turned.split((heads, kv_heads), dim=1)
    return q, k, v
