"""A static key/value cache: one buffer for all layers, written at positions, rolled back by forgetting."""

import torch

from fused_spec.kernels.attention import STRIDE
from fused_spec.kernels.rope import rope_table
from fused_spec.models.config import ModelConfig


class KVCache:
    """Keys and values of one sequence.

    A slot is valid only if the owner says so: nothing is erased on rollback, later tokens overwrite it.

    Attributes:
        keys, values: [layers, capacity, Hkv, D].
        rotations: [capacity, D/2] complex64, the rotary embedding of every slot.
    """

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        # On a CPU attention is several times faster in float32 than in half precision, and the cache is small there.
        self.dtype = torch.float32 if device.type == "cpu" else dtype
        capacity = -(-capacity // STRIDE) * STRIDE
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=device)
        self.rotations = rope_table(config.rope_theta, config.head_dim, capacity).to(device)

    @property
    def capacity(self) -> int:
        """Number of slots: what was asked for, rounded up to whole strides of the attention kernel."""
        return self.keys.shape[1]

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [W, Hkv, D] of one layer at positions [W]."""
        self.keys[layer].index_copy_(0, positions, keys.to(self.dtype))
        self.values[layer].index_copy_(0, positions, values.to(self.dtype))
