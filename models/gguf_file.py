"""GGUF files: a bounded header reader over mmap, and tensors by their Hugging Face names.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here rather than by
`gguf.GGUFReader`, which needs seconds for a vocabulary of 49 152 tokens and trusts the lengths a file declares. Every
declared count is compared with the bytes that are left before anything is allocated, so a corrupt file costs time and
memory in proportion to its size at most.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from fused_spec.errors import InvalidInput

_NATIVE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTISED = {GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
SUPPORTED_TYPES = (*_NATIVE, *sorted(_QUANTISED))
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_MAX_ITEMS = 1 << 24  # of one metadata array; the largest vocabularies have about 2^18 entries
_MAX_DIMS = 4
_CHUNK = 1 << 20  # bytes of a tensor that are dequantised at a time
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` in torch order, `offset` and `num_bytes` in the file."""

    name: str
    stored_name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def hugging_face_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; a name without a counterpart stays."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _BLOCK_NAMES:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    return _GLOBAL_NAMES.get(name, name)


class GGUFFile:
    """An open GGUF file (little-endian, version 2 or 3).

    Attributes:
        fields: metadata by key; arrays are lists.
        tensors: by Hugging Face name, in file order.
        interleaved: query and key rows are stored for interleaved rotary embedding: architecture llama only.

    Raises InvalidInput for a file that is truncated or corrupt, or that holds a tensor type outside SUPPORTED_TYPES.
    """

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    interleaved: bool

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._size = os.path.getsize(self.path)
            if self._size < 24:
                raise InvalidInput(f"{self.path}: truncated GGUF file: shorter than its 24-byte header")
            data: npt.NDArray[np.uint8] = np.memmap(self.path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise InvalidInput(f"{self.path}: cannot be read: {error.strerror or error}") from error
        header = _Header(data.data, self.path)
        num_tensors, num_fields = header.start()
        self.fields = header.fields(num_fields)
        infos = [header.tensor_info() for _ in range(num_tensors)]
        self.tensors = self._place(infos, header.offset)
        self.interleaved = self.fields.get("general.architecture") == "llama"

    def names(self) -> Iterable[str]:
        """Hugging Face names of the tensors, in file order."""
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in torch order."""
        return self.tensors[name].shape

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for error messages: always this one."""
        return self.path

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor with this Hugging Face name in `dtype`; None: F32, F16 and BF16 as stored, others as float32."""
        if name not in self.tensors:
            raise InvalidInput(f"{self.path}: no tensor {name!r}")
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=dtype or _NATIVE.get(info.type, torch.float32))
        rows = out.view(math.prod(info.shape[:-1]), -1)
        row_bytes = info.num_bytes // len(rows)
        step = max(1, _CHUNK // row_bytes)  # in pieces, so that no second copy of a whole matrix is made
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            raw = self._read(info.offset + start * row_bytes, len(part) * row_bytes)
            part.copy_(_values(raw.reshape(len(part), -1), info.type))
        return out

    def mapped(self, name: str) -> torch.Tensor | None:
        """None: most tensors of such files need converting."""
        return None

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _read(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """Bytes of the file. Not through a mapping: its pages would count as memory of ours, or vanish under us."""
        try:
            raw = np.fromfile(self.path, dtype=np.uint8, count=count, offset=offset)
        except OSError as error:
            raise InvalidInput(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if len(raw) != count:
            raise InvalidInput(f"{self.path}: truncated while it was read: {len(raw)} of {count} bytes at {offset}")
        return raw

    def _place(self, infos: list[GGUFTensor], header_end: int) -> dict[str, GGUFTensor]:
        """Turns offsets into the data section into offsets into the file, and checks that every tensor lies there."""
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise InvalidInput(f"{self.path}: general.alignment is {alignment!r}; allowed: a power of two")
        start = -(-header_end // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end_of_last = start
        for info in sorted(infos, key=lambda info: info.offset):
            offset = start + info.offset
            if info.offset % alignment or offset < end_of_last:
                raise InvalidInput(f"{self.path}: tensor {info.stored_name!r} is misaligned or overlaps another one")
            end_of_last = offset + info.num_bytes
            if end_of_last > self._size:
                raise InvalidInput(
                    f"{self.path}: truncated: tensor {info.stored_name!r} ends at byte {end_of_last}, "
                    f"the file has {self._size}"
                )
            if info.name in tensors:
                raise InvalidInput(f"{self.path}: tensor {info.stored_name!r} is there twice")
            tensors[info.name] = GGUFTensor(info.name, info.stored_name, info.type, info.shape, offset, info.num_bytes)
        return tensors


def _values(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> torch.Tensor:
    """Rows of stored bytes [n, row bytes] as numbers [n, columns]."""
    if kind in _NATIVE:
        return torch.from_numpy(raw).view(_NATIVE[kind])
    with np.errstate(over="ignore", invalid="ignore"):  # bad scales show as NaN, which the caller looks for
        return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, kind), dtype=np.float32))


class _Header:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, data: memoryview, path: str) -> None:
        self.data, self.path, self.offset = data, path, 0

    def take(self, count: int, item_bytes: int, what: str) -> int:
        """Moves past `count` items of `item_bytes` bytes (or at least so many) and returns where they start."""
        left = len(self.data) - self.offset
        if count * item_bytes > left:
            raise InvalidInput(
                f"{self.path}: truncated or corrupt: {what} needs {count * item_bytes} bytes at byte {self.offset}, "
                f"{left} are left"
            )
        start = self.offset
        self.offset += count * item_bytes
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self.take(1, struct.calcsize(code), what)
        return struct.unpack_from(code, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        start = self.take(length, 1, what)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{self.path}: corrupt: {what} at byte {start} is not UTF-8 text") from None

    def start(self) -> tuple[int, int]:
        """Magic, version and the two counts (tensors, fields)."""
        if bytes(self.data[:4]) != b"GGUF":
            raise InvalidInput(f"{self.path}: not a GGUF file: it starts with {bytes(self.data[:4])!r}, not b'GGUF'")
        self.offset = 4
        version = self.scalar("<I", "version")
        if version not in (2, 3):
            raise InvalidInput(f"{self.path}: GGUF version {version} is not supported; allowed: 2, 3 (little-endian)")
        num_tensors, num_fields = self.scalar("<Q", "tensor count"), self.scalar("<Q", "field count")
        here = self.offset
        # the least that an entry can take: an empty name and a one-byte value, or one dimension
        self.take(num_tensors * 32 + num_fields * 13, 1, f"a header of {num_tensors} tensors and {num_fields} fields")
        self.offset = here
        return num_tensors, num_fields

    def fields(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = self.string("a metadata key")
            if key in fields:
                raise InvalidInput(f"{self.path}: metadata key {key[:80]!r} is there twice")
            fields[key] = self.value(f"metadata {key[:80]!r}")
        return fields

    def value_type(self, what: str) -> GGUFValueType:
        number = self.scalar("<I", what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise InvalidInput(f"{self.path}: {what} has unknown value type {number}; allowed: 0 to 12") from None

    def value(self, what: str) -> Any:
        kind = self.value_type(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == GGUFValueType.STRING:
            return self.string(what)
        item = self.value_type(what)
        count = self.scalar("<Q", what)
        if item == GGUFValueType.ARRAY or count > _MAX_ITEMS:
            raise InvalidInput(f"{self.path}: {what} is an array of arrays or has {count} items; allowed: {_MAX_ITEMS}")
        if item == GGUFValueType.STRING:
            here = self.offset
            self.take(count, 8, what)  # each string has at least its length
            self.offset = here
            return [self.string(what) for _ in range(count)]
        code = _SCALARS[item]
        start = self.take(count, struct.calcsize(code), what)
        return list(struct.unpack_from(f"<{count}{code[1]}", self.data, start))

    def tensor_info(self) -> GGUFTensor:
        """One entry of the tensor table; `offset` is still relative to the data section."""
        name = self.string("a tensor name")
        what = f"tensor {name[:80]!r}"
        num_dims = self.scalar("<I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise InvalidInput(f"{self.path}: {what} has {num_dims} dimensions; allowed: 1 to {_MAX_DIMS}")
        dims = [self.scalar("<Q", what) for _ in range(num_dims)]
        number, offset = self.scalar("<I", what), self.scalar("<Q", what)
        kind = next((kind for kind in SUPPORTED_TYPES if kind == number), None)
        if kind is None:
            known = {int(kind): kind.name for kind in GGMLQuantizationType}
            allowed = ", ".join(kind.name for kind in SUPPORTED_TYPES)
            raise InvalidInput(
                f"{self.path}: {what} has type {known.get(number, f'number {number}')}; allowed: {allowed}"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        # 2^63 elements are more than any file holds, and torch cannot count further
        if min(dims) < 1 or math.prod(dims) >= 2**63 or dims[0] % block:
            raise InvalidInput(
                f"{self.path}: {what} has dimensions {dims}; allowed: positive, the first a multiple of {block}"
            )
        num_bytes = math.prod(dims) // block * block_bytes
        return GGUFTensor(hugging_face_name(name), name, kind, tuple(reversed(dims)), offset, num_bytes)
