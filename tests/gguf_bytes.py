"""GGUF files put together byte by byte."""

import struct
from pathlib import Path

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
