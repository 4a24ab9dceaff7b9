"""Tokens per second of SmolLM2-135M on two threads, as ratios within one run: `make perf`.

bfloat16, 256 new tokens, greedy and at T=0.6, top-p 0.95, top-k 20. A sample is a whole call, prompt included.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fused_spec.drafters
import fused_spec.round
from contenders import Ours, Transformers
from fused_spec.models.config import ModelConfig
from fused_spec.models.transformer import Transformer
from fused_spec.table import Table
from fused_spec.timing import Turns, timed
from quiet import take_turns

PROMPT = "Explain in a short paragraph why the sky is blue, then list three other things that are blue."
TURNS = 5

STORY = (
    "The old lighthouse keeper counted the steps every evening. There were two hundred and six of them, and on each "
    "tenth step he had painted a small white number. When the storm came in from the north, he lit the lamp early. "
)
RECIPE = "Mix 200 g flour, 3 eggs, 100 ml milk and a pinch of salt. Rest the dough for 20 minutes, then bake at 180 C. "
CODE = (
    "def total(prices: list[float], rate: float) -> float:\n    subtotal = sum(prices)\n    tax = subtotal * rate\n"
    "    return round(subtotal + tax, 2)\n\n"
)
LIST = "1. apples\n2. oranges\n3. a bag of rice\n4. two tins of tomatoes\n5. olive oil\n6. a loaf of bread\n\n"
LETTER = (
    "Dear Ms Carter, thank you for your letter of 3 May. The part you ordered (no. 4711) left our warehouse on Monday. "
)
COPYING = [text * 3 for text in (STORY, RECIPE, CODE, LIST, LETTER)]
WRITING = [
    "The history of the lighthouse begins",
    "Question: A train travels 60 km in 45 minutes. How far does it travel in 3 hours?\nAnswer:",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "Three reasons to learn a second language are",
    "The chemical that makes leaves green is called",
]


def chat(ours: Ours, question: str) -> list[int]:
    """A question as the model's own chat template puts it."""
    assert ours.engine.tokenizer is not None
    messages = [{"role": "user", "content": question}]
    text = str(ours.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return list(ours.engine.tokenizer.encode(text, add_special_tokens=False))


def rates(turns: Turns, peer: str) -> str:
    """Tokens per second and ratios, with the share of foreign CPU time."""
    rows = [(name, f"{turns.rate(name):.1f}", f"{turns.ratio(name, peer):.2f}") for name in turns.samples]
    shown = Table(("", "tokens/s", f"of {peer}"), rows)
    return f"{shown.text()}\nothers used {turns.foreign:.1%} of the CPU time; {len(turns.quiet)} quiet turns"


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_against_transformers(
    sampling: str,
    plain: Ours,
    self_int4: Ours,
    self_int8: Ours,
    peer: Transformers,
    benchmark: Any,
    figures: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    prompt = chat(plain, PROMPT)
    contenders = {"self-int4": self_int4, "self-int8": self_int8, "plain": plain}
    calls = {name: ours.contender(prompt, sampling) for name, ours in contenders.items()}
    calls["transformers"] = peer.contender(prompt, sampling)
    for call in calls.values():
        call()  # the first call pages weights in
    turns = take_turns(calls, TURNS, benchmark)
    say(f"SmolLM2-135M, {sampling}\n{rates(turns, 'transformers')}")
    best = max(("self-int4", "self-int8"), key=lambda name: turns.ratio(name, "plain"))
    measured = {
        "plain_over_transformers": turns.ratio("plain", "transformers"),
        "best_self_draft": best,
        "best_over_transformers": turns.ratio(best, "transformers"),
        "best_over_plain": turns.ratio(best, "plain"),
        "tokens_per_second": {name: turns.rate(name) for name in calls},
        "foreign_cpu_share": turns.foreign,
        "quiet_turns": len(turns.quiet),
    }
    figures[f"smollm2_{sampling}"] = measured
    benchmark.extra_info.update(measured)
    assert turns.ratio("plain", "transformers") >= 2.2
    assert turns.ratio(best, "transformers") >= 2.6
    assert turns.ratio(best, "plain") >= 1.15


@pytest.mark.parametrize(("kind", "prompts", "least"), [("copying", COPYING, 1.3), ("writing", WRITING, 0.9)])
def test_ngram_drafts(
    kind: str,
    prompts: list[str],
    least: float,
    plain: Ours,
    ngram: Ours,
    benchmark: Any,
    figures: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """A text that repeats itself is copied quickly, and looking for what to copy costs next to nothing elsewhere."""
    assert plain.engine.tokenizer is not None
    calls: dict[str, Callable[[], float | None]] = {}
    for i, prompt in enumerate(prompts):
        ids = plain.engine.tokenizer.encode(prompt)
        calls |= {f"ngram {i}": ngram.contender(ids, "greedy"), f"plain {i}": plain.contender(ids, "greedy")}
    turns = take_turns(calls, 3, benchmark)
    ratios = [turns.ratio(f"ngram {i}", f"plain {i}") for i in range(len(prompts))]
    say(f"n-gram drafts over plain, {kind}: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    figures[f"smollm2_ngram_{kind}"] = {"over_plain": ratios, "foreign_cpu_share": turns.foreign}
    assert min(ratios) >= least


class Clock:
    """Adds up the time that calls take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, name: Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed."""

        def timed_call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            self.seconds[name(*arguments)] += time.perf_counter() - start
            return result

        return timed_call


def weight_bytes(config: ModelConfig, per_layer_weight: float, per_head_weight: float) -> float:
    """Bytes of the matrices that one forward pass reads."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer * per_layer_weight + config.vocab_size * config.hidden_size * per_head_weight


def test_split_of_a_round(
    self_int4: Ours,
    monkeypatch: pytest.MonkeyPatch,
    benchmark: Any,
    figures: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Where a round's time goes, against the time that reading the weights alone takes."""
    buffer = torch.zeros(2**25, dtype=torch.int64)
    bandwidth = buffer.nbytes / min(timed(lambda: float(buffer.sum())).seconds for _ in range(9))
    engine, clock = self_int4.engine, Clock()
    call = self_int4.contender(chat(self_int4, PROMPT), "sampled")
    call()
    forward = clock.around(lambda model, *_: "verify" if model is engine.target else "draft", Transformer.forward)
    monkeypatch.setattr(Transformer, "forward", forward)
    for module, name in ((fused_spec.drafters, "sample"), (fused_spec.round, "verify")):
        monkeypatch.setattr(module, name, clock.around(lambda *_: "sampling", getattr(module, name)))

    def run() -> float:
        clock.seconds.clear()
        return call()

    turns = take_turns({"round": run}, 3, benchmark)
    assert self_int4.output is not None
    stats = self_int4.output.stats
    m, config, rounds = engine.round_sizes[-1], engine.target.config, stats.rounds
    draft = m * weight_bytes(config, 0.5 + 4 / 32, 1.0)  # int4 with scale and offset per 32, and an int8 head
    floors = {"draft": draft / bandwidth, "verify": weight_bytes(config, 2.0, 2.0) / bandwidth, "sampling": 0.0}
    whole = stats.decode_seconds / rounds
    rows = []
    for part, floor in floors.items():
        seconds = clock.seconds[part] / rounds
        rows.append((part, f"{seconds * 1e3:.2f}", f"{seconds / whole:.1%}", f"{floor * 1e3:.2f}"))
    rows.append(("round", f"{whole * 1e3:.2f}", "", f"{sum(floors.values()) * 1e3:.2f}"))
    say(f"A round of self-int4, m={m}, {stats.tokens_per_round:.2f} tokens; {bandwidth / 1e9:.0f} GB/s")
    say(Table(("", "ms", "share", "byte floor, ms"), rows).text())
    figures["smollm2_round"] = {
        "milliseconds": {part: clock.seconds[part] / rounds * 1e3 for part in floors} | {"whole": whole * 1e3},
        "byte_floor_milliseconds": {part: floor * 1e3 for part, floor in floors.items()},
        "tokens_per_round": stats.tokens_per_round,
        "foreign_cpu_share": turns.foreign,
    }
    turns.seconds("round")  # skips on a busy machine
    assert clock.seconds["sampling"] / rounds <= 0.06 * whole
