"""The round as a GPU runs it, on the CPU: every kernel under Triton's interpreter, models, caches and all.

The same engine code on the torch path is the oracle. In float32 the two differ by rounding, and tokens are equal unless
a draw lies within that of a boundary: with some hundred draws at 1e-6, these seeds would have to be unlucky.
"""

import math
from typing import Any

import pytest
import torch

from fused_spec import Cactus, Engine
from fused_spec.kernels.check import default_backend
from fused_spec.models.device_cache import DeviceCache
from fused_spec.models.transformer import Transformer
from graphs import with_graphs
from toy import toy_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 3, 1, 4]
ARCHITECTURES = ["llama", "qwen2", "qwen3"]
DRAFTS = ["none", "model", "ngram", "self-int8", "self-int4"]


def model(seed: int, architecture: str = "llama", layers: int = 1, **options: Any) -> Transformer:
    return toy_model(
        seed, vocab_size=40, sharpness=2.0, layers=layers, context=128, architecture=architecture, **options
    )


def engine(draft: str, **options: Any) -> Engine:
    """Built under whichever backend is the default at the time."""
    drafts: dict[str, Any] = {"none": None, "model": model(2)}
    options = {"num_draft_tokens": 3, "max_length": 64, "rule": Cactus(0.1), **options}
    return Engine(model(1, layers=2), draft=drafts.get(draft, draft), **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward(architecture: str) -> None:
    """A prompt at once, then blocks of several widths: logits and cache within float32 rounding of the torch path."""
    torch_path = model(1, architecture, layers=2)
    tokens = torch.tensor(PROMPT)
    with torch.inference_mode():
        cache = torch_path.new_cache(64)
        expected = torch_path.forward(tokens, torch.arange(14), cache)
        with default_backend("triton"):
            ours, start = torch_path.new_cache(64, width=8), 0
            assert isinstance(ours, DeviceCache)
            for width in (9, 1, 2, 2):  # the first is wider than what is decoded: a prompt's way
                block = slice(start, start + width)
                logits = torch_path.forward(tokens[block], torch.arange(14)[block], ours)
                torch.testing.assert_close(logits, expected[block], rtol=1e-4, atol=1e-4)
                start += width
                assert ours.used.item() == start
                last = torch.empty(1, 40)
                again = torch_path.forward(tokens[block], torch.arange(14)[block], ours, last_only=True, out=last)
                assert again.data_ptr() == last.data_ptr()
                torch.testing.assert_close(last, logits[-1:], rtol=1e-5, atol=1e-5)  # one row of a product, or several
    torch.testing.assert_close(ours.keys[:, :14], cache.keys[:, :14], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.values[:, :14], cache.values[:, :14], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft", ["none", "model", "ngram"])
@pytest.mark.parametrize(
    "request_options",
    [
        {"temperature": 0.0, "logprobs": True},
        {"seed": 5},
        {"seed": 6, "temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "logprobs": True},
    ],
    ids=["greedy", "plain", "filters"],
)
def test_the_engine_gives_the_torch_paths_text(draft: str, request_options: dict[str, Any]) -> None:
    expected = engine(draft).generate(PROMPT, max_new_tokens=9, **request_options)
    with default_backend("triton"):
        ours = with_graphs(engine(draft)).generate(PROMPT, max_new_tokens=9, **request_options)
    assert ours.token_ids == expected.token_ids
    assert ours.stats.accepted == expected.stats.accepted
    assert ours.stats.drafted == expected.stats.drafted
    if expected.logprobs is not None and ours.logprobs is not None:
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    if expected.stats.total_variation is not None:
        assert ours.stats.total_variation == pytest.approx(expected.stats.total_variation, abs=1e-4)


@pytest.mark.parametrize("draft", ["self-int8", "self-int4"])
def test_a_self_draft_is_tested_like_any_other(draft: str) -> None:
    """Its products differ from the CPU's by design; greedy text is the verifier's all the same, in less rounds."""
    expected = engine("none").generate(PROMPT, max_new_tokens=7, temperature=0.0)
    with default_backend("triton"):
        ours = engine(draft, num_draft_tokens=2).generate(PROMPT, max_new_tokens=7, temperature=0.0)
    assert ours.token_ids == expected.token_ids
    assert ours.stats.rounds <= 4


@pytest.mark.parametrize("draft", DRAFTS)
def test_poisoned_slots_change_nothing(draft: str) -> None:
    """NaN in every slot beyond the valid length before every round."""
    with default_backend("triton"):
        options: dict[str, Any] = {"max_new_tokens": 5, "seed": 3}
        clean = engine(draft, num_draft_tokens=2).generate(PROMPT, **options)
        poisoned = engine(draft, num_draft_tokens=2)
        generation = poisoned.stream(PROMPT, **options)
        for _ in generation:
            length = int(poisoned.state.length)
            caches = {id(c): c for c in (poisoned.cache, getattr(poisoned.drafter, "cache", poisoned.cache))}
            for cache in caches.values():
                valid = length - 1 if cache is poisoned.cache else length - 2
                cache.keys[:, valid:] = math.nan
                cache.values[:, valid:] = math.nan
    assert generation.output.token_ids == clean.token_ids


@pytest.mark.parametrize("draft", DRAFTS)
def test_rounds_after_done_change_nothing(draft: str) -> None:
    """Up to the last slot of the cache."""
    with default_backend("triton"):
        full = engine(draft, num_draft_tokens=2, max_length=len(PROMPT) + 4)
        out = full.generate(PROMPT, max_new_tokens=50, seed=1)
        assert len(out.token_ids) == 4
        tokens = full.state.tokens.clone()
        with torch.inference_mode():
            for _ in range(2):
                full.runner.launch(full.round_sizes[-1])
        assert full.state.length.item() == len(PROMPT) + 4
        assert full.state.report.emitted.item() == 0
        assert torch.equal(full.state.tokens, tokens)


def test_a_draft_equal_to_the_verifier_is_always_accepted() -> None:
    with default_backend("triton"):
        verifier = model(1)
        same = with_graphs(Engine(verifier, draft=verifier, num_draft_tokens=4, max_length=64))
        stats = same.generate(PROMPT, max_new_tokens=31, temperature=0.0).stats
    assert (stats.rounds, stats.accepted) == (6, 24)
