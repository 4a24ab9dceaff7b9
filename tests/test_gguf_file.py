"""GGUFFile: metadata and values against the gguf package."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from fused_spec.models.gguf_file import SUPPORTED_TYPES, GGUFFile, hugging_face_name
from gguf_bytes import field, file_bytes, open_bytes, random_blocks, tensor_info

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


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
    data = random_blocks(kind, rows=6, blocks=2, seed=int(kind))
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
