"""Whole rounds of speculative decoding, of models that are shapes only, ready to be traced on the meta device.

What is traced is the function that a CUDA graph is made of (fused_spec/runner.py). tools/launches.json has what every
round of `ROUNDS` launched when `python tools/dryrun.py --write-rounds` was last run:

    {"Qwen3-8B/ngram/cactus/plain": {"launches": 223, "products": 145, "verify": 3}}
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import fused_spec.round
from fused_spec import Engine, parse_rule
from fused_spec.errors import InvalidInput
from fused_spec.kernels.launch import recorded
from fused_spec.models.known_configs import config_of
from fused_spec.models.transformer import Transformer
from fused_spec.options import NAMED_DRAFTS, check_sampling, resolve_dtype
from fused_spec.round import Sampling
from fused_spec.rules import CascadeOpt, CascadeToken, MentoredDecoding
from fused_spec.runner import GraphKind, GraphRunner, Speculation
from meta_trace import Trace, Verified, traced

BASELINE = Path(__file__).with_name("launches.json")

VERIFICATION, VERIFICATION_OF_FILTERED = 3, 5
"""Launches that verification may take."""

PAIR_LAUNCHES = {MentoredDecoding: 7, CascadeOpt: 2, CascadeToken: 2}
"""Launches that it may take besides where drafts are tested by these rules, which look at pairs of rows."""


class Counts(NamedTuple):
    """Launches of our kernels, matrix products besides, and how many of the launches are verification's."""

    launches: int
    products: int
    verify: int


@dataclass(frozen=True)
class Round:
    """Arguments of `Engine` and of a request, as far as they make a difference to a round.

    Attributes:
        model, draft: as `config_of` takes them; the draft may also be "none" (plain decoding), "ngram", "self-int8" or
            "self-int4".
        temperature, top_k, top_p, min_p: it matters whether T is 0, and whether any token is cut; a graph reads the
            rest from buffers.
        allowed: whether the text is under a bitmask. logprobs: whether log-probabilities are asked for.
    """

    model: str
    draft: str = "none"
    num_draft_tokens: int = 5
    rule: str = "speculative_sampling"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    allowed: bool = False
    logprobs: bool = False
    dtype: str = "bfloat16"
    max_length: int = 4096

    def calls(self) -> dict[str, Callable[[], object]]:
        """The round, ready to be traced; it returns `Verified`.

        Raises:
            InvalidInput: an argument is not usable.
        """
        rule = parse_rule(self.rule)
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p, 0)
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        runner, size = _runner(self.model, self.draft, self.num_draft_tokens, self.dtype, self.max_length)
        kind = GraphKind(size, sampling.filtered, self.temperature == 0, self.allowed, self.logprobs)
        budget = (VERIFICATION_OF_FILTERED if sampling.filtered else VERIFICATION) + (
            PAIR_LAUNCHES.get(type(rule), 0) if size else 0
        )

        def call() -> Verified:
            with _verifications() as launches:
                runner.round_of(rule, kind)()
            (count,) = launches  # a round verifies once
            return Verified(count, budget)

        return {"round": call}


def counts(trace: Trace) -> Counts:
    """What the baseline has of a traced round."""
    assert isinstance(trace.result, Verified)
    return Counts(len(trace.launches), len(trace.products), trace.result.launches)


@contextmanager
def _verifications() -> Iterator[list[int]]:
    """A list of how many launches each verification inside the `with` block takes."""
    verify = fused_spec.round.verify
    found: list[int] = []

    def counting(*arguments: Any, **options: Any) -> object:
        with recorded() as launches:
            result = verify(*arguments, **options)
        found.append(len(launches))
        return result

    with patch.object(fused_spec.round, "verify", counting):
        yield found


class _NoRecorder:
    """For a `GraphRunner` that is asked for its functions only."""

    pinned = False

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError

    def mark(self) -> Callable[[], None]:
        raise NotImplementedError


@cache
def _model(name: str, dtype: str) -> Transformer:
    return Transformer.uninitialised(config_of(name), resolve_dtype(dtype), "meta")


@cache
def _runner(model: str, draft: str, num_draft_tokens: int, dtype: str, max_length: int) -> tuple[GraphRunner, int]:
    """(what records the rounds of an engine, its m)"""
    drafting: Transformer | str | None = None if draft == "none" else draft
    if drafting is not None and drafting not in NAMED_DRAFTS:
        drafting = _model(draft, dtype)
    engine = Engine(_model(model, dtype), draft=drafting, num_draft_tokens=num_draft_tokens, max_length=max_length)
    parts = Speculation(engine.target, engine.cache, engine.drafter, engine.state)
    return GraphRunner(parts, engine.round_sizes, _NoRecorder()), engine.round_sizes[-1]


