"""The transformer against transformers' Llama on tiny checkpoints, and against itself in other block sizes."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bitwise import assert_same_row
from fused_spec.kernels.attention import NARROW, STRIDE
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.transformer import Transformer


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tmp_path: Path, heads: int, kv_heads: int, tied: bool) -> None:
    """300 positions in float32, max error below 1e-4 of the logit range; blocks of any size give the same."""
    torch.manual_seed(heads)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    theirs = LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        ours = Transformer.load(checkpoint, torch.float32, torch.device("cpu"))
    tokens = torch.randint(0, 200, (300,))
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
        bound = 1e-4 * (expected.max() - expected.min())
        for widths in ([300], [1] * 300, [7, 100, 1, 2, 190]):
            cache = ours.new_cache(300)
            rows, start = [], 0
            for width in widths:
                block = torch.arange(start, start + width)
                rows.append(ours.forward(tokens[block], block, cache))
                start += width
            assert (torch.cat(rows) - expected).abs().max() < bound
        last = ours.forward(tokens, torch.arange(300), ours.new_cache(300), last_only=True)
        torch.testing.assert_close(last, rows[-1][-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("width", [20, NARROW + 1])
def test_bfloat16_on_a_cpu(tmp_path: Path, rows: int, width: int) -> None:
    """Every layout of bfloat16 weights gives the logits of float32 to what rounding to 8 bits leaves of them."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tokens = torch.arange(width) % 50
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        with open_checkpoint(tmp_path) as checkpoint, torch.inference_mode():
            model = Transformer.load(checkpoint, dtype, torch.device("cpu"), rows=rows)
            cache = model.new_cache(width)
            logits.append(model.forward(tokens, torch.arange(width), cache))
            assert logits[-1].dtype == model.logits_dtype
        assert (cache.keys.dtype, cache.capacity) == (torch.float32, -(-width // STRIDE) * STRIDE)
    # 2 layers of 4 products in a row, the head and the embedding: ten roundings of half an eps, all the same way
    assert (logits[0] - logits[1]).abs().max() < 5 * torch.finfo(torch.bfloat16).eps * logits[0].abs().max()


def test_one_row_comes_out_like_a_block(tmp_path: Path) -> None:
    """Bit for bit, in bfloat16: greedy text is the same with a draft and without one."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        model = Transformer.load(checkpoint, torch.bfloat16, torch.device("cpu"), rows=5)
    tokens = torch.randint(0, 96, (270,))
    with torch.inference_mode():
        expected = model.forward(tokens[:100], torch.arange(100), cache := model.new_cache(280))[-1]
        single = torch.cat([model.forward(tokens[i : i + 1], torch.tensor([i]), cache) for i in range(100, 270)])
        for width in (2, 5, 8):
            block = model.new_cache(280)
            assert_same_row(model.forward(tokens[:100], torch.arange(100), block)[-1], expected, 0.05)
            for first in range(100, 270 - width, width):
                rows = model.forward(tokens[first : first + width], torch.arange(first, first + width), block)
                assert_same_row(rows, single[first - 100 : first - 100 + width], 0.05)
