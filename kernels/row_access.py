"""What the kernels share: parameters of a request, random numbers, and logits as z = l / T.

Every function here is inlined into a kernel. Interpreted or compiled, the arithmetic is the same, operation for
operation, but for the last bits of exp and log and the order inside a sum over 1024 tokens. A parameter that is a
Python number is rounded to float32, which is how Triton passes it.
"""

import triton
import triton.language as tl

from fused_spec.kernels import error_bits, philox

GROUP = tl.constexpr(1024)
"""Masses are summed over fixed groups of this many consecutive ids; kernels/row_law.py has the same number."""

SUBGROUP = tl.constexpr(128)
"""Maxima are kept for fixed groups of this many consecutive ids, so that a filter finds the largest logits quickly."""

ACCEPT_STREAM, RESAMPLE_STREAM = tl.constexpr(philox.ACCEPT), tl.constexpr(philox.RESAMPLE)

NAN_TARGET, NAN_DRAFT = tl.constexpr(error_bits.NAN_TARGET), tl.constexpr(error_bits.NAN_DRAFT)
EMPTY_SUPPORT, ZERO_RESIDUAL = tl.constexpr(error_bits.EMPTY_SUPPORT), tl.constexpr(error_bits.ZERO_RESIDUAL)
DRAFT_OUT_OF_RANGE = tl.constexpr(error_bits.DRAFT_OUT_OF_RANGE)
DRAFT_IMPOSSIBLE = tl.constexpr(error_bits.DRAFT_IMPOSSIBLE)


@triton.jit
def parameter(value, request, dtype: tl.constexpr):
    """A number shared by the batch, or entry `request` of a tensor [B]: decided when the kernel is compiled."""
    if hasattr(value, "dtype"):
        result = tl.load(value + request).to(dtype) if value.dtype.is_ptr() else value.to(dtype)
    elif dtype.is_floating():  # a Python float under the interpreter
        result = tl.full([], value, tl.float32).to(dtype)
    else:
        result = tl.full([], value, dtype)
    return result


@triton.jit
def acceptance_uniform(seed, position):
    """u in [0, 1) with 24 bits as float64; seed and position int64, scalars or blocks."""
    word, _, _, _ = tl.philox(
        seed, (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32), ACCEPT_STREAM, 0
    )
    return (word >> 8).to(tl.float64) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def sampling_uniform(seed, position, stream):
    """U in [0, 1) with 53 bits as float64."""
    high, low, _, _ = tl.philox(seed, (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32), stream, 0)
    bits = (high.to(tl.int64) << 21) + (low >> 11).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def inverse(temperature):
    """1 / T as float32, correctly rounded: what logits are multiplied by. A greedy row (T = 0) is left as it is.

    Two Newton steps in float64 bring a quick division, good to 22 bits, to 52; 1 / T lies at least 2^-49 of itself from
    where rounding to float32 turns. A precise division would be a call, around which registers spill.
    """
    t = tl.where(temperature == 0.0, 1.0, temperature)
    exact, result = t.to(tl.float64), (1.0 / t).to(tl.float64)
    result += result * (1.0 - exact * result)
    result += result * (1.0 - exact * result)
    return result.to(tl.float32)


@triton.jit
def scaled_logits(row, ids, inside, allowed, temperature):
    """z of some tokens of a row as float32, -inf where `inside` is false or the bitmask `allowed` (or None) has no bit.

    row, allowed: pointers to the row's first logit and first word. Each logit is read in its own dtype, once.
    """
    z = tl.load(row + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if allowed is not None:
        word = tl.load(allowed + ids // 32, mask=inside, other=0)
        z = tl.where(((word >> (ids % 32)) & 1) != 0, z, -float("inf"))
    return z * inverse(temperature)


@triton.jit
def finite_base(peak):
    """The maximum to subtract before exp: 0 for a row or group that holds -inf only, where -inf - -inf would be NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)
