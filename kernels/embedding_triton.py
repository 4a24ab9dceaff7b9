"""The Triton path of `embed`: one launch over tokens and blocks of a row."""

import torch
import triton
import triton.language as tl

from fused_spec.kernels.check import LOGIT_DTYPES, check_tensor, check_unit_stride
from fused_spec.kernels.launch import launch

BLOCK = 512


@triton.jit
def embed_kernel(
    tokens, tokens_stride, embedding, embedding_stride, out, out_stride, vocab_size, size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < size
    token = tl.minimum(tl.maximum(tl.load(tokens + row * tokens_stride), 0), vocab_size - 1)
    values = tl.load(embedding + token * embedding_stride + channels, mask=inside, other=0.0)
    tl.store(out + row * out_stride + channels, values.to(tl.float32), mask=inside)


def embed_triton(tokens: torch.Tensor, embedding: torch.Tensor, out: torch.Tensor) -> None:
    """Launch over tokens [W] int64."""
    vocab_size, size = embedding.shape
    check_tensor("tokens", tokens, (tokens.numel(),), (torch.int64,))
    check_tensor("embedding", embedding, (vocab_size, size), LOGIT_DTYPES)
    check_tensor("out", out, (tokens.numel(), size), LOGIT_DTYPES)
    check_unit_stride("embedding", embedding)
    check_unit_stride("out", out)
    launch(
        embed_kernel,
        (tokens.numel(), triton.cdiv(size, BLOCK)),  # tokens first: the other axes of a grid end at 65535
        tokens=tokens,
        tokens_stride=tokens.stride(0),
        embedding=embedding,
        embedding_stride=embedding.stride(0),
        out=out,
        out_stride=out.stride(0),
        vocab_size=vocab_size,
        size=size,
        BLOCK=BLOCK,
    )
