"""Toy models that mostly count in circles, so that every kind of draft is often right and sometimes wrong."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from fused_spec import Engine
from fused_spec.drafters import ModelDrafter
from fused_spec.models.linear import DenseLinear
from fused_spec.models.tokenizer import tokenizer_from_gguf
from fused_spec.models.transformer import Transformer
from toy import toy_model

VOCAB, CYCLE = 96, 12
PROMPT = [*range(12, 24), *range(12, 24)]
"""Twice "-./012345678"."""
DRAFTERS = ["model", "ngram", "self-int8", "self-int4", "none"]


@cache
def ascii_tokenizer() -> PreTrainedTokenizerBase:
    """One token per printable ASCII character but the space (0 is "!"), then "ab" and the special token "<s>"."""
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*map(chr, range(33, 127)), "ab", "<s>"],
            "tokenizer.ggml.token_type": [1] * 95 + [3],
            "tokenizer.ggml.merges": ["a b"],
        }
    )


def cycle_model(sharpness: float, *, eos: tuple[int, ...] = (), noise: float = 0.0, context: int = 256) -> Transformer:
    """After token t most likely comes t + 1 within its dozen; attention and MLP disturb that a little.

    `noise` is added to the output weights.
    """
    model = toy_model(5, vocab_size=VOCAB, eos=eos, context=context)
    direction = F.normalize(model.embedding)
    before = torch.tensor([t - t % CYCLE + (t - 1) % CYCLE for t in range(VOCAB)])
    generator = torch.Generator().manual_seed(6)
    blur = noise * torch.randn(direction.shape, generator=generator)
    model.embedding = direction * 32
    model.head = DenseLinear(direction[before] * sharpness + blur)
    return model


def cycle_engine(drafter: str, *, eos: tuple[int, ...] = (), max_length: int = 64, **options: Any) -> Engine:
    """An engine over such a model. Whatever model drafts has other output weights, so that it is wrong at times."""
    blurred = cycle_model(3.4, noise=0.3)
    draft = {"model": blurred, "none": None}.get(drafter, drafter)
    options = {"num_draft_tokens": 4, "max_length": max_length, **options}
    engine = Engine(cycle_model(4.0, eos=eos), ascii_tokenizer(), draft=draft, **options)
    if drafter.startswith("self-"):
        assert isinstance(engine.drafter, ModelDrafter)
        engine.drafter.model.head = blurred.head
    return engine
