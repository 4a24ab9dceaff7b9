"""`fused-spec bench`: how fast an engine decodes here, or, with --plan, what a model needs of a GPU."""

import argparse
import json
from pathlib import Path

from fused_spec.bench import measure, prescribe_acceptance
from fused_spec.cli_flags import ENGINE_FLAGS, SAMPLING_FLAGS, add_flags, engine_of
from fused_spec.engine import Engine
from fused_spec.errors import InvalidInput
from fused_spec.gpus import GPUS, gpu_of
from fused_spec.models.known_configs import config_of, known_config
from fused_spec.options import NAMED_DRAFTS, check_draft_name, resolve_dtype
from fused_spec.plan import plan
from fused_spec.plan_report import ACCEPTANCES, Report

PROMPT = "Write a short story about a lighthouse keeper who counts the steps of the tower every evening."
_SAMPLING = {name: SAMPLING_FLAGS[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
_MEASURING = ("prompt", "tokens", "turns", "plot", *_SAMPLING)
_PLANNING = ("gpu", "context")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("target", metavar="MODEL", help="the verifier; with --plan its config or a known name (qwen3-8b) is enough")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add_flags(parser, Engine.from_pretrained, ENGINE_FLAGS)
    parser.set_defaults(num_draft_tokens=None)
    rates = f"shares of drafts that are accepted: with --plan to show (default: {' '.join(map(str, ACCEPTANCES))}), "
    add("--acceptance", nargs="+", action="extend", type=float, metavar="A", help=rates + "else one to prescribe")
    measuring = parser.add_argument_group("measuring; without --num-draft-tokens, every size of auto").add_argument
    measuring("--prompt", metavar="TEXT", help="left out: one about a lighthouse keeper")
    measuring("--tokens", type=int, metavar="N", help="new tokens of every text (default: 128)")
    measuring("--turns", type=int, metavar="N", help="how often each way is timed (default: 3)")
    measuring("--plot", type=Path, metavar="FILE", help="a PNG of tokens per second against drafts per round")
    for name, settings in _SAMPLING.items():
        measuring(f"--{name.replace('_', '-')}", **settings)
    planning = parser.add_argument_group("planning, from the config alone").add_argument
    planning("--plan", action="store_true", help="compute memory and bandwidth instead of measuring")
    planning("--gpu", nargs="+", action="extend", metavar="NAME", help=f"{', '.join(GPUS)}; left out: all of them")
    context = "committed tokens that the floors are for (default: 1024, or max_length if that is less)"
    planning("--context", type=int, metavar="N", help=context)


def run_bench(options: argparse.Namespace) -> int:
    """Measure or plan."""
    others = _MEASURING if options.plan else _PLANNING
    for name in others:
        if getattr(options, name) is not None:
            mode = "measures, and --plan computes only" if options.plan else "is for --plan"
            raise InvalidInput(f"--{name.replace('_', '-')} {mode}")
    if options.acceptance and options.draft is None:
        raise InvalidInput("--acceptance needs --draft: plain decoding has no drafts to accept")
    return _plan(options) if options.plan else _measure(options)


def _measure(options: argparse.Namespace) -> int:
    if options.acceptance and len(options.acceptance) > 1:
        raise InvalidInput(f"--acceptance prescribes one rate, got {' '.join(map(str, options.acceptance))}")
    drafting = None
    if options.draft is not None:
        options.num_draft_tokens = options.num_draft_tokens or "auto"
        drafting = engine_of(options)
        if options.acceptance:
            prescribe_acceptance(drafting, options.acceptance[0])
    options.draft, options.num_draft_tokens = None, 1
    plain = engine_of(options)  # loaded anew: weights are laid out for the number of tokens that a pass has
    prompt = options.prompt or PROMPT
    if plain.tokenizer is None:
        raise InvalidInput("bench needs a tokenizer, and this checkpoint has none")
    given = {name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None}
    result = measure(
        plain,
        drafting,
        prompt,
        turns=3 if options.turns is None else options.turns,
        new_tokens=128 if options.tokens is None else options.tokens,
        sampling={"seed": 1, **given},
    )
    if options.plot is not None:
        result.plot(options.plot)
    print(json.dumps(result.as_dict()) if options.json else result.as_text())
    return 0


def _plan(options: argparse.Namespace) -> int:
    draft = options.draft
    if draft is not None and draft not in NAMED_DRAFTS:
        if known_config(draft) is None:
            check_draft_name(draft)
        draft = config_of(draft)
    gpus = dict.fromkeys(gpu_of(name) for name in options.gpu or GPUS)
    target, dtype = config_of(options.target), resolve_dtype(options.dtype)
    m = 5 if options.num_draft_tokens is None else options.num_draft_tokens
    report = Report(
        target=options.target,
        draft=options.draft,
        dtype=str(dtype).removeprefix("torch."),
        plans=[
            plan(target, draft, num_draft_tokens=m, max_length=options.max_length, dtype=dtype, gpu=gpu) for gpu in gpus
        ],
        context=min(1024, options.max_length) if options.context is None else options.context,
        acceptances=options.acceptance or ACCEPTANCES,
    )
    print(json.dumps(report.as_dict()) if options.json else report.as_text())
    return 0
