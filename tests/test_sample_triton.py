"""The Triton path of fs.sample, under Triton's interpreter, against the torch path."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fused_spec as fs


def both(logits: torch.Tensor, **options: Any) -> fs.Sample:
    """The draw of the Triton path, which has to be that of the torch path."""
    arguments: dict[str, Any] = {"seed": 3, "position": 10} | options
    ours = fs.sample(logits, backend="triton", **arguments)
    reference = fs.sample(logits, backend="torch", **arguments)
    assert torch.equal(ours.token_ids, reference.token_ids)
    assert torch.equal(ours.error, reference.error)
    assert torch.equal(ours.cutoff, reference.cutoff)
    sound = ours.error == 0
    # float32 holds z to 2^-24 of itself, and so ln p to that much of the largest z.
    torch.testing.assert_close(ours.lse[sound], reference.lse[sound], rtol=3e-7, atol=1e-6)
    torch.testing.assert_close(ours.logprob[sound], reference.logprob[sound], rtol=1e-5, atol=1e-6)
    assert ours.logprob[~sound].isnan().all()
    empty = ours.error == 4
    assert (ours.lse[empty] == -math.inf).all()
    return ours


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, size = draw(st.integers(1, 4)), draw(st.sampled_from([2, 3, 127, 1024, 1025, 3000]))
    logits = torch.randn(batch, size) * draw(st.sampled_from([0.5, 4.0]))
    options: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.6, 1.0, torch.linspace(0, 1.5, batch)])),
        "top_k": draw(st.sampled_from([0, 0, 1, 20, 70, torch.arange(batch) * 3])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.95, 0.3, torch.linspace(0.2, 1, batch)])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.1, torch.linspace(0, 0.5, batch)])),
        "stream": draw(st.sampled_from(["draft", "resample"])),
        "seed": torch.randint(0, 2**62, (batch,)),
        "position": torch.randint(0, 2**40, (batch,)),
    }
    if draw(st.booleans()):
        words = torch.randint(-(2**31), 2**31, (batch, -(-size // 32)), dtype=torch.int64)
        options["allowed"] = words.to(torch.int32)
    return {"logits": logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))), **options}


@settings(max_examples=120, deadline=None)
@given(calls())
def test_same_as_the_torch_path(arguments: dict[str, Any]) -> None:
    both(**arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}], ids=str)
def test_rows_without_a_law(temperature: float, options: dict[str, Any]) -> None:
    rows = torch.randn(6, 40)
    rows[1, 3], rows[2], rows[3, 7], rows[5] = math.nan, -math.inf, math.inf, 2.0
    mask = torch.tensor([[-1, -1]] * 3 + [[-64, -1]] + [[0, 0], [-1, -1]], dtype=torch.int32)
    out = both(rows, seed=torch.arange(6), temperature=temperature, allowed=mask, **options)
    assert out.error.tolist() == [0, 1, 4, 1, 4, 0]
    assert out.token_ids[1:5].tolist() == [0, 0, 6, 0]


def test_strided_rows_and_outputs() -> None:
    wide = torch.full((4, 4000), math.nan).bfloat16()
    wide[:, 501:3501] = torch.randn(4, 3000)
    columns = {name: torch.empty(4, 3, dtype=tensor.dtype) for name, tensor in vars(fs.Sample.empty(4)).items()}
    out = fs.Sample(**{name: column[:, 1] for name, column in columns.items()})
    order = torch.tensor([2, 0, 3, 1])
    assert fs.sample(wide[:, 501:3501], seed=7, position=1, backend="triton", out=out) is out
    expected = both(wide[order][:, 501:3501].contiguous(), seed=7, position=1)
    assert torch.equal(out.token_ids[order], expected.token_ids)
    assert torch.equal(out.lse[order], expected.lse)


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.1])
def test_a_top_p_that_float32_does_not_know(value: float) -> None:
    """It keeps the largest tokens, here all of a flat row."""
    out = both(torch.full((1, 5000), value), top_p=1e-46)
    assert out.error.item() == 0
    assert out.cutoff.item() == pytest.approx(value)


def test_seeds_and_positions_beyond_32_bits() -> None:
    logits = torch.randn(1, 500)
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1):
        for position in (0, 1, 2**32, 2**62):
            both(logits, seed=seed, position=position)
