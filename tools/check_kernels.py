"""The kernels of a forward pass on the device, each against its float64 oracle, at the sizes of real models.

Bounds count roundings, as the tests do: u = 2^-24 for each float32 operation, and half a step for a conversion to the
output's dtype. What a GPU's exp and division may be off besides is part of the counts.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from check_run import Check, Finding, Setting
from fused_spec.kernels.embedding import embed
from fused_spec.kernels.int4_linear import GROUP, int4_linear, int4_linear_reference, pack_levels
from fused_spec.kernels.int8_linear import int8_linear, int8_linear_reference
from fused_spec.kernels.logprob import token_logprobs
from fused_spec.kernels.ngram import ngram_propose, ngram_propose_reference
from fused_spec.kernels.rms_norm import RMSNorm, rms_norm, rms_norm_reference
from fused_spec.kernels.rope import rope_frequencies, rope_table
from fused_spec.kernels.rope_store import rope_store, rope_store_reference
from fused_spec.kernels.round_inputs import round_inputs
from fused_spec.kernels.silu_mul import silu_mul, silu_mul_reference

UNIT = 2.0**-24


class Sizes(NamedTuple):
    """What kernels see of a model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool


MODELS = {
    "Qwen3-0.6B": Sizes(1024, 3072, 16, 8, 128, 151936, True),
    "Qwen3-8B": Sizes(4096, 12288, 32, 8, 128, 151936, True),
    "Llama-3.1-8B": Sizes(4096, 14336, 32, 8, 128, 128256, False),
}
_TINY = {"tiny": Sizes(80, 100, 4, 2, 16, 300, True), "tiny, plain": Sizes(64, 64, 3, 1, 8, 77, False)}


def models(setting: Setting) -> list[Sizes]:
    """Of real models, or next to nothing where kernels are interpreted."""
    return list((_TINY if setting.reduced else MODELS).values())


