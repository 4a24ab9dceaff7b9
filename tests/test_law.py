"""End to end: the joint law of the first tokens an engine emits, enumerated exactly and tested by chi-square.

V = 16, m = 3, T = 1, float32. For a lossless rule it is the verifier's own law; for a relaxed one it is the h_alg that
follows from the definitions, slot by slot. Drafts are poor enough that three tokens often span several rounds, so noise
shared between drafting, testing and resampling would show; a planted fault of that kind is found.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chi2

from fused_spec import Cactus, Engine, SpeculativeSampling
from fused_spec.kernels import philox
from fused_spec.kernels.ngram import ngram_propose_reference
from fused_spec.models.transformer import Transformer
from fused_spec.rules import (
    CascadeOpt,
    CascadeToken,
    Ensemble,
    Lenience,
    MentoredDecoding,
    Rule,
    TypicalAcceptance,
)
from laws import assert_law, chi_square, emitted_law
from toy import next_laws, toy_model

V, M, RUNS = 16, 3, 1800
A = 5
PROMPT = [token for other in range(V) for token in (A, other)] + [A]  # every pair (A, x) has been seen before
VERIFIER = toy_model(1, sharpness=1.5)
MODEL = toy_model(2, sharpness=1.5)

DraftLaw = Callable[[Sequence[int], int], torch.Tensor | None]
"""(context, slot) -> p of the slot's draft, None where there is no draft."""


def model_law(context: Sequence[int], slot: int) -> torch.Tensor | None:
    return next_laws(MODEL, list(context))[-1] if slot < M else None


def ngram_law(context: Sequence[int], slot: int) -> torch.Tensor | None:
    drafts = [*ngram_propose_reference(list(context[: len(context) - slot]), M), -1]
    return None if drafts[slot] < 0 else torch.nn.functional.one_hot(torch.tensor(drafts[slot]), V).double()


def self_law(verifier: Transformer, bits: int) -> DraftLaw:
    """Committed tokens are in the cache as the verifier computed them, the block's own as the quantised copy did."""
    copy = verifier.quantized(bits)

    def law(context: Sequence[int], slot: int) -> torch.Tensor | None:
        if slot == M:
            return None
        tokens, positions = torch.tensor(context), torch.arange(len(context))
        committed = len(context) - slot - 1
        with torch.inference_mode():
            cache = verifier.new_cache(len(context))
            verifier.forward(tokens[:committed], positions[:committed], cache)
            logits = copy.forward(tokens[committed:], positions[committed:], cache)
        return logits[-1].double().softmax(0)

    return law


def enumerate_law(rule: Rule, draft_law: DraftLaw) -> tuple[torch.Tensor, float]:
    """([V, V, V] joint law of the first three tokens, expected total variation of the slots that gave the last two).

    The first token is sampled from the prefill.
    """
    paid = 0.0
    law = torch.zeros(V, V, V, dtype=torch.float64)
    first = next_laws(VERIFIER, PROMPT)[-1]
    for a in range(V):
        states: dict[tuple[int, ...], dict[int, torch.Tensor]] = {
            (a,): {0: first[a]}
        }  # emitted tokens -> mass by the slot that comes next
        for _ in range(2):
            following: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
            for emitted, by_slot in states.items():
                context = PROMPT + list(emitted)
                q = next_laws(VERIFIER, context)[-1]
                for slot, mass in by_slot.items():
                    p = draft_law(context, slot)
                    masses = (torch.zeros_like(q), q) if p is None else emitted_law(rule, p, q)
                    paid += (mass * (masses[0] + masses[1] - q).abs().sum() / 2).item()
                    for share, then in zip(masses, (slot + 1, 0), strict=True):
                        for token in share.nonzero().flatten().tolist():
                            reached = following.setdefault((*emitted, token), {})
                            reached[then] = reached.get(then, torch.tensor(0.0)) + mass * share[token]
            states = following
        for emitted, by_slot in states.items():
            law[emitted] = torch.stack(list(by_slot.values())).sum()
    return law, paid


def draw(engine: Engine, runs: int = RUNS) -> tuple[torch.Tensor, float, torch.Tensor]:
    """([V, V, V] counts of the first three tokens over fresh seeds, accepted drafts per run, gain of each run)."""
    counts = torch.zeros(V, V, V)
    accepted = 0
    gains = torch.zeros(runs, dtype=torch.float64)
    for seed in range(runs):
        out = engine.generate(PROMPT, max_new_tokens=3, seed=seed)
        counts[tuple(out.token_ids)] += 1
        accepted += out.stats.accepted
        gains[seed] = (out.stats.total_variation or 0.0) * out.stats.emitted
    return counts, accepted / runs, gains


