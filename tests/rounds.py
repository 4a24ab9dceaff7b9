"""Every rule once, and verify with defaults for what a test does not care about."""

from typing import Any

import torch

import fused_spec as fs
from fused_spec.rules import Rule

RULES: list[Rule] = [
    fs.SpeculativeSampling(),
    fs.Cactus(0.5),
    fs.Cactus(0.5, solver="exact"),
    fs.TypicalAcceptance(),
    fs.Lenience(0.5),
    fs.Ensemble(0.7),
    fs.MentoredDecoding(0.1),
    fs.CascadeOpt(0.2),
    fs.CascadeToken(0.6),
]
SPS = fs.SpeculativeSampling()


def run(target: torch.Tensor, ids: Any, draft: torch.Tensor | None = None, **options: Any) -> fs.Verification:
    """verify with defaults for what a test does not care about."""
    defaults: dict[str, Any] = {"rule": SPS, "seed": 3, "position": 10} | options
    return fs.verify(target, torch.as_tensor(ids), draft, **defaults)


def drafted(logits: torch.Tensor, seed: torch.Tensor, position: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """Drafts [B, m] sampled from logits [B, m, V], and their statistics."""
    samples = [fs.sample(logits[:, i], seed=seed, position=position + i, **options) for i in range(logits.shape[1])]
    columns = [torch.stack([getattr(s, name) for s in samples], 1) for name in ("lse", "cutoff", "logprob")]
    return torch.stack([s.token_ids for s in samples], 1), tuple(columns)
