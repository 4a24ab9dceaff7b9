"""The engine whose rounds are profiled, from a command line that the profiling tools share."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fused_spec import Engine, InvalidInput, parse_rule
from fused_spec.generation import Generation
from fused_spec.models.checkpoint import Checkpoint
from fused_spec.models.config import ModelConfig, expected_shapes
from fused_spec.models.known_configs import config_of
from fused_spec.models.transformer import Transformer
from fused_spec.options import NAMED_DRAFTS, check_sampling, resolve_device, resolve_dtype
from fused_spec.runner import EagerRunner, Speculation

_PERIOD = 32
"""Prompts repeat themselves after so many tokens, so that prompt lookup has something to find."""


def add_round_options(parser: argparse.ArgumentParser) -> None:
    """Everything that says which rounds are run."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, a .gguf file or a hub id")
    add("--shape", metavar="NAME", help="instead of MODEL: random weights of a known shape, e.g. Qwen3-8B")
    add("--draft", help="ngram, self-int8, self-int4, or a second model (with --shape a second shape); default: none")
    add("--num-draft-tokens", type=_number(1), default=5, metavar="M")
    add("--rule", default="speculative_sampling", help="as in cactus:delta=0.25")
    add("--temperature", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--context", type=_number(1), default=512, metavar="N", help="tokens of the prompt (%(default)s)")
    add("--rounds", type=_number(1), default=10, metavar="N", help="that are profiled (%(default)s)")
    add("--warmup", type=_number(1), default=5, metavar="N", help="rounds before them (%(default)s)")
    add("--dtype", default="bfloat16")
    add("--device", help="cpu, cuda or cuda:N")
    add("--attention", default="auto")


def check_round_options(options: argparse.Namespace) -> None:
    """Raise unless they go together, before anything is loaded."""
    if (options.model is None) == (options.shape is None):
        raise InvalidInput("one of MODEL and --shape NAME is needed, and not both")
    parse_rule(options.rule)
    check_sampling(options.temperature, options.top_k, options.top_p, options.min_p, 0)


def max_length_of(options: argparse.Namespace) -> int:
    """Room for the prompt and for all rounds if every draft is accepted; of two more nothing is reported."""
    rounds = options.warmup + options.rounds + 2
    return int(options.context + 1 + rounds * (options.num_draft_tokens + 1))


def engine_of(options: argparse.Namespace) -> Engine:
    """Load the models, or make them up.

    Raises:
        InvalidInput: an option is not usable.
    """
    check_round_options(options)
    common: dict[str, Any] = {
        "rule": parse_rule(options.rule),
        "num_draft_tokens": options.num_draft_tokens,
        "max_length": max_length_of(options),
        "attention": options.attention,
    }
    if options.shape is None:
        places = {"dtype": options.dtype, "device": options.device}
        return Engine.from_pretrained(options.model, draft=options.draft, **places, **common)
    dtype, device = resolve_dtype(options.dtype), resolve_device(options.device)
    rows = 1 if options.draft in (None, "ngram") else options.num_draft_tokens + 1
    target = random_model(config_of(options.shape), dtype, device, rows)
    draft: Transformer | str | None = options.draft
    if isinstance(draft, str) and draft not in NAMED_DRAFTS:
        draft = random_model(config_of(draft), dtype, device, 2)
    return Engine(target, draft=draft, **common)


def one_by_one(engine: Engine) -> None:
    """Have rounds run when they are launched, on whatever device: the eager twin of graphs."""
    engine.runner = EagerRunner(Speculation(engine.target, engine.cache, engine.drafter, engine.state))


def started(engine: Engine, options: argparse.Namespace) -> Generation:
    """A text behind its prompt and its first rounds: graphs are recorded and kernels compiled. No EOS ends it."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(engine.target.config.vocab_size, (_PERIOD,), generator=generator).tolist()
    prompt = (pattern * -(-options.context // _PERIOD))[: options.context]
    generation = engine.stream(
        prompt,
        max_new_tokens=engine.max_length - options.context,
        seed=0,
        ignore_eos=True,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
    )
    for _ in range(1 + options.warmup):
        next(generation)
    return generation


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, rows: int) -> Transformer:
    """A model with random weights, laid out for passes over so many rows as a loaded one is."""
    with Checkpoint(Path(config.architecture), config, _RandomWeights(config)) as checkpoint:
        return Transformer.load(checkpoint, dtype, device, rows=rows)


class _RandomWeights:
    """Tensors of random numbers in the place of a model's files, of a size that keeps activations as they are."""

    interleaved, fields = True, None

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_shapes(config)
        # Cheaper than as many random numbers as a large model has; no two rows of a matrix are the same.
        self._numbers = torch.empty(1_000_003).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file_of(self, name: str) -> str:
        return name

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        scale, offset = (0.5, 1.0) if re.search(r"norm\.weight$", name) else ((3 / shape[-1]) ** 0.5, 0.0)
        numbers = (self._numbers * scale + offset).to(dtype or torch.float32)
        count = torch.Size(shape).numel()
        return numbers.repeat(-(-count // len(numbers)))[:count].view(shape)

    def mapped(self, name: str) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        """There are no files."""


def _number(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
        return int(text)

    return number
