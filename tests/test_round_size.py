"""The size of a round: what it may depend on, what it must not, and what it leaves alone."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from fused_spec import Engine, InvalidInput, round_size
from fused_spec.models.linear import DenseLinear
from fused_spec.models.transformer import Transformer
from fused_spec.round_size import AUTO_SIZES, AdaptiveSize, FixedSize, PrescribedSizes, tokens_per_round
from laws import chi_square
from toy import next_laws, toy_model

VERIFIER = toy_model(1, vocab_size=64, sharpness=2.0, layers=2, context=1024)
DRAFT = toy_model(2, vocab_size=64, sharpness=2.0, context=1024)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
DRAFTS: dict[str, Any] = {"model": DRAFT, "ngram": "ngram", "self-int8": "self-int8", "self-int4": "self-int4"}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("size", [1, 2, 5, 8, "auto"])
def test_greedy_text_does_not_depend_on_the_size(draft: str, size: Any) -> None:
    plain = Engine(VERIFIER, max_length=256).generate(PROMPT, max_new_tokens=120, temperature=0.0)
    engine = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens=size, max_length=256)
    out = engine.generate(PROMPT, max_new_tokens=120, temperature=0.0)
    assert out.token_ids == plain.token_ids
    assert set(out.stats.round_sizes) <= set(engine.round_sizes)
    assert 0 not in out.stats.round_sizes


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_auto_text_is_replayed_by_its_sizes(draft: str) -> None:
    engine = Engine(VERIFIER, draft=DRAFTS[draft], num_draft_tokens="auto", max_length=256)
    engine._draft_cost = 0.05  # these models are of a size
    options: dict[str, Any] = {"max_new_tokens": 200, "seed": 11, "temperature": 0.8}
    out = engine.generate(PROMPT, **options)
    assert len(set(out.stats.round_sizes)) > 1
    sizes = out.stats.round_sizes
    again = engine.generate(PROMPT, round_sizes=sizes, **options)
    assert (again.token_ids, again.stats.round_sizes) == (out.token_ids, sizes)
    # The list decides, not what the engine would choose. Of n-grams so few are accepted that the text may be the same.
    other = engine.generate(PROMPT, round_sizes=[8] * 200, **options)
    assert set(other.stats.round_sizes) == {8}
    assert draft == "ngram" or other.token_ids != out.token_ids


def test_sizes_that_an_engine_lacks_are_refused() -> None:
    engine = Engine(VERIFIER, draft=DRAFT, num_draft_tokens=3, max_length=64)
    for sizes in ([2], [3, 0], [3, 3.5], [3.0], [True], 3):
        with pytest.raises(InvalidInput, match="round_sizes must be a list of sizes out of"):
            engine.generate(PROMPT, round_sizes=sizes)  # type: ignore[arg-type]
    assert engine.generate(PROMPT, round_sizes=[3, 3], max_new_tokens=9).stats.round_sizes[:2] == [3, 3]


def test_the_best_size_is_that_of_the_formula() -> None:
    """Brute force over all sizes: the more is accepted and the less a draft costs, the longer the rounds."""
    assert tokens_per_round(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_per_round(1.0, 4) == 5
    for cost in (0.0, 0.1, 0.5):
        chosen = []
        for accepted in range(0, 101, 5):
            size = AdaptiveSize(cost)
            for _ in range(10):
                size.learn(100, accepted)
            assert size.acceptance == pytest.approx(accepted / 100, abs=0.02)
            rates = [
                (1 - size.acceptance ** (m + 1)) / (1 - size.acceptance) / (1 + m * (cost + 0.02)) for m in AUTO_SIZES
            ]
            assert size.next() == AUTO_SIZES[rates.index(max(rates))]
            chosen.append(size.next())
        assert chosen == sorted(chosen)
        assert chosen[0] == 1
        assert chosen[-1] == 8
    assert 0 not in AUTO_SIZES


def test_prescribed_sizes_come_first() -> None:
    afterwards = AdaptiveSize(0.0)
    sizes = PrescribedSizes([4, 1, 2], afterwards)
    assert [sizes.next() for _ in range(3)] == [4, 1, 2]
    for _ in range(50):
        sizes.learn(1, 0)
    assert sizes.next() == afterwards.next() == 1


SMALL_V, RUNS, LONG = 8, 140, 250


def forgetful(seed: int) -> Transformer:
    """A model whose law depends on the last token only: attention and MLP add nothing."""
    model = toy_model(seed, vocab_size=SMALL_V, sharpness=1.2)
    layer = model.layers[0]
    silent = replace(
        layer,
        attention_out=DenseLinear(torch.zeros_like(layer.attention_out.dense())),
        down=DenseLinear(torch.zeros_like(layer.down.dense())),
    )
    return Transformer(model.config, model.embedding, [silent], model.norm, model.head)


def chain(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine over such models; the draft is called cheap, and one outcome changes the next choice."""
    monkeypatch.setattr(round_size, "_ITS_WEIGHT", 0.5)
    monkeypatch.setattr(round_size, "_FADING", 0.5)
    engine = Engine(forgetful(1), draft=forgetful(2), num_draft_tokens="auto", max_length=256)
    engine._draft_cost = 0.05
    return engine