RULES = {
    "speculative_sampling": "speculative_sampling",
    "cactus": "cactus:delta=0.1",
    "cactus_exact": "cactus:delta=0.1,solver=exact",
    "typical": "typical",
    "lenience": "lenience:lenience=0.5",
    "ensemble": "ensemble:weight=0.5",
    "mentored": "mentored:kl=0.1",
    "cascade_opt": "cascade_opt:alpha=0.1",
    "cascade_token": "cascade_token:alpha=0.1",
}
"""Every rule, as `parse_rule` reads it."""

_FILTERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": _FILTERS,
    "greedy": {"temperature": 0.0},
    "allowed": {"allowed": True},
    "logprobs": {"logprobs": True},
    "all": {**_FILTERS, "allowed": True, "logprobs": True},
}
_WITH_EVERY_RULE = ("plain", "filters", "greedy")
_TARGETS = ("SmolLM2-135M-Instruct", "Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B")
_PAIR = Round("Qwen3-8B", "Qwen3-0.6B")
OTHERS: dict[str, dict[str, Any]] = {
    "one": {"num_draft_tokens": 1},
    "eight": {"num_draft_tokens": 8},
    "long": {"max_length": 40960},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
}
"""What differs in further rounds of the pair of models: of one draft or eight, of a long text, of other dtypes."""


def _rounds() -> dict[str, Round]:
    """By model/draft/rule/kind."""
    pairs = [*(Round(model, draft) for model, draft in product(_TARGETS, ("none", *NAMED_DRAFTS))), _PAIR]
    found = {
        f"{pair.model}/{pair.draft}/{rule}/{kind}": replace(pair, rule=RULES[rule], **KINDS[kind])
        for pair, rule, kind in product(pairs, RULES, KINDS)
        if _is_kept(pair, rule, kind)
    }
    for name, options in OTHERS.items():
        found[f"{_PAIR.model}/{_PAIR.draft}/speculative_sampling/{name}"] = replace(_PAIR, **options)
    return found


def _is_kept(pair: Round, rule: str, kind: str) -> bool:
    if rule == "speculative_sampling":
        return True
    if pair.draft == "none" and pair.model != _PAIR.model:
        return False  # no rule tests anything there, and to see that of one model is enough
    return kind in _WITH_EVERY_RULE or (kind == "allowed" and pair == _PAIR)


ROUNDS = _rounds()
"""What the baseline has; they share five models, which are made once."""


def selected(names: Sequence[str] | None) -> dict[str, Round]:
    """The rounds of `ROUNDS` with these names, or whose names begin with one of them and a slash; all without any.

    Raises:
        InvalidInput: there is no round for a name.
    """
    if not names:
        return ROUNDS
    for wanted in names:
        if not any(f"{name}/".startswith(f"{wanted}/") for name in ROUNDS):
            raise InvalidInput(f"no round is named {wanted!r}, or begins so; names are model/draft/rule/kind")
    return {n: setting for n, setting in ROUNDS.items() if any(f"{n}/".startswith(f"{w}/") for w in names)}


def targets(name: str, architectures: Sequence[int]) -> Sequence[int]:
    """The architectures to compile a round for.

    One alone has all rounds: for three that would take twice as many minutes. All have those of speculative sampling,
    and for Qwen's vocabulary those of every rule, plain and with filters.
    """
    model, _, rule, kind = name.split("/")
    if rule == "speculative_sampling" or (model.startswith("Qwen3") and kind in ("plain", "filters")):
        return architectures
    return [90] if 90 in architectures else architectures[:1]


def read() -> dict[str, Counts]:
    """The committed baseline, empty where there is none yet."""
    known = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    return {name: Counts(**numbers) for name, numbers in known.items()}


def write(found: dict[str, Counts]) -> None:
    """Replace the baseline, a round per line."""
    lines = (f" {json.dumps(name)}: {json.dumps(numbers._asdict())}" for name, numbers in sorted(found.items()))
    BASELINE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(baseline: dict[str, Counts], found: dict[str, Counts]) -> list[str]:
    """Where rounds that were traced, or that the baseline has and `ROUNDS` does not, differ from it."""
    lines = []
    for name, numbers in found.items():
        known = baseline.get(name)
        if known is None:
            lines.append(f"{name}: {_text(numbers)}, and tools/launches.json does not have it")
        elif known != numbers:
            lines.append(f"{name}: {_text(numbers)}, and tools/launches.json says {_text(known)}")
    return lines + [f"{name}: in tools/launches.json, and no such round" for name in sorted({*baseline} - {*ROUNDS})]


def _text(numbers: Counts) -> str:
    return f"{numbers.launches} launches and {numbers.products} products, {numbers.verify} launches in verification"


def count(setting: Round) -> Counts:
    """Trace a round and count; raises what `traced` raises."""
    (call,) = setting.calls().values()
    return counts(traced(call))
