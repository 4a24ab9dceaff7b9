"""Buffers of a forward pass on a CPU, and views of them: made once per width, since making them takes time."""

import torch

from fused_spec.kernels.attention import HeadBuffers
from fused_spec.kernels.rms_norm import NormBuffers
from fused_spec.kernels.rope import as_pairs
from fused_spec.models.config import ModelConfig


class Workspace:
    """Where activations of W tokens are kept.

    There are R >= W rows, as matrix products want them (`Linear.least_rows`); rows from W on hold zeros or what comes
    of them, and are never looked at.

    Attributes:
        stream: [R, hidden] float32, what is added up over the layers.
        normed: [R, hidden] working dtype, what goes into a layer's products.
        norm: for normalising the stream.
        qkv: [R, (H + 2 Hkv) D] float32. heads: its first W rows as [W, H + 2 Hkv, D].
        q, k, v: of the first W rows: [W, Hkv, G, D/2] and [W, Hkv, 1, D/2] complex64, rotary pairs, and [W, Hkv, D].
        qk: [W, H + Hkv, D], what q/k norm works on. qk_norm: room for it.
        attended: [R, H D] working dtype, the results of attention. attention: the way there.
        activated: [R, inner] working dtype, what goes into the last product of a layer.
    """

    def __init__(
        self, config: ModelConfig, width: int, rows: int, dtype: torch.dtype, device: torch.device, by_head: bool
    ) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

        def zeros(columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=device)

        self.stream = zeros(config.hidden_size, torch.float32)
        self.normed = zeros(config.hidden_size)
        self.norm = NormBuffers.like(self.stream)
        self.qkv = zeros((heads + 2 * kv_heads) * dim, torch.float32)
        self.heads = self.qkv[:width].view(width, -1, dim)
        q, k, _ = as_pairs(self.heads).split((heads, kv_heads, kv_heads), dim=1)
        self.q, self.k = q.unflatten(1, (kv_heads, -1)), k.unflatten(1, (kv_heads, -1))
        self.v = self.heads[:, heads + kv_heads :]
        self.qk = self.heads[:, : heads + kv_heads]
        self.qk_norm = NormBuffers.like(self.qk) if config.family.qk_norm else None
        self.attended = zeros(heads * dim)
        self.attention = HeadBuffers.of(self.attended[:width], kv_heads, dim, by_head)
        self.activated = zeros(config.intermediate_size)
