"""Weights, config and tokenizer of a model: a Hugging Face folder, a GGUF file or a hub id.

What the headers tell (names, shapes, dtypes, files) is checked when a checkpoint is opened, values as each tensor is
read. What belongs to queries and keys is delivered for INTERLEAVED rotary embedding (pairs 2i, 2i+1) whichever order
the file has: Hugging Face stores the halves of a head one after the other, as do GGUF files; only those of architecture
llama have the pairs side by side.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fused_spec.errors import InvalidInput
from fused_spec.models.config import ModelConfig, expected_shapes
from fused_spec.models.rope_scaling import divided_frequencies
from fused_spec.models.safetensors_files import PICKLE, SafetensorsFiles, contents, listed, read_json, shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROPE_DIVISORS = "rope_freqs.weight"
_ROTATED = re.compile(r".*\.self_attn\.[qk]_(proj|norm)\.(weight|bias)")
HUB_ID = re.compile(r"(?!.*\.(?:gguf|safetensors|bin|pt|pth)$)[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
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
        source: the files.
    """

    def __init__(self, path: Path, config: ModelConfig, source: Source) -> None:
        self.path, self.config, self.source, self._closed = path, config, source, False
        self._shapes = expected_shapes(config)
        self._check_names_and_shapes()
        if config.tie_word_embeddings and _HEAD in source.names():
            self._check_tied_head()

    def names(self) -> list[str]:
        """Hugging Face names of all tensors. A tied model has no `lm_head.weight`, even if the file stores one."""
        return list(self._shapes)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads one tensor: a contiguous copy on the CPU, in `dtype`.

        None means the stored dtype, float32 where the file is quantised. What belongs to queries and keys comes in
        interleaved order. Raises InvalidInput for an unknown name, or for values that are not finite in `dtype`.
        """
        if name not in self._shapes or self._closed:
            raise InvalidInput(f"{self.path}: {'checkpoint is closed' if self._closed else f'no tensor {name}'}")
        weight = self.source.load(name, dtype)
        low, high = torch.aminmax(weight)  # one pass without a temporary; NaN shows in both
        if not (torch.isfinite(low) and torch.isfinite(high)):
            kind = str(weight.dtype).removeprefix("torch.")
            raise InvalidInput(f"{self.source.file_of(name)}: tensor {name} holds NaN or infinite values as {kind}")
        halves = not self.source.interleaved and _ROTATED.fullmatch(name)
        return interleave_halves(weight, self.config.head_dim) if halves else weight

    def mapped(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor that stays in its file, to be read as it is used; None unless it is there as `tensor` gives it.

        Its values are not checked: `tensor` does that.
        """
        if not self.source.interleaved and _ROTATED.fullmatch(name):
            return None
        weight = self.source.mapped(name)
        return weight if weight is not None and weight.dtype == dtype else None

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that came with the weights, or None when there is none.

        Raises InvalidInput when it cannot be read or knows ids that the embedding has no row for.
        """
        from fused_spec.models.tokenizer import check_fits, tokenizer_from_folder, tokenizer_from_gguf

        tokenizer: PreTrainedTokenizerBase | None
        if self.source.fields is None:
            tokenizer = tokenizer_from_folder(self.path)
        elif "tokenizer.ggml.model" in self.source.fields:
            tokenizer = tokenizer_from_gguf(self.source.fields, str(self.path))
        else:
            return None
        if tokenizer is not None:
            check_fits(tokenizer, self.config.vocab_size, str(self.path))
        return tokenizer

    def close(self) -> None:
        """Lets go of the files; tensors that were read stay valid. `tensor` is an error from here on."""
        self._closed = True
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_names_and_shapes(self) -> None:
        # in a GGUF file it became a part of the config
        known = set() if self.source.fields is None else {_ROPE_DIVISORS}
        stored = [name for name in self.source.names() if name not in known]
        if missing := sorted(self._shapes.keys() - set(stored)):
            raise InvalidInput(f"{self.path}: tensor {listed(missing)} is missing")
        tied_head = {_HEAD: self._shapes[_EMBEDDING]} if self.config.tie_word_embeddings else {}
        allowed = self._shapes | tied_head
        if extra := [name for name in stored if name not in allowed]:
            raise InvalidInput(f"{self.path}: unexpected tensor {listed(extra)}; this config has no such tensor")
        for name in stored:
            if self.source.shape(name) != allowed[name]:
                raise InvalidInput(
                    f"{self.source.file_of(name)}: tensor {name} has shape {list(self.source.shape(name))}; "
                    f"the config needs {list(allowed[name])}"
                )

    def _check_tied_head(self) -> None:
        head, embedding = self.source.load(_HEAD), self.source.load(_EMBEDDING)
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise InvalidInput(
                f"{self.source.file_of(_HEAD)}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}"
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
    if isinstance(path_or_id, str) and HUB_ID.fullmatch(text):
        return _open_folder(download(text, _HUB_FILES))
    raise InvalidInput(f"{text}: no such file or folder")


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLE:
        raise InvalidInput(f"{path}: pickle checkpoints are not read, they can run code; allowed: safetensors, GGUF")
    if path.suffix != ".gguf":
        raise InvalidInput(f"{path}: not a model; allowed: a .gguf file, or the folder that holds config.json")
    from fused_spec.models.gguf_file import GGUFFile  # only here: the gguf package takes 50 ms to import

    source = GGUFFile(path)
    if _EMBEDDING not in source.tensors:
        raise InvalidInput(f"{path}: tensor token_embd.weight is missing")
    vocab_size = source.shape(_EMBEDDING)[0]
    config = ModelConfig.from_gguf(source.fields, vocab_size, _HEAD not in source.tensors, str(path))
    if _ROPE_DIVISORS in source.tensors:  # Llama 3.1's scaling, which these files spell out
        if config.rope_scaling is not None:
            raise InvalidInput(f"{path}: tensor rope_freqs.weight beside rope.scaling; allowed: one of them")
        scaling = divided_frequencies(source.load(_ROPE_DIVISORS), config.head_dim, str(path))
        config = replace(config, rope_scaling=scaling)
    return Checkpoint(path, config, source)


def _open_folder(folder: Path) -> Checkpoint:
    shards = shard_files(folder)
    return Checkpoint(folder, config_in(folder), SafetensorsFiles(folder, shards))


def config_in(folder: Path) -> ModelConfig:
    """What a folder's `config.json` says, with the EOS tokens of a `generation_config.json` beside it."""
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{folder}: config.json is missing; there is {contents(folder)}")
    return config_file(folder / "config.json")