def tail_of_transitions(engine: Engine, *, peeking: bool = False) -> tuple[float, set[int]]:
    """(least chi-square tail of several views of which token follows which, sizes of the rounds), over fresh seeds.

    A token has the law that belongs to the one before it, at every place of a round: all are looked at, and those in
    second place alone, whose noise a size could have seen. A bias is thickest in two halves of the vocabulary.
    """
    law = torch.stack([next_laws(engine.target, [token])[0] for token in range(SMALL_V)])
    counts, second = torch.zeros(2, SMALL_V, SMALL_V, dtype=torch.float64)
    seen = set()
    for seed in range(RUNS):
        generation = engine.stream([1, 2], max_new_tokens=LONG, seed=seed)
        if peeking:
            generation._request = replace(generation._request, sizes=Peeking(engine))
        chunks = [chunk.token_ids for chunk in generation]
        tokens = generation.output.token_ids
        for pair in pairwise(tokens):
            counts[pair] += 1
        for chunk in chunks:
            if len(chunk) > 1:
                second[chunk[0], chunk[1]] += 1
        seen |= set(generation.output.stats.round_sizes)
    halves = law.unflatten(1, (2, -1)).sum(2)
    tails = [tail(view, law) for view in (counts, second)]
    return min(tails + [tail(view.unflatten(1, (2, -1)).sum(2), halves) for view in (counts, second)]), seen


def tail(counts: torch.Tensor, laws: torch.Tensor) -> float:
    """Of all rows together, each a sample of its own law."""
    squares = [chi_square(row, law) for row, law in zip(counts, laws, strict=True) if row.sum() > 0]
    return float(chi2.sf(sum(square for square, _ in squares), sum(freedom for _, freedom in squares)))


def test_auto_emits_the_verifiers_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are sized by the outcomes of those before them; the law is that of plain decoding."""
    tail, seen = tail_of_transitions(chain(monkeypatch))
    assert len(seen) > 3
    assert tail > 1e-6


class Peeking(FixedSize):
    """A planted fault: after a rejection, the draft two slots on decides over the next size.

    That draft was never tested, and its noise will be used again for its position.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(4)
        self._engine, self._next = engine, 4

    def next(self) -> int:
        return self._next

    def learn(self, tested: int, accepted: int) -> None:
        peeks = self._next == 4 and accepted < 2
        self._next = 1 if peeks and int(self._engine.state.block[4 + accepted]) < SMALL_V // 2 else 4


def test_a_size_chosen_by_an_untested_draft_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tail, seen = tail_of_transitions(chain(monkeypatch), peeking=True)
    assert seen == {1, 4}
    assert tail < 1e-9
