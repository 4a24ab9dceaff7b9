"""Safetensors files of a Hugging Face folder, read as one.

Format: https://huggingface.co/docs/safetensors. Files are opened anew for every tensor: the library maps a whole file
into memory, and pages that were read would count as ours for as long as the file stays open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fused_spec.errors import InvalidInput

PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that run code when they are read."""

_DTYPES = ("F32", "F16", "BF16")
_RECOMPUTED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")  # old files; the config has it


class SafetensorsFiles:
    """Safetensors files read as one; all headers are read, and names and dtypes checked, when it is built.

    Query and key rows are in Hugging Face's order, unless `interleaved` says that they were permuted before.
    """

    fields: dict[str, Any] | None = None

    def __init__(self, folder: Path, shards: dict[str, set[str]], interleaved: bool = False) -> None:
        self.interleaved = interleaved
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, str] = {}
        for file, promised in shards.items():
            self._add(folder / file, promised)

    def _add(self, path: Path, promised: set[str]) -> None:
        with _opened(path) as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
            if promised and (odd := sorted(promised ^ slices.keys())):
                raise InvalidInput(f"{path}: its tensors are not those its index names; they differ in {listed(odd)}")
            for name, entry in slices.items():
                if _RECOMPUTED.fullmatch(name):
                    continue
                if entry.get_dtype() not in _DTYPES:
                    dtype = entry.get_dtype()
                    raise InvalidInput(f"{path}: tensor {name!r} has dtype {dtype}; allowed: {', '.join(_DTYPES)}")
                self._shapes[name], self._file_of[name] = tuple(entry.get_shape()), str(path)

    def names(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def file_of(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._file_of[name]

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of a tensor, in `dtype` or the stored one."""
        with _opened(Path(self._file_of[name])) as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor.to(dtype or tensor.dtype, copy=True)

    def mapped(self, name: str) -> torch.Tensor | None:
        """A tensor that stays in its file, to be read as it is used; the mapping lives as long as the tensor."""
        with _opened(Path(self._file_of[name])) as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor

    def close(self) -> None:
        """Nothing is open between two calls."""


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path}: truncated or corrupt safetensors file: {error}") from error


def shard_files(folder: Path) -> dict[str, set[str]]:
    """File names of the weights, each with the tensors that the index promises in it (empty without an index)."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": set()}
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        needed = "model.safetensors or model.safetensors.index.json"
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLE)
        if pickles:
            raise InvalidInput(
                f"{folder / pickles[0]}: pickle checkpoints are not read, they can run code; needed: {needed}"
            )
        raise InvalidInput(f"{folder}: no weights: needed is {needed}; there is {contents(folder)}")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput(f"{index_path}: weight_map is missing or empty")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # a plain file name only: an index must not reach outside its folder
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise InvalidInput(f"{index_path}: weight_map[{name!r}] is {file!r}; allowed: the name of a file beside it")
        if not (folder / file).is_file():
            raise InvalidInput(f"{folder / file}: shard is missing; {index_path.name} names it")
        shards.setdefault(file, set()).add(name)
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path}: holds a JSON {type(value).__name__}; allowed: an object")
    return value


def listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def contents(folder: Path) -> str:
    """What is in a folder, for an error message."""
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
