"""GGUFFile: values against the gguf package, and corrupt files, which must be refused at once and by our error only."""

import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_spec.errors import InvalidInput
from fused_spec.models.gguf_file import SUPPORTED_TYPES, GGUFFile, hugging_face_name

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


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


def refused(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        open_bytes(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "x.gguf") + ": ")
    assert "\n" not in message
    return message.removeprefix(str(tmp_path / "x.gguf") + ": ")


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray[Any, Any]:
    """Random bytes [rows, blocks * block_bytes] with finite scales where the type keeps float16 scales."""
    size = GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(int(kind))
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scale = rng.uniform(0.005, 0.02, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if kind == GGMLQuantizationType.Q6_K:
        data[..., -2:] = scale
    else:
        data[..., 0:2] = data[..., 2:4] = scale
    return data.reshape(rows, -1)


def test_every_kind_of_metadata_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -3)
    writer.add_float32("f32", 0.5)
    writer.add_bool("bool", True)
    writer.add_string("text", "grüße 🙂")
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 0.1)
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("reals", [0.5, 0.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.tensors == {}
    assert file.fields == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 2**32 - 1,
        "i32": -3,
        "f32": 0.5,
        "bool": True,
        "text": "grüße 🙂",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "texts": ["a", "", "ü"],
        "numbers": [1, -2, 3],
        "flags": [True, False],
        "reals": [0.5, 0.25],
    }


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_tensors_equal_gguf_dequantize(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    assert kind in SUPPORTED_TYPES
    data = random_blocks(kind, rows=6, blocks=2)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.add_tensor("blk.1.ffn_up.weight", data[::-1].copy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    expected = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))
    assert expected.isfinite().all()
    assert expected.unique().numel() > 100
    first = file.load("model.layers.0.mlp.up_proj.weight")
    assert first.dtype == torch.float32
    assert first.shape == expected.shape == (6, 2 * GGML_QUANT_SIZES[kind][0])
    assert torch.equal(first, expected)
    assert torch.equal(file.load("model.layers.1.mlp.up_proj.weight"), expected.flip(0))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_approximate_what_was_quantised(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    data = gguf.quantize(values, kind)
    content = file_bytes([], [tensor_info("output.weight", [64, 8], int(kind))], data.tobytes())
    loaded = open_bytes(tmp_path, content).load("lm_head.weight").numpy()
    # half a step of 4 bits over a block's range of about 6 standard deviations, with room for clipping at one end
    assert np.abs(loaded - values).max() < 0.5


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_native_tensors_keep_their_bits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    content = file_bytes([], [tensor_info("output.weight", [5, 3], int(GGMLQuantizationType[name]))], raw)
    file = open_bytes(tmp_path, content)
    loaded = file.load("lm_head.weight")
    assert loaded.dtype == dtype
    assert torch.equal(loaded, values)
    loaded.zero_()  # a copy: the file and later reads stay as they are
    assert torch.equal(file.load("lm_head.weight"), values)
    file.close()
    assert loaded.sum() == 0


def test_alignment_and_offsets(tmp_path: Path) -> None:
    fields = [field("general.alignment", 4, struct.pack("<I", 64))]
    infos = [tensor_info("b", [2], 0, 64), tensor_info("a", [2], 0, 0)]
    content = file_bytes(fields, infos)
    content += b"\0" * (-len(content) % 64) + struct.pack("<2f", 1, 2) + b"\0" * 56 + struct.pack("<2f", 3, 4)
    file = open_bytes(tmp_path, content)
    assert file.load("a").tolist() == [1, 2]
    assert file.load("b").tolist() == [3, 4]


def test_version_2_is_read(tmp_path: Path) -> None:
    assert open_bytes(tmp_path, file_bytes([field("a", 7, b"\1")], [], version=2)).fields == {"a": True}


def test_names_become_hugging_face_names() -> None:
    known = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "blk.12.attn_norm.weight": "model.layers.12.input_layernorm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.attn_k.bias": "model.layers.0.self_attn.k_proj.bias",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    assert {name: hugging_face_name(name) for name in known} == known
    for strange in ("rope_freqs.weight", "blk.00.attn_q.weight", "blk.1.attn_q.scale", "blk.1.ffn_x.weight"):
        assert hugging_face_name(strange) == strange


HUGE = struct.pack("<Q", 2**63)


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


def test_real_file_agrees_with_its_own_package(smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    assert len(file.tensors) == 272
    assert file.fields["llama.attention.head_count_kv"] == 3
    assert len(file.fields["tokenizer.ggml.tokens"]) == 49152
    info = file.tensors["model.layers.7.self_attn.k_proj.weight"]
    assert (info.type, info.shape) == (GGMLQuantizationType.Q4_1, (192, 576))
    with Path(smollm2_path).open("rb") as stream:
        stream.seek(info.offset)
        data = np.frombuffer(stream.read(info.num_bytes), dtype=np.uint8).reshape(192, -1)
    expected = torch.from_numpy(gguf.dequantize(data, info.type))
    assert torch.equal(file.load(info.name), expected)
    assert 0.01 < expected.std() < 1
