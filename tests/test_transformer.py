"""The transformer against transformers' Llama on tiny checkpoints, and against itself in other block sizes."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def test_dtype_and_cache_of_the_cpu(tmp_path: Path) -> None:
    """Weights and logits in the working dtype; keys and values in float32, which a CPU attends to faster."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        model = Transformer.load(checkpoint, torch.bfloat16, torch.device("cpu"))
    cache = model.new_cache(10)
    with torch.inference_mode():
        logits = model.forward(torch.tensor([1, 2]), torch.arange(2), cache)
    assert (logits.dtype, cache.keys.dtype, cache.capacity) == (torch.bfloat16, torch.float32, 128)
