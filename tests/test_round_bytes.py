"""What launches move at least, beside what kernels touch under Triton's interpreter and the planner's formulas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fused_spec import Engine, parse_rule
from fused_spec.gpus import gpu_of
from fused_spec.kernels.check import default_backend
from fused_spec.kernels.launch import Launch, recorded
from fused_spec.models.known_configs import config_of
from fused_spec.plan import plan
from round_bytes import distinct_bytes, launch_bytes, steps_of
from toy import toy_model
from traced_rounds import Round

FILTERS = {"top_k": 12, "top_p": 0.9, "min_p": 0.01}
PICKING = {"pick_kernel", "pick_tokens_kernel", "decide_kernel", "row_cutoff_kernel", "logprob_kernel"}
"""Kernels that touch more than is counted: what they pick depends on values."""


@contextmanager
def touched() -> Iterator[list[tuple[Launch, int]]]:
    """Every launch of the `with` block and how many distinct bytes it loaded or stored; filled when the block ends."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[tuple[Launch, int]] = []
    bytes_of: dict[int, list[np.ndarray]] = {}

    def noting(method: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def wrapped(self: Any, pointers: Any, *arguments: Any, **options: Any) -> Any:
            mask = np.broadcast_to(arguments[mask_at].data, pointers.data.shape)
            width = pointers.get_element_ty().primitive_bitwidth // 8
            addresses = pointers.data[mask].astype(np.int64)[:, None] + np.arange(width)
            bytes_of.setdefault(len(launches) - 1, []).append(addresses.ravel())
            return method(self, pointers, *arguments, **options)

        return wrapped

    with recorded() as launches, pytest.MonkeyPatch.context() as patch:
        for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
            patch.setattr(InterpreterBuilder, name, noting(getattr(InterpreterBuilder, name), mask_at))
        yield found
    for index, launch in enumerate(launches):
        found.append((launch, len(np.unique(np.concatenate(bytes_of.get(index, [np.zeros(0)]))))))


@pytest.mark.parametrize(
    ("draft", "rule", "options"),
    [
        ("none", "speculative_sampling", {"logprobs": True}),
        ("model", "speculative_sampling", {}),
        ("model", "typical", FILTERS),
        ("model", "mentored:kl=0.1", {}),
        ("model", "mentored:kl=0.1", {"temperature": 0.0, "logprobs": True}),
        ("model", "cascade_opt:alpha=0.1", FILTERS),
        ("ngram", "cascade_token:alpha=0.1", {}),
        ("self-int8", "typical", {}),
        ("self-int4", "speculative_sampling", {"temperature": 0.0}),
    ],
    ids=str,
)
def test_no_launch_touches_less(draft: str, rule: str, options: dict[str, Any]) -> None:
    vocab = 64 if draft.startswith("self") else 2100  # products of quantised weights take the interpreter long

    def model(seed: int, architecture: str = "llama") -> Any:
        return toy_model(seed, vocab_size=vocab, context=256, architecture=architecture)

    drafts: dict[str, Any] = {"none": None, "model": model(2)}
    with default_backend("triton"):
        engine = Engine(
            model(1, "qwen3"), draft=drafts.get(draft, draft), rule=parse_rule(rule), num_draft_tokens=2, max_length=200
        )
        generation = engine.stream([*range(35), *range(34)], max_new_tokens=50, seed=3, **options)
        next(generation)
        context = int(engine.state.length)
        with torch.inference_mode(), touched() as found:
            engine.runner.launch(engine.round_sizes[-1])
    assert len(found) > 12
    for launch, num_bytes in found:
        name, least = launch.kernel.__name__, launch_bytes(launch, context)
        if name == "embed_kernel":  # tokens that occur twice: a missing draft is taken for the nearest id
            tokens, row = launch.arguments["tokens"].clamp(min=0), launch.arguments["embedding"][0].nbytes
            least -= (len(tokens) - len(tokens.unique())) * row
        assert least <= num_bytes, name
        assert name in PICKING or least >= 0.99 * num_bytes, name


@pytest.mark.parametrize(
    ("target", "draft"), [("Qwen3-8B", "Qwen3-0.6B"), ("Llama-3.1-8B", "ngram"), ("Qwen3-8B", "self-int4")], ids=str
)
def test_a_round_is_what_the_planner_says_and_a_little_more(target: str, draft: str) -> None:
    """The planner counts weights and cache; what it leaves out is 2 % here."""
    context = 1024
    steps = steps_of(Round(target, draft), context)
    drafting: Any = config_of(draft) if "-int" not in draft and draft != "ngram" else draft
    sizes = {"num_draft_tokens": 5, "max_length": 4096}
    floor = plan(config_of(target), drafting, **sizes, dtype="bfloat16", gpu=gpu_of("H100")).round_bytes(context)
    assert floor <= sum(step.num_bytes for step in steps) <= 1.02 * floor


def test_steps_are_in_order_and_say_what_a_product_is_of() -> None:
    steps = steps_of(Round("SmolLM2-135M-Instruct", "ngram", num_draft_tokens=3), 100)
    names = [step.kernel or step.product for step in steps]
    assert names[:3] == ["round_inputs_kernel", "ngram_kernel", "embed_kernel"]
    assert names[3:8] == [
        "rms_norm_kernel",
        "4 x 576 -> 960",
        "rope_store_kernel",
        "split_attention_kernel",
        "merge_chunks_kernel",
    ]
    assert names[-4:] == ["4 x 576 -> 49152", "row_statistics_kernel", "decide_kernel", "pick_kernel"]
    assert steps[4].num_bytes == 2 * (4 * 576 + 576 * 960 + 4 * 960)
    assert steps[1].num_bytes == 8 * (100 + 1 + 3)  # the text, its length, the drafts


def test_a_longer_text_has_more_to_attend_to() -> None:
    setting = Round("SmolLM2-135M-Instruct", "none")
    short, long = (steps_of(setting, context) for context in (100, 1100))
    slot = 2 * 3 * 64 * 2  # keys and values of three heads in half precision
    grown = [(a.kernel, b.num_bytes - a.num_bytes) for a, b in zip(short, long, strict=True) if a != b]
    assert {name for name, _ in grown} == {"split_attention_kernel", "merge_chunks_kernel"}
    cache = [growth for name, growth in grown if name == "split_attention_kernel"]
    assert len(cache) == 30
    assert all(1000 * slot <= growth <= 1000 * slot * 1.2 for growth in cache)


def test_entries_of_an_expanded_dimension_count_once() -> None:
    row = torch.zeros(5, dtype=torch.float32)
    assert distinct_bytes(row.expand(3, 5)) == 20
    assert distinct_bytes(torch.zeros(3, 5)[:, ::2]) == 36
    assert distinct_bytes(torch.zeros(0, 5)) == 0
