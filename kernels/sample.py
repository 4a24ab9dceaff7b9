"""Draw one token per row from processed logits, with the statistics that verification needs.

    z = l / T,  P(x) = exp(z_x - lse) over the tokens that top-k, top-p and min-p keep

The token is the inverse CDF of P at one Philox number of (seed, position, stream).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import (
    Layout,
    Scalar,
    check_device,
    check_key,
    check_logits,
    check_out,
    check_processing,
    check_tensor,
    check_unit_stride,
    kernel_argument,
    per_request,
    runs_on_triton,
    seeds_and_positions,
    store,
)
from fused_spec.kernels.error_bits import NAN_TARGET
from fused_spec.kernels.inverse_cdf import draw
from fused_spec.kernels.philox import STREAMS, sampling_uniform
from fused_spec.kernels.row_law import Processing, row_law

if TYPE_CHECKING:
    from fused_spec.kernels.row_statistics import Rows


@dataclass(frozen=True)
class Sample:
    """One token per row, of the processed law.

    Attributes:
        token_ids: [B] int64.
        logprob: [B] float32, natural log of the token's probability; NaN on a faulty row.
        lse: [B] float32, log-sum-exp of the kept logits / T, -inf without any. T = 0: the largest logit.
        cutoff: [B] float32, smallest kept logit / T, -inf if nothing is cut. T = 0: the largest logit.
        error: [B] int32 bits: 1 NaN or +inf in the row, 4 no token has weight. Such a row yields its lowest allowed id.
    """

    token_ids: torch.Tensor
    logprob: torch.Tensor
    lse: torch.Tensor
    cutoff: torch.Tensor
    error: torch.Tensor

    @staticmethod
    def layout(batch: int) -> Layout:
        """Shapes and dtypes for B rows."""
        shape = (batch,)
        numbers = dict.fromkeys(("logprob", "lse", "cutoff"), (shape, torch.float32))
        return {"token_ids": (shape, torch.int64), **numbers, "error": (shape, torch.int32)}

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> "Sample":
        """Uninitialised outputs for B rows, to be passed as `out=`."""
        layout = cls.layout(batch).items()
        return cls(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout})


def processing_per_request(
    temperature: Scalar, top_k: Scalar, top_p: Scalar, min_p: Scalar, batch: int
) -> list[Processing]:
    """Checked processing parameters of each of B requests."""
    columns = [
        per_request("temperature", temperature, batch),
        per_request("top_k", top_k, batch, integer=True),
        per_request("top_p", top_p, batch),
        per_request("min_p", min_p, batch),
    ]
    requests = []
    for t, k, p, m in zip(*columns, strict=True):
        check_processing(t, k, p, m)
        requests.append(Processing(t, int(k), p, m))
    return requests


def kernel_rows(
    logits: torch.Tensor, allowed: torch.Tensor | None, processing: tuple[Scalar, Scalar, Scalar, Scalar]
) -> "Rows":
    """Logits [B, R, V] and how they are processed, checked as far as that takes no look at a device."""
    from fused_spec.kernels.row_statistics import Rows

    batch, device = logits.shape[0], logits.device
    temperature, top_k, top_p, min_p = processing
    check_device("allowed", allowed, device)
    check_unit_stride("allowed", allowed)
    rows = Rows(
        logits,
        allowed if allowed is None or allowed.dim() == 3 else allowed[:, None],
        kernel_argument("temperature", temperature, batch, device),
        kernel_argument("top_k", top_k, batch, device, integer=True),  # type: ignore[arg-type]
        kernel_argument("top_p", top_p, batch, device),
        kernel_argument("min_p", min_p, batch, device),
    )
    check_processing(temperature, top_k, top_p, min_p)
    return rows


def kernel_key(
    seed: int | torch.Tensor, position: int | torch.Tensor, batch: int, device: torch.device
) -> tuple[Scalar, Scalar]:
    """(seed, position) as a kernel takes them."""
    key = (
        kernel_argument("seed", seed, batch, device, integer=True),
        kernel_argument("position", position, batch, device, integer=True),
    )
    check_key(seed, position)
    return key


def sample(
    logits: torch.Tensor,
    *,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    temperature: Scalar = 1.0,
    top_k: Scalar = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
    allowed: torch.Tensor | None = None,
    stream: str = "draft",
    backend: str | None = None,
    out: Sample | None = None,
) -> Sample:
    """Draw one token per row.

    Args:
        logits: [B, V] float32, bfloat16 or float16, unit stride in V; not modified, and no gradients pass.
        seed: int or int64 tensor [B], 0 <= seed < 2^63.
        position: int or int64 tensor [B], the index that the token will have in its sequence.
        temperature: 0 (greedy) or >= 0.001. top_k: 0 is off. top_p: (0, 1]. min_p: [0, 1]. Numbers or tensors [B].
        allowed: int32 bitmask [B, ceil(V/32)], bit i of word w for id 32 w + i; None allows every id.
        stream: "draft" for drafting, "resample" for a token that no draft is tested against (the first of a text).
        backend: "triton", "torch", or None: Triton where the logits are not on the CPU.
        out: a `Sample` to write into.

    Returns:
        A `Sample`; `out` if given. Same arguments, same token, whatever else is in the batch.

    Raises:
        InvalidInput: an argument has another shape, dtype or range than stated here.
    """
    check_logits("logits", logits, "[B, V]")
    on_triton = runs_on_triton(backend, logits.device)
    batch, vocab_size = logits.shape
    if not isinstance(stream, str) or stream not in STREAMS:
        raise InvalidInput(f"stream must be one of {', '.join(map(repr, STREAMS))}, got {stream!r}")
    if allowed is not None:
        check_tensor("allowed", allowed, (batch, -(-vocab_size // 32)), (torch.int32,))
    if out is None:
        out = Sample.empty(batch, logits.device)
    else:
        check_out(out, Sample, Sample.layout(batch))
    if on_triton:
        from fused_spec.kernels.sample_triton import sample_triton  # not at the top: the torch path needs no Triton

        rows = kernel_rows(logits[:, None], allowed, (temperature, top_k, top_p, min_p))
        key = kernel_key(seed, position, batch, logits.device)
        for name, tensor in vars(out).items():
            check_device(f"out {name}", tensor, logits.device)
        sample_triton(rows, key, STREAMS[stream], out)
        return out
    keys = seeds_and_positions(seed, position, batch)
    requests = processing_per_request(temperature, top_k, top_p, min_p, batch)
    without_gradient = logits.detach()
    for b, (processing, (s, at)) in enumerate(zip(requests, keys, strict=True)):
        law = row_law(without_gradient[b], processing, None if allowed is None else allowed[b])
        token = draw(law, sampling_uniform(s, at, STREAMS[stream]))
        store(out.token_ids, b, token)
        store(out.logprob, b, law.log_prob(token) if not law.fault else math.nan)
        store(out.lse, b, law.lse)
        store(out.cutoff, b, law.cutoff)
        store(out.error, b, law.error_bit(NAN_TARGET))
    return out
