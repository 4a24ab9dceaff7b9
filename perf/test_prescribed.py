"""Rounds whose drafts are accepted as often as prescribed, on the GPU where there is one: `make perf`.

What the models agree on has no part in it, only how fast an engine goes through its rounds (fused_spec/synthetic.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fused_spec import Engine, GenerationOutput
from fused_spec.bench import prescribe_acceptance
from quiet import take_turns

ACCEPTANCE, M, TOKENS = 0.7, 4, 128


def test_prescribed_acceptance(
    smollm2: Path, benchmark: Any, figures: dict[str, Any], say: Callable[[str], None]
) -> None:
    """A round is as long as it is whatever is accepted; were everything accepted, it would have to pay."""
    plain = Engine.from_pretrained(smollm2, max_length=1024)
    drafting = Engine.from_pretrained(smollm2, draft="self-int4", num_draft_tokens=M, max_length=1024)
    prescribe_acceptance(drafting, ACCEPTANCE)
    outputs: dict[str, GenerationOutput] = {}

    def text(name: str, engine: Engine) -> Callable[[], float]:
        def generate() -> float:  # without filters, under which q has no weight for some drafts
            prompt = list(range(1000, 1064))
            outputs[name] = engine.generate(prompt, max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=1)
            return TOKENS

        generate()
        return generate

    calls = {"self-int4": text("self-int4", drafting), "plain": text("plain", plain)}
    turns = take_turns(calls, 5, benchmark)
    rate = turns.rate("self-int4")  # skips on a busy machine
    stats, plain_stats = outputs["self-int4"].stats, outputs["plain"].stats
    share, spread = stats.accepted / stats.tested, (ACCEPTANCE * (1 - ACCEPTANCE) / stats.tested) ** 0.5
    steps = stats.decode_seconds / stats.rounds / (plain_stats.decode_seconds / plain_stats.rounds)
    device = str(plain.target.device)
    say(
        f"self-int4, m={M}, {share:.2f} of tested drafts accepted ({ACCEPTANCE} prescribed), on {device}: "
        f"{rate:.1f} tokens/s; a round takes as long as {steps:.2f} tokens of plain decoding"
    )
    figures["smollm2_prescribed"] = {
        "device": device,
        "acceptance": ACCEPTANCE,
        "tokens_per_second": rate,
        "round_over_plain_step": steps,
        "foreign_cpu_share": turns.foreign,
    }
    assert abs(share - ACCEPTANCE) <= 5 * spread
    assert device != "cpu" or steps < M + 1
