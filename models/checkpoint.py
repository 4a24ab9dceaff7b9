"""Weights, config and tokenizer of a model: a Hugging Face folder, a GGUF file or a hub id.

What the headers tell (names, shapes, dtypes, files) is checked when a checkpoint is opened, values as each tensor is
read. Query and key projections are delivered for INTERLEAVED rotary embedding (pairs 2i, 2i+1) whichever order the
file has: Hugging Face stores the halves of a head one after the other, llama GGUF files the pairs side by side.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from fused_spec.errors import InvalidInput
from fused_spec.models.config import ModelConfig, expected_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_INTERLEAVED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")
_IGNORED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")  # recomputed from the config
_DTYPES = ("F32", "F16", "BF16")
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_ID = re.compile(r"(?!.*\.(?:gguf|safetensors|bin|pt|pth)$)[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]


def interleave_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders the rows of each head from half-split to interleaved: row i to 2i, row i + head_dim/2 to 2i + 1.

    Args:
        weight: [heads * head_dim, ...], any dtype.

    Returns a new contiguous tensor of the same shape. The permutation is the one of llama.cpp's
    `convert_hf_to_gguf.py: LlamaModel.permute`.
    """
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


class Checkpoint:
    """An open checkpoint; close it, or use it in a `with` statement.

    Attributes:
        path: the folder or the GGUF file.
        config: sizes and constants of the model.
    """

    def __init__(self, path: Path, config: ModelConfig, source: _Source) -> None:
        self.path, self.config, self._source, self._closed = path, config, source, False
        self._shapes = expected_shapes(config)
        self._check_names_and_shapes()
        if config.tie_word_embeddings and _HEAD in source.names():
            self._check_tied_head()

    def names(self) -> list[str]:
        """Hugging Face names of all tensors. A tied model has no `lm_head.weight`, even if the file stores one."""
        return list(self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        """Reads one tensor: contiguous, on the CPU, in the stored dtype (float32 where the file is quantised).

        `q_proj` and `k_proj` come in interleaved order. Raises InvalidInput for an unknown name, or for NaN or
        infinite values.
        """
        if name not in self._shapes or self._closed:
            raise InvalidInput(f"{self.path}: {'checkpoint is closed' if self._closed else f'no tensor {name}'}")
        weight = self._source.load(name)
        low, high = torch.aminmax(weight)  # one pass without a temporary; NaN shows in both
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise InvalidInput(f"{self._source.file_of(name)}: tensor {name} holds NaN or infinite values")
        halves = not self._source.interleaved and _INTERLEAVED.fullmatch(name)
        return interleave_halves(weight, self.config.head_dim) if halves else weight

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that came with the weights, or None when there is none.

        Raises InvalidInput when it cannot be read or knows ids that the embedding has no row for.
        """
        from fused_spec.models.tokenizer import check_fits, tokenizer_from_folder, tokenizer_from_gguf

        tokenizer: PreTrainedTokenizerBase | None
        if self._source.fields is None:
            tokenizer = tokenizer_from_folder(self.path)
        elif "tokenizer.ggml.model" in self._source.fields:
            tokenizer = tokenizer_from_gguf(self._source.fields, str(self.path))
        else:
            return None
        if tokenizer is not None:
            check_fits(tokenizer, self.config.vocab_size, str(self.path))
        return tokenizer

    def close(self) -> None:
        """Lets go of the files; tensors that were read stay valid. `tensor` is an error from here on."""
        self._closed = True
        self._source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_names_and_shapes(self) -> None:
        stored = [name for name in self._source.names() if not _IGNORED.fullmatch(name)]
        if missing := sorted(self._shapes.keys() - set(stored)):
            raise InvalidInput(f"{self.path}: tensor {_listed(missing)} is missing")
        tied_head = {_HEAD: self._shapes[_EMBEDDING]} if self.config.tie_word_embeddings else {}
        allowed = self._shapes | tied_head
        if extra := [name for name in stored if name not in allowed]:
            raise InvalidInput(f"{self.path}: unexpected tensor {_listed(extra)}; this config has no such tensor")
        for name in stored:
            if self._source.shape(name) != allowed[name]:
                raise InvalidInput(
                    f"{self._source.file_of(name)}: tensor {name} has shape {list(self._source.shape(name))}; "
                    f"the config needs {list(allowed[name])}"
                )

    def _check_tied_head(self) -> None:
        head, embedding = self._source.load(_HEAD), self._source.load(_EMBEDDING)
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise InvalidInput(
                f"{self._source.file_of(_HEAD)}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}"
            )


def open_checkpoint(path_or_id: str | os.PathLike[str]) -> Checkpoint:
    """Opens a model's files.

    Args:
        path_or_id: a Hugging Face folder (`model.safetensors`, or shards with `model.safetensors.index.json`), a
            `.gguf` file, or a hub id "org/name", downloaded into Hugging Face's cache (`HF_HUB_OFFLINE` etc. hold).

    Raises InvalidInput, one line naming the file: path missing, nothing to load, pickle files, a missing shard or
    tensor, a truncated or corrupt file, a wrong shape or dtype, an unsupported tensor or architecture.
    """
    text = os.fspath(path_or_id) if isinstance(path_or_id, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidInput(f"model is {path_or_id!r}; allowed: a folder, a .gguf file or a hub id 'org/name'")
    path = Path(text)
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.is_file():
            return _open_file(path)
    except OSError as error:  # no permission, a name too long, a device that fails
        raise InvalidInput(f"{text}: {error.strerror or error}") from None
    if isinstance(path_or_id, str) and _HUB_ID.fullmatch(text):
        return _open_folder(_download(text))
    raise InvalidInput(f"{text}: no such file or folder")


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in _PICKLE:
        raise InvalidInput(f"{path}: pickle checkpoints are not read, they can run code; allowed: safetensors, GGUF")
    if path.suffix != ".gguf":
        raise InvalidInput(f"{path}: not a model; allowed: a .gguf file, or the folder that holds config.json")
    from fused_spec.models.gguf_file import GGUFFile  # only here: the gguf package takes 50 ms to import

    source = GGUFFile(path)
    if _EMBEDDING not in source.tensors:
        raise InvalidInput(f"{path}: tensor token_embd.weight is missing")
    vocab_size = source.shape(_EMBEDDING)[0]
    config = ModelConfig.from_gguf(source.fields, vocab_size, _HEAD not in source.tensors, str(path))
    return Checkpoint(path, config, source)


def _open_folder(folder: Path) -> Checkpoint:
    shards = _shard_files(folder)
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    if not config_path.is_file():
        raise InvalidInput(f"{folder}: config.json is missing; there is {_contents(folder)}")
    generation = _read_json(generation_path) if generation_path.is_file() else None
    config = ModelConfig.from_hf(_read_json(config_path), generation, str(config_path))
    return Checkpoint(folder, config, _SafetensorsFiles(folder, shards))


def _shard_files(folder: Path) -> dict[str, set[str]]:
    """File names of the weights, each with the tensors that the index promises in it (empty without an index)."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": set()}
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        needed = "model.safetensors or model.safetensors.index.json"
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLE)
        if pickles:
            raise InvalidInput(
                f"{folder / pickles[0]}: pickle checkpoints are not read, they can run code; needed: {needed}"
            )
        raise InvalidInput(f"{folder}: no weights: needed is {needed}; there is {_contents(folder)}")
    weight_map = _read_json(index_path).get("weight_map")
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


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # the transport's own error class; which package it comes from depends on the version of huggingface_hub
    transport_error: Any = HfHubHTTPError.__bases__[0]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, transport_error) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise InvalidInput(f"{hub_id}: no such folder, and it cannot be fetched from the hub: {reason[0]}") from error


