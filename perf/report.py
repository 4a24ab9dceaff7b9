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
NO_GPU = (
    "Not measured: anything on a GPU. No kernel of this project, no captured graph and no flash-attn call has run on "
    "one; `tools/gpu_check.py` is what will."
)
KINDS = {"greedy": "greedy", "sampled": "T=0.6, top-p 0.95, top-k 20"}


def section(results: Path = RESULTS) -> str:
    """The text between the two marks, from the files in a folder."""
    on_gpus = [json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))]
    parts = ["## Measured", *_on_a_cpu(results), *([_gpu(run) for run in on_gpus] or [_paragraph(NO_GPU)])]
    return "\n\n".join(parts) + "\n"


def _on_a_cpu(results: Path) -> list[str]:
    small = json.loads((results / "smollm2.json").read_text())
    pair = json.loads((results / "qwen2.5-coder.json").read_text())
    figures = small["figures"]
    rates = {kind: figures[f"smollm2_{kind}"]["tokens_per_second"] for kind in KINDS}
    pair_rates = {kind: pair["figures"][kind]["tokens_per_second"] for kind in KINDS}
    return [
        _paragraph(
            "On a CPU. Tokens per second of whole calls, 256 new tokens, two threads, bfloat16; in brackets the ratio "
            "to transformers' `generate` within the same run. The files hold 4-bit weights, expanded on loading, which "
            "flatters drafts made from a quantised copy. The machines are virtual, and the speed of their memory "
            "varies: compare ratios within a run, not runs."
        ),
        _paragraph(_machine(small["machine"])),
        _table("SmolLM2-135M (`make perf`)", rates, ("transformers", "plain", "self-int8", "self-int4")),
        _paragraph(f"{_ngram(figures)} {_peers(figures)}"),
        _table("Qwen2.5-Coder-1.5B (`perf/pair.py`, one turn)", pair_rates, tuple(pair_rates["greedy"])),
        _paragraph(_verify(figures["verify_6_rows"], figures["verify_21_rows"])),
        _paragraph(_split(figures["smollm2_round"])),
        _paragraph(_traced(figures)),
    ]


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


def _peers(figures: dict[str, Any]) -> str:
    lookup = figures["smollm2_prompt_lookup"]["over_transformers"]
    prefill = figures["smollm2_prefill"]["over_transformers"]
    assisted = figures["smollm2_assisted"]["over_transformers"]
    return (
        f"On the former texts they are {min(lookup):.1f} to {max(lookup):.1f} times as fast as transformers' prompt "
        f"lookup. A model that drafts for itself is {assisted:.1f} times as fast as in "
        f"transformers' assisted generation. A prompt of 512 tokens is read {prefill['single tokens']:.2f} times as "
        f"fast as there, with `self-int4` {prefill['blocks']:.2f} times."
    )


def _traced(figures: dict[str, Any]) -> str:
    launches, most = figures["launches"], max(figures["bytes_over_floor"].values())
    verify = sorted({found["verify"] for found in launches.values()})
    return (
        "Counted on the meta device, not timed, in rounds of Qwen3-8B with five drafts: "
        f"{' or '.join(map(str, verify))} launches of a verification, without and with filters; all launches together "
        f"touch at most {most - 1:.1%} more bytes than weights and cache have."
    )


def _gpu(run: dict[str, Any]) -> str:
    """What tools/gpu_check.py kept of a GPU: a line of the table for each time and speed."""
    machine = run["machine"]
    checks = {check["name"]: check for check in run["checks"]}
    passed = sum(check["status"] == "ok" for check in checks.values())
    about = (
        f"{machine['device']} (`tools/gpu_check.py`): {passed} of {len(checks)} checks passed; "
        f"torch {machine['torch']}, triton {machine['triton']}, CUDA {machine['cuda']}; {machine['date']}."
    )
    shown = [check for name, check in checks.items() if name.startswith(("times/", "speed/"))]
    rows = [f"| {check['name']} | {check['key'] or check['status']} |" for check in shown]
    return "\n".join([_paragraph(about), "", "| on a GPU | found |", "|---|---|", *rows])


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
