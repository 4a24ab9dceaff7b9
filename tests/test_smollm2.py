"""A real model: SmolLM2-135M-Instruct, against transformers on the same weights and against our own other paths."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwise import BITWISE
from fused_spec import Engine
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.transformer import Transformer

PROMPTS = [
    "The history of the lighthouse begins",
    "def fibonacci(n):\n    ",
    "Question: A train travels 60 km in 45 minutes. How far does it travel in 3 hours?\nAnswer:",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "List of animals: cat, dog, horse, cow. List of animals again: cat, dog,",
]
NEW_TOKENS = 100
DRAFTS = ["none", "ngram", "self-int8", "self-int4", "model"]


def load(path: Path, dtype: torch.dtype) -> tuple[Transformer, Any]:
    with open_checkpoint(path) as checkpoint:
        return Transformer.load(checkpoint, dtype, torch.device("cpu"), rows=5), checkpoint.tokenizer()


@pytest.fixture(scope="module")
def float32(smollm2_path: Path) -> tuple[Transformer, Any]:
    return load(smollm2_path, torch.float32)


@pytest.fixture(scope="module")
def bfloat16(smollm2_path: Path) -> tuple[Transformer, Any]:
    return load(smollm2_path, torch.bfloat16)


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    """transformers' own reading of the same file, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()


def engine(loaded: tuple[Transformer, Any], draft: str, m: int = 4) -> Engine:
    """An engine on loaded weights; as a second model serves the int8 copy, with a cache of its own."""
    model, tokenizer = loaded
    drafting = {"none": None, "model": model.quantized(8) if draft == "model" else None}.get(draft, draft)
    return Engine(model, tokenizer, draft=drafting, num_draft_tokens=m, max_length=512)


@pytest.fixture(scope="module")
def greedy(float32: tuple[Transformer, Any]) -> dict[str, list[list[int]]]:
    """Greedy token ids of every drafter on every prompt."""
    texts = {}
    for draft in DRAFTS:
        running = engine(float32, draft, m=2 if draft == "ngram" else 6)
        texts[draft] = [
            running.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True).token_ids
            for prompt in PROMPTS
        ]
    return texts


def test_every_drafter_gives_plain_greedy(greedy: dict[str, list[list[int]]]) -> None:
    assert [len(ids) for ids in greedy["none"]] == [NEW_TOKENS] * len(PROMPTS)
    for draft in DRAFTS:
        assert greedy[draft] == greedy["none"], draft


def test_plain_greedy_and_logits_are_transformers(
    greedy: dict[str, list[list[int]]], float32: tuple[Transformer, Any], reference: Any
) -> None:
    """Its arg max given our tokens is our next token at every step, so its own greedy text is ours."""
    model, tokenizer = float32
    for prompt, continuation in zip(PROMPTS, greedy["none"], strict=True):
        ids = tokenizer.encode(prompt)
        tokens = torch.tensor(ids + continuation)
        with torch.inference_mode():
            theirs = reference(tokens[None]).logits[0]
            ours = model.forward(tokens, torch.arange(len(tokens)), model.new_cache(len(tokens)))
        assert theirs[len(ids) - 1 : -1].argmax(-1).tolist() == continuation
        assert (ours - theirs).abs().max() < 1e-4 * (theirs.max() - theirs.min())


def test_bfloat16_greedy_is_the_same_text_with_any_draft(bfloat16: tuple[Transformer, Any]) -> None:
    """Plain decoding too: a row's bits depend neither on its block nor on the width of it (BITWISE)."""
    for prompt in PROMPTS[:3]:
        options: dict[str, Any] = {"max_new_tokens": 70, "temperature": 0.0, "ignore_eos": True}
        expected = engine(bfloat16, "none").generate(prompt, **options).token_ids
        for draft, m in (("ngram", 4), ("self-int8", 3), ("self-int4", 6), ("model", 2)):
            text = engine(bfloat16, draft, m).generate(prompt, **options).token_ids
            if BITWISE:
                assert text == expected, (draft, prompt)
            else:
                assert_only_near_ties_differ(bfloat16, prompt, text)


def assert_only_near_ties_differ(loaded: tuple[Transformer, Any], prompt: str, text: list[int]) -> None:
    """Teacher-forced: where a one-row pass prefers another token, its two best lie within 2 bfloat16 ulps."""
    model, tokenizer = loaded
    ids = tokenizer.encode(prompt)
    tokens = torch.tensor(ids + text)
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        rows = [model.forward(tokens[i : i + 1], torch.tensor([i]), cache)[0].float() for i in range(len(tokens))]
    for i, token in enumerate(text):
        row = rows[len(ids) - 1 + i]
        best = row.max().item()
        ulp = 2.0 ** (math.floor(math.log2(abs(best))) - 7)
        assert best - row[token].item() <= 2 * ulp, (prompt, i)


def test_a_layout_for_one_row_differs_only_at_near_ties(bfloat16: tuple[Transformer, Any], smollm2_path: Path) -> None:
    """Plain decoding loads weights for products that round less: text may part where two tokens are about equal."""
    with open_checkpoint(smollm2_path) as checkpoint:
        single = Transformer.load(checkpoint, torch.bfloat16, torch.device("cpu"), rows=1)
    for prompt in PROMPTS[:2]:
        text = Engine(single, bfloat16[1], max_length=512).generate(
            prompt, max_new_tokens=70, temperature=0.0, ignore_eos=True
        )
        assert_only_near_ties_differ(bfloat16, prompt, text.token_ids)


@pytest.mark.parametrize("draft", ["self-int8", "self-int4"])
def test_self_draft_is_a_good_draft(bfloat16: tuple[Transformer, Any], draft: str) -> None:
    """The quantised copy shares the cache and agrees with its bfloat16 self on most tokens."""
    stats = engine(bfloat16, draft).generate(PROMPTS[0], max_new_tokens=120, seed=1).stats
    assert stats.acceptance_length is not None
    assert stats.acceptance_length > 3
    assert stats.total_variation == 0
