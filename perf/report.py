"""Write the "Measured" section of README.md from the stored figures: python perf/report.py [--check]"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results"
BEGIN, END = "<!-- measured: written by perf/report.py -->\n", "<!-- end of measured -->\n"
KINDS = {"greedy": "greedy", "sampled": "T=0.6, top-p 0.95, top-k 20"}


def section() -> str:
    """The text between the two marks."""
    small = json.loads((RESULTS / "smollm2.json").read_text())
    pair = json.loads((RESULTS / "qwen2.5-coder.json").read_text())
    figures = small["figures"]
    rates = {kind: figures[f"smollm2_{kind}"]["tokens_per_second"] for kind in KINDS}
    pair_rates = {kind: pair["figures"][kind]["tokens_per_second"] for kind in KINDS}
    parts = [
        "## Measured",
        _paragraph(
            "On a CPU only; nothing was measured on a GPU yet. Tokens per second of whole calls, 256 new tokens, two "
            "threads, bfloat16; in brackets the ratio to transformers' `generate` within the same run. The files hold "
            "4-bit weights, expanded on loading, which flatters drafts made from a quantised copy of them. The machine "
            "is a virtual one: between runs its memory was up to half as fast, which plain decoding feels most."
        ),
        _paragraph(_machine(small["machine"])),
        _table("SmolLM2-135M (`make perf`)", rates, ("transformers", "plain", "self-int8", "self-int4")),
        _paragraph(_ngram(figures)),
        _table("Qwen2.5-Coder-1.5B (`perf/pair.py`, one turn)", pair_rates, tuple(pair_rates["greedy"])),
        _paragraph(_verify(figures["verify_6_rows"], figures["verify_21_rows"])),
        _paragraph(_split(figures["smollm2_round"])),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(title: str, rates: dict[str, dict[str, float]], names: tuple[str, ...]) -> str:
    rows = [f"| {title} | {' | '.join(KINDS.values())} |", "|---|---|---|"]
    for name in names:
        cells = [f"{rate[name]:.1f} ({rate[name] / rate['transformers']:.2f})" for rate in rates.values()]
        shown = "0.5B model as draft" if name == "draft model" else name
        rows.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['instructions']}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, Python {machine['python']}; {machine['date']}."
    )


def _ngram(figures: dict[str, Any]) -> str:
    copying, writing = (figures[f"smollm2_ngram_{kind}"]["over_plain"] for kind in ("copying", "writing"))
    return (
        f"N-gram drafts over plain decoding, greedy: {min(copying):.1f} to {max(copying):.1f} on five texts that "
        f"repeat themselves, {min(writing):.2f} to {max(writing):.1f} on five others."
    )


def _verify(six: dict[str, Any], more: dict[str, Any]) -> str:
    return (
        f"`fs.verify` at V=151936 with bfloat16 logits and `draft_stats` costs {six['logsumexps']:.1f} log-sum-exps "
        f"over the same rows for 6 rows and {more['logsumexps']:.1f} for 21. For 6 rows it is "
        f"{six['over_materialised']:.1f} times as fast as computing both distributions into buffers and drawing from "
        "their difference."
    )


def _split(figures: dict[str, Any]) -> str:
    spent, floor = figures["milliseconds"], figures["byte_floor_milliseconds"]
    return (
        f"A round of SmolLM2 with `self-int4` and four drafts takes {spent['draft']:.0f} ms of drafting, "
        f"{spent['verify']:.0f} ms of verifying and {spent['sampling']:.1f} ms of sampling and acceptance; reading the "
        f"weights alone takes {floor['draft']:.0f} and {floor['verify']:.0f} ms."
    )


def main() -> int:
    """Rewrite the section, or only say whether it is up to date."""
    parser = argparse.ArgumentParser(description='Write the "Measured" section of README.md.')
    parser.add_argument("--check", action="store_true", help="exit with status 1 if it is not what the figures say")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = before + BEGIN + section() + END + after
    if check:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