def config_file(path: Path) -> ModelConfig:
    """The same, for a file of any name."""
    beside = path.with_name("generation_config.json")
    generation = read_json(beside) if beside.is_file() else None
    return ModelConfig.from_hf(read_json(path), generation, str(path))


def download(hub_id: str, patterns: list[str]) -> Path:
    """A folder with those files of a hub id whose names fit one of the patterns."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # the transport's own error class; which package it comes from depends on the version of huggingface_hub
    transport_error: Any = HfHubHTTPError.__bases__[0]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (OSError, ValueError, transport_error) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise InvalidInput(f"{hub_id}: no such folder, and it cannot be fetched from the hub: {reason[0]}") from error


class Source(Protocol):
    """The tensors of one or several files, by their Hugging Face names.

    `interleaved` says in which order the rows of queries and keys are stored; `fields` is a GGUF file's metadata, None
    elsewhere. `load` gives a copy, in `dtype` or the stored one; `mapped` what is in the file, where it can be used so.
    """

    @property
    def interleaved(self) -> bool: ...
    @property
    def fields(self) -> dict[str, Any] | None: ...

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def file_of(self, name: str) -> str: ...
    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor: ...
    def mapped(self, name: str) -> torch.Tensor | None: ...
    def close(self) -> None: ...
