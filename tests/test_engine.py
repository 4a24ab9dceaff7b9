"""Engine: seeds, reuse, log-probabilities, broken models, and what it refuses."""

import math
from typing import Any

import pytest
import torch

from cycles import DRAFTERS, PROMPT, VOCAB, ascii_tokenizer, cycle_engine, cycle_model
from fused_spec import (
    Cactus,
    CascadeToken,
    Engine,
    GenerationError,
    GenerationOutput,
    InvalidInput,
    SpeculativeSampling,
)
from fused_spec.drafters import ModelDrafter
from fused_spec.models.kv_cache import KVCache
from fused_spec.models.linear import DenseLinear
from fused_spec.models.transformer import Transformer
from toy import next_laws

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.9, "seed": 2, "logprobs": True}


def result(output: GenerationOutput) -> dict[str, Any]:
    """All but the times."""
    figures = output.stats.as_dict()
    timed = ("prefill_seconds", "decode_seconds", "tokens_per_second")
    return {**vars(output), "stats": {name: value for name, value in figures.items() if name not in timed}}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_seed_on_a_fresh_engine_and_after_other_texts(drafter: str) -> None:
    """Neither the cache nor the buffers may remember: other lengths, ends, an abandoned text and other settings."""
    expected = result(cycle_engine(drafter).generate(PROMPT, **OPTIONS))
    engine = cycle_engine(drafter)
    assert result(engine.generate(PROMPT, **OPTIONS)) == expected
    engine.generate([5] * 40, seed=3, temperature=0)
    engine.generate([7], seed=4, top_k=3, stop="5", ignore_eos=True)
    assert result(engine.generate(PROMPT, **OPTIONS)) == expected
    abandoned = engine.stream([90, 30, 31, 32] * 9, seed=5)
    next(abandoned)
    next(abandoned)
    assert result(engine.generate(PROMPT, **OPTIONS)) == expected


def poison(engine: Engine, committed: int) -> None:
    """NaN into every slot that no round may rely on, with so many tokens committed."""
    valid = {engine.cache: committed - 1}
    if isinstance(engine.drafter, ModelDrafter) and engine.drafter.cache is not engine.cache:
        valid[engine.drafter.cache] = committed - 2
    for cache, slots in valid.items():
        assert isinstance(cache, KVCache)
        for stale in (cache.keys, cache.values):
            stale[:, max(slots, 0) :] = math.nan
        cache.written = cache.capacity


