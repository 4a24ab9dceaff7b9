"""Compare a model's logits with those of transformers on the same file.

    python tools/compare_logits.py MODEL [--prompt TEXT] [--positions N] [--json]

Both read MODEL (a folder or a .gguf file) on their own, into float32. Exits with status 1 unless the largest difference
is below 1e-4 of the range of the logits, for a pass over the whole text as well as for one token at a time.
Needs `accelerate` for GGUF files.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fused_spec import InvalidInput
from fused_spec.models.checkpoint import open_checkpoint
from fused_spec.models.transformer import Transformer

PROMPT = "def quicksort(values):\n    # 3-way partition; see Bentley & McIlroy (1993), pp. 1249-1265.\n"
BOUND = 1e-4


def our_logits(path: str, prompt: str, positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [P], logits of one pass [P, V], logits of one token at a time [P, V])."""
    with open_checkpoint(path) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        if tokenizer is None:
            raise InvalidInput(f"{path}: has no tokenizer")
        model = Transformer.load(checkpoint, torch.float32, torch.device("cpu"))
    ids = tokenizer(prompt)["input_ids"]
    tokens = torch.tensor((ids * -(-positions // len(ids)))[:positions])
    cache = model.new_cache(positions)
    whole = model.forward(tokens, torch.arange(positions), cache)
    cache = model.new_cache(positions)
    steps = [model.forward(tokens[i : i + 1], torch.tensor([i]), cache) for i in range(positions)]
    return tokens, whole, torch.cat(steps)


def their_logits(path: str, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [P, V] of transformers."""
    from transformers import AutoModelForCausalLM

    where = Path(path)
    source: dict[str, Any] = {"gguf_file": where.name} if where.is_file() else {}
    folder = where.parent if where.is_file() else where
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


def compare(path: str, prompt: str, positions: int) -> dict[str, Any]:
    """The figures that are printed."""
    with torch.inference_mode():
        tokens, whole, steps = our_logits(path, prompt, positions)
        gc.collect()  # two models in float32 may not fit side by side
        theirs = their_logits(path, tokens)
        span = float(theirs.max() - theirs.min())
        errors = {
            name: float((ours - theirs).abs().max()) / span for name, ours in (("whole", whole), ("steps", steps))
        }
        same = int((whole.argmax(1) == theirs.argmax(1)).sum())
    return {
        "model": Path(path).name,
        "positions": positions,
        "vocabulary": theirs.shape[1],
        "logit_range": span,
        "largest_error_of_range": errors["whole"],
        "largest_error_of_range_one_token_at_a_time": errors["steps"],
        "same_arg_max": same,
        "bound": BOUND,
    }


def main() -> int:
    """Parse the command line, print, and say by the exit status whether the bound holds."""
    parser = argparse.ArgumentParser(description="Compare a model's logits with those of transformers.")
    parser.add_argument("model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--positions", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.positions < 1:
        parser.error(f"--positions must be at least 1, got {options.positions}")
    try:
        figures = compare(options.model, options.prompt, options.positions)
    except InvalidInput as error:
        print(f"compare_logits: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))
    errors = [value for name, value in figures.items() if name.startswith("largest_error")]
    return int(max(errors) >= BOUND)


if __name__ == "__main__":
    sys.exit(main())
