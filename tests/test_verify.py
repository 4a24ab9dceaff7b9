"""fs.verify: ordering, ragged batches, padded vocabularies, memory, and rows that have no law."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_spec as fs
from fused_spec.kernels.philox import acceptance_uniform
from fused_spec.kernels.row_law import Processing, row_law
from fused_spec.kernels.verify_request import Request
from fused_spec.rules import Rule

RULES: list[Rule] = [fs.SpeculativeSampling(), fs.Cactus(0.5), fs.Cactus(0.5, solver="exact")]
SPS = RULES[0]


def run(target: torch.Tensor, ids: Any, draft: torch.Tensor | None = None, **options: Any) -> fs.Verification:
    """verify with defaults for what a test does not care about."""
    defaults: dict[str, Any] = {"rule": SPS, "seed": 3, "position": 10} | options
    return fs.verify(target, torch.as_tensor(ids), draft, **defaults)


def drafted(logits: torch.Tensor, seed: torch.Tensor, position: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """Drafts [B, m] sampled from logits [B, m, V], and their statistics."""
    samples = [fs.sample(logits[:, i], seed=seed, position=position + i, **options) for i in range(logits.shape[1])]
    columns = [torch.stack([getattr(s, name) for s in samples], 1) for name in ("lse", "cutoff", "logprob")]
    return torch.stack([s.token_ids for s in samples], 1), tuple(columns)


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


class TestFaultyRows:
    """No NaN escapes, no id leaves the vocabulary, the other requests of the batch do not notice."""

    size, m = 60, 2

    def outcome(self, rule: Rule, spoil: Any, **options: Any) -> tuple[fs.Verification, fs.Verification]:
        """(spoiled, clean) with request 1 of 3 spoiled; drafts are the verifier's likely tokens."""
        generator = torch.Generator().manual_seed(1)
        target = torch.randn(3, self.m + 1, self.size, generator=generator)
        draft = target[:, : self.m] + torch.randn(3, self.m, self.size, generator=generator) / 4
        ids = draft.argmax(-1)
        clean = run(target, ids, draft, rule=rule, **options)
        target, draft, ids = target.clone(), draft.clone(), ids.clone()
        spoil(target[1], draft[1], ids[1])
        spoiled = run(target, ids, draft, rule=rule, **options)
        for b in (0, 2):
            assert torch.equal(spoiled.token_ids[b], clean.token_ids[b])
            assert spoiled.error[b] == 0
        tokens = spoiled.token_ids[1, : int(spoiled.num_accepted[1]) + 1]
        assert ((tokens >= 0) & (tokens < self.size)).all()
        tested = spoiled.accept_prob[1, : int(spoiled.num_accepted[1]) + 1]
        assert not tested.isnan().any()
        return spoiled, clean

    @pytest.mark.parametrize("rule", RULES, ids=str)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        ("spoil", "bits"),
        [
            (lambda t, d, n: t[0].fill_(math.nan), 1),
            (lambda t, d, n: t[0, 5:6].fill_(math.nan), 1),
            (lambda t, d, n: t[0, 5:6].fill_(math.inf), 1),
            (lambda t, d, n: t[0].fill_(-math.inf), 4),
            (lambda t, d, n: d[0].fill_(math.nan), 2),
            (lambda t, d, n: d[0, 5:6].fill_(math.inf), 2),
            (lambda t, d, n: d[0].fill_(-math.inf), 4),
            (lambda t, d, n: n[0:1].fill_(60), 8),
            (lambda t, d, n: n[0:1].fill_(-7), 8),
            (lambda t, d, n: n[0:1].fill_(2**40), 8),
            (lambda t, d, n: d[0, n[0] : n[0] + 1].fill_(-math.inf), 16),
        ],
    )
    def test_first_slot(self, rule: Rule, temperature: float, spoil: Any, bits: int) -> None:
        out, _ = self.outcome(rule, spoil, temperature=temperature)
        assert out.error[1] == bits
        assert out.num_accepted[1] == 0
        assert out.accept_prob[1, 0] == 0

    def test_rows_behind_the_deciding_one_do_not_matter(self) -> None:
        reject_all = torch.full((3, self.m), 1 - 2**-24)

        def spoil(target: torch.Tensor, draft: torch.Tensor, ids: torch.Tensor) -> None:
            target[1:], draft[1:], ids[1:] = math.nan, math.nan, 9999

        out, clean = self.outcome(SPS, spoil, uniforms=reject_all)
        assert clean.num_accepted[1] == 0
        assert torch.equal(out.token_ids[1], clean.token_ids[1])
        assert out.error[1] == 0

    def test_faulty_bonus_row(self) -> None:
        out, _ = self.outcome(SPS, lambda t, d, n: t[self.m].fill_(math.nan), uniforms=torch.zeros(3, self.m))
        assert (out.num_accepted[1].item(), out.error[1].item()) == (self.m, 1)
        assert out.token_ids[1, self.m] == 0

    def test_without_draft_logits_an_unknown_id_is_out_of_range(self) -> None:
        out = run(torch.randn(1, 2, 60), [[60]])
        assert (out.num_accepted.item(), out.error.item()) == (0, 8)