def views(joint: torch.Tensor) -> list[torch.Tensor]:
    """The joint and its marginals: a bias spread thin over 4,096 cells is thick in 16."""
    singles = [joint.sum((1, 2)), joint.sum((0, 2)), joint.sum((0, 1))]
    pairs = [joint.sum(2).flatten(), joint.sum(0).flatten(), joint.sum(1).flatten()]
    return [*singles, *pairs, joint.flatten()]


def verifier_law() -> torch.Tensor:
    law = torch.zeros(V, V, V, dtype=torch.float64)
    first = next_laws(VERIFIER, PROMPT)[-1]
    for a in range(V):
        second = next_laws(VERIFIER, [*PROMPT, a])[-1]
        for b in range(V):
            law[a, b] = first[a] * second[b] * next_laws(VERIFIER, [*PROMPT, a, b])[-1]
    return law


DRAFTS: dict[str, tuple[Transformer | str, DraftLaw]] = {
    "model": (MODEL, model_law),
    "ngram": ("ngram", ngram_law),
    "self-int8": ("self-int8", self_law(VERIFIER, 8)),
    "self-int4": ("self-int4", self_law(VERIFIER, 4)),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_speculative_sampling_emits_the_verifiers_law(draft: str) -> None:
    engine = Engine(VERIFIER, draft=DRAFTS[draft][0], num_draft_tokens=M, max_length=64)
    law = verifier_law()
    enumerated, _ = enumerate_law(SpeculativeSampling(), DRAFTS[draft][1])
    torch.testing.assert_close(enumerated, law, rtol=0, atol=1e-12)  # the enumeration itself, against losslessness
    counts, accepted, gains = draw(engine)
    assert accepted > 0.05
    assert gains.abs().max() == 0
    for seen, expected in zip(views(counts), views(law), strict=True):
        assert_law(seen, expected, 1e-7)


RELAXED: list[tuple[Rule, str]] = [
    *((Cactus(0.2), draft) for draft in DRAFTS),
    (Cactus(0.2, solver="exact"), "model"),
    (TypicalAcceptance(0.2, 0.5), "model"),
    (Lenience(0.5), "self-int8"),
    (Ensemble(0.6), "ngram"),
    (Ensemble(0.6), "model"),
    (MentoredDecoding(0.1), "model"),
    (CascadeOpt(0.1), "model"),
    (CascadeToken(0.7), "model"),
]


@pytest.mark.parametrize(("rule", "draft"), RELAXED, ids=str)
def test_relaxed_rules_emit_their_own_exact_law(rule: Rule, draft: str) -> None:
    """And the meter lies within 3 standard errors of the enumerated total variation (a false alarm of 0.3 % a case)."""
    runs = RUNS // 2
    engine = Engine(VERIFIER, draft=DRAFTS[draft][0], rule=rule, num_draft_tokens=M, max_length=64)
    law, paid = enumerate_law(rule, DRAFTS[draft][1])
    # Else the test could not tell it from the verifier's law. A good draft makes the self-draft's case a mild one.
    assert (law - verifier_law()).abs().sum() / 2 > (0.001 if draft.startswith("self-") else 0.005)
    counts, _, gains = draw(engine, runs)
    for seen, expected in zip(views(counts), views(law / law.sum()), strict=True):
        assert_law(seen, expected, 1e-7)
    if rule.gain_is_variation:
        assert abs(gains.mean() - paid) <= 3 * gains.std() / runs**0.5
    else:
        assert engine.generate(PROMPT, max_new_tokens=3, seed=1).stats.total_variation is None


def test_plain_decoding_emits_the_verifiers_law() -> None:
    counts, _, _ = draw(Engine(VERIFIER, max_length=64), RUNS // 2)
    for seen, expected in zip(views(counts), views(verifier_law()), strict=True):
        assert_law(seen, expected, 1e-7)


def test_shared_noise_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the classic fault, acceptance tested with the draft's own noise: the same test must reject it."""
    monkeypatch.setattr(philox, "ACCEPT", philox.DRAFT)
    engine = Engine(VERIFIER, draft=MODEL, num_draft_tokens=M, max_length=64)
    counts, _, _ = draw(engine)
    tails = [
        float(chi2.sf(*chi_square(seen.double(), expected)))
        for seen, expected in zip(views(counts), views(verifier_law()), strict=True)
    ]
    assert min(tails) < 1e-7
