"""Flags of the commands: parameters of the engine, with its defaults."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from fused_spec.engine import Engine
from fused_spec.options import DTYPES, NAMED_DRAFTS
from fused_spec.rules import RULES, SpeculativeSampling, parse_rule


def _draft_tokens(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer or auto, got {text!r}") from None


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers as in 4,4,2, got {text!r}") from None


ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "draft": {
        "metavar": "MODEL",
        "help": f"where drafts come from: a model, {' or '.join(NAMED_DRAFTS)}; left out: plain decoding",
    },
    "rule": {"metavar": "RULE", "help": f"acceptance rule: {', '.join(RULES)}, as in cactus:delta=0.25,solver=exact"},
    "num_draft_tokens": {"type": _draft_tokens, "metavar": "M", "help": "drafts per round, 1 to 64, or auto"},
    "max_length": {"type": int, "metavar": "N", "help": "most tokens of prompt and text together"},
    "dtype": {"metavar": "DTYPE", "help": f"{', '.join(DTYPES)}; left out: bfloat16"},
    "device": {"metavar": "DEVICE", "help": "cpu, cuda or cuda:N; left out: cuda where there is one"},
    "attention": {"metavar": "NAME", "help": "auto; on a GPU also triton or flash, on a CPU also sdpa"},
}
SAMPLING_FLAGS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"type": int, "metavar": "N", "help": "most tokens to generate"},
    "temperature": {"type": float, "metavar": "T", "help": "0 is greedy"},
    "top_k": {"type": int, "metavar": "K", "help": "keep the K most likely tokens; 0 is off"},
    "top_p": {"type": float, "metavar": "P", "help": "keep the most likely tokens of mass P; 1 is off"},
    "min_p": {
        "type": float,
        "metavar": "P",
        "help": "keep tokens at least P times as likely as the likeliest; 0 is off",
    },
    "seed": {"type": int, "metavar": "S", "help": "for the same text again; left out: a fresh one, reported"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text; may be repeated"},
    "ignore_eos": {"action": "store_true", "help": "go on behind EOS tokens"},
    "logprobs": {"action": "store_true", "help": "report log-probabilities (with --json)"},
    "round_sizes": {
        "type": _sizes,
        "metavar": "M,M",
        "help": "drafts of each round, as --json reports them: replays a text that --num-draft-tokens auto gave",
    },
}


def add_flags(parser: argparse.ArgumentParser, function: Callable[..., Any], flags: dict[str, dict[str, Any]]) -> None:
    """Add flags for parameters of a function, whose defaults they have and show."""
    parameters = inspect.signature(function).parameters
    for name, settings in flags.items():
        # A list that argparse appends to must not be the default itself.
        default = None if settings.get("action") == "append" else parameters[name].default
        shown = SpeculativeSampling.name if name == "rule" else default
        extra = "" if shown is None or isinstance(shown, bool) else f" (default: {shown})"
        text = (settings["help"] + extra).replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", **{**settings, "default": default, "help": text})


def engine_of(options: argparse.Namespace) -> Engine:
    """The engine that the flags ask for."""
    values = {name: getattr(options, name) for name in ENGINE_FLAGS}
    values["rule"] = None if values["rule"] is None else parse_rule(values["rule"])
    return Engine.from_pretrained(options.target, **values)
