"""What a round on a GPU is made of, on any machine: launches, bytes and allocations, none of them timed.

Rounds are traced on the meta device (tools/traced_rounds.py): a read on the host, or an operator that nobody counted,
fails there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_spec.gpus import gpu_of
from fused_spec.models.known_configs import config_of
from fused_spec.options import NAMED_DRAFTS
from fused_spec.plan import plan
from meta_trace import ALLOCATIONS, PRODUCTS
from round_bytes import steps_of
from traced_rounds import Round, count, differences, read

CONTEXT, M = 1024, 5
PAIRS = [("Qwen3-8B", draft) for draft in ("none", *NAMED_DRAFTS, "Qwen3-0.6B")]
pairs = pytest.mark.parametrize(("model", "draft"), PAIRS)


@pairs
@pytest.mark.parametrize("kind", ["plain", "filters"])
def test_launches(model: str, draft: str, kind: str, figures: dict[str, Any]) -> None:
    """As many as the committed baseline has, and no host read."""
    filters: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    found = count(Round(model, draft, M, **(filters if kind == "filters" else {})))
    figures.setdefault("launches", {})[f"{model}, {draft}, {kind}"] = found._asdict()
    name = f"{model}/{draft}/speculative_sampling/{kind}"
    assert differences(read(), {name: found}) == []
    assert found.verify <= (5 if kind == "filters" else 3)


@pairs
def test_bytes(model: str, draft: str, figures: dict[str, Any], say: Callable[[str], None]) -> None:
    """What all launches touch against the floor of weights and cache: activations, logits and partial results add
    less than a twentieth."""
    steps = steps_of(Round(model, draft, M), CONTEXT)
    drafting: Any = None if draft == "none" else draft if draft in NAMED_DRAFTS else config_of(draft)
    floor = plan(
        config_of(model), drafting, num_draft_tokens=M, max_length=4096, dtype=torch.bfloat16, gpu=gpu_of("H100")
    ).round_bytes(CONTEXT)
    touched = sum(step.num_bytes for step in steps)
    say(f"{model}, {draft}: {touched / 1e9:.2f} GB in a round, {touched / floor:.4f} of the floor")
    figures.setdefault("bytes_over_floor", {})[f"{model}, {draft}"] = touched / floor
    assert 1 <= touched / floor <= 1.05


class Allocations(TorchDispatchMode):
    """Counts new tensors and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ALLOCATIONS or (name in PRODUCTS and "out" not in (kwargs or {})):
            self.sizes.append(result.nbytes)
        return result


@pairs
def test_allocations(model: str, draft: str, figures: dict[str, Any]) -> None:
    """Nothing larger than the verifier's logits, and beside the results of products a handful for each sample."""
    (call,) = Round(model, draft, M).calls().values()
    call()  # what is made once is made now
    with Allocations() as found:
        call()
    figures.setdefault("allocations", {})[f"{model}, {draft}"] = {"count": len(found.sizes), "bytes": sum(found.sizes)}
    logits = (M + 1) * config_of(model).vocab_size * 2
    drafts = 0 if draft in ("none", "ngram") else M
    products = sum(
        step.kernel is None or step.kernel.endswith("linear_kernel")
        for step in steps_of(Round(model, draft, M), CONTEXT)
    )
    assert max(found.sizes) <= logits
    assert len(found.sizes) <= products + 20 * (drafts + 1)
