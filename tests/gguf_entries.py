"""Small quantised GGUF files, and what they give with and without the cache of converted files."""

from pathlib import Path
from typing import Any

import torch

from families import family_model
from fused_spec.models.checkpoint import Checkpoint, open_checkpoint
from fused_spec.models.gguf_cache import converted
from gguf_models import write_gguf


def gguf(tmp_path: Path, family: str = "llama", kind: str = "Q8_0", name: str = "x.gguf", **sizes: Any) -> Path:
    small = {"heads": 2, "kv_heads": 1, "head_dim": 32, "hidden": 32, "inner": 32, "vocab": 33} | sizes
    return write_gguf(tmp_path / name, family_model(family, **small), [kind])


def weights(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: checkpoint.tensor(name, dtype) for name in checkpoint.names()}


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight, expected[name]), name


def fill(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Converts a file, and gives its entry, the newest one."""
    with open_checkpoint(path) as checkpoint, converted(checkpoint, dtype) as cached:
        assert cached is not checkpoint
        return Path(cached.source.file_of("model.norm.weight"))


def check(path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """What comes through the cache is what the file holds."""
    with open_checkpoint(path) as checkpoint:
        expected = weights(checkpoint, dtype)
        with converted(checkpoint, dtype) as cached:
            assert_same(weights(cached, dtype), expected)
