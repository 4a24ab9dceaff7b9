"""GGUFFile: corrupt files are refused at once, by name and by our error only."""

import struct
import tempfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_spec.errors import InvalidInput
from fused_spec.models.gguf_file import GGUFFile
from gguf_bytes import field, file_bytes, open_bytes, string, tensor_info

HUGE = struct.pack("<Q", 2**63)


def refused(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        open_bytes(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "x.gguf") + ": ")
    assert "\n" not in message
    return message.removeprefix(str(tmp_path / "x.gguf") + ": ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated GGUF file: shorter than its 24-byte header"),
        (b"GGUF\3\0\0\0", "truncated GGUF file: shorter than its 24-byte header"),
        (file_bytes([], [], magic=b"PK\3\4"), "not a GGUF file: it starts with b'PK\\x03\\x04', not b'GGUF'"),
        (file_bytes([], [], version=1), "GGUF version 1 is not supported; allowed: 2, 3"),
        (file_bytes([], [], version=3 << 24), "GGUF version 50331648 is not supported; allowed: 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), f"truncated or corrupt: a header of {2**63} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "truncated or corrupt: a header of 0 tensors and 1844"),
        (file_bytes([HUGE + b"k" * 30], []), f"truncated or corrupt: a metadata key needs {2**63} bytes at byte 32"),
        (file_bytes([field("k", 8, HUGE)], []), f"truncated or corrupt: metadata 'k' needs {2**63} bytes"),
        (
            file_bytes([field("k", 9, struct.pack("<IQ", 8, 2**63))], []),
            f"metadata 'k' is an array of arrays or has {2**63} items; allowed: {2**24}",
        ),
        (
            file_bytes([field("k", 9, struct.pack("<IQ", 8, 2**20))], []),
            f"truncated or corrupt: metadata 'k' needs {2**23} bytes",
        ),
        (
            file_bytes([field("k", 9, struct.pack("<IQ", 4, 2**20))], []),
            f"truncated or corrupt: metadata 'k' needs {2**22} bytes",
        ),
        (
            file_bytes([field("k", 9, struct.pack("<IQIQ", 9, 1, 4, 0))], []),
            "metadata 'k' is an array of arrays or has 1 items",
        ),
        (file_bytes([field("k", 13, b"")], []), "metadata 'k' has unknown value type 13; allowed: 0 to 12"),
        (
            file_bytes([field("k", 9, struct.pack("<IQ", 77, 0))], []),
            "metadata 'k' has unknown value type 77; allowed: 0 to 12",
        ),
        (file_bytes([field("k", 7, b"\1")] * 2, []), "metadata key 'k' is there twice"),
        (file_bytes([field("k", 8, string(b"\xff\xfe"))], []), "corrupt: metadata 'k' at byte"),
        (
            file_bytes([field("general.alignment", 4, struct.pack("<I", 0))], []),
            "general.alignment is 0; allowed: a power of two",
        ),
        (
            file_bytes([field("general.alignment", 4, struct.pack("<I", 48))], []),
            "general.alignment is 48; allowed: a power of two",
        ),
        (file_bytes([], [tensor_info("t", [4])], b"\0" * 15), "truncated: tensor 't' ends at byte 80, the file has 79"),
        (file_bytes([], [tensor_info("t", [4], offset=2**63)], b"\0" * 16), "truncated: tensor 't' ends at byte 92233"),
        (file_bytes([], [tensor_info("t", [4], offset=8)], b"\0" * 64), "tensor 't' is misaligned or overlaps"),
        (
            file_bytes([], [tensor_info("t", [16]), tensor_info("u", [4], offset=32)], b"\0" * 64),
            "tensor 'u' is misaligned or overlaps",
        ),
        (
            file_bytes([], [tensor_info("t", [4]), tensor_info("t", [4], offset=32)], b"\0" * 64),
            "tensor 't' is there twice",
        ),
        (
            file_bytes(
                [],
                [tensor_info("output.weight", [4]), tensor_info("lm_head.weight", [4], offset=32)],
                b"\0" * 64,
            ),
            "tensor 'lm_head.weight' is there twice",
        ),
        (file_bytes([], [tensor_info("t", [])], b"\0" * 64), "tensor 't' has 0 dimensions; allowed: 1 to 4"),
        (file_bytes([], [tensor_info("t", [1] * 5)], b"\0" * 64), "tensor 't' has 5 dimensions; allowed: 1 to 4"),
        (file_bytes([], [tensor_info("t", [4, 0])], b"\0" * 64), "tensor 't' has dimensions [4, 0]; allowed: positive"),
        (file_bytes([], [tensor_info("t", [2**40, 2**40])]), "tensor 't' has dimensions [1099511627776, 10995116"),
        (
            file_bytes([], [tensor_info("t", [33], kind=8)], b"\0" * 64),
            "tensor 't' has dimensions [33]; allowed: positive, the first a multiple of 32",
        ),
        (
            file_bytes([], [tensor_info("t", [256], kind=10)], b"\0" * 99),
            "tensor 't' has type Q2_K; allowed: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K",
        ),
        (file_bytes([], [tensor_info("t", [4], kind=28)], b"\0" * 64), "tensor 't' has type F64; allowed: F32"),
        (file_bytes([], [tensor_info("t", [4], kind=999)], b"\0" * 64), "tensor 't' has type number 999; allowed: F32"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_corrupt_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    assert refused(tmp_path, content).startswith(message)


def test_missing_file_and_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none.gguf: cannot be read: No such file or directory$"):
        GGUFFile(tmp_path / "none.gguf")
    file = open_bytes(tmp_path, file_bytes([], [tensor_info("t", [4])], b"\0" * 16))
    with pytest.raises(InvalidInput, match=r"x.gguf: no tensor 'u'$"):
        file.load("u")


def test_array_of_many_empty_texts_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """A sparse file: 2^25 empty texts would fit its length, and would take gigabytes as a list."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field("k", 9, struct.pack("<IQ", 8, 2**25))
    path = tmp_path / "x.gguf"
    with path.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + 2**28)
    with pytest.raises(InvalidInput, match=r"has 33554432 items; allowed: 16777216$"):
        GGUFFile(path)


def sample() -> bytes:
    """A small file with every kind of entry, as the seed of the corruptions below."""
    fields = [
        field("general.architecture", 8, string("llama")),
        field("general.alignment", 4, struct.pack("<I", 32)),
        field("texts", 9, struct.pack("<IQ", 8, 2) + string("a") + string("bc")),
        field("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
        field("real", 12, struct.pack("<d", 0.5)),
    ]
    infos = [
        tensor_info("token_embd.weight", [32, 2], int(GGMLQuantizationType.Q8_0), 0),
        tensor_info("output_norm.weight", [4], int(GGMLQuantizationType.F32), 96),
        tensor_info("blk.0.attn_q.weight", [4, 4], int(GGMLQuantizationType.BF16), 128),
    ]
    return file_bytes(fields, infos, bytes(range(160)))


def read_all(content: bytes) -> bool:
    """Opens the file and loads every tensor; False where InvalidInput says no, and nothing else may be raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(content)
        try:
            file = GGUFFile(path)
            shapes = {name: file.load(name).shape for name in file.tensors}
        except InvalidInput as error:
            message = str(error)
        else:
            message = ""
            assert shapes == {name: info.shape for name, info in file.tensors.items()}
    assert "\n" not in message
    return not message


def test_sample_is_whole() -> None:
    assert read_all(sample())


def test_truncation_at_every_byte_is_refused() -> None:
    whole = sample()
    assert not any(read_all(whole[:end]) for end in range(len(whole)))


@settings(max_examples=400, deadline=2000)
@given(flips=st.lists(st.tuples(st.integers(0, len(sample()) - 1), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_raise_nothing_else_and_take_no_time(flips: list[tuple[int, int]]) -> None:
    content = bytearray(sample())
    for position, bit in flips:
        content[position] ^= 1 << bit
    read_all(bytes(content))


@settings(max_examples=200, deadline=2000)
@given(st.binary(max_size=200))
def test_noise_behind_the_magic_raises_nothing_else(noise: bytes) -> None:
    read_all(b"GGUF\3\0\0\0" + noise)
