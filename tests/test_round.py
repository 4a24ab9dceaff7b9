"""Invariants of a round: no hole in the draft's cache, nothing read from stale slots, buffers that may be replayed."""

from typing import Any

import pytest
import torch

from fused_spec import Cactus, Engine, SpeculativeSampling
from fused_spec.kernels.commit import commit
from fused_spec.kernels.ngram import ngram_propose, ngram_propose_reference
from fused_spec.kernels.round_inputs import round_inputs
from fused_spec.models.transformer import Transformer
from fused_spec.round import RoundState, Sampling, decode_round
from toy import next_laws, toy_model

VERIFIER = toy_model(1, vocab_size=64, sharpness=2.0, layers=2, context=1024)
DRAFT = toy_model(2, vocab_size=64, sharpness=2.0, context=1024)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
DRAFTS: dict[str, Any] = {
    "model": DRAFT,
    "ngram": "ngram",
    "self-int8": "self-int8",
    "self-int4": "self-int4",
    "none": None,
}


def caches(engine: Engine) -> list[Any]:
    own = getattr(engine.drafter, "cache", engine.cache)
    return [engine.cache] if own is engine.cache else [engine.cache, own]


@pytest.mark.parametrize("prompt", [[7], PROMPT])
def test_a_draft_equal_to_the_verifier_is_always_accepted(prompt: list[int]) -> None:
    """200 rounds of m = 4 at T = 0: a missing cache entry after full acceptance would cost acceptance at once."""
    engine = Engine(VERIFIER, draft=VERIFIER, num_draft_tokens=4, max_length=1024)
    stats = engine.generate(prompt, max_new_tokens=1001, temperature=0.0).stats
    assert (stats.rounds, stats.accepted, stats.emitted) == (200, 800, 1000)
    assert stats.accepted_per_position == [200] * 4
    assert stats.verifier_forwards == 201


def test_a_draft_equal_to_the_verifier_is_always_accepted_when_sampling() -> None:
    """Float32 widths 1, 2 and m + 1 differ by rounding: a rejection has a probability of about 1e-6 a draft."""
    engine = Engine(VERIFIER, draft=VERIFIER, num_draft_tokens=4, max_length=1024)
    stats = engine.generate(PROMPT, max_new_tokens=1001, seed=3).stats
    assert (stats.rounds, stats.accepted) == (200, 800)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_poisoned_slots_change_nothing(draft: str, temperature: float) -> None:
    """Everything beyond the valid length is NaN before every round: text and cache are those of a clean run."""
    options: dict[str, Any] = {"max_new_tokens": 150, "temperature": temperature, "seed": 5}
    clean = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=3, max_length=256).generate(PROMPT, **options)
    engine = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=3, max_length=256)
    generation = engine.stream(PROMPT, **options)
    for _ in generation:
        length = int(engine.state.length)
        for cache in caches(engine):
            valid = length - 1 if cache is engine.cache else length - 2
            for stale in (cache.keys, cache.values):
                stale[:, valid:] = torch.nan
            cache.written = cache.capacity
    assert generation.output.token_ids == clean.token_ids
    assert generation.output.stats.accepted == clean.stats.accepted
    scratch = VERIFIER.new_cache(256)
    tokens = torch.tensor(PROMPT + clean.token_ids)
    with torch.inference_mode():
        VERIFIER.forward(tokens, torch.arange(len(tokens)), scratch)
    valid = len(tokens) - 1
    torch.testing.assert_close(engine.cache.keys[:, :valid], scratch.keys[:, :valid], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(engine.cache.values[:, :valid], scratch.values[:, :valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_is_the_verifiers_arg_max(draft: str) -> None:
    """Every drafter, float32: each token is the arg max of the verifier's law given those before it."""
    out = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=5, max_length=256).generate(
        PROMPT, max_new_tokens=200, temperature=0.0
    )
    laws = next_laws(VERIFIER, PROMPT + out.token_ids)
    assert out.token_ids == laws[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert out.stats.total_variation == 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_length_up_to_the_capacity(draft: str) -> None:
    """Texts that begin anywhere and fill the cache to its last slot are the plain ones."""
    full = 24
    engine = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=5, max_length=full)
    plain = Engine(VERIFIER, max_length=full)
    tokens = (PROMPT * 3)[:full]
    for length in range(1, full):
        options: dict[str, Any] = {"max_new_tokens": 100, "temperature": 0.0}
        out = engine.generate(tokens[:length], **options)
        assert out.token_ids == plain.generate(tokens[:length], **options).token_ids
        assert len(out.token_ids) == full - length


@pytest.mark.parametrize("draft", [name for name in DRAFTS if name != "none"])
def test_lossless_rules_agree_and_replay(draft: str) -> None:
    """delta = 0 is speculative sampling bit for bit, also end to end; the same seed replays on the same buffers."""
    engines = [
        Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=4, max_length=256, rule=rule)
        for rule in (SpeculativeSampling(), Cactus(0.0), Cactus(0.0, solver="exact"))
    ]
    texts = [engine.generate(PROMPT, max_new_tokens=60, seed=9).token_ids for engine in engines]
    assert texts[0] == texts[1] == texts[2]
    engines[0].generate([1, 2, 3], max_new_tokens=90, seed=1, temperature=0.3)
    assert engines[0].generate(PROMPT, max_new_tokens=60, seed=9).token_ids == texts[0]


def test_drafts_depend_on_committed_tokens_only() -> None:
    """A round's drafts are the same whatever an earlier round drafted and lost beyond its first rejection."""
    engine = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=6, max_length=256)
    generation = engine.stream(PROMPT, max_new_tokens=100, seed=2)
    seen = {}
    for _ in generation:
        tokens = engine.state.tokens[: int(engine.state.length)].tolist()
        seen[tuple(tokens)] = propose(engine)
    fresh = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=6, max_length=256)
    for text, drafts in list(seen.items())[:-1]:
        with torch.inference_mode():
            fresh.state.start(list(text), 256, 2)
            fresh.drafter.prefill(torch.tensor(text))
        assert propose(fresh) == drafts


