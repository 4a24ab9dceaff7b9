"""Attention on the device against its float64 oracle, flash-attn's where it is installed, and whole forward passes."""

import math
from typing import NamedTuple

import torch

from check_kernels import UNIT, Errors, models, poisoned, randn, twice
from check_models import on_cpu, random_model, small_config
from check_run import Absent, Check, Finding, Setting
from fused_spec.kernels import flash_attention as flash
from fused_spec.kernels.attention import attention_reference
from fused_spec.kernels.cached_attention import prefill_attention
from fused_spec.kernels.check import default_backend
from fused_spec.kernels.split_attention import SplitBuffers, split_attention
from fused_spec.models.transformer import Transformer

ROUNDING = {torch.float32: UNIT, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""By what share a conversion may be off."""


class Block(NamedTuple):
    """A block at positions first..first+W-1, over a cache that is NaN behind it."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor

    def reference(self) -> torch.Tensor:
        """The oracle, on the CPU."""
        return attention_reference(*(part.cpu() for part in self))


def block(
    setting: Setting, width: int, first: int, shape: tuple[int, int, int], capacity: int, dtype: torch.dtype
) -> Block:
    """Random, with large scores for some heads; shape is (H, Hkv, D)."""
    heads, kv_heads, dim = shape
    spread = torch.logspace(-1, 0.7, heads, device=setting.device)[:, None]
    queries = (randn(setting, width, heads, dim) * spread).to(dtype)
    keys, values = randn(setting, 2, capacity, kv_heads, dim, dtype=dtype)
    keys[first + width :], values[first + width :] = math.nan, math.nan
    return Block(queries, keys, values, torch.arange(first, first + width, device=setting.device))


def bound(case: Block, exact: torch.Tensor, weights_rounded: float) -> torch.Tensor:
    """How far [W, H, D] may be off, to first order in the roundings, whatever the order of the sums.

    A score is a sum of D products, scaled; the exponent is a difference of scores that lie in some range, and no
    exponential or product that goes into a weight adds more than two units, for which 32 are plenty. Weights are
    converted to the dtype, by a share of `weights_rounded`. If they are off by some share, the quotient moves by twice
    that share of P |v|. Numerator and denominator have n terms each. The result is converted to the dtype.
    """
    queries, keys, values, positions = (part.cpu() for part in case)
    _, heads, dim = queries.shape
    n = int(positions[-1]) + 1
    k, v = (x[:n].double().repeat_interleave(heads // keys.shape[1], 1) for x in (keys, values))
    hidden = torch.arange(n) > positions[:, None, None]
    q = queries.double() / dim**0.5
    scores = torch.einsum("whd,nhd->whn", q, k).masked_fill(hidden, -math.inf)
    sizes = torch.einsum("whd,nhd->whn", q.abs(), k.abs()).masked_fill(hidden, 0)
    extent = scores.amax(-1) - scores.masked_fill(hidden, math.inf).amin(-1)
    share = UNIT * ((dim + 3) * sizes.amax(-1) + 2 * extent + 32)
    share = 2 * (share + n * UNIT + weights_rounded)
    result = share[..., None] * torch.einsum("whn,nhd->whd", scores.softmax(-1), v.abs())
    return 1.01 * result + ROUNDING[queries.dtype] * exact.abs()


def _shapes(setting: Setting) -> set[tuple[int, int, int]]:
    return {(sizes.heads, sizes.kv_heads, sizes.head_dim) for sizes in models(setting)}


def check_split(setting: Setting) -> Finding:
    """Blocks of several widths at the beginning, across chunks and at the end of a cache; twice with the same bits."""
    errors, capacity = Errors(), 200 if setting.reduced else 4117
    places = [(1, 0), (6, 125)] if setting.reduced else [(1, 0), (1, 4116), (2, 63), (6, 1000), (6, 4111), (21, 3000)]
    for shape in _shapes(setting):
        for dtype in setting.dtypes:
            for width, first in places:
                case = block(setting, width, first, shape, capacity, dtype)
                out = poisoned(setting, *case.queries.shape, dtype=dtype)
                buffers = SplitBuffers.empty(capacity, width, *shape, setting.device)
                twice(lambda a=(*case, out, buffers): split_attention(*a), out)  # type: ignore[misc]
                exact = case.reference()
                limit = bound(case, exact, ROUNDING[dtype]).to(setting.device)
                errors.within(f"attention {shape}, {width} tokens from {first}, {dtype}", out, exact, limit)
    return errors.finding()


def check_rows(setting: Setting) -> Finding:
    """A row has the same bits wherever in a block it stands and however wide that is: greedy text depends on it.

    Triton's interpreter multiplies with BLAS, which does not promise that: there, to 2^-20.
    """
    errors, capacity = Errors(), 128 if setting.reduced else 2048
    last = capacity - 25
    for shape in _shapes(setting):
        for dtype in setting.dtypes:
            everything = block(setting, 24, last, shape, capacity, dtype)
            rows = {}
            for width, before in ((1, 0), (2, 1), (6, 0), (6, 5)) if setting.reduced else ((1, 0), (6, 3), (21, 8)):
                part = slice(10 - before, 10 - before + width)
                queries, positions = everything.queries[part], everything.positions[part]
                out = poisoned(setting, *queries.shape, dtype=dtype)
                buffers = SplitBuffers.empty(capacity, width, *shape, setting.device)
                split_attention(queries, everything.keys, everything.values, positions, out, buffers)
                rows[width, before] = out[before].clone()
            expected = rows.pop((1, 0))
            for place, row in rows.items():
                if setting.reduced:
                    errors.within(f"{place}", row, expected.double(), 2.0**-20 * expected.abs().max().item())
                else:
                    errors.equal(f"{shape} {dtype}: a row alone, and in a block (width, place) {place}", row, expected)
    return errors.finding()


def check_prefill(setting: Setting) -> Finding:
    """A prompt's second chunk, which sees the first, by torch's attention."""
    errors, capacity = Errors(), 100 if setting.reduced else 700
    width, first = (20, 40) if setting.reduced else (200, 300)
    for shape in _shapes(setting):
        for dtype in setting.dtypes:
            case = block(setting, width, first, shape, capacity, dtype)
            some = slice(0, width, width // 4)
            out = poisoned(setting, *case.queries.shape, dtype=dtype)
            prefill_attention(case.positions)(case.queries, case.keys, case.values, out)
            rows = Block(case.queries[some], case.keys, case.values, case.positions[some])
            exact = rows.reference()
            limit = bound(rows, exact, ROUNDING[dtype]).to(setting.device)
            if dtype == torch.float32:  # torch may take three products of tf32 for one
                limit = limit * 8
            errors.within(f"prompt {shape} {dtype}", out[some], exact, limit)
    return errors.finding()


def check_flash(setting: Setting) -> Finding:
    """flash-attn's result and ours, against the oracle."""
    if setting.reduced or not flash.usable(torch.bfloat16, 128, setting.device):
        raise Absent("flash-attn is not installed" if not flash.available() else "flash-attn is for GPUs")
    errors, capacity = Errors(), 2048
    for shape in _shapes(setting):
        for width, first in ((1, 0), (6, 1000), (21, 2000)):
            case = block(setting, width, first, shape, capacity, torch.bfloat16)
            out = poisoned(setting, *case.queries.shape, dtype=torch.bfloat16)
            used = torch.tensor([first + width], dtype=torch.int32, device=setting.device)
            flash.flash_attention(case.queries, case.keys, case.values, used, out)
            exact = case.reference()
            limit = bound(case, exact, ROUNDING[torch.bfloat16]).to(setting.device)
            errors.within(f"flash-attn {shape}, {width} tokens from {first}", out, exact, limit)
    return errors.finding()


def check_forward(setting: Setting) -> Finding:
    """Whole passes, prompt and blocks, against torch's path on the CPU in float32.

    float32: to 2^-14 of the largest logit. Products on a GPU in bfloat16: an error with a root mean square of at most
    four times that of torch's path in bfloat16, which keeps keys, values and weights of attention in float32.
    """
    errors, ratios = Errors(), []
    for architecture in ("llama", "qwen2", "qwen3"):
        config = small_config(setting, architecture)
        for dtype in setting.dtypes:
            model = random_model(config, dtype, setting.device, 3)
            tokens = torch.randint(0, config.vocab_size, (100 if not setting.reduced else 30,))
            exact = _logits(on_cpu(model, torch.float32), tokens, "torch")
            ours = _logits(model, tokens, None).cpu()
            if dtype == torch.float32:
                errors.within(f"{architecture} {dtype}", ours, exact.double(), exact.abs().max().item() * 2.0**-14)
                continue
            theirs = _logits(on_cpu(model, dtype), tokens, "torch")
            mean = [(logits.float() - exact).square().mean().sqrt().item() for logits in (ours, theirs)]
            ratios.append(mean[0] / mean[1])
            if not ratios[-1] <= 4:
                raise AssertionError(f"{architecture} {dtype}: {ratios[-1]:.2f} times the error of torch's path")
    key, numbers = errors.finding()
    if ratios:
        key, numbers = f"{key}; bfloat16 {max(ratios):.2f} times torch's error", {**numbers, "over_torch": max(ratios)}
    return Finding(key, numbers)


def _logits(model: Transformer, tokens: torch.Tensor, backend: str | None) -> torch.Tensor:
    """[W, V], from a prompt of most tokens and blocks of 1, 2 and 6, over a cache that is NaN beyond."""
    parts, tokens = [], tokens.to(model.device)
    positions = torch.arange(len(tokens), device=model.device)

    def run() -> None:
        cache, start = model.new_cache(len(tokens) + 3, width=6, attention="auto" if backend else "triton"), 0
        for width in (len(tokens) - 9, 1, 2, 6):
            now = slice(start, start + width)
            if backend is None:
                cache.keys[:, start:], cache.values[:, start:] = math.nan, math.nan
            parts.append(model.forward(tokens[now], positions[now], cache))
            start += width

    if backend is None:
        run()
    else:
        with default_backend(backend):
            run()
    return torch.cat(parts)


CHECKS: dict[str, Check] = {
    "attention/split": check_split,
    "attention/rows": check_rows,
    "attention/prefill": check_prefill,
    "attention/flash-attn": check_flash,
    "attention/forward": check_forward,
}
