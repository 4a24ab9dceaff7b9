"""Models of transformers written as GGUF files, as llama.cpp's converter does it."""

import math
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

from families import family_model
from gguf_bytes import random_blocks

NOT_QUANTISED_BY_GGUF = ("Q4_K", "Q5_K", "Q6_K")
SPREAD = 0.1


def wide_model(family: str, tied: bool = False, **rope: Any) -> PreTrainedModel:
    """A model whose every matrix has 256 columns, a whole block of each type."""
    return family_model(
        family, heads=4, kv_heads=2, head_dim=64, hidden=256, inner=256, tied=tied, spread=SPREAD, **rope
    )


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: Iterable[str] = ("F32",),
    *,
    architecture: str | None = None,
    permuted: bool | None = None,
    more: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Writes the model, and gives it the weights that the file really holds.

    Args:
        kinds: types of the matrices, in turn; vectors are F32. Those that the gguf package cannot quantise to are
            filled with random blocks.
        architecture: what the file calls itself; None is the model's own type.
        permuted: rows of queries and keys with rotary pairs side by side; None: as the converter has it, llama's only.
        more: adds metadata and tensors.
    """
    architecture = architecture or model.config.model_type
    permuted = architecture == "llama" if permuted is None else permuted
    writer = GGUFWriter(path, architecture)
    _add_sizes(writer, model.config)
    family = model.config.model_type.replace("mistral", "llama")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], model.config.num_hidden_layers)
    kind_of_next = cycle(kinds)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        kind = GGMLQuantizationType[next(kind_of_next)] if parameter.ndim == 2 else GGMLQuantizationType.F32
        raw = _stored(parameter.detach().numpy(), kind, number)
        parameter.data.copy_(torch.from_numpy(gguf.dequantize(raw, kind)).reshape(parameter.shape))
        if permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = raw.reshape(-1, 2, model.config.head_dim // 2, *raw.shape[1:])
            raw = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(raw.shape))
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None
        writer.add_tensor(stored_name, raw, raw_dtype=kind)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _stored(values: np.ndarray[Any, Any], kind: GGMLQuantizationType, seed: int) -> np.ndarray[Any, Any]:
    if kind.name in NOT_QUANTISED_BY_GGUF:
        rows, columns = values.shape
        return random_blocks(kind, rows, columns // GGML_QUANT_SIZES[kind][0], seed, SPREAD)
    return gguf.quantize(values, kind)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """What the converter puts into `rope_freqs.weight` [D/2] for Llama 3.1: each frequency by itself, in floats."""
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(rope["factor"])
        else:
            kept = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(divisors, dtype=np.float32)
