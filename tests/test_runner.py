"""Rounds as graphs launched ahead of the host: the same text as round by round, and nothing left behind.

Graphs are stood in for by functions that run when they are replayed (tests/graphs.py).
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cycles import DRAFTERS, PROMPT, cycle_engine
from fused_spec import Cactus, Engine, GenerationError, SpeculativeSampling
from fused_spec.generation import Chunk, Generation
from fused_spec.models.linear import DenseLinear
from fused_spec.report import Report
from fused_spec.runner import GraphRunner
from fused_spec.statistics import Statistics
from graphs import Replayer, with_graphs
from toy import toy_model

VERIFIER = toy_model(1, vocab_size=64, sharpness=2.0, layers=2, context=1024)
DRAFT = toy_model(2, vocab_size=64, sharpness=2.0, context=1024)
DRAFTS: dict[str, Any] = {"model": DRAFT, "ngram": "ngram", "self-int8": "self-int8", "none": None}
MASK = torch.tensor([0x7FF0FF0F, 0x00FFFFFF], dtype=torch.int32)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [3, 1, 4, 1, 5], "seed": 1, "max_new_tokens": 40},
    {"prompt": [7], "seed": 2, "max_new_tokens": 33, "temperature": 0.0, "logprobs": True},
    {"prompt": [9, 9, 8], "seed": 3, "max_new_tokens": 21, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"prompt": [2, 7, 1, 8], "seed": 1, "max_new_tokens": 17, "temperature": 0.4, "top_k": 5},
    {"prompt": [3, 1, 4, 1, 5], "seed": 4, "max_new_tokens": 30, "temperature": 1.3, "allowed": MASK},
    {"prompt": [5, 5], "seed": 4, "max_new_tokens": 30, "temperature": 0.5, "logprobs": True},
    {"prompt": [3, 1, 4, 1, 5], "seed": 1, "max_new_tokens": 40},
]


def counted(stats: Statistics) -> dict[str, object]:
    return {name: value for name, value in stats.as_dict().items() if "second" not in name}


def runner_of(engine: Engine) -> GraphRunner:
    assert isinstance(engine.runner, GraphRunner)
    return engine.runner


@pytest.mark.parametrize("size", [3, "auto"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_replays_give_the_texts_of_single_rounds(draft: str, size: Any) -> None:
    """One engine, many texts: other prompts, lengths, seeds, temperatures, filters and masks than at recording."""

    def engine() -> Engine:
        return Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=size, max_length=128, rule=Cactus(0.05))

    graphs = with_graphs(engine())
    for request in REQUESTS:
        sizes: dict[str, Any] = {}
        ours = graphs.generate(**request)
        if size == "auto":  # the graphs' host chooses a round earlier, with a report less
            sizes = {"round_sizes": ours.stats.round_sizes}
        theirs = engine().generate(**request, **sizes)
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
        assert ours.finish_reason == theirs.finish_reason
        assert counted(ours.stats) == counted(theirs.stats)


def test_a_graph_is_recorded_once_for_what_it_cannot_read_anew() -> None:
    engine = with_graphs(Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128))
    recorder = runner_of(engine)._recorder
    assert isinstance(recorder, Replayer)
    counts = []
    for request in REQUESTS:
        engine.generate(**request)
        counts.append(recorder.recorded)
    # plain; greedy with log-probabilities; filters; the same; a mask; log-probabilities; the first again
    assert counts == [1, 2, 3, 3, 4, 5, 5]
    engine.rule = SpeculativeSampling()  # an equal one
    engine.generate(**REQUESTS[0])
    assert recorder.recorded == 5
    engine.rule = Cactus(0.1)
    engine.generate(**REQUESTS[0])
    assert recorder.recorded == 6


def test_the_largest_graph_is_recorded_first() -> None:
    engine = with_graphs(Engine(VERIFIER, draft=DRAFT, num_draft_tokens="auto", max_length=128))
    engine.generate([1, 2], max_new_tokens=5)
    sizes = [kind.size for kind in runner_of(engine)._graphs]
    assert sizes == sorted(engine.round_sizes, reverse=True)


def test_rounds_are_launched_ahead_and_only_their_own_is_waited_for() -> None:
    engine = with_graphs(Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128))
    generation = engine.stream([1, 2, 3], max_new_tokens=50, seed=1)
    next(generation)
    recorder = runner_of(engine)._recorder
    assert isinstance(recorder, Replayer)
    assert (recorder.launched, recorder.waited, runner_of(engine).replays) == (1, 1, 0)  # the prompt's token
    for rounds in range(1, 6):
        next(generation)
        assert (recorder.launched, recorder.waited) == (rounds + 2, rounds + 1)
        assert runner_of(engine).replays == rounds + 1


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("end", ["eos", "length", "stop"])
def test_an_end_at_every_place_of_a_block(drafter: str, end: str) -> None:
    """The rounds launched ahead of it leave the sequence alone."""
    options: dict[str, Any] = {"temperature": 0.9, "seed": 2, "logprobs": True}
    long = cycle_engine(drafter).generate(PROMPT, max_new_tokens=26, **options)
    text = long.text
    for cut in range(1, 17):
        request = {"max_new_tokens": cut if end == "length" else 26, **options}
        eos = (long.token_ids[cut - 1],) if end == "eos" else ()
        if end == "stop":
            request["stop"] = text[cut - 1 : cut + 1]
        one = cycle_engine(drafter, eos=eos).generate(PROMPT, **request)
        engine = with_graphs(cycle_engine(drafter, eos=eos))
        other = engine.generate(PROMPT, **request)
        assert (other.token_ids, other.text, other.logprobs) == (one.token_ids, one.text, one.logprobs)
        assert (other.finish_reason, counted(other.stats)) == (one.finish_reason, counted(one.stats))
        if end != "stop":
            committed = len(PROMPT) + len(one.token_ids)
            assert int(engine.state.length) == committed
            assert engine.state.tokens[:committed].tolist() == [*PROMPT, *one.token_ids]


def test_a_text_that_was_given_up_leaves_nothing_behind() -> None:
    engine = with_graphs(Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128))
    expected = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128).generate(**REQUESTS[0])
    for chunks in range(6):
        given_up = engine.stream([8, 9], max_new_tokens=100, seed=5)
        for _ in range(chunks):
            next(given_up)
        assert engine.generate(**REQUESTS[0]).token_ids == expected.token_ids
    with pytest.raises(RuntimeError, match="ended by a later one"):
        next(given_up)


def test_a_fault_is_raised_in_its_round_and_the_engine_recovers() -> None:
    engine = with_graphs(Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128))
    good = engine.generate(**REQUESTS[0])
    head = engine.target.head
    generation = engine.stream(**REQUESTS[0])
    chunks = [next(generation), next(generation)]
    engine.target.head = DenseLinear(torch.full((64, 16), torch.nan))
    chunks += take(generation)
    engine.target.head = head
    known = [token for chunk in chunks for token in chunk.token_ids]
    assert known == good.token_ids[: len(known)]
    assert engine.generate(**REQUESTS[0]).token_ids == good.token_ids


def take(generation: Generation) -> list[Chunk]:
    """Chunks up to a fault; one round was launched before the head was lost."""
    chunks = [next(generation)]
    with pytest.raises(GenerationError, match="NaN"):
        next(generation)
    return chunks


class Interrupted(KeyboardInterrupt):
    pass


def interrupting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, interrupted before its call number `at`."""
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Interrupted
        return function(*arguments, **options)

    return call


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "place", ["runner.launch", "runner.collect", "runner.settle", "drafter.prefill", "target.forward"]
)
def test_an_interrupt_ends_a_text_and_harms_no_other(place: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call is interrupted: the text cannot be taken up again by mistake, and the next one is sound."""
    engine = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128)
    good = engine.generate(**REQUESTS[0]).token_ids
    engine = with_graphs(engine) if graphs else engine
    for at in (1, 2, 3, 4, 5):
        generation = engine.stream(**REQUESTS[0])
        known: list[int] = []
        with monkeypatch.context() as patch:
            owner, name = place.split(".")
            patch.setattr(getattr(engine, owner), name, interrupting(getattr(getattr(engine, owner), name), at))
            try:
                for chunk in generation:
                    known += chunk.token_ids
            except Interrupted:
                with pytest.raises(GenerationError, match="cannot go on: Interrupted in an earlier step"):
                    next(generation)
        assert known == good[: len(known)]
        assert engine.generate(**REQUESTS[0]).token_ids == good


def test_an_interrupted_wait_loses_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU's host spends its time: again and again."""
    engine = with_graphs(Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128))
    good = engine.generate(**REQUESTS[0]).token_ids
    recorder = runner_of(engine)._recorder
    mark = recorder.mark

    def interrupted() -> None:
        raise Interrupted

    def interrupting_mark() -> Callable[[], None]:
        mark()
        return interrupted

    for _ in range(5):
        generation = engine.stream(**REQUESTS[0])
        next(generation)
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "mark", interrupting_mark)
            with pytest.raises(Interrupted):
                next(generation)
        assert engine.generate(**REQUESTS[0]).token_ids == good


