"""The public calls that the dry run traces, `fused_spec.sample` and `fused_spec.verify`, for a choice of arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fused_spec as fs
from fused_spec.kernels.commit import Sequences

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DRAFTS = ("stats", "logits", "none")


@dataclass(frozen=True)
class Setting:
    """Arguments of one round's calls; tensors are made from them on the meta device.

    Attributes:
        vocab, draft_vocab: V and Vd; None is as V.
        num_draft_tokens, batch: m and B.
        dtype: of all logits.
        draft: what verification knows of the drafter: its logits and "stats" of them, as in a round with a draft model,
            its "logits" only, or "none" (a deterministic drafter).
        allowed: whether target rows have a bitmask.
        tensors: whether processing parameters are tensors [B] instead of numbers.
        commit: whether verification appends the tokens to their sequences, as in a round.
    """

    vocab: int = 151936
    draft_vocab: int | None = None
    num_draft_tokens: int = 5
    batch: int = 1
    dtype: str = "bfloat16"
    rule: str = "speculative_sampling"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft: str = "stats"
    allowed: bool = False
    tensors: bool = False
    commit: bool = False

    def calls(self) -> dict[str, Callable[[], object]]:
        """Each call by name, ready to be traced.

        Raises:
            InvalidInput: the rule is not one.
        """
        return {"sample": self._sample, "verify": partial(self._verify, fs.parse_rule(self.rule))}

    def _tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def _common(self, *mask_shape: int) -> dict[str, Any]:
        """Keyword arguments that both calls have. Seed and position live on the device, as in a captured round."""
        integers, floats = (self._tensor(self.batch, dtype=dtype) for dtype in (torch.int64, torch.float32))
        mask = self._tensor(*mask_shape, -(-self.vocab // 32), dtype=torch.int32) if self.allowed else None
        return {
            "seed": integers,
            "position": integers,
            "temperature": floats if self.tensors else self.temperature,
            "top_k": integers if self.tensors else self.top_k,
            "top_p": floats if self.tensors else self.top_p,
            "min_p": floats if self.tensors else self.min_p,
            "allowed": mask,
            "backend": "triton",
        }

    def _sample(self) -> None:
        logits = self._tensor(self.batch, self.draft_vocab or self.vocab, dtype=DTYPES[self.dtype])
        fs.sample(logits, **self._common(self.batch))

    def _verify(self, rule: fs.Rule) -> None:
        batch, m, dtype = self.batch, self.num_draft_tokens, DTYPES[self.dtype]
        draft_logits = self._tensor(batch, m, self.draft_vocab or self.vocab, dtype=dtype)
        statistic = self._tensor(batch, m, dtype=torch.float32)
        fs.verify(
            self._tensor(batch, m + 1, self.vocab, dtype=dtype),
            self._tensor(batch, m, dtype=torch.int64),
            None if self.draft == "none" else draft_logits,
            rule=rule,
            draft_stats=(statistic, statistic, statistic) if self.draft == "stats" else None,
            sequences=self._sequences() if self.commit else None,
            **self._common(batch, m + 1),
        )

    def _sequences(self) -> Sequences:
        numbers = self._tensor(self.batch, dtype=torch.int64)
        return Sequences(
            tokens=self._tensor(self.batch, 4096, dtype=torch.int64),
            length=numbers,
            limit=numbers,
            done=self._tensor(self.batch, dtype=torch.bool),
            stop_ids=self._tensor(2, dtype=torch.int64),
            emitted=numbers,
            drafted=numbers,
        )
