"""Log-probabilities of tokens under Triton's interpreter, against float64 and the torch path."""

import math

import pytest
import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.launch import recorded
from fused_spec.kernels.logprob import token_logprobs, token_logprobs_reference
from traffic import traffic


def assert_logprobs(ours: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
    """The bound that `token_logprobs` states; -inf and NaN where the oracle has them."""
    exact = token_logprobs_reference(logits, ids)
    assert torch.equal(ours.isnan(), exact.isnan())
    finite = exact.isfinite()
    assert torch.equal(ours[~finite & ~exact.isnan()].double(), exact[~finite & ~exact.isnan()])
    lse = logits.double().logsumexp(-1)
    bound = 6e-6 + (exact.abs() + lse.abs()) * 2.0**-23
    assert ((ours.double() - exact).abs() <= bound)[finite].all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("scale", [0.01, 3.0, 40.0])
def test_logprobs(backend: str, dtype: torch.dtype, size: int, scale: float) -> None:
    """Strided rows with NaN around them, rows without a token, and masked tokens."""
    wide = torch.full((6, size + 64), math.nan, dtype=dtype)
    logits = wide[:, 16 : 16 + size]
    logits.copy_(torch.randn(6, size) * scale)
    logits[3, 1] = logits[4, size // 2 :] = -math.inf
    ids = torch.stack([torch.tensor([0, size - 1, -1, 1, 0, -(2**40)]), torch.zeros(6, dtype=torch.int64)], 1)[:, 0]
    out = torch.full((6, 2), 7.0)
    assert token_logprobs(logits, ids, out=out[:, 0], backend=backend).data_ptr() == out.data_ptr()
    assert_logprobs(out[:, 0], logits, ids)
    assert (out[:, 1] == 7).all()
    assert torch.equal(token_logprobs(logits, ids, backend=backend).nan_to_num(), out[:, 0].nan_to_num())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_faulty_rows(backend: str) -> None:
    """Also where the fault is in another group of ids than the token; other rows are left alone."""
    logits = torch.randn(5, 3000)
    expected = token_logprobs_reference(logits, torch.tensor([5, 5, 5, 5, 5]))
    logits[1, 2500], logits[2, 2500], logits[3] = math.nan, math.inf, -math.inf
    ours = token_logprobs(logits, torch.full((5,), 5), backend=backend)
    assert ours.isnan().tolist() == [False, True, True, True, False]
    torch.testing.assert_close(ours[[0, 4]].double(), expected[[0, 4]], rtol=0, atol=1e-5)


def test_two_launches_read_the_logits_once() -> None:
    """One number of each row is read again."""
    logits, ids, out = torch.randn(4, 3000).bfloat16(), torch.tensor([1, -1, 2999, 7]), torch.empty(4)
    with traffic(logits=logits, ids=ids, out=out) as seen:
        token_logprobs(logits, ids, out=out, backend="triton")
    assert len(seen.launches) == 2
    assert seen.of_launch(0)["logits"] == logits.nbytes
    assert seen.of_launch(1)["logits"] == 3 * 2
    assert seen.stored["out"] == 4 * 4
    with recorded() as launches:
        assert token_logprobs(logits[:0], ids[:0], backend="triton").shape == (0,)
    assert not launches


def test_ids_beyond_the_vocabulary_read_nothing() -> None:
    wide = torch.randn(1, 50)
    assert token_logprobs(wide[:, :40], torch.tensor([40]), backend="triton").isnan().all()


def test_what_is_refused() -> None:
    logits, ids = torch.randn(2, 10), torch.tensor([1, 2])
    with pytest.raises(InvalidInput, match="logits: expected unit stride"):
        token_logprobs(logits.T, ids)
    with pytest.raises(InvalidInput, match="token_ids: expected shape"):
        token_logprobs(logits, ids[:1])
    with pytest.raises(InvalidInput, match="token_ids: expected int64"):
        token_logprobs(logits, ids.int())
    with pytest.raises(InvalidInput, match="out: expected float32"):
        token_logprobs(logits, ids, out=torch.empty(2).double())
