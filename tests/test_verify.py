"""fs.verify: ordering, ragged batches, padded vocabularies, memory, and rows that have no law."""

import doctest
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_spec as fs
from fused_spec.kernels import verify
from fused_spec.kernels.acceptance import decide
from fused_spec.kernels.philox import acceptance_uniform
from fused_spec.kernels.row_law import Processing, row_law
from fused_spec.kernels.verify_request import Request
from fused_spec.rules import Rule
from rounds import RULES, SPS, drafted, run


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(verify)
    assert (result.failed, result.attempted) == (0, 6)


def test_acceptance_follows_the_stream_and_stops_at_the_first_rejection() -> None:
    batch, m, size = 64, 4, 50
    target, draft = torch.randn(batch, m + 1, size), torch.randn(batch, m, size)
    seeds = torch.arange(batch)
    ids, _ = drafted(draft, seeds, 10)
    out = run(target, ids, draft, seed=seeds)
    p, q = draft.double().softmax(-1), target.double().softmax(-1)
    for b in range(batch):
        expected = m
        for i in range(m):
            n = ids[b, i]
            accept = min(1.0, (q[b, i, n] / p[b, i, n]).item())
            assert out.accept_prob[b, i].item() == pytest.approx(accept, rel=1e-5)
            if acceptance_uniform(b, 10 + i) >= accept:
                expected = i
                break
        assert out.num_accepted[b] == expected
        assert out.token_ids[b, :expected].tolist() == ids[b, :expected].tolist()
        assert 0 <= out.token_ids[b, expected] < size
        assert out.token_ids[b, expected + 1 :].tolist() == [-1] * (m - expected)
        assert out.accept_prob[b, expected + 1 :].isnan().all()
        assert out.tv_gain[b, expected + 1 :].isnan().all()
    assert len(set(out.num_accepted.tolist())) == m + 1  # every outcome was seen


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.0}], ids=str
)
def test_statistics_change_nothing(rule: Rule, options: dict[str, Any]) -> None:
    batch, m, size = 50, 3, 1500
    draft = (torch.randn(batch, m, size) * 2).bfloat16()
    target = torch.cat([draft + torch.randn(batch, m, size).bfloat16() / 2, draft[:, :1]], 1)
    seeds = torch.arange(batch)
    ids, stats = drafted(draft, seeds, 10, **options)
    with_stats = run(target, ids, draft, rule=rule, seed=seeds, draft_stats=stats, **options)
    without = run(target, ids, draft, rule=rule, seed=seeds, **options)
    assert torch.equal(with_stats.token_ids, without.token_ids)
    torch.testing.assert_close(with_stats.accept_prob, without.accept_prob, rtol=1e-5, atol=0, equal_nan=True)
    if decide(rule, 0.5, 0.5) is not None:  # p_n and q_n are all it looks at
        assert torch.equal(with_stats.accept_prob.nan_to_num(-1), without.accept_prob.nan_to_num(-1))
    assert with_stats.error.sum() == 0


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_batch_slot_and_strides_change_nothing(rule: Rule) -> None:
    batch, m, size = 6, 3, 700
    target, draft = torch.randn(batch, m + 1, size), torch.randn(batch, m, size)
    seeds, positions = torch.arange(batch) + 5, torch.arange(batch) * 100
    ids, _ = drafted(draft, seeds, 10)
    together = run(target, ids, draft, rule=rule, seed=seeds, position=positions)
    buffer = torch.full((m + 1, batch, size + 50), math.nan)
    buffer[:, :, 20 : 20 + size] = target.transpose(0, 1)
    strided = buffer[:, :, 20 : 20 + size].transpose(0, 1)
    for order in (torch.arange(batch), torch.randperm(batch)):
        other = run(strided[order], ids[order], draft[order], rule=rule, seed=seeds[order], position=positions[order])
        assert torch.equal(other.token_ids, together.token_ids[order])


def test_per_request_parameters() -> None:
    """A batch with its own rule, temperature and filters per request is the same as one call per request."""
    batch, m, size = 4, 2, 300
    target, draft = torch.randn(batch, m + 1, size) * 2, torch.randn(batch, m, size) * 2
    ids = torch.randint(size, (batch, m))
    columns = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0]),
        "top_k": torch.tensor([0, 10, 0, 40]),
        "top_p": torch.tensor([1.0, 0.9, 0.8, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.01]),
    }
    delta = torch.tensor([0.0, 0.1, 0.5, 2.0])
    together = run(target, ids, draft, rule=fs.Cactus(delta), draft_temperature=1.0, **columns)
    for b in range(batch):
        own = {name: column[b].item() for name, column in columns.items()}
        rule = fs.Cactus(delta[b].item())
        alone = run(target[b : b + 1], ids[b : b + 1], draft[b : b + 1], rule=rule, draft_temperature=1.0, **own)
        assert torch.equal(alone.token_ids[0], together.token_ids[b])


