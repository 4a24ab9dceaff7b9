"""Small checkpoints on disk, as folders and as GGUF files, and ways to spoil them."""

import json
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from fused_spec.errors import InvalidInput
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.config import expected_shapes
from fused_spec.models.gguf_file import GGUFFile, hugging_face_name
from fused_spec.models.tokenizer import tokenizer_from_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 8, 32, 300
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def model(tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    llama = LlamaForCausalLM(config)
    for parameter in llama.parameters():
        parameter.data = parameter.data.to(dtype)
    return llama


@cache
def tokenizer_of(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, built once."""
    return tokenizer_from_gguf(GGUFFile(path).fields)


def speaking_folder(folder: Path, tokenizer: PreTrainedTokenizerBase, context: int) -> Path:
    """A folder with a tiny model as large as the tokenizer's vocabulary, and the tokenizer; EOS is token 2."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refusal(path: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def gguf_bytes(
    weights: dict[str, torch.Tensor], fields: dict[str, Any] | None = None, vocabulary: bool = True
) -> bytes:
    """A llama GGUF file of Hugging Face weights, q and k permuted as llama.cpp's converter does."""
    back = {hugging_face_name(name): name for name in ("token_embd.weight", "output_norm.weight", "output.weight")}
    for layer in range(2):
        for part in (
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        ):
            back[hugging_face_name(f"blk.{layer}.{part}.weight")] = f"blk.{layer}.{part}.weight"
    with tempfile.TemporaryDirectory() as scratch:
        writer = gguf.GGUFWriter(Path(scratch) / "x.gguf", "llama")
        writer.add_block_count(2)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(48)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        for key, value in (fields or {}).items():
            writer.add_uint32(key, value)
        if vocabulary:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<s>"])
            writer.add_token_types([1] * 257 + [3])
            writer.add_token_merges(["a b"])
            writer.add_eos_token_id(257)
        for name, weight in weights.items():
            array = weight.numpy()
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = len(array) // HEAD_DIM
                array = array.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(back.get(name, name), np.ascontiguousarray(array))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(scratch) / "x.gguf").read_bytes()


def gguf_file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return path


@contextmanager
def bounded_memory(more: int = 2**30) -> Iterator[None]:
    """Lets the process grow by a gibibyte: any allocation beyond is an error, and no InvalidInput.

    Not less, since the address space that threads reserve for themselves counts, too.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(path: Path) -> str:
    """Opens a checkpoint and reads all of it: "", or the one line of InvalidInput; nothing else may be raised."""
    try:
        with open_checkpoint(path) as checkpoint:
            shapes = expected_shapes(checkpoint.config)
            assert checkpoint.names() == list(shapes)
            for name, shape in shapes.items():
                weight = checkpoint.tensor(name)
                assert weight.shape == shape
                assert weight.isfinite().all()
            assert checkpoint.config.rope_frequencies.isfinite().all()
            return ""
    except InvalidInput as error:
        message = str(error)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    return message
