"""GGUF files put together byte by byte."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from fused_spec.models.gguf_file import GGUFFile


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def field(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_bytes(
    fields: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    header = magic + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields + tensors)
    return header + b"\0" * (-len(header) % 32) + data


def open_bytes(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def random_blocks(
    kind: GGMLQuantizationType, rows: int, blocks: int, seed: int, spread: float | None = None
) -> np.ndarray[Any, Any]:
    """Random bytes [rows, blocks * block_bytes] with finite scales where the type keeps float16 scales.

    With `spread`, the scales are such that this is the root mean square of the values.
    """
    size = GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)

    def put(scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        stored = scale.astype(np.float16).view(np.uint8)
        if kind == GGMLQuantizationType.Q6_K:
            data[..., -2:] = stored
        else:
            data[..., 0:2] = data[..., 2:4] = stored
        return data.reshape(rows, -1)

    scale = rng.uniform(0.005, 0.02, (rows, blocks, 1))
    out = put(scale)
    return out if spread is None else put(scale * spread / np.sqrt(np.square(gguf.dequantize(out, kind)).mean()))