@pytest.mark.parametrize("present", [0, 1, 2, 3])
def test_ragged_drafts(present: int) -> None:
    """-1 ends a request's drafts; with all of them accepted the bonus comes from the row behind the last."""
    target = torch.randn(1, 4, 30)
    ids = target[0, :3].argmax(-1)[None].clone()
    ids[0, present:] = -1
    out = run(target, ids, temperature=0.0)
    assert out.num_accepted.item() == present
    assert out.token_ids[0].tolist() == target[0, : present + 1].argmax(-1).tolist() + [-1] * (3 - present)
    behind = ids.clone()
    behind[0, present + 1 :] = 7  # whatever stands behind the first -1 does not matter
    assert torch.equal(run(target, behind, temperature=0.0).token_ids, out.token_ids)


def test_no_drafts_at_all_is_plain_sampling() -> None:
    target = torch.randn(3, 1, 100)
    out = run(target, torch.empty(3, 0, dtype=torch.int64), seed=torch.arange(3))
    plain = fs.sample(target[:, 0], seed=torch.arange(3), position=10, stream="resample")
    assert torch.equal(out.token_ids[:, 0], plain.token_ids)
    assert out.accept_prob.shape == (3, 0)


def test_identical_laws_always_accept() -> None:
    """Linear space and float32 logs of equal rows: acceptance is exactly 1 even for u just below 1."""
    logits = (torch.randn(200, 1, 4000) * 3).bfloat16()
    ids, stats = drafted(logits, torch.arange(200), 10, temperature=0.7)
    almost_one = torch.full((200, 1), 1 - 2**-24)
    for options in ({}, {"draft_stats": stats}):
        out = run(logits.expand(200, 2, 4000), ids, logits, uniforms=almost_one, temperature=0.7, **options)
        assert (out.accept_prob == 1).all()
        assert (out.num_accepted == 1).all()


@pytest.mark.parametrize(("known", "drafter"), [(100, 140), (140, 100), (1000, 1100), (1100, 1000)])
def test_vocabularies_padded_differently(known: int, drafter: int) -> None:
    """Ids beyond the verifier's have q = 0, ids beyond the draft's p = 0 and stay reachable."""
    target = torch.zeros(300, 2, known)
    draft = torch.zeros(300, 1, drafter)
    seeds = torch.arange(300)
    ids, _ = drafted(draft, seeds, 10)
    out = run(target, ids, draft, seed=seeds)
    assert out.error.sum() == 0
    assert (out.token_ids < known).all()
    outside = ids[:, 0] >= known
    assert (out.num_accepted[outside] == 0).all()
    assert outside.any() == (drafter > known)
    if known > drafter:
        assert (out.token_ids[:, 0] >= drafter).any()
    assert out.accept_prob[~outside, 0].numpy() == pytest.approx(min(1.0, drafter / known), rel=1e-5)


def peak_rows(m: int, size: int, options: dict[str, Any]) -> float:
    """Peak allocation inside verify in float32 rows of V, in the worst case: all rows read, the last one resampled."""
    draft = torch.randn(1, m, size).bfloat16()
    ids, stats = drafted(draft, torch.tensor([1]), 10, **options)
    target = torch.cat([draft, draft[:, :1]], 1)
    target[0, m - 1, ids[0, -1]] -= 2
    uniforms = torch.zeros(1, m)
    uniforms[0, -1] = 1 - 2**-24
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = run(target, ids, draft, uniforms=uniforms, draft_stats=stats, **options)
    assert out.num_accepted.item() == m - 1
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / (4 * size)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_memory_does_not_grow_with_the_number_of_drafts(options: dict[str, Any]) -> None:
    """A few rows, whatever m: never [m+1, V]. Top-p alone may sort a whole row, with int64 indices."""
    few, many = (peak_rows(m, 50_000, options) for m in (2, 20))
    assert 1 < many < (12 if options == {"top_p": 0.9} else 6)
    assert many < few * 1.02


def test_residual_mass_at_full_vocabulary() -> None:
    """The residual law at V = 151,936 in bf16 against float64: total variation below 1e-6."""
    size = 151_936
    target, draft = (torch.randn(2, size) * 3).bfloat16()
    processing = Processing(1.0, 0, 1.0, 0.0)
    ids, (_, cutoffs, log_probs) = drafted(draft.view(1, 1, -1), torch.tensor([5]), 0)
    request = Request(
        target_logits=target.expand(2, size),
        draft_ids=ids[0].tolist(),
        draft_logits=draft[None],
        rule=SPS,
        key=(5, 0),
        target=processing,
        draft=processing,
        allowed=None,
        log_probs=log_probs[0].tolist(),
        cutoffs=cutoffs[0].tolist(),
        lses=None,
        uniforms=None,
    )
    law = row_law(target, processing)
    slot = request._draft(0)
    verdict = request._judge(law, slot)
    ours = request._residual(law, slot, verdict)[:size].double()
    p, q = draft.double().softmax(0), target.double().softmax(0)
    exact = (q - p).clamp(min=0)
    exact[ids[0, 0]] = 0.0  # a rejection means that q_n < p_n
    assert (ours - exact).abs().sum() < 1e-6
    assert abs(ours.sum() - exact.sum()) < 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(RULES), st.sampled_from([0.0, 0.7, 1.0]), st.booleans())
