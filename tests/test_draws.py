"""Draws as a whole: rare tokens of a wide row come as often as they should, and no round knows what another drew."""

from collections.abc import Callable

import pytest
import torch

import fused_spec as fs
from fused_spec.kernels import philox, verify_request
from fused_spec.kernels.inverse_cdf import draw
from fused_spec.kernels.philox import DRAFT, sampling_uniform
from fused_spec.kernels.row_law import Processing, row_law
from laws import assert_law, chi_square

V, DEPTH, DRAWS = 262_144, 16.0, 40_000
TAIL = torch.full((V,), -DEPTH)
TAIL[:2] = 0.0  # two equal tops, then a tail of 1.1e-7 each, 3 % of the mass together
LAW = TAIL.double().softmax(0)


def reached_by_24_bits() -> torch.Tensor:
    """[V] bool: whether some multiple of 2^-24 falls into a token's share of [0, 1)."""
    steps = 2**24
    ends = (LAW.cumsum(0) * steps).ceil().long()
    return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long)) > 0


def classes(tokens: torch.Tensor) -> torch.Tensor:
    """Counts of the two tops, of 16 stretches of the tail that 24 bits reach, and of all tokens that they do not."""
    stretch = 2 + torch.arange(V) * 16 // V
    stretch[:2] = torch.tensor([0, 1])
    stretch[~reached_by_24_bits()] = 18
    return torch.zeros(19, dtype=torch.float64).index_add_(0, stretch[tokens], torch.ones(len(tokens)).double())


def class_law() -> torch.Tensor:
    stretch = 2 + torch.arange(V) * 16 // V
    stretch[:2] = torch.tensor([0, 1])
    stretch[~reached_by_24_bits()] = 18
    return torch.zeros(19, dtype=torch.float64).index_add_(0, stretch, LAW)


def drawn(pick: Callable[[float], int]) -> torch.Tensor:
    return torch.tensor([pick(sampling_uniform(seed, 0, DRAFT)) for seed in range(DRAWS)])


def test_a_deep_tail_is_hit_as_often_as_it_should() -> None:
    """40,000 draws; a false alarm of 1e-6. One in fifteen tail tokens is out of reach of 24 bits, and yet is drawn."""
    law = row_law(TAIL, Processing(1.0, 0, 1.0, 0.0))
    assert_law(classes(drawn(lambda uniform: draw(law, uniform))), class_law())
    assert 0.05 < (~reached_by_24_bits()).float().mean() < 0.1


def test_24_bits_or_a_float32_running_sum_would_fail() -> None:
    """The same test finds both faults: tokens that are never drawn, and a tail that rounds away."""
    exact = LAW.cumsum(0)
    coarse = drawn(lambda uniform: int(torch.searchsorted(exact, int(uniform * 2**24) / 2**24, right=True)))
    assert classes(coarse)[18] == 0
    assert chi_square(classes(coarse), class_law())[0] > 50
    running = torch.ones(2).tolist()
    running[1] = 2.0
    step = TAIL[2].exp()
    assert torch.tensor(2.0) + step == 2.0  # so a running sum stays at 2, and all of the tail is lost
    rounded = drawn(lambda uniform: int(uniform * running[1] >= 1))
    assert classes(rounded)[2:].sum() == 0
    assert chi_square(classes(rounded), class_law())[0] > 50


def test_the_kernel_draws_the_same_tail_tokens() -> None:
    """20 draws from the tail, a quarter of a token away from its ends or more: token for token, and the exact ones.

    Float32 sums over a group put the tops' mass wrong by 3e-7 of it at most, which moves a draw in the last 3 % of the
    uniforms by 3 % of that, 0.15 of a tail token's share.
    """
    position = {seed: (sampling_uniform(seed, 0, DRAFT) - LAW[:2].sum().item()) / LAW[2].item() for seed in range(3000)}
    chosen = {seed: place for seed, place in position.items() if place > 0 and 0.25 < place % 1 < 0.75}
    seed = torch.tensor(list(chosen)[:20])
    exact = torch.tensor([2 + int(place) for place in list(chosen.values())[:20]])
    ours = fs.sample(TAIL.expand(20, V), seed=seed, position=0, backend="triton")
    reference = fs.sample(TAIL.expand(20, V), seed=seed, position=0, backend="torch")
    assert len(exact) == 20
    assert torch.equal(ours.token_ids, reference.token_ids)
    assert torch.equal(ours.token_ids, exact)


DRAFT_LAW = torch.tensor([0.8, 0.1, 0.1])  # leaves a residual of two tokens
TARGET_LAW = torch.tensor([0.1, 0.6, 0.3])


def three_rounds(requests: int) -> torch.Tensor:
    """[27] counts of the first three tokens of sequences whose laws never change, made by rounds of two drafts."""
    seeds = torch.arange(requests)
    length = torch.zeros(requests, dtype=torch.int64)
    tokens = torch.full((requests, 12), -1)
    q = TARGET_LAW.log().expand(requests, 3, 3)
    p = DRAFT_LAW.log().expand(requests, 3)
    for _ in range(3):
        samples = [fs.sample(p, seed=seeds, position=length + i) for i in range(2)]
        ids = torch.stack([s.token_ids for s in samples], 1)
        stats = tuple(torch.stack([getattr(s, name) for s in samples], 1) for name in ("lse", "cutoff", "logprob"))
        out = fs.verify(q, ids, p[:, None].expand(-1, 2, -1), rule=fs.SpeculativeSampling(), seed=seeds,
                        position=length, draft_stats=stats)  # type: ignore[arg-type]  # fmt: skip
        for slot in range(3):
            emitted = slot <= out.num_accepted
            tokens[seeds[emitted], (length + slot)[emitted]] = out.token_ids[emitted, slot]
        length += out.num_accepted + 1
    return torch.bincount(tokens[:, 0] * 9 + tokens[:, 1] * 3 + tokens[:, 2], minlength=27)


EMITTED = (TARGET_LAW[:, None, None] * TARGET_LAW[None, :, None] * TARGET_LAW[None, None, :]).double().flatten()
EMITTED = EMITTED / EMITTED.sum()


def test_three_rounds_are_not_coupled() -> None:
    """6,000 sequences of three tokens out of three successive rounds: independent draws of q; false alarm 1e-6."""
    assert_law(three_rounds(6000), EMITTED)


@pytest.mark.parametrize("shared", ["draft and acceptance", "draft and resampling", "acceptance and resampling"])
def test_a_shared_stream_would_be_found(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shared == "draft and acceptance":
        monkeypatch.setattr(philox, "ACCEPT", philox.DRAFT)
    elif shared == "draft and resampling":
        monkeypatch.setattr(verify_request, "RESAMPLE", philox.DRAFT)
    else:
        monkeypatch.setattr(verify_request, "RESAMPLE", philox.ACCEPT)
    with pytest.raises(AssertionError):
        assert_law(three_rounds(6000), EMITTED)
