"""A real model: SmolLM2-135M-Instruct, against transformers on the same weights and against our own other paths."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_spec import Engine
from fused_spec.drafters import Drafts
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.transformer import Transformer
from fused_spec.round import RoundState, Sampling

PROMPTS = [
    "The history of the lighthouse begins",
    "def fibonacci(n):\n    ",
    "Question: A train travels 60 km in 45 minutes. How far does it travel in 3 hours?\nAnswer:",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "List of animals: cat, dog, horse, cow. List of animals again: cat, dog,",
]
NEW_TOKENS = 200
DRAFTS = ["none", "ngram", "self-int8", "model"]


def load(path: Path, dtype: torch.dtype) -> tuple[Transformer, Any]:
    with open_checkpoint(path) as checkpoint:
        return Transformer.load(checkpoint, dtype, torch.device("cpu")), checkpoint.tokenizer()


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


class Hopeless:
    """Drafts nothing, m wide: the verifier runs its m + 1 rows and one token comes of it."""

    def __init__(self, m: int) -> None:
        self.num_tokens = m

    def prefill(self, tokens: torch.Tensor) -> None:
        pass

    def propose(self, state: RoundState, sampling: Sampling) -> Drafts:
        return Drafts(torch.full((1, self.num_tokens), -1), None, None)


def test_bfloat16_greedy_is_bitwise_our_wide_path(bfloat16: tuple[Transformer, Any]) -> None:
    """What is accepted changes which row of a block a token comes from, but not its logits."""
    plain = engine(bfloat16, "ngram")
    plain.drafter = Hopeless(4)
    for prompt in PROMPTS[:3]:
        options: dict[str, Any] = {"max_new_tokens": 70, "temperature": 0.0, "ignore_eos": True}
        expected = plain.generate(prompt, **options).token_ids
        for draft in ("ngram", "self-int8", "model"):
            assert engine(bfloat16, draft).generate(prompt, **options).token_ids == expected, (draft, prompt)


def test_bfloat16_differs_from_width_one_only_at_near_ties(bfloat16: tuple[Transformer, Any]) -> None:
    """Teacher-forced: where a one-row pass prefers another token, its two best lie within 2 bfloat16 ulps."""
    model, tokenizer = bfloat16
    running = engine(bfloat16, "self-int8")
    for prompt in PROMPTS[:3]:
        ids = tokenizer.encode(prompt)
        out = running.generate(prompt, max_new_tokens=70, temperature=0.0, ignore_eos=True).token_ids
        tokens = torch.tensor(ids + out)
        with torch.inference_mode():
            cache = model.new_cache(len(tokens))
            rows = [model.forward(tokens[i : i + 1], torch.tensor([i]), cache)[0].float() for i in range(len(tokens))]
        for i, token in enumerate(out):
            row = rows[len(ids) - 1 + i]
            if row.argmax().item() != token:
                best = row.max().item()
                ulp = 2.0 ** (math.floor(math.log2(abs(best))) - 7)
                assert best - row[token].item() <= 2 * ulp, (prompt, i)


def test_self_draft_is_a_good_draft(bfloat16: tuple[Transformer, Any]) -> None:
    """The int8 copy shares the cache and agrees with its bfloat16 self on most tokens."""
    stats = engine(bfloat16, "self-int8").generate(PROMPTS[0], max_new_tokens=120, seed=1).stats
    assert stats.acceptance_length is not None
    assert stats.acceptance_length > 3
    assert stats.total_variation == 0
