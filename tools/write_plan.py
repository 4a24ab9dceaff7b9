"""Write docs/plan.md, whose tables are what the planner computes: `python tools/write_plan.py`."""

import sys
import textwrap
from pathlib import Path

from fused_spec.gpus import GPUS
from fused_spec.models.config import ModelConfig
from fused_spec.models.known_configs import config_of
from fused_spec.plan import NamedDraft, plan
from fused_spec.plan_report import ACCEPTANCES, GPU_CAPTION, LEFT_OUT, Report

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
NUM_DRAFT_TOKENS, MAX_LENGTH, DTYPE, CONTEXT = 5, 4096, "bfloat16", 1024

INTRODUCTION = """# Memory and bandwidth of a round

A single stream waits for memory: every forward pass reads all weights, whether it has one row or several. So much can
be said of a model on a GPU from its config alone, before anything is downloaded or run:

```
fused-spec bench --plan Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
```

prints what stays allocated, the least time that a plain step and a round take, and what a round gains at some
acceptance rates. This page shows two pairs. `python tools/write_plan.py` writes it; a test compares it with the code.

## Formulas

With c committed tokens and m drafts per round; capitals are the verifier's, small letters the draft's:

```
B(W, s)  = weights + W row + s slot                            bytes of a pass over W tokens that sees s slots
plain(c) = B(1, c)
round(c) = B(m + 1, c + m) + sum over i < m of b(w_i, c + i)   w_0 = 2 for a draft model, all other w_i = 1
floor    = bytes / bandwidth
E(a)     = (1 - a^(m+1)) / (1 - a)                             tokens per round at acceptance a
speed-up = E(a) plain(c) / round(c)
```

* *weights*: each once, but for the table of embeddings, of which W rows are read, unless it is the head too. *slot*:
  keys and values of one token in all layers.
* A self-draft reads its own matrices (int8: a byte per weight and a float32 per row; int4: half a byte and two bfloat16
  per 32 columns, the head in int8) and the verifier's norms and cache. Prompt lookup reads next to nothing.
* E(a) takes each draft to be accepted with probability a, whatever became of the others (Leviathan et al. 2023,
  arXiv 2211.17192). Real acceptance varies with the text and along the block.
* The bandwidth cancels in the speed-up and in what follows from it, which are therefore the same on every GPU.
* Memory: both models' weights; keys and values for max_length + m + 1 tokens, which a self-draft shares; and scratch:
  activations of 512 rows (a prompt is taken in such chunks), logits, partial results of attention and the table of
  rotations. GB are 10^9 bytes, sizes and bandwidths those of the data sheets (`fused_spec/gpus.py`).
"""

NOT_IN_IT = (
    f"Left out of the times: {LEFT_OUT}. What fits in the L2 cache may, on the other hand, be faster than its floor.",
    "Left out of the memory: what CUDA, its libraries and captured graphs take, and what loading needs for a while.",
)

ASSUMED = f"""## Computed, not measured

No figure below was measured, and no acceptance rate was: {", ".join(f"{rate:g}" for rate in ACCEPTANCES)} are assumed.
"best m" is the number of drafts, at most 64, with the largest speed-up at that rate.
"""


def main() -> int:
    """Write the page."""
    PAGE.write_text(document(), encoding="utf-8")
    return 0


def document() -> str:
    """The page."""
    limits = "\n\n".join(textwrap.fill(text, 120) for text in NOT_IN_IT) + "\n"
    tables = [
        _section("Qwen3-8B", "Qwen3-0.6B", config_of("Qwen3-0.6B")),
        _section("Llama-3.1-8B", "self-int4", "self-int4"),
    ]
    return "\n".join([INTRODUCTION, limits, ASSUMED, *tables])


def _section(target: str, name: str, draft: ModelConfig | NamedDraft) -> str:
    sizes = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_length": MAX_LENGTH}
    plans = [plan(config_of(target), draft, **sizes, dtype=DTYPE, gpu=gpu) for gpu in GPUS.values()]
    report = Report(target, name, DTYPE, plans, CONTEXT, ACCEPTANCES)
    parts = [
        f"### {target} with {name}",
        f"{report.setting()}:",
        report.memory_table().markdown(),
        report.reads_table().markdown(),
        GPU_CAPTION,
        report.gpu_table().markdown(),
        report.break_even(),
        report.acceptance_table().markdown(),
        *report.notes(),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
