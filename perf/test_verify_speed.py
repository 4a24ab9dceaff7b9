"""`fs.verify` at V=151936 against a log-sum-exp over the same rows, and against storing probabilities: `make perf`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fused_spec as fs
from fused_spec import timing
from fused_spec.table import Table
from fused_spec.timing import Turns
from quiet import take_turns

V = 151936
GATES = [(6, 3.0), (21, 2.5)]
"""Rows, and how many log-sum-exps over them verify may take."""


def case(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Logits [1, R, V] and [1, R-1, V] in bfloat16, drafts and their statistics. Draft and verifier nearly agree."""
    torch.manual_seed(rows)
    target = (torch.randn(1, rows, V) * 3).bfloat16()
    draft = (target[:, :-1].float() + 0.3 * torch.randn(1, rows - 1, V)).bfloat16()
    drawn = fs.sample(draft[0], seed=1, position=torch.arange(rows - 1) + 5)
    statistics = (drawn.lse[None], drawn.cutoff[None], drawn.logprob[None])
    return target, draft, drawn.token_ids[None], statistics


def contenders(rows: int, verifications: int = 1) -> dict[str, Callable[[], None]]:
    """A hundred calls each of verify, of a log-sum-exp and of what keeps p and q in buffers of its own.

    All rows are looked at: the last draft is rejected. With more than one verification a call is slowed on purpose.
    """
    target, draft, ids, statistics = case(rows)
    uniforms = torch.zeros(1, rows - 1)
    uniforms[0, -1] = 1 - 2.0**-24
    p, q = torch.empty(rows - 1, V), torch.empty(rows, V)

    def verify() -> None:
        for _ in range(verifications):
            out = fs.verify(
                target, ids, draft, rule=fs.SpeculativeSampling(), seed=1, position=5, draft_stats=statistics,
                uniforms=uniforms,
            )  # fmt: skip
            assert int(out.num_accepted) >= rows - 2

    def materialised() -> None:
        torch.softmax(target[0], -1, dtype=torch.float32, out=q)
        torch.softmax(draft[0], -1, dtype=torch.float32, out=p)
        p.gather(1, ids[0, :, None])
        q[:-1].gather(1, ids[0, :, None])
        torch.multinomial((q[rows - 2] - p[rows - 2]).clamp_(min=0), 1)

    def repeated(call: Callable[[], object]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(100):
                call()

        calls()
        return calls

    return {
        "verify": repeated(verify),
        "logsumexp": repeated(lambda: torch.logsumexp(target, -1)),
        "materialised": repeated(materialised),
    }


def gate(turns: Turns, rows: int, most: float) -> None:
    """Fail if verify is slow."""
    assert turns.ratio("logsumexp", "verify") <= most
    if rows == 6:
        assert turns.ratio("verify", "materialised") >= 2


@pytest.mark.parametrize(("rows", "most"), GATES)
def test_verify(rows: int, most: float, benchmark: Any, figures: dict[str, Any], say: Callable[[str], None]) -> None:
    with torch.inference_mode():
        calls = contenders(rows)
        turns = take_turns(calls, 7, benchmark)
    over_logsumexp, over_materialised = turns.ratio("logsumexp", "verify"), turns.ratio("verify", "materialised")
    shown = Table(("", "ms"), [(name, f"{turns.seconds(name) * 10:.3f}") for name in calls])
    say(
        f"verify, R={rows}: {over_logsumexp:.2f} log-sum-exps, {over_materialised:.2f} times as fast as materialised\n"
        f"{shown.text()}\nothers used {turns.foreign:.1%} of the CPU time; {len(turns.quiet)} quiet turns"
    )
    figures[f"verify_{rows}_rows"] = {
        "logsumexps": over_logsumexp,
        "over_materialised": over_materialised,
        "foreign_cpu_share": turns.foreign,
    }
    gate(turns, rows, most)


@pytest.mark.parametrize(("rows", "most"), GATES)
def test_a_verify_that_takes_twice_as_long_would_be_found(rows: int, most: float) -> None:
    with torch.inference_mode():
        turns = timing.take_turns(contenders(rows, verifications=2), 3)
        turns.ratio("logsumexp", "verify")  # skips on a busy machine
    with pytest.raises(AssertionError):
        gate(turns, rows, most)
