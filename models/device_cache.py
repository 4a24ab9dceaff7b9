"""A static key/value cache on a GPU, in the working dtype; what a forward pass does there between two products.

Where a block stands is known on the device only: its positions are read by the kernels. So one captured graph serves
every length, and a rollback is a write of a length.
"""

from typing import NamedTuple

import torch

from fused_spec.kernels.cached_attention import Attend, cached_attention
from fused_spec.kernels.rms_norm import NormBuffers, RMSNorm
from fused_spec.kernels.rope import rope_table
from fused_spec.models.config import ModelConfig

WIDEST = 512
"""Tokens of one forward pass at most; a prompt is taken in chunks."""


class DeviceWorkspace(NamedTuple):
    """Where activations are kept; narrower blocks take the first rows.

    Attributes:
        stream: [W, hidden] float32, what is added up over the layers.
        normed: [W, hidden] working dtype, what goes into a layer's products.
        queries: [W, H, D]. attended: [W, H D], the results of attention.
        activated: [W, inner], what goes into the last product of a layer.
    """

    stream: torch.Tensor
    normed: torch.Tensor
    queries: torch.Tensor
    attended: torch.Tensor
    activated: torch.Tensor

    @classmethod
    def empty(cls, config: ModelConfig, width: int, dtype: torch.dtype, device: torch.device) -> "DeviceWorkspace":
        """Room for `width` tokens."""

        def rows(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(width, *shape, dtype=kind, device=device)

        return cls(
            stream=rows(config.hidden_size, kind=torch.float32),
            normed=rows(config.hidden_size),
            queries=rows(config.num_heads, config.head_dim),
            attended=rows(config.num_heads * config.head_dim),
            activated=rows(config.intermediate_size),
        )

    @property
    def norm(self) -> NormBuffers | None:
        """The kernels need no room between x and its normalisation."""
        return None

    def first(self, width: int) -> "DeviceWorkspace":
        """The part for `width` tokens."""
        return DeviceWorkspace(*(buffer[:width] for buffer in self))


class DeviceCache:
    """Keys and values of one sequence.

    A slot is valid only if the owner says so: nothing is erased on rollback, later tokens overwrite it, and what lies
    beyond a block is not read.

    Attributes:
        keys, values: [layers, capacity, Hkv, D] in the working dtype, in one piece.
        rotations: [capacity, D/2] complex64, the rotary embedding of every slot.
        used: [1] int32, slots that were valid after the last forward pass.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, width: int, dtype: torch.dtype, device: torch.device, attention: str
    ) -> None:
        """Room for `capacity` tokens; blocks of up to `width` are decoded, wider ones are a prompt's."""
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=dtype, device=device)
        self.rotations = rope_table(config.rope_frequencies, capacity, config.rope_amplitude).to(device)
        self.used = torch.zeros(1, dtype=torch.int32, device=device)
        self._layers = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))
        self._room = DeviceWorkspace.empty(config, WIDEST, dtype, device)
        self._attention = cached_attention(attention, self.keys[0], self.used, config.num_heads, width)

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.keys.shape[1]

    def block(self, positions: torch.Tensor, least_rows: int, dtype: torch.dtype, drafting: bool) -> "DeviceBlock":
        """A forward pass over tokens at consecutive positions [W]; what else matters on a CPU does not here."""
        room = self._room.first(positions.numel())
        return DeviceBlock(room, positions, self, self._layers, self._attention(positions))


class DeviceBlock(NamedTuple):
    """A block of tokens on its way through the layers."""

    room: DeviceWorkspace
    positions: torch.Tensor
    cache: DeviceCache
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    attention: Attend

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: RMSNorm | None) -> torch.Tensor:
        """From qkv [W, (H + 2 Hkv) D] to the results of attention [W, H D]; keys and values go into the cache."""
        from fused_spec.kernels.rope_store import rope_store  # not at the top: a CPU needs no Triton

        (keys, values), queries, used = self.layers[layer], self.room.queries, self.cache.used
        rope_store(qkv, self.positions, self.cache.rotations, qk_norm, queries, keys, values, used)
        self.attention(queries, keys, values, self.room.attended.view_as(queries))
        return self.room.attended