def test_allowed_tokens_only(seed: int, rule: Rule, temperature: float, one_hot: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, m = 50, 3
    mask = torch.randint(-(2**31), 2**31, (1, m + 1, 2), generator=generator, dtype=torch.int64).to(torch.int32)
    mask[..., 0] |= 1  # at least one id
    target, draft = (torch.randn(1, m + 1, size, generator=generator) for _ in range(2))
    ids = torch.randint(size, (1, m), generator=generator)
    out = run(target, ids, None if one_hot else draft[:, :m], rule=rule, seed=seed, temperature=temperature,
              draft_temperature=1.0, allowed=mask)  # fmt: skip
    for slot in range(int(out.num_accepted) + 1):
        token = int(out.token_ids[0, slot])
        assert (int(mask[0, slot, token // 32]) >> (token % 32)) & 1


LOSSLESS: list[Rule] = [
    fs.Cactus(0.0),
    fs.Cactus(0.0, solver="exact"),
    fs.Lenience(1.0),
    fs.Ensemble(1.0),
    fs.MentoredDecoding(0.0),
]


@pytest.mark.parametrize("rule", LOSSLESS, ids=str)
def test_rules_without_slack_are_speculative_sampling_bit_for_bit(rule: Rule) -> None:
    batch, m, size = 200, 4, 400
    draft = torch.randn(batch, m, size)
    target = torch.cat([draft + torch.randn(batch, m, size), draft[:, :1]], 1)
    seeds = torch.arange(batch)
    ids, _ = drafted(draft, seeds, 10)
    expected = run(target, ids, draft, seed=seeds)
    out = run(target, ids, draft, seed=seeds, rule=rule)
    assert torch.equal(out.token_ids, expected.token_ids)
    assert torch.equal(out.accept_prob.nan_to_num(-1), expected.accept_prob.nan_to_num(-1))


def test_out_is_written_and_inputs_are_not() -> None:
    target, draft, ids = torch.randn(2, 3, 40), torch.randn(2, 2, 40), torch.randint(40, (2, 2))
    copies = [tensor.clone() for tensor in (target, draft, ids)]
    out = fs.Verification.empty(2, 2)
    assert run(target, ids, draft, temperature=0.7, top_k=10, out=out) is out
    fresh = run(target, ids, draft, temperature=0.7, top_k=10)
    assert torch.equal(out.token_ids, fresh.token_ids)
    assert torch.equal(out.num_accepted, fresh.num_accepted)
    assert all(torch.equal(a, b) for a, b in zip((target, draft, ids), copies, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "cactus"}, "rule must be an acceptance rule"),
        ({"rule": fs.Cactus(torch.tensor([0.1, 0.2, 0.3]))}, r"delta has shape \(3,\), expected \(2,\)"),
        ({"target_logits": torch.zeros(2, 40)}, r"target_logits: expected a tensor \[B, m\+1, V\]"),
        ({"target_logits": torch.zeros(2, 0, 40)}, "with m >= 0"),
        ({"draft_token_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"draft_token_ids: expected shape \(2, 2\)"),
        ({"draft_token_ids": torch.zeros(2, 2)}, "draft_token_ids: expected int64 or int32, got float32"),
        ({"draft_logits": torch.zeros(2, 3, 40)}, r"draft_logits: expected shape \(2, 2, 40\)"),
        ({"draft_logits": None, "draft_stats": (torch.zeros(2, 2),) * 3}, "together with draft_logits"),
        ({"draft_stats": (torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 3))}, "draft_stats logprob"),
        ({"uniforms": torch.ones(2, 2)}, r"uniforms: expected numbers in \[0, 1\)"),
        ({"uniforms": torch.full((2, 2), math.nan)}, r"uniforms: expected numbers in \[0, 1\)"),
        ({"allowed": torch.zeros(2, 2, 2, dtype=torch.int32)}, r"allowed: expected shape \(2, 3, 2\)"),
        ({"draft_temperature": -1.0}, "temperature must be 0"),
        ({"draft_top_p": 0.0}, "top_p must be in"),
        ({"backend": "cuda"}, "backend must be None, 'torch' or 'triton'"),
        ({"out": fs.Verification.empty(2, 3)}, r"out token_ids: expected shape \(2, 3\)"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "target_logits": torch.zeros(2, 3, 40),
        "draft_token_ids": torch.zeros(2, 2, dtype=torch.int64),
        "draft_logits": torch.zeros(2, 2, 40),
        "rule": SPS,
        "seed": 0,
        "position": 0,
    } | options
    with pytest.raises(fs.InvalidInput, match=message) as caught:
        fs.verify(**arguments)
    assert "\n" not in str(caught.value)


def test_the_round_in_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    outcome, sequences = names["outcome"], names["sequences"]
    assert outcome.error.sum() == 0
    assert (sequences.length - 100 == sequences.emitted).all()
    assert (sequences.drafted == 3).all()
    for b, count in enumerate(sequences.emitted.tolist()):
        assert count == outcome.num_accepted[b] + 1
        assert torch.equal(sequences.tokens[b, 100 : 100 + count], outcome.token_ids[b, :count])
