"""A static key/value cache on a CPU: one buffer for all layers, written at positions, rolled back by forgetting."""

import functools
from typing import NamedTuple

import torch

from fused_spec.kernels.attention import NARROW, STRIDE, Span, attention, span
from fused_spec.kernels.rms_norm import RMSNorm, rms_norm
from fused_spec.kernels.rope import as_pairs, rope, rope_table
from fused_spec.models.config import ModelConfig
from fused_spec.models.workspace import Workspace


class LayerSlots(NamedTuple):
    """What one layer sees of the cache during a forward pass; views, not copies."""

    new_keys: torch.Tensor  # [W, Hkv, 1, D/2] complex64, rotary pairs: where the block's keys go
    new_values: torch.Tensor  # [W, Hkv, D]
    keys: torch.Tensor  # [1, Hkv, end, D]
    values: torch.Tensor  # [1, Hkv, end, D]


Slots = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""Keys and values of every layer, each [1, Hkv, end, D]."""


class KVCache:
    """Keys and values of one sequence, in float32, which torch's CPU attention is made for.

    A slot is valid only if the owner says so: nothing is erased on rollback, later tokens overwrite it.

    Attributes:
        keys, values: [layers, capacity, Hkv, D]; in memory the slots of a head lie side by side.
        written: slots from here on are zero; those before it may hold anything.
        rotations: [capacity, D/2] complex64, the rotary embedding of every slot.
    """

    def __init__(self, config: ModelConfig, capacity: int, device: torch.device) -> None:
        capacity = -(-capacity // STRIDE) * STRIDE
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=torch.float32, device=device).transpose(2, 3)
        self.rotations = rope_table(config.rope_frequencies, capacity, config.rope_amplitude).to(device)
        self.written = 0
        self._config = config
        # a sequence is decoded in few widths: drafting, and verification of as many drafts as there are
        self._kept_workspace = functools.lru_cache(maxsize=8)(self._workspace)
        self._kept_slots = functools.lru_cache(maxsize=2)(self._slots)

    @property
    def capacity(self) -> int:
        """Number of slots: what was asked for, rounded up to whole strides of the attention kernel."""
        return self.keys.shape[1]

    def block(self, positions: torch.Tensor, least_rows: int, dtype: torch.dtype, drafting: bool) -> "Block":
        """A forward pass over tokens at consecutive positions [W], whose products are in `dtype`."""
        width = positions.numel()
        by_head = drafting or width > NARROW
        where = span(positions, self._config.num_heads // self._config.num_kv_heads, by_head)
        room = (self._kept_workspace if width <= NARROW else self._workspace)(width, least_rows, dtype, by_head)
        rotations = self.rotations[where.first : where.valid, None, None]
        slots = (self._slots if by_head else self._kept_slots)(where.end)
        return Block(room, where, rotations, self._layers(where, slots))

    def _layers(self, where: Span, slots: Slots) -> list[LayerSlots]:
        """The slots of a block for every layer. Stale ones that it covers become zero: a mask does not hide a NaN."""
        stale = slice(where.valid, min(where.end, self.written))
        if stale.start < stale.stop:
            self.keys[:, stale].zero_()
            self.values[:, stale].zero_()
        self.written = self.written if self.written > where.end else where.valid
        new = slice(where.first, where.valid)
        written = as_pairs(self.keys[:, new, :, None]).unbind(), self.values[:, new].unbind()
        return list(map(LayerSlots, *written, *slots))

    def _slots(self, end: int) -> Slots:
        """What a block looks at. All tokens of a stride look at the same slots, and these views are kept for them."""
        keys, values = (kept[:, None, :end].transpose(2, 3).unbind() for kept in (self.keys, self.values))
        return keys, values

    def _workspace(self, width: int, least_rows: int, dtype: torch.dtype, by_head: bool) -> Workspace:
        return Workspace(self._config, width, max(width, least_rows), dtype, self.keys.device, by_head)


class Block(NamedTuple):
    """A block of tokens on its way through the layers."""

    room: Workspace
    where: Span
    rotations: torch.Tensor  # [W, 1, 1, D/2] complex64
    layers: list[LayerSlots]

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: RMSNorm | None) -> torch.Tensor:
        """From qkv [R, (H + 2 Hkv) D] to the results of attention [R, H D]; keys and values go into the cache."""
        room, slots = self.room, self.layers[layer]
        room.qkv.copy_(qkv)
        if qk_norm is not None and room.qk_norm is not None:
            rms_norm(room.qk, qk_norm, room.qk_norm, out=room.qk)
        rope(room.q, self.rotations, out=room.attention.queries)
        rope(room.k, self.rotations, out=slots.new_keys)
        slots.new_values.copy_(room.v)
        attention(room.attention, self.where, slots.keys, slots.values)
        return room.attended