def test_a_new_drafter_ends_the_text_under_way() -> None:
    engine = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128)
    generation = engine.stream(**REQUESTS[0])
    next(generation)
    engine.use_drafter(engine.drafter)
    with pytest.raises(RuntimeError, match="ended by a later one"):
        next(generation)
    assert len(engine.generate(**REQUESTS[0]).token_ids) == 40


def test_an_engine_goes_when_nobody_needs_it() -> None:
    """Without waiting for the garbage collector: weights and caches are large."""
    engine = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128)
    out = engine.generate(**REQUESTS[0])
    known = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert known() is None
    finally:
        gc.enable()
    assert out.token_ids


@pytest.mark.parametrize("graphs", [False, True])
def test_a_mask_is_the_engines_own_once_asked_with(graphs: bool) -> None:
    engine = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=128)
    engine = with_graphs(engine) if graphs else engine
    mask = MASK.clone()
    expected = engine.generate([1, 2], max_new_tokens=30, seed=1, allowed=MASK).token_ids
    generation = engine.stream([1, 2], max_new_tokens=30, seed=1, allowed=mask)
    mask.fill_(1)
    for _ in generation:
        pass
    assert generation.output.token_ids == expected


def test_reports_are_one_copy() -> None:
    """Whatever a round tells lies in one piece of memory: later rounds cannot tear it."""
    one, other = Report(5), Report(5)
    names = [name for name in vars(one) if not name.startswith("_")]
    for name in names:
        getattr(one, name).copy_(torch.ones_like(getattr(one, name)))
    other.take(one)
    for name in names:
        assert (getattr(other, name) == 1).all()
    sizes = sum(getattr(one, name).numel() * getattr(one, name).element_size() for name in names)
    assert sizes == one._memory.numel()
