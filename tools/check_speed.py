"""How fast an engine decodes on random weights of a real model's shape, as a share of what memory allows.

The weights are noise, and so are the texts. What models agree on is taken out as well: drafts are accepted with a
prescribed probability, decided beforehand for each position (fused_spec/synthetic.py), while everything else is done as
ever: drafting, the verifier's pass, statistics, decisions, the residual of a rejected row, commit. That costs one small
launch per round more. A prompt lookup finds something only in a text that repeats itself: there the text is made of
eight tokens, under a mask.

Timed are the rounds of a text of `TOKENS` tokens behind a prompt of `PROMPT` as `stats.decode_seconds` has them, from
the moment the first token is known until the last report has been read, host included; the second text of an engine,
so that kernels are compiled and graphs recorded. Bytes are those of fused_spec/plan.py at half the length of the text.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import torch

from check_models import own_attention, random_model, replays, small_config, with_graphs
from check_report import NOT_MEANINGFUL, copied_bandwidth, gpu
from check_run import Absent, Check, Finding, Setting
from fused_spec import Engine, GenerationOutput
from fused_spec.drafters import Drafter, NgramDrafter
from fused_spec.kernels.check import default_backend
from fused_spec.models.config import ModelConfig
from fused_spec.models.known_configs import config_of
from fused_spec.models.transformer import Transformer
from fused_spec.plan import NamedDraft, Plan, plan
from fused_spec.round import Drafts, RoundState, Sampling
from fused_spec.synthetic import SyntheticDrafter

TOKENS, PROMPT, MAX_LENGTH = 256, 512, 1024
M, ACCEPTANCE = 5, 0.7
LETTERS = 8


class Subject(NamedTuple):
    """Which models are timed; the draft may be a shape, a name or None."""

    target: str
    draft: str | None


class PrescribedLookup:
    """Prompt lookup whose drafts are accepted with a prescribed probability.

    A found draft's p is 1, so that u alone decides here too: 0 accepts what q gives any weight, and a number just below
    1 rejects what q gives less than that.
    """

    def __init__(self, acceptance: float, state: RoundState) -> None:
        places = len(state.tokens) + len(state.block)
        accepted = torch.rand(places, generator=torch.Generator().manual_seed(0)) < acceptance
        self._uniforms = torch.where(accepted, 0.0, 1 - 2.0**-24).to(state.tokens.device)
        self._drawn = torch.empty(1, len(state.block) - 2, device=state.tokens.device)
        self._lookup = NgramDrafter()

    def prefill(self, tokens: torch.Tensor) -> None:
        """Nothing to do."""

    def propose(self, state: RoundState, sampling: Sampling, size: int) -> Drafts:
        """The lookup's drafts, with uniforms of their positions."""
        drafts, uniforms = self._lookup.propose(state, sampling, size), self._drawn[:, :size]
        torch.index_select(self._uniforms, 0, state.positions[2 : size + 2], out=uniforms[0])
        return Drafts(drafts.token_ids, uniforms=uniforms)


def check_speed(subject: Subject, setting: Setting) -> Finding:
    """Tokens per second of one engine."""
    target = _config(setting, subject.target)
    named = subject.draft in (None, "ngram", "self-int8", "self-int4")
    draft: Any = subject.draft if named else _config(setting, str(subject.draft))
    budget = None if setting.reduced else _plan(target, draft, setting)
    if setting.reduced and subject.draft in ("self-int8", "self-int4"):
        with default_backend("torch"):  # the interpreter takes minutes for these products
            return _timed(subject, target, draft, None, setting)
    return _timed(subject, target, draft, budget, setting)


