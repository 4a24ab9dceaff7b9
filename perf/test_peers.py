"""Against transformers' own ways to be fast, on the same weights, threads and dtype: `make perf`."""

from collections.abc import Callable
from typing import Any

import torch
from test_generate import COPYING, PROMPT, chat, rates

from contenders import Ours, Transformers
from fused_spec import Engine
from quiet import take_turns


def test_prompt_lookup(
    ngram: Ours,
    peer: Transformers,
    benchmark: Any,
    figures: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Greedy, on texts that repeat themselves: n-gram drafts of ours and theirs, five a round."""
    assert ngram.engine.tokenizer is not None
    calls: dict[str, Callable[[], float | None]] = {}
    for i, text in enumerate(COPYING):
        ids = ngram.engine.tokenizer.encode(text)
        calls[f"ours {i}"] = ngram.contender(ids, "greedy", 128)
        calls[f"theirs {i}"] = peer.contender(ids, "greedy", 128, prompt_lookup_num_tokens=5)
    turns = take_turns(calls, 3, benchmark)
    ratios = [turns.ratio(f"ours {i}", f"theirs {i}") for i in range(len(COPYING))]
    say("n-gram drafts over transformers' prompt lookup: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    figures["smollm2_prompt_lookup"] = {"over_transformers": ratios, "foreign_cpu_share": turns.foreign}
    assert min(ratios) >= 1.5


def test_assisted_by_itself(
    self_int4: Ours,
    peer: Transformers,
    benchmark: Any,
    figures: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """A model that drafts for itself is always right: what is left is the engines' own speed, draft models included."""
    target = self_int4.engine.target
    ours = Ours(Engine(target, self_int4.engine.tokenizer, draft=target, num_draft_tokens=5, max_length=2048))
    config = peer.model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 5, "constant"
    config.assistant_confidence_threshold = 0.0
    prompt = chat(ours, PROMPT)
    calls = {
        "draft model": ours.contender(prompt, "greedy", 128),
        "assisted": peer.contender(prompt, "greedy", 128, assistant_model=peer.model),
    }
    for call in calls.values():
        call()
    turns = take_turns(calls, 3, benchmark)
    assert ours.output is not None
    say(
        f"SmolLM2 drafting for itself, {ours.output.stats.tokens_per_round:.2f} tokens a round\n"
        f"{rates(turns, 'assisted')}"
    )
    figures["smollm2_assisted"] = {
        "over_transformers": turns.ratio("draft model", "assisted"),
        "foreign_cpu_share": turns.foreign,
    }
    assert turns.ratio("draft model", "assisted") >= 1.5


def test_prefill(
    self_int4: Ours,
    plain: Ours,
    peer: Transformers,
    benchmark: Any,
    figures: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """512 tokens of a prompt until the next one is known; weights laid out for blocks, and for single tokens."""
    prompt = [int(token) for token in torch.randint(100, 40000, (512,), generator=torch.Generator().manual_seed(1))]
    ids = torch.tensor([prompt])

    def theirs() -> float:
        with torch.inference_mode():
            out = peer.model(ids, use_cache=True, logits_to_keep=1)
        return float(out.logits.shape[1])

    calls = {
        "blocks": self_int4.contender(prompt, "greedy", 1),
        "single tokens": plain.contender(prompt, "greedy", 1),
        "transformers": theirs,
    }
    for call in calls.values():
        call()
    turns = take_turns(calls, 5, benchmark)
    ratios = {name: turns.ratio(name, "transformers") for name in calls}
    say("prefill of 512 tokens over transformers': " + ", ".join(f"{name} {r:.2f}" for name, r in ratios.items()))
    figures["smollm2_prefill"] = {"over_transformers": ratios, "foreign_cpu_share": turns.foreign}
    assert min(ratios.values()) >= 0.8
