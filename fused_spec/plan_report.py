"""A plan as tables and as JSON: memory, floors on some GPUs, and what rounds gain at some acceptance rates."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fused_spec.plan import Memory, Plan
from fused_spec.round_size import tokens_per_round
from fused_spec.table import Table

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
"""Rates to show where none are asked for."""

GPU_CAPTION = "Least microseconds of a plain step and of a round, most tokens per second (plain, at acceptance a):"

LEFT_OUT = (
    "gaps between launches and between rounds; what attention and matrix products fall short of the bandwidth; "
    "compute, which grows with the number of drafts; activations, logits, sampling and verification; and everything "
    "that is written"
)
"""What no time of a report has in it."""


@dataclass(frozen=True)
class Report:
    """One plan on several GPUs, at one context.

    Attributes:
        target, draft, dtype: how they are called.
        plans: at least one; they differ in the GPU only.
        context: committed tokens.
        acceptances: rates to show; none without a draft.
    """

    target: str
    draft: str | None
    dtype: str
    plans: Sequence[Plan]
    context: int
    acceptances: Sequence[float]

    def as_text(self) -> str:
        """For a terminal."""
        parts = [
            f"Computed from configs, not measured: memory, and the least time that reading it takes.\n{self.setting()}",
            self.memory_table().text(),
            self.reads_table().text(),
            f"{GPU_CAPTION}\n{self.gpu_table().text()}",
        ]
        if self.draft is not None:
            parts += [self.break_even(), self.acceptance_table().text()]
        parts += [textwrap.fill(note, 100) for note in (*self.notes(), f"Left out: {LEFT_OUT}.")]
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For machines: bytes, microseconds, and the rest as in the tables."""
        plan, c = self.plans[0], self.context
        drafting = self.draft is not None
        return {
            "measured": False,
            "target": self.target,
            "draft": self.draft,
            "dtype": self.dtype,
            "num_draft_tokens": plan.num_draft_tokens,
            "max_length": plan.max_length,
            "context": c,
            "memory": self._memory(),
            "reads": self._reads(),
            "break_even_tokens_per_round": plan.break_even_tokens(c) if drafting else None,
            "break_even_acceptance": plan.break_even_acceptance(c) if drafting else None,
            "acceptances": [self._gain(acceptance) for acceptance in self._rates()],
            "gpus": [self._floor(each) for each in self.plans],
        }

    def setting(self) -> str:
        """What is planned, in one line."""
        plan = self.plans[0]
        draft = "no draft" if self.draft is None else f"{self.draft} with {plan.num_draft_tokens} drafts per round"
        return f"{self.target}, {draft}, {self.dtype}, max_length {plan.max_length}, {self.context} committed tokens"

    def memory_table(self) -> Table:
        """What stays allocated."""
        rows = [[name.replace("_", " "), f"{size / 1e9:.3f}"] for name, size in self._memory().items()]
        return Table(["memory", "GB"], rows)

    def reads_table(self) -> Table:
        """What a step and a round read."""
        rows = [[name.replace("_", " "), f"{size / 1e9:.3f}"] for name, size in self._reads().items()]
        return Table(["reads", "GB"], rows)

    def gpu_table(self) -> Table:
        """Floors on each GPU: microseconds, and tokens per second."""
        rates = self._rates()
        rounds = ["round us", *(f"a={rate:g}" for rate in rates)] if self.draft is not None else []
        rows = []
        for plan in self.plans:
            floor = self._floor(plan)
            size, fits = f"{plan.gpu.memory_bytes / 1e9:.0f}", "yes" if plan.fits else "no"
            row = [plan.gpu.name, size, fits, f"{plan.gpu.bandwidth}", f"{floor['plain_step_us']:.0f}"]
            row += [f"{floor['plain_tokens_per_second']:.0f}"]
            if self.draft is not None:
                row += [f"{floor['round_us']:.0f}", *(f"{speed:.0f}" for speed in floor["tokens_per_second"])]
            rows.append(row)
        return Table(["GPU", "GB", "fits", "GB/s", "plain us", "plain", *rounds], rows)

    def acceptance_table(self) -> Table:
        """What rounds gain over plain decoding, on any GPU."""
        header = ["acceptance", "tokens per round", "speed-up", "best m", "its speed-up"]
        gains = [self._gain(rate) for rate in self._rates()]
        return Table(
            header,
            [
                [
                    f"{gain['acceptance']:g}",
                    f"{gain['tokens_per_round']:.2f}",
                    f"{gain['speedup']:.2f}",
                    f"{gain['best_num_draft_tokens']}",
                    f"{gain['best_speedup']:.2f}",
                ]
                for gain in gains
            ],
        )

    def break_even(self) -> str:
        """Above which acceptance a round beats plain decoding."""
        plan = self.plans[0]
        rate = plan.break_even_acceptance(self.context)
        reached = "which no acceptance reaches" if rate is None else f"an acceptance of {rate:.2f}"
        tokens = plan.break_even_tokens(self.context)
        return f"A round beats plain decoding above {tokens:.2f} tokens per round, {reached}."

    def notes(self) -> list[str]:
        """What to beware of in these tables."""
        drafter = self.plans[0].drafter
        if self.draft is None:
            return []
        if drafter is None:
            free = "Drafts without a model read next to nothing, and only what is left out limits their number"
            return [f"{free}: the best m says little here."]
        size = drafter.of(1, self.context)
        names = [plan.gpu.name for plan in self.plans if size <= plan.gpu.l2_bytes]
        fits = f"A draft step reads {size / 1e6:.0f} MB, which fits the L2 cache of {', '.join(names)}"
        return [f"{fits}: it may be faster than its floor there."] if names else []

    def _rates(self) -> Sequence[float]:
        return self.acceptances if self.draft is not None else []

    def _memory(self) -> dict[str, int]:
        memory = self.plans[0].memory
        return {field.name: getattr(memory, field.name) for field in fields(Memory)} | {"total": memory.total}

    def _reads(self) -> dict[str, int]:
        plan, c = self.plans[0], self.context
        rounds = {} if self.draft is None else {"round": plan.round_bytes(c), "of_it_drafting": plan.draft_bytes(c)}
        return {"plain_step": plan.plain_bytes(c), **rounds}

    def _gain(self, acceptance: float) -> dict[str, float]:
        plan, c = self.plans[0], self.context
        best = plan.best_num_draft_tokens(acceptance, c)
        return {
            "acceptance": acceptance,
            "tokens_per_round": tokens_per_round(acceptance, plan.num_draft_tokens),
            "speedup": plan.speedup(acceptance, c),
            "best_num_draft_tokens": best,
            "best_speedup": plan.speedup(acceptance, c, best),
        }

    def _floor(self, plan: Plan) -> dict[str, Any]:
        """`tokens_per_second` are in the order of the acceptance rates."""
        gpu, c = plan.gpu, self.context
        plain, whole = gpu.microseconds(plan.plain_bytes(c)), gpu.microseconds(plan.round_bytes(c))
        speeds = [1e6 * tokens_per_round(rate, plan.num_draft_tokens) / whole for rate in self._rates()]
        return {
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "bandwidth_gb_per_s": gpu.bandwidth,
            "fits": plan.fits,
            "plain_step_us": plain,
            "plain_tokens_per_second": 1e6 / plain,
            "round_us": whole if self.draft is not None else None,
            "tokens_per_second": speeds,
        }
