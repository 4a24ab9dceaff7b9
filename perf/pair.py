"""Compare ways of decoding one model on a CPU, on two threads: ours and transformers', with a smaller model as draft.

    python perf/pair.py TARGET DRAFT [--tokens N] [--turns N] [--ours-only] [--figures FILE]

TARGET and DRAFT are GGUF files or folders with the same tokenizer. bfloat16, greedy and at T=0.6, top-p 0.95, top-k 20.
GGUF files hold quantised weights, expanded here, which flatters drafts made from a quantised copy.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from contenders import SAMPLINGS, Ours, Transformers
from fused_spec import Engine
from fused_spec.table import Table
from fused_spec.timing import machine, take_turns

PROMPT = "Write a Python function that merges two sorted lists, explain how it works and give two examples."


def contenders(target: Path, draft: Path) -> dict[str, Ours]:
    """Our engines by name; those that draft share the target's weights."""
    plain = Engine.from_pretrained(target, max_length=1024, device="cpu")
    int4 = Engine.from_pretrained(target, draft="self-int4", num_draft_tokens=4, max_length=1024, device="cpu")
    int8 = Engine(int4.target, plain.tokenizer, draft="self-int8", num_draft_tokens=4, max_length=1024)
    small = Engine.from_pretrained(draft, max_length=1024, device="cpu").target
    model = Engine(int4.target, plain.tokenizer, draft=small, num_draft_tokens=5, max_length=1024)
    engines = {"plain": plain, "self-int4": int4, "self-int8": int8, "draft model": model}
    return {name: Ours(engine) for name, engine in engines.items()}


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Compare ways of decoding one model.")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--ours-only", action="store_true", help="leave transformers out, which takes most of the time")
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    ours = contenders(options.target, options.draft)
    tokenizer = ours["plain"].engine.tokenizer
    assert tokenizer is not None
    prompt = list(tokenizer.encode(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"))
    peers = None if options.ours_only else (Transformers(options.target), Transformers(options.draft))
    figures: dict[str, Any] = {}
    for sampling in SAMPLINGS:
        calls = {name: one.contender(prompt, sampling, options.tokens) for name, one in ours.items()}
        if peers is not None:
            peer, assistant = peers
            calls["transformers"] = peer.contender(prompt, sampling, options.tokens)
            calls["transformers, assisted"] = peer.contender(
                prompt, sampling, options.tokens, assistant_model=assistant.model
            )
        for one in ours.values():
            one.contender(prompt, sampling, 16)()  # the first call pages weights in
        turns = take_turns(calls, options.turns)
        rows = []
        for name in calls:
            per_round = f"{ours[name].output.stats.tokens_per_round:.2f}" if name in ours else ""  # type: ignore[union-attr]
            rows.append((name, f"{turns.rate(name):.2f}", f"{turns.ratio(name, 'plain'):.2f}", per_round))
        shown = Table(("", "tokens/s", "of plain", "tokens per round"), rows).text()
        print(f"{options.target.name}, {sampling}\n{shown}\nothers used {turns.foreign:.1%}\n", flush=True)
        figures[sampling] = {
            "tokens_per_second": {name: turns.rate(name) for name in calls},
            "over_plain": {name: turns.ratio(name, "plain") for name in calls},
            "foreign_cpu_share": turns.foreign,
            "turns": len(turns.quiet),
            "new_tokens": options.tokens,
        }
    if options.figures is not None:
        models = {"target": options.target.name, "draft": options.draft.name}
        options.figures.write_text(
            json.dumps({"machine": machine(), "models": models, "figures": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