def test_zero_probability_is_never_accepted() -> None:
    """u = 0 must not let a token with q_n = 0 through, nor one with p_n = 0."""
    target = torch.tensor([[[0.0, -math.inf, 1.0]] * 2])
    draft = torch.zeros(1, 1, 3)
    for rule in RULES:
        out = run(target, [[1]], draft, rule=rule, uniforms=torch.zeros(1, 1))
        assert out.num_accepted.item() == 0
        assert out.token_ids[0, 0] != 1


def test_zero_residual_samples_from_q() -> None:
    """p >= q everywhere off n within float32, p_n > q_n by a rounding: nothing is left to resample but q itself."""
    target = torch.tensor([[[0.0, -200.0, -1.0]] * 2])
    out = run(target, [[1]], target[:, :1], uniforms=torch.zeros(1, 1))
    assert out.error.item() == 0
    cactus = fs.Cactus(50.0)  # g = 1 for q_n > 0.0099: scale 0 leaves no residual when u rounds to 1
    logits = torch.tensor([[[0.0, 0.0]] * 2])
    out = run(logits, [[0]], torch.tensor([[[-math.inf, 0.0]]]), rule=cactus, seed=1)
    assert out.error.item() == 16
    assert out.token_ids[0, 0] in (0, 1)
    one_hot = torch.tensor([[[0.0, -math.inf]]])  # h = p = one-hot, but the draft is the other token
    out = run(torch.tensor([[[0.0, -math.inf]] * 2]), [[1]], one_hot)
    assert (out.error.item(), out.token_ids[0, 0].item()) == (16 | 32, 0)


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
        uniforms=None,
    )
    law = row_law(target, processing)
    test, _, _ = request._test(law, 0)
    ours = request._residual(law, test, 0)[:size].double()
    p, q = draft.double().softmax(0), target.double().softmax(0)
    exact = (q - p).clamp(min=0)
    exact[ids[0, 0]] = max(0.0, test.threshold - test.p_n)
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


def test_delta_zero_is_speculative_sampling_bit_for_bit() -> None:
    batch, m, size = 200, 4, 400
    draft = torch.randn(batch, m, size)
    target = torch.cat([draft + torch.randn(batch, m, size), draft[:, :1]], 1)
    seeds = torch.arange(batch)
    ids, _ = drafted(draft, seeds, 10)
    expected = run(target, ids, draft, seed=seeds)
    for solver in ("taylor", "exact"):
        out = run(target, ids, draft, seed=seeds, rule=fs.Cactus(0.0, solver=solver))
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
        ({"backend": "cuda"}, "backend must be None or 'torch'"),
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
