"""Generation: an end of text at every place of a block cuts tokens, text, log-probabilities and counters alike.

The oracle is one long run without an end, cut by hand: an end must not change what came before it.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from cycles import DRAFTERS, PROMPT, ascii_tokenizer, cycle_engine
from fused_spec import Cactus, GenerationOutput
from fused_spec.kernels.ngram import ngram_propose_reference
from fused_spec.statistics import Statistics

M, LONG = 4, 26
CUTS = range(1, 17)
OPTIONS: dict[str, Any] = {"temperature": 0.9, "seed": 2, "logprobs": True}
RULE = Cactus(0.05)


@dataclass(frozen=True)
class Step:
    """A chunk of the long run, and the round behind it."""

    token_ids: list[int]
    accepted: int
    proposed: int
    gains: list[float]


@dataclass(frozen=True)
class Run:
    """The long run."""

    steps: list[Step]
    token_ids: list[int]
    logprobs: list[float]


@cache
def long_run(drafter: str) -> Run:
    engine = cycle_engine(drafter, rule=RULE)
    generation = engine.stream(PROMPT, max_new_tokens=LONG, **OPTIONS)
    steps: list[Step] = []
    known = list(PROMPT)
    for chunk in generation:
        ngrams = sum(token >= 0 for token in ngram_propose_reference(known, M))
        proposed = {"none": 0, "ngram": ngrams}.get(drafter, M) if steps else 0
        gains = engine.state.report.tv_gain[0, :proposed].tolist() if steps else []
        steps.append(Step(chunk.token_ids, chunk.num_accepted, proposed, gains))
        known += chunk.token_ids
    output = generation.output
    assert output.logprobs is not None
    return Run(steps, output.token_ids, output.logprobs)


def cut(steps: list[Step], count: int) -> list[Step]:
    """The steps that hold the first `count` tokens, the last of them cut short."""
    out = []
    for step in steps:
        if count > 0:
            out.append(Step(step.token_ids[:count], step.accepted, step.proposed, step.gains))
        count -= len(step.token_ids)
    return out


def check_statistics(stats: Statistics, steps: list[Step], size: int) -> None:
    rounds = [(len(step.token_ids), step) for step in steps[1:]]
    accepted = [min(step.accepted, emitted) for emitted, step in rounds]
    assert stats.rounds == len(rounds)
    assert stats.round_sizes == [size] * len(rounds)
    assert stats.accepted == sum(accepted)
    positions = [sum(count > slot for count in accepted) for slot in range(size)] if rounds else []
    assert stats.accepted_per_position == positions
    assert stats.emitted == sum(emitted for emitted, _ in rounds)
    assert stats.verifier_forwards == 1 + len(rounds)
    proposed = [step.proposed if emitted > step.accepted else emitted for emitted, step in rounds]
    assert stats.drafted == sum(proposed)
    gains = [sum(gain for gain in step.gains[:emitted] if not math.isnan(gain)) for emitted, step in rounds]
    assert stats.total_variation == (sum(gains) / stats.emitted if rounds else None)
    assert stats.prefill_seconds > 0
    assert (stats.decode_seconds > 0) is bool(rounds)


def run_and_check(drafter: str, count: int, reason: str, *, eos: tuple[int, ...] = (), **arguments: object) -> None:
    """Generate with some end of text and compare with the long run cut at `count` tokens."""
    run = long_run(drafter)
    engine = cycle_engine(drafter, eos=eos, rule=RULE)
    options: dict[str, Any] = {"max_new_tokens": LONG, **OPTIONS, **arguments}
    generation = engine.stream(PROMPT, **options)
    chunks = list(generation)
    output = generation.output
    expected = cut(run.steps, count)
    assert [chunk.token_ids for chunk in chunks] == [step.token_ids for step in expected]
    assert [chunk.num_accepted for chunk in chunks] == [min(s.accepted, len(s.token_ids)) for s in expected]
    assert output.token_ids == run.token_ids[:count]
    assert output.logprobs == run.logprobs[:count]
    assert output.finish_reason == reason
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert output.text == expected_text(output, reason, arguments.get("stop"))
    check_statistics(output.stats, expected, 0 if drafter == "none" else M)
    assert output.stats.emitted + 1 == len(output.token_ids)
    with pytest.raises(StopIteration):
        next(generation)


def expected_text(output: GenerationOutput, reason: str, stop: object) -> str:
    ids = output.token_ids[:-1] if reason == "eos" else output.token_ids
    text = str(ascii_tokenizer().decode(ids, skip_special_tokens=True))
    return text[: text.index(stop)] if reason == "stop" and isinstance(stop, str) else text


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_long_run_is_worth_cutting(drafter: str) -> None:
    """Some rounds are accepted in full, some in part: otherwise the tests below would prove little."""
    steps = long_run(drafter).steps
    assert steps[0].accepted == 0
    assert len(steps[0].token_ids) == 1
    assert sum(len(step.token_ids) for step in steps) == LONG
    assert all(len(step.token_ids) == step.accepted + 1 for step in steps[:-1])
    if drafter == "none":
        assert [step.accepted for step in steps] == [0] * LONG
    else:
        accepted = [step.accepted for step in steps[1:-1]]
        assert M in accepted
        assert min(accepted) < M


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("count", CUTS)
def test_max_new_tokens(drafter: str, count: int) -> None:
    run_and_check(drafter, count, "length", max_new_tokens=count)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("at", CUTS)
def test_eos(drafter: str, at: int) -> None:
    ids = long_run(drafter).token_ids
    token = ids[at - 1]
    run_and_check(drafter, ids.index(token) + 1, "eos", eos=(token,))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_eos_ends_many_places_of_a_block(drafter: str) -> None:
    """Tokens repeat, so that test_eos cuts at the first of equals; that still covers the first two rounds."""
    run = long_run(drafter)
    places = {run.token_ids.index(run.token_ids[at - 1]) + 1 for at in CUTS}
    first_rounds = sum(len(step.token_ids) for step in run.steps[:3])
    assert places >= set(range(1, first_rounds + 1))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("at", CUTS)
def test_stop(drafter: str, at: int) -> None:
    """The stop string is the text of the token and of the one before it."""
    ids = long_run(drafter).token_ids
    texts = [ascii_tokenizer().decode(ids[:count]) for count in range(len(ids) + 1)]
    stop = texts[at][-2:]
    count = next(count for count, text in enumerate(texts) if stop in text)
    run_and_check(drafter, count, "stop", stop=stop)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_beats_length_and_eos_beats_length(drafter: str) -> None:
    ids = long_run(drafter).token_ids
    for count in (1, 2, 4, 6):
        run_and_check(drafter, count, "stop", stop=ascii_tokenizer().decode(ids[count - 1]), max_new_tokens=count)
        run_and_check(drafter, count, "eos", eos=(ids[count - 1],), max_new_tokens=count)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_whichever_of_stop_and_eos_comes_first(drafter: str) -> None:
    ids = long_run(drafter).token_ids
    for count in range(2, 6):
        stop, eos = ascii_tokenizer().decode(ids[count - 1]), ids[count]
        run_and_check(drafter, count, "stop", stop=stop, eos=(eos,))
        run_and_check(drafter, count - 1, "eos", stop=stop, eos=(ids[count - 2],))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ignore_eos(drafter: str) -> None:
    eos = tuple(set(long_run(drafter).token_ids))
    run_and_check(drafter, LONG, "length", eos=eos, ignore_eos=True)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_part_of_a_stop_string_at_the_end_is_text(drafter: str) -> None:
    ids = long_run(drafter).token_ids
    text = str(ascii_tokenizer().decode(ids[:6]))
    run_and_check(drafter, 6, "length", stop=text[-3:] + "?", max_new_tokens=6)
    run_and_check(drafter, 7, "eos", stop=text[-3:] + "?", eos=(ids[6],))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_tokens(drafter: str) -> None:
    generation = cycle_engine(drafter).stream(PROMPT, max_new_tokens=0, logprobs=True)
    assert list(generation) == []
    output = generation.output
    assert (output.token_ids, output.text, output.logprobs, output.finish_reason) == ([], "", [], "length")
    assert output.stats == Statistics()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [25, 26, 28, 29, 31])
def test_max_length(drafter: str, length: int) -> None:
    """The cache ends in the middle of a block."""
    output = cycle_engine(drafter, rule=RULE, max_length=length).generate(PROMPT, max_new_tokens=1000, **OPTIONS)
    assert output.token_ids == long_run(drafter).token_ids[: length - len(PROMPT)]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_more_drafts_than_room(drafter: str) -> None:
    engine = cycle_engine(drafter, num_draft_tokens=64, max_length=27)
    output = engine.generate(PROMPT, temperature=0)
    assert output.finish_reason == "length"
    assert output.token_ids == [12, 13, 14]