class _Source(Protocol):
    """What GGUFFile and _SafetensorsFiles have in common.

    `interleaved` says in which order q and k rows are stored; `fields` is a GGUF file's metadata, None elsewhere.
    """

    interleaved: bool

    @property
    def fields(self) -> dict[str, Any] | None: ...

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def file_of(self, name: str) -> str: ...
    def load(self, name: str) -> torch.Tensor: ...
    def close(self) -> None: ...


class _SafetensorsFiles:
    """Safetensors files read as one; all headers are read, and names and dtypes checked, when it is built."""

    interleaved = False
    fields: dict[str, Any] | None = None

    def __init__(self, folder: Path, shards: dict[str, set[str]]) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, str] = {}
        for file, promised in shards.items():
            self._add(folder / file, promised)

    def _add(self, path: Path, promised: set[str]) -> None:
        try:
            shard: Any = safe_open(path, framework="pt")
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"{path}: truncated or corrupt safetensors file: {error}") from error
        self._files[str(path)] = shard
        if promised and (odd := sorted(promised ^ slices.keys())):
            raise InvalidInput(f"{path}: its tensors are not those its index names; they differ in {_listed(odd)}")
        for name, entry in slices.items():
            if entry.get_dtype() not in _DTYPES and not _IGNORED.fullmatch(name):
                dtype = entry.get_dtype()
                raise InvalidInput(f"{path}: tensor {name!r} has dtype {dtype}; allowed: {', '.join(_DTYPES)}")
            self._shapes[name], self._file_of[name] = tuple(entry.get_shape()), str(path)

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file_of(self, name: str) -> str:
        return self._file_of[name]

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._files.clear()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path}: holds a JSON {type(value).__name__}; allowed: an object")
    return value


def _listed(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