@pytest.mark.parametrize("prompt", [PROMPT, [12]], ids=["long", "one token"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_a_rolled_back_cache_still_holds_does_not_matter(drafter: str, prompt: list[int]) -> None:
    options = {**OPTIONS, "max_new_tokens": 35}
    expected = result(cycle_engine(drafter).generate(prompt, **options))
    engine = cycle_engine(drafter)
    poison(engine, 0)
    generation = engine.stream(prompt, **options)
    for _ in generation:
        poison(engine, int(engine.state.length))
    assert result(generation.output) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeds(drafter: str) -> None:
    engine = cycle_engine(drafter)
    texts = [engine.generate([3], max_new_tokens=30, seed=seed).token_ids for seed in (0, 1, 2, 2**63 - 1)]
    assert len({tuple(text) for text in texts}) == 4
    greedy = [engine.generate([3], max_new_tokens=30, seed=seed, temperature=0).token_ids for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    drawn = engine.generate([3], max_new_tokens=30)
    assert 0 <= drawn.seed < 2**63
    assert engine.generate([3], max_new_tokens=30, seed=drawn.seed).token_ids == drawn.token_ids
    assert engine.generate([3], max_new_tokens=30).seed != drawn.seed


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logprobs_are_those_of_one_teacher_forced_forward(drafter: str, temperature: float) -> None:
    """Unprocessed: neither the temperature nor the filters show. Prompts of one token and of many."""
    model = cycle_model(4.0)
    for prompt in ([12], PROMPT):
        engine = cycle_engine(drafter, rule=Cactus(0.05))
        output = engine.generate(
            prompt, max_new_tokens=30, temperature=temperature, top_k=40, top_p=0.98, seed=2, logprobs=True
        )
        tokens = torch.tensor(prompt + output.token_ids)
        with torch.inference_mode():
            logits = model.forward(tokens, torch.arange(len(tokens)), model.new_cache(len(tokens)))
        rows = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
        expected = rows[torch.arange(30), output.token_ids]
        assert output.logprobs is not None
        # Logits reach 16, whose float32 spacing is 1.9e-6; blocks of another width sum in another order.
        torch.testing.assert_close(torch.tensor(output.logprobs).double(), expected, rtol=0, atol=1e-5)
        if temperature == 0:
            assert output.token_ids == rows.argmax(-1).tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [1, 2, 61, 62, 63])
def test_prompts_that_leave_little_room_or_much(drafter: str, length: int) -> None:
    """Greedy, so that a forward of the whole text tells every token; at most max_length tokens in all."""
    prompt = [token % 12 for token in range(length)]
    output = cycle_engine(drafter).generate(prompt, temperature=0)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 64 - length
    laws = next_laws(cycle_model(4.0), prompt + output.token_ids)
    assert output.token_ids == laws[length - 1 : -1].argmax(-1).tolist()


def test_a_later_generation_ends_an_earlier_one() -> None:
    engine = cycle_engine("model")
    expected = result(cycle_engine("model").generate(PROMPT, **OPTIONS))
    first, second = engine.stream([3] * 9, seed=1), engine.stream(PROMPT, **OPTIONS)
    next(first)
    next(first)  # the second has not begun, so nothing is disturbed yet
    known = list(first.output.token_ids)
    for _ in range(2):
        next(second)
        with pytest.raises(RuntimeError, match="this generation was ended by a later one"):
            next(first)
    assert first.output.token_ids == known
    assert first.output.finish_reason is None
    for _ in second:
        pass
    assert result(second.output) == expected


def test_the_rule_may_be_replaced_between_texts() -> None:
    engine = cycle_engine("model", rule=Cactus(0.2))
    relaxed = engine.generate(PROMPT, **OPTIONS)
    assert relaxed.stats.total_variation is not None
    assert relaxed.stats.total_variation > 0
    engine.rule = SpeculativeSampling()
    exact = engine.generate(PROMPT, **OPTIONS)
    assert exact.stats.total_variation == 0
    assert result(exact) == result(cycle_engine("model").generate(PROMPT, **OPTIONS))


def test_a_rule_set_while_a_text_is_running_waits_for_the_next_one() -> None:
    engine = cycle_engine("model")
    generation = engine.stream(PROMPT, **OPTIONS)
    next(generation)
    engine.rule = CascadeToken(0.5)
    for _ in generation:
        pass
    assert generation.output.stats.total_variation == 0
    assert engine.generate(PROMPT, **OPTIONS).stats.total_variation is None
    engine.rule = "cactus"  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="rule must be an acceptance rule"):
        engine.stream(PROMPT)


@pytest.mark.parametrize("top_k", [2.0, float("inf"), float("nan"), "2", True])
def test_a_bad_top_k_is_refused_before_anything_starts(top_k: Any) -> None:
    with pytest.raises(InvalidInput, match="top_k must be an integer"):
        cycle_engine("none").stream(PROMPT, top_k=top_k)


def test_prompts_of_every_kind() -> None:
    engine = cycle_engine("none")
    ids = engine.generate(ascii_tokenizer().encode("-./012"), temperature=0, max_new_tokens=3)
    text = engine.generate("-./012", temperature=0, max_new_tokens=3)
    assert text.token_ids == ids.token_ids == [18, 19, 20]
    assert text.text == "345"
    engine.tokenizer = None
    without = engine.generate([12, 13, 14, 15, 16, 17], temperature=0, max_new_tokens=3)
    assert (without.token_ids, without.text) == ([18, 19, 20], "")


def broken(model: Transformer, token: int) -> Transformer:
    """Logits are NaN after this token, and only then."""
    model.embedding = model.embedding.clone()
    model.embedding[token] = math.nan
    return model


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nan_of_the_verifier_is_an_error_that_names_it(drafter: str) -> None:
    engine = cycle_engine(drafter)
    broken(engine.target, 20)
    with pytest.raises(GenerationError, match="the verifier's logits are NaN or infinite"):
        engine.generate([12, 20])
    with pytest.raises(GenerationError, match="the verifier's logits are NaN or infinite"):
        engine.generate([12], temperature=0)
    assert engine.generate([12], temperature=0, max_new_tokens=3).token_ids == [13, 14, 15]


def test_nan_of_the_draft_is_an_error_that_names_it() -> None:
    engine = Engine(cycle_model(4.0), draft=broken(cycle_model(4.0), 14), num_draft_tokens=2, max_length=64)
    generation = engine.stream([0, 11], temperature=0)
    assert [len(chunk.token_ids) for chunk in (next(generation), next(generation))] == [1, 3]
    with pytest.raises(GenerationError, match=r"^the draft's logits are NaN or infinite \(in the round"):
        engine.generate([12], temperature=0)
    nan = Engine(cycle_model(4.0), draft=cycle_model(4.0), num_draft_tokens=2, max_length=64)
    assert isinstance(nan.drafter, ModelDrafter)
    nan.drafter.model.head = DenseLinear(torch.full((VOCAB, 16), math.nan))
    with pytest.raises(GenerationError, match=r"^the draft's logits are NaN or infinite"):
        nan.generate([12])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [1] * 64}, "the prompt has 64 tokens; it must have fewer than max_length = 64"),
        ({"prompt": [1, VOCAB]}, "prompt token ids must be integers from 0 to 95, got 96"),
        ({"prompt": [-1]}, "prompt token ids must be integers from 0 to 95, got -1"),
        ({"prompt": [True]}, "prompt token ids must be integers from 0 to 95, got True"),
        ({"prompt": [1.0]}, "prompt must be a string, a list of token ids or of chat messages, got float"),
        ({"prompt": [1, "a"]}, "prompt must be a string, a list of token ids or of chat messages, got int, str"),
        ({"prompt": None}, "prompt must be a string, a list of token ids or of chat messages, got NoneType"),
        ({"prompt": b"ab"}, "prompt must be a string, a list of token ids or of chat messages, got bytes"),
        ({"prompt": {"role": "user", "content": "x"}}, "prompt must be a string, a list of token ids or of chat mess"),
        ({"prompt": "a\udcff"}, r"the prompt is not valid Unicode: '\\udcff' at 1"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, r"the prompt is not valid Unicode: '\\ud800' at 0"),
        ({"prompt": [{"role": "user"}]}, "a chat message must have exactly 'role' and 'content' strings"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "this checkpoint has no chat template"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0, got -1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 0, got 2.0"),
        ({"temperature": -0.5}, "temperature must be 0 .* got -0.5"),
        ({"temperature": math.nan}, "temperature must be 0 .* got nan"),
        ({"temperature": math.inf}, "temperature must be 0 .* got inf"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_k": -1}, "top_k must be an integer >= 0 .* got -1"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\] .* got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\] .* got 1.5"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\] .* got nan"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\] .* got 2"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\] .* got -0.1"),
        ({"seed": -1}, r"seed must be an integer, 0 <= seed < 2\^63, got -1"),
        ({"seed": 2**63}, rf"seed must be an integer, 0 <= seed < 2\^63, got {2**63}"),
        ({"seed": 1.0}, r"seed must be an integer, 0 <= seed < 2\^63, got 1.0"),
        ({"stop": ""}, "stop must be non-empty strings, got ''"),
        ({"stop": ("a", "")}, r"stop must be non-empty strings, got \('a', ''\)"),
        ({"stop": [3]}, r"stop must be non-empty strings, got \[3\]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[:50],
)
def test_stream_refuses_before_it_is_iterated(arguments: dict[str, Any], named: str) -> None:
    engine = cycle_engine("none")
    with pytest.raises(InvalidInput, match=named):
        engine.stream(**{"prompt": [1], **arguments})
    assert engine.running is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"draft": "self-int3"}, "'ngram', 'self-int8', 'self-int4' or None, got 'self-int3'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be an integer from 1 to 64 or 'auto', got 0"),
        ({"num_draft_tokens": 65}, "num_draft_tokens must be an integer from 1 to 64 or 'auto', got 65"),
        ({"num_draft_tokens": "many"}, "num_draft_tokens must be an integer from 1 to 64 or 'auto', got 'many'"),
        ({"max_length": 1}, "max_length must be an integer >= 2, got 1"),
        ({"max_length": 257}, "max_length 257 is more than the target's context of 256 tokens"),
        ({"draft": cycle_model(4.0, context=63)}, "max_length 64 is more than the draft's context of 63 tokens"),
        ({"rule": "cactus"}, "rule must be an acceptance rule such as .* got 'cactus'"),
        ({"attention": "flash"}, "attention must be 'auto' or 'sdpa' on the device 'cpu', got 'flash'"),
    ],
)
def test_the_engine_refuses_bad_options(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        Engine(cycle_model(4.0), **{"max_length": 64, **arguments})
