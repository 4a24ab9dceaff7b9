"""What is compared: engines of ours and transformers' `generate`, on the same weights, in bfloat16, on the CPU."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fused_spec import Engine, GenerationOutput

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}
NEW_TOKENS = 256


class Ours:
    """An engine as a contender; keeps its last output."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.output: GenerationOutput | None = None

    def contender(self, prompt: list[int], sampling: str, new_tokens: int = NEW_TOKENS) -> Callable[[], float]:
        """A call that generates and returns the number of new tokens; each call has the next seed, from 1 on.

        How many drafts are accepted is luck within one text.
        """
        seeds = itertools.count(1)

        def generate() -> float:
            self.output = self.engine.generate(
                prompt, max_new_tokens=new_tokens, ignore_eos=True, seed=next(seeds), **SAMPLINGS[sampling]
            )
            return len(self.output.token_ids)

        return generate


class Transformers:
    """transformers' own model and `generate`, plain or assisted by a second one of its models."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        source: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **source).eval()

    def contender(
        self, prompt: list[int], sampling: str, new_tokens: int = NEW_TOKENS, **options: Any
    ) -> Callable[[], float]:
        """A call that generates and returns the number of new tokens. Options go to `generate`."""
        choice = dict(SAMPLINGS[sampling])
        if choice["temperature"] == 0:
            choice = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            choice["do_sample"] = True
        ids = torch.tensor([prompt])

        def generate() -> float:
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                **choice,
                **options,
            )
            return out.shape[1] - len(prompt)

        return generate
