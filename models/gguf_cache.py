"""Converted GGUF files, kept under the user's cache folder: dequantising takes seconds to a minute, reading does not.

An entry is one safetensors file (https://huggingface.co/docs/safetensors) for each GGUF path and dtype; a file that
changed replaces its own. Its metadata says what it was made from, and gives a checksum for each tensor:

* Opening compares the former with the GGUF file as it is now: path, size, times, and a digest of its header. Weights
  are not compared, that would cost what the cache saves; ctime tells that they were written to, even if mtime was put
  back.
* Reading compares the latter, tensor by tensor, so that it costs no pass of its own. From the first tensor on that is
  not as it was written, everything comes from the GGUF file, and the entry is deleted for the next load to rebuild.

The checksum is a sum of words: it finds flipped bits and lost blocks, but not blocks that changed places.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from fused_spec.errors import InvalidInput
from fused_spec.models.checkpoint import Checkpoint, open_checkpoint
from fused_spec.models.safetensors_files import SafetensorsFiles

if TYPE_CHECKING:
    from fused_spec.models.gguf_file import GGUFFile

_FORMAT = "1"  # another one whenever Checkpoint.tensor would give other values or another order than before
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_LEFTOVER_SECONDS = 24 * 3600


def converted(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """The same checkpoint, read from the cache, which is filled first if need be.

    Folders, and GGUF files without a quantised tensor, come back as they are; so does everything, with a warning, where
    the cache cannot be written. Closing the result closes `checkpoint`.

    Args:
        checkpoint: open, and left so.
        dtype: the working dtype, float32, float16 or bfloat16; `tensor(name)` of the result is of this dtype.

    Raises InvalidInput for what is wrong with the GGUF file.
    """
    if checkpoint.source.fields is None:
        return checkpoint
    from fused_spec.models.gguf_file import GGUFFile  # only here: the gguf package takes 50 ms to import

    source = checkpoint.source
    if not isinstance(source, GGUFFile) or all(info.type.name in _DTYPES.values() for info in source.tensors.values()):
        return checkpoint
    origin = _origin(checkpoint.path, source, dtype)
    key = hashlib.blake2b(f"{origin['source']}\n{origin['dtype']}".encode(), digest_size=16).hexdigest()
    folder = _folder()
    path = folder / f"{key}.safetensors"
    try:
        if not folder.is_absolute():
            raise FileNotFoundError(errno.ENOENT, "there is no home folder")
        if (entry := _opened(path, origin, checkpoint, dtype)) is not None:
            return entry
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(folder)
        # anew: the file may have been replaced between its opening and `origin`, and must not be taken for the new one
        with open_checkpoint(checkpoint.path) as current:
            _write(current, dtype, path, origin)
    except OSError as error:  # of the cache: those of the GGUF file have become InvalidInput
        cause = error.strerror or error
        warnings.warn(f"{folder}: the cache of converted GGUF files cannot be written: {cause}", stacklevel=2)
        return checkpoint
    return _opened(path, origin, checkpoint, dtype) or checkpoint  # another process may have removed or replaced it


class _Entry(SafetensorsFiles):
    """An entry whose origin was checked; its tensors are checked as they are read."""

    def __init__(self, path: Path, metadata: dict[str, str], original: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__(path.parent, {path.name: set()}, interleaved=True)  # as Checkpoint.tensor delivered it
        self.fields = original.source.fields
        self._path, self._metadata, self._original, self._dtype = path, metadata, original, dtype
        self._damaged = False

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of a tensor, in `dtype` or the one of the cache."""
        weight = self._intact(name)
        if weight is None:
            weight = self._original.tensor(name, self._dtype)
        return weight.to(dtype or self._dtype)

    def mapped(self, name: str) -> torch.Tensor | None:
        """A tensor that stays in the entry, if none was found damaged."""
        return None if self._damaged else super().mapped(name)

    def close(self) -> None:
        """Closes the GGUF file too."""
        self._original.close()

    def _intact(self, name: str) -> torch.Tensor | None:
        if self._damaged:
            return None
        with suppress(InvalidInput):  # truncated, or gone
            weight = super().load(name)
            if weight.dtype == self._dtype and _checksum(weight) == self._metadata.get(name):
                return weight
        self._damaged = True
        with suppress(OSError):
            self._path.unlink()
        warnings.warn(f"{self._path}: damaged cache entry; {self._original.path} is read instead", stacklevel=2)
        return None


def _folder() -> Path:
    """Where the entries are, by the XDG base directory specification, which wants relative paths ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "fused-spec", "gguf")


def _origin(path: Path, source: GGUFFile, dtype: torch.dtype) -> dict[str, str]:
    """What an entry is made from."""
    try:
        resolved = path.resolve()
        with open(resolved, "rb") as file:
            status = os.fstat(file.fileno())
            header = file.read(min(info.offset for info in source.tensors.values()))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from error
    return {
        "format": _FORMAT,
        "source": os.fsencode(resolved).decode(errors="backslashreplace"),  # JSON has no other bytes than UTF-8
        "size": str(status.st_size),
        "mtime_ns": str(status.st_mtime_ns),
        "ctime_ns": str(status.st_ctime_ns),
        "header": hashlib.blake2b(header, digest_size=16).hexdigest(),
        "dtype": _DTYPES[dtype],
    }


def _opened(path: Path, origin: dict[str, str], checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint | None:
    """The entry, or None when there is none, when it was made from something else, or when its header is damaged."""
    with suppress(InvalidInput, SafetensorError, OSError):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if origin.items() <= metadata.items():
            return Checkpoint(checkpoint.path, checkpoint.config, _Entry(path, metadata, checkpoint, dtype))
    return None


def _write(checkpoint: Checkpoint, dtype: torch.dtype, path: Path, origin: dict[str, str]) -> None:
    """Writes an entry, tensor by tensor, beside `path`, and moves it there when all of it is on disk."""
    file = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False)  # noqa: SIM115
    try:
        with file:
            sums = dict.fromkeys(checkpoint.names(), "0" * 16)  # as long as those to come
            file.seek(len(_header(checkpoint, dtype, origin | sums)))
            for name in tqdm(sums, desc=f"caching {checkpoint.path.name}", unit="tensor", disable=None):
                sums[name] = _append(file, checkpoint.tensor(name, dtype))
            file.seek(0)
            file.write(_header(checkpoint, dtype, origin | sums))
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except BaseException:  # an interrupt, too
        with suppress(OSError):
            os.unlink(file.name)
        raise


def _header(checkpoint: Checkpoint, dtype: torch.dtype, metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in checkpoint.names():
        shape = checkpoint.source.shape(name)
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _append(file: IO[bytes], weight: torch.Tensor) -> str:
    """Writes a tensor and returns its checksum. A function, so that the tensor is gone before the next one is read."""
    file.write(weight.flatten().view(torch.uint8).numpy().data)
    return _checksum(weight)


def _checksum(weight: torch.Tensor) -> str:
    """The sum of the words of 64 bits modulo 2^64, and of the bytes behind the last of them; 16 digits."""
    raw = weight.flatten().view(torch.uint8)
    whole = len(raw) // 8 * 8
    return f"{(int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())) % 2**64:016x}"


def _remove_leftovers(folder: Path) -> None:
    """Removes what conversions that were killed left behind; one that runs has written lately."""
    for file in folder.glob("*.tmp"):
        with suppress(OSError):  # another process was quicker
            if time.time() - file.stat().st_mtime > _LEFTOVER_SECONDS:
                file.unlink()