def propose(engine: Engine) -> list[int]:
    """The drafts of the round that comes next."""
    with torch.inference_mode():
        state = engine.state
        round_inputs(state.tokens, state.length, state.block, state.positions)
        return [int(token) for token in engine.drafter.propose(state, Sampling(), 6).token_ids[0]]


def append(state: RoundState, block: list[int], count: int) -> None:
    none = torch.empty(1, 0, dtype=torch.int64)
    commit(state.sequences(), torch.tensor([block]), torch.tensor([count - 1]), none)


class TestCommit:
    def state(self, length: int, limit: int, stop_ids: tuple[int, ...] = (), *, ignored: bool = False) -> RoundState:
        state = RoundState.empty(40, 4, stop_ids, "cpu")
        state.start(list(range(100, 100 + length)), limit, 0, ignore_stop_ids=ignored)
        return state

    @pytest.mark.parametrize("count", range(1, 6))
    @pytest.mark.parametrize("room", range(7))
    @pytest.mark.parametrize("stop_at", [None, 0, 1, 2, 3, 4])
    def test_cuts(self, count: int, room: int, stop_at: int | None) -> None:
        state = self.state(5, 5 + room, (9,))
        block = [9 if slot == stop_at else slot for slot in range(5)]
        append(state, block, count)
        stopped = stop_at is not None and stop_at < min(count, room)
        expected = min(count, room, stop_at + 1 if stop_at is not None else 5)
        assert state.report.emitted.item() == expected
        assert state.length.item() == 5 + expected
        assert state.tokens[:10].tolist() == [100, 101, 102, 103, 104, *block[:expected], *[0] * (5 - expected)]
        assert state.done.item() == (stopped or expected == room)

    def test_after_done_nothing_changes(self) -> None:
        state = self.state(5, 6)
        append(state, [1, 2, 3], 3)
        names = ("tokens", "length", "limit", "done", "seed")
        before = {name: getattr(state, name).clone() for name in names}
        append(state, [7, 7, 7], 3)
        assert state.report.emitted.item() == 0
        for name in names:
            assert torch.equal(getattr(state, name), before[name])

    def test_stop_ids_can_be_ignored(self) -> None:
        state = self.state(5, 30, (9,), ignored=True)
        append(state, [9, 9, 1], 3)
        assert (state.report.emitted.item(), state.done.item()) == (3, False)


@pytest.mark.parametrize("draft", DRAFTS)
def test_rounds_launched_after_done_change_nothing(draft: str) -> None:
    """As a graph launched ahead of the host would: ten more rounds on a finished sequence."""
    engine = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=3, max_length=40)
    out = engine.generate(PROMPT, max_new_tokens=100, seed=1)
    assert len(PROMPT) + len(out.token_ids) == 40
    tokens, size = engine.state.tokens.clone(), engine.round_sizes[-1]
    for _ in range(10):
        with torch.inference_mode():
            decode_round(engine.state, engine.target, engine.cache, engine.drafter, engine.rule, Sampling(), size=size)
        assert (engine.state.length.item(), engine.state.report.emitted.item()) == (40, 0)
        assert torch.equal(engine.state.tokens, tokens)


def test_ngram_matches_its_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    found = 0
    for size in range(1, 40):
        for _ in range(20):
            tokens = torch.randint(0, 3, (size,), generator=generator)
            buffer = torch.cat([tokens, torch.randint(0, 3, (60 - size,), generator=generator)])  # stale tail
            for shortest, longest in ((1, 3), (2, 4), (3, 3)):
                ours = ngram_propose(buffer, torch.tensor([size]), 5, shortest=shortest, longest=longest).tolist()
                assert ours == ngram_propose_reference(tokens.tolist(), 5, shortest=shortest, longest=longest)
                found += ours[0] >= 0
    assert found > 1000


def test_a_smaller_draft_vocabulary_keeps_every_token_reachable() -> None:
    """A verifier padded to more rows than the draft: ids that the draft lacks come out with their probability."""
    wide: Transformer = toy_model(5, vocab_size=24, sharpness=0.5)
    for draft in (toy_model(6, vocab_size=16, sharpness=0.5), toy_model(6, vocab_size=40, sharpness=0.5)):
        engine = Engine(wide, draft=draft, num_draft_tokens=3, max_length=200)
        seen = set(engine.generate([1, 2], max_new_tokens=190, seed=1).token_ids)
        assert max(seen) < 24
        assert seen & set(range(16, 24))