class Errors:
    """Compares results with oracles and keeps the largest error, as a share of what is allowed."""

    def __init__(self) -> None:
        self.largest, self.compared = 0.0, 0

    def within(self, what: str, ours: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor | float) -> None:
        """Raise unless |ours - exact| <= allowed everywhere; a NaN is not."""
        exact = exact.to(ours.device)
        error = (ours.double() - exact).abs()
        allowed = torch.as_tensor(allowed, dtype=torch.float64, device=ours.device).expand(error.shape)
        share = torch.where(error == 0, 0.0, error / allowed)
        worst = share.nan_to_num(math.inf).max().item()
        if not worst <= 1:
            raise AssertionError(f"{what}: off by {worst:.3g} times what rounding explains")
        self.largest, self.compared = max(self.largest, worst), self.compared + error.numel()

    def equal(self, what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise unless all entries are the same."""
        if not torch.equal(ours.cpu(), expected.cpu()):
            raise AssertionError(f"{what}: {int((ours.cpu() != expected.cpu()).sum())} entries differ")
        self.compared += ours.numel()

    def finding(self) -> Finding:
        """How far off it was."""
        if not self.compared:
            raise AssertionError("nothing was compared")
        key = f"largest error {self.largest:.2f} of its bound" if self.largest else "equal"
        return Finding(f"{key}, {self.compared} numbers", {"error_share": self.largest, "compared": self.compared})


def last_rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a step of `dtype` at most, and no less than that of its smallest normal number."""
    info = torch.finfo(dtype)
    return (exact.abs() * (1 + 2.0**-10)).clamp(min=info.tiny) * info.eps / 2


def poisoned(setting: Setting, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN, so that what is not written, or should not be read, is noticed."""
    return torch.full(shape, math.nan, dtype=dtype, device=setting.device)


def randn(setting: Setting, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device=setting.device).to(dtype)


def twice(call: Callable[[], Any], *outputs: torch.Tensor) -> None:
    """Call twice, poisoning what is written in between; raise unless both give the same bits."""
    call()
    first = [output.clone() for output in outputs]
    for output in outputs:
        output.fill_(math.nan if output.is_floating_point() else -1)
    call()
    for before, after in zip(first, outputs, strict=True):
        if not torch.equal(before.contiguous().view(torch.uint8), after.contiguous().view(torch.uint8)):
            raise AssertionError("two calls with the same arguments differ")


def check_rms_norm(setting: Setting) -> Finding:
    """A length of n terms is off by n/2 roundings at most; a dozen operations add one each."""
    errors = Errors()
    for size in {sizes.hidden for sizes in models(setting)}:
        for dtype in setting.dtypes:
            for rows in (1, 6) if setting.reduced else (1, 6, 512):
                x, weight = randn(setting, rows, size), randn(setting, size)
                added, out = randn(setting, rows, size, dtype=dtype), poisoned(setting, rows, size, dtype=dtype)
                total = x + added.float()
                rms_norm(x, RMSNorm.of(weight, 1e-6), None, out, added)
                errors.equal("the sum", x, total)
                exact = rms_norm_reference(total, weight, 1e-6)
                bound = exact.abs() * (size / 2 + 12) * UNIT + last_rounding(exact, dtype)
                errors.within(f"rms_norm {rows}x{size} {dtype}", out, exact, bound)
    return errors.finding()


def check_silu_mul(setting: Setting) -> Finding:
    """exp(x) of a rounded product is off by |x| roundings, and ten operations add one each."""
    errors = Errors()
    for inner in {sizes.inner for sizes in models(setting)}:
        for dtype in setting.dtypes:
            for rows in (1, 6) if setting.reduced else (1, 6, 512):
                gate_up = (randn(setting, rows, 2 * inner) * 4).to(dtype)
                out = poisoned(setting, rows, inner, dtype=dtype)
                twice(lambda gate_up=gate_up, out=out: silu_mul(gate_up, out), out)  # type: ignore[misc]
                exact = silu_mul_reference(gate_up)
                roundings = 10 + 2 * gate_up[:, :inner].double().abs()
                bound = exact.abs() * roundings * UNIT + last_rounding(exact, dtype)
                errors.within(f"silu_mul {rows}x{inner} {dtype}", out, exact, bound)
    return errors.finding()


def check_embed(setting: Setting) -> Finding:
    """Ids outside the vocabulary are moved to its ends, and nothing is read for them."""
    errors = Errors()
    for sizes in models(setting):
        table = randn(setting, sizes.vocab, sizes.hidden, dtype=setting.dtypes[0])
        last = sizes.vocab - 1
        ids = [-1, 0, 7, last, last + 1, 2**31 + 3, 2**40, 2**63 - 1, -(2**31) - 5, -(2**63)]
        out = poisoned(setting, len(ids), sizes.hidden)
        embed(torch.tensor(ids, device=setting.device), table, out)
        places = torch.tensor([0, 0, 7, *[last] * 5, 0, 0], device=setting.device)
        errors.equal("rows", out, table[places].float())
    return errors.finding()


def check_rope_store(setting: Setting) -> Finding:
    """A turn is three operations on numbers as large as the pair; a norm adds D/2 roundings and a dozen."""
    errors, capacity = Errors(), 64 if setting.reduced else 4096
    for _, _, heads, kv_heads, dim, _, normed in models(setting):
        rotations = rope_table(rope_frequencies(10000.0, dim), capacity, amplitude=1.25).to(setting.device)
        norm = RMSNorm.of(randn(setting, heads + kv_heads, dim), 1e-6) if normed else None
        for dtype in setting.dtypes:
            for width in (1, 6):
                qkv = randn(setting, width, (heads + 2 * kv_heads) * dim, dtype=dtype)
                keys, values = (poisoned(setting, capacity, kv_heads, dim, dtype=dtype) for _ in range(2))
                queries = poisoned(setting, width, heads, dim, dtype=dtype)
                positions = torch.arange(capacity - 9, capacity, device=setting.device)[2 : 2 + width]
                used = torch.zeros(1, dtype=torch.int32, device=setting.device)
                rope_store(qkv, positions, rotations, norm, queries, keys, values, used)
                errors.equal("used", used, torch.tensor([capacity - 7 + width], dtype=torch.int32))
                q, k, v = rope_store_reference(qkv, positions, rotations, norm, heads, dim)
                for name, ours, exact in (("queries", queries, q), ("keys", keys[positions], k)):
                    pair = exact.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
                    bound = pair * 2**0.5 * (3 + (dim / 2 + 12) * normed) * UNIT + last_rounding(exact, dtype)
                    errors.within(f"{name} {dtype}", ours, exact, bound)
                errors.equal("values", values[positions].double(), v)
                for buffer in (keys, values):
                    buffer[positions] = math.nan
                    errors.equal("other slots", buffer.isnan().all(), torch.tensor(True))
    return errors.finding()


def check_round_inputs(setting: Setting) -> Finding:
    """The last two tokens and the slots of a block, at every length that matters."""
    errors, capacity = Errors(), 64
    tokens = torch.randint(0, 2**40, (capacity,), device=setting.device)
    for m in (0, 1, 5, 20):
        for length in (0, 1, 2, 17, capacity):
            block, positions = torch.full((2, m + 2), -7, device=setting.device)
            round_inputs(tokens, torch.tensor([length], device=setting.device), block, positions)
            errors.equal("positions", positions, torch.tensor([max(length - 2 + i, 0) for i in range(m + 2)]))
            known = tokens[[max(length - 2, 0), max(length - 1, 0)]]
            errors.equal("block", block, torch.cat([known.cpu(), torch.full((m,), -7)]))
    return errors.finding()


def check_int8_linear(setting: Setting) -> Finding:
    """A thread's sum and the tree above it are no deeper than 64 additions and products."""
    errors = Errors()
    for rows, outs, columns in _products(setting):
        for dtype in setting.dtypes:
            x, bias = randn(setting, rows, columns, dtype=dtype), randn(setting, outs, dtype=dtype)
            weight = torch.randint(-127, 128, (outs, columns), dtype=torch.int8, device=setting.device)
            scale = torch.rand(outs, device=setting.device) + 0.1
            out = poisoned(setting, rows, outs, dtype=dtype)
            twice(lambda a=(x, weight, scale, bias, out): int8_linear(*a), out)  # type: ignore[misc]
            exact = int8_linear_reference(x, weight, scale, bias)
            terms = int8_linear_reference(x.abs(), weight.abs(), scale, bias.abs())
            bound = 64 * UNIT * terms + last_rounding(exact, dtype)
            errors.within(f"int8 {rows}x{columns}x{outs} {dtype}", out, exact, bound)
    return errors.finding()


def check_int4_linear(setting: Setting) -> Finding:
    """As for int8; a level and the middle of its group count apart, since they may cancel."""
    errors = Errors()
    for rows, outs, columns in _products(setting):
        for dtype in setting.dtypes:
            x, bias = randn(setting, rows, columns, dtype=dtype), randn(setting, outs, dtype=dtype)
            groups = -(-columns // GROUP)
            levels = torch.randint(0, 16, (outs, groups * GROUP), device=setting.device)
            scale, middle = torch.rand(outs, groups, device=setting.device) / 8, randn(setting, outs, groups) / 8
            pairs = torch.stack([scale, middle], dim=-1).bfloat16()
            out = poisoned(setting, rows, outs, dtype=dtype)
            packed = pack_levels(levels)
            twice(lambda a=(x, packed, pairs, bias, out): int4_linear(*a), out)  # type: ignore[misc]
            exact = int4_linear_reference(*(a.cpu() for a in (x, packed, pairs, bias)))
            sizes = torch.full_like(packed, 0xFF), torch.stack([pairs[..., 0] * 8 / 7, pairs[..., 1].abs()], dim=-1)
            terms = int4_linear_reference(*(a.cpu() for a in (x.abs(), *sizes, bias.abs())))
            bound = 64 * UNIT * 1.01 * terms + last_rounding(exact, dtype)
            errors.within(f"int4 {rows}x{columns}x{outs} {dtype}", out, exact, bound.to(setting.device))
    return errors.finding()


def _products(setting: Setting) -> list[tuple[int, int, int]]:
    """(rows, outs, columns) of what self-drafts multiply, and of a matrix that fits nothing."""
    if setting.reduced:
        return [(1, 13, 70), (3, 16, 64)]
    return [(1, 4096, 1024), (2, 6144, 4096), (6, 1024, 3072), (1, 24576, 4096), (3, 1001, 1000)]


def check_logprob(setting: Setting) -> Finding:
    """float32 holds a sum of exponentials and z to 1e-5 of ln p."""
    errors = Errors()
    for vocab in {sizes.vocab for sizes in models(setting)}:
        for dtype in setting.dtypes:
            logits = (randn(setting, 6, vocab) * 3).to(dtype)
            ids = torch.tensor([0, vocab - 1, 5, -1, 33, 1], device=setting.device)
            ours = token_logprobs(logits, ids)
            errors.equal("rows without a token", ours.isnan(), ids < 0)
            exact = logits.double().log_softmax(-1).gather(1, ids[:, None].clamp(min=0))[:, 0]
            errors.within(f"ln p {dtype}", ours[ids >= 0], exact[ids >= 0], 1e-5)
    return errors.finding()


def check_ngram(setting: Setting) -> Finding:
    """The search on a list, at lengths around the ends and with many matches."""
    errors, capacity = Errors(), 80 if setting.reduced else 4097
    for letters in (2, 5, 1000):
        tokens = torch.randint(0, letters, (capacity,), device=setting.device)
        for length in (2, 3, 17, capacity // 2, capacity - 1, capacity):
            proposed = ngram_propose(tokens, torch.tensor([length], device=setting.device), 5)
            expected = ngram_propose_reference(tokens[:length].tolist(), 5)
            errors.equal(f"{letters} letters, length {length}", proposed, torch.tensor(expected))
    return errors.finding()


CHECKS: dict[str, Check] = {
    "kernels/rms_norm": check_rms_norm,
    "kernels/silu_mul": check_silu_mul,
    "kernels/embed": check_embed,
    "kernels/rope_store": check_rope_store,
    "kernels/round_inputs": check_round_inputs,
    "kernels/int8_linear": check_int8_linear,
    "kernels/int4_linear": check_int4_linear,
    "kernels/logprob": check_logprob,
    "kernels/ngram": check_ngram,
}