def _timed(
    subject: Subject,
    target: ModelConfig,
    draft: ModelConfig | NamedDraft | None,
    budget: Plan | None,
    setting: Setting,
) -> Finding:
    dtype, new_tokens = setting.dtypes[0], 4 if setting.reduced else TOKENS
    verifier = random_model(target, dtype, setting.device, 1)
    model: Any = random_model(draft, dtype, setting.device, 2) if isinstance(draft, ModelConfig) else draft
    sizes = {"max_length": 64 if setting.reduced else MAX_LENGTH, "num_draft_tokens": 2 if setting.reduced else M}
    engine = with_graphs(prescribed(verifier, model, attention=own_attention(setting.device), **sizes))
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": True}
    letters = LETTERS if draft == "ngram" else target.vocab_size
    if draft == "ngram":
        options["allowed"] = torch.zeros(-(-target.vocab_size // 32), dtype=torch.int32)
        options["allowed"][0] = 2**LETTERS - 1
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(0, letters, (24 if setting.reduced else PROMPT,), generator=generator).tolist()
    if not setting.reduced:
        engine.generate(prompt, seed=1, **options)
    begin = time.perf_counter()
    output = engine.generate(prompt, seed=2, **options)
    seconds = time.perf_counter() - begin
    if len(output.token_ids) != new_tokens:
        raise AssertionError(f"{len(output.token_ids)} tokens, expected {new_tokens}")
    numbers: dict[str, Any] = {"target": subject.target, "draft": subject.draft, "replays": replays(engine)}
    return _finding(output, numbers, seconds, budget, setting)


def prescribed(verifier: Transformer, draft: Transformer | str | None, **options: Any) -> Engine:
    """An engine whose drafts are accepted as prescribed."""
    engine = Engine(verifier, draft=draft, **options)
    if draft is None:
        return engine
    drafter: Drafter = SyntheticDrafter(engine.drafter, ACCEPTANCE, engine.state)
    if draft == "ngram":
        drafter = PrescribedLookup(ACCEPTANCE, engine.state)
    engine.use_drafter(drafter)
    return engine


def _finding(
    output: GenerationOutput, numbers: dict[str, Any], seconds: float, budget: Plan | None, setting: Setting
) -> Finding:
    """Figures of a text; the acceptance has to be what was prescribed, within five standard deviations."""
    stats = output.stats
    tested = stats.tested
    numbers |= {"rounds": stats.rounds, "tokens_per_round": stats.tokens_per_round, "drafted": stats.drafted,
                "accepted": stats.accepted, "prescribed_acceptance": ACCEPTANCE if tested else None}  # fmt: skip
    if tested and numbers["draft"] != "ngram":  # which does not always find as many drafts as there is room for
        share, spread = stats.accepted / tested, (ACCEPTANCE * (1 - ACCEPTANCE) / tested) ** 0.5
        numbers["acceptance"] = share
        if abs(share - ACCEPTANCE) > 5 * spread:
            raise AssertionError(f"{stats.accepted} of {tested} tested drafts accepted, {ACCEPTANCE} was prescribed")
    if stats.tokens_per_second is None or stats.tokens_per_round is None:
        raise AssertionError("no round was timed")
    if budget is None:
        return Finding(f"{stats.tokens_per_round:.2f} tokens per round; {NOT_MEANINGFUL}", numbers)
    device, source = gpu(setting.device)
    each = stats.decode_seconds / stats.rounds
    bandwidth = budget.round_bytes(PROMPT + TOKENS // 2) / each
    share = bandwidth / (device.bandwidth * 1e9)
    numbers |= {
        "tokens_per_second": stats.tokens_per_second, "rounds_per_second": 1 / each, "round_milliseconds": each * 1e3,
        "bytes_per_second": bandwidth, "bandwidth_share": share, "bandwidth_from": source,
        "share_of_copy": bandwidth / copied_bandwidth(setting.device), "whole_call_seconds": seconds,
    }  # fmt: skip
    return Finding(
        f"{stats.tokens_per_second:.0f} tokens/s, {1 / each:.0f} rounds/s of {stats.tokens_per_round:.2f} tokens, "
        f"{share:.0%} of bandwidth",
        numbers,
    )


def _config(setting: Setting, name: str) -> ModelConfig:
    return small_config(setting, "llama" if "Llama" in name else "qwen3") if setting.reduced else config_of(name)


def _plan(target: ModelConfig, draft: ModelConfig | NamedDraft | None, setting: Setting) -> Plan:
    """Bytes of a round; raises `Absent` where the models do not fit, with a sixth more for graphs and libraries."""
    device, _ = gpu(setting.device)
    found = plan(target, draft, num_draft_tokens=M, max_length=MAX_LENGTH, dtype=setting.dtypes[0], gpu=device)
    torch.cuda.empty_cache()
    free, needed = torch.cuda.mem_get_info(setting.device)[0], found.memory.total * 7 // 6 + 2**30
    if needed > free:
        raise Absent(f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free")
    return found


def check_copy(setting: Setting) -> Finding:
    """What memory gives to a large copy, next to its data sheet."""
    if setting.reduced:
        raise Absent("a copy within a GPU's memory needs a GPU")
    measured, (device, source) = copied_bandwidth(setting.device), gpu(setting.device)
    numbers = {"bytes_per_second": measured, "data_sheet": device.bandwidth * 1e9 if source == "data sheet" else None}
    sheet = f", {measured / device.bandwidth / 1e9:.0%} of its data sheet" if numbers["data_sheet"] else ""
    return Finding(f"{measured / 1e9:.0f} GB/s copied{sheet}", numbers)


_SUBJECTS = {
    "Qwen3-0.6B": (None, "self-int8", "self-int4", "ngram"),
    "Llama-3.1-8B": (None, "self-int8", "self-int4", "ngram"),
    "Qwen3-8B": (None, "Qwen3-0.6B"),
}
CHECKS: dict[str, Check] = {
    "speed/copy": check_copy,
    **{
        f"speed/{target}/{draft or 'plain'}": partial(check_speed, Subject(target, draft))
        for target, drafts in _SUBJECTS.items()
        for draft in drafts
    },
}
