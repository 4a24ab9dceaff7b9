"""Bytes that kernels move, counted from the loads and stores of Triton's interpreter, not declared by a launcher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fused_spec.kernels.launch import Launch, recorded


class Traffic:
    """Distinct bytes that each launch loads from and stores to the storages of some tensors, by name."""

    def __init__(self, tensors: dict[str, torch.Tensor], launches: list[Launch]) -> None:
        self.launches = launches
        self._storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
        self._touched: dict[tuple[str, str, int], np.ndarray] = {}

    def note(self, kind: str, addresses: np.ndarray, width: int) -> None:
        """Mark `width` bytes from each address on for the launch that runs."""
        for name, storage in self._storages.items():
            start, size = storage.data_ptr(), storage.nbytes()
            inside = addresses[(addresses >= start) & (addresses < start + size)].astype(np.int64) - start
            if len(inside):
                key = (kind, name, len(self.launches) - 1)
                touched = self._touched.setdefault(key, np.zeros(size, dtype=bool))
                for byte in range(width):
                    touched[inside + byte] = True

    def of_launch(self, index: int, kind: str = "loaded") -> dict[str, int]:
        """Distinct bytes "loaded" or "stored" by one launch, per tensor."""
        return {name: int(np.count_nonzero(self._touched.get((kind, name, index), ()))) for name in self._storages}

    def _sum(self, kind: str) -> dict[str, int]:
        each = [self.of_launch(index, kind) for index in range(len(self.launches))]
        return {name: sum(counts[name] for counts in each) for name in self._storages}

    @property
    def loaded(self) -> dict[str, int]:
        """Distinct bytes loaded per launch, summed over launches."""
        return self._sum("loaded")

    @property
    def stored(self) -> dict[str, int]:
        """Distinct bytes stored per launch, summed over launches."""
        return self._sum("stored")


@contextmanager
def traffic(**tensors: torch.Tensor) -> Iterator[Traffic]:
    """Count what the launches in the `with` block load and store; views that share a storage count all of it."""
    from triton.runtime.interpreter import InterpreterBuilder

    def counting(kind: str, method: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def wrapped(self: Any, pointers: Any, *arguments: Any, **options: Any) -> Any:
            mask = np.broadcast_to(arguments[mask_at].data, pointers.data.shape)
            seen.note(kind, pointers.data[mask], pointers.get_element_ty().primitive_bitwidth // 8)
            return method(self, pointers, *arguments, **options)

        return wrapped

    with recorded() as launches, pytest.MonkeyPatch.context() as patch:
        seen = Traffic(tensors, launches)
        for kind, name, mask_at in (("loaded", "create_masked_load", 0), ("stored", "create_masked_store", 1)):
            patch.setattr(InterpreterBuilder, name, counting(kind, getattr(InterpreterBuilder, name), mask_at))
        yield seen
