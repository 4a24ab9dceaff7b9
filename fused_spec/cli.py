"""Command line: `fused-spec generate`, `fused-spec chat` and `fused-spec bench --plan`.

Every flag of the first two is a parameter of `Engine.from_pretrained` or `Engine.generate`, with its default. A mask of
allowed tokens has no form on a command line.
"""

import argparse
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fused_spec.engine import Engine
from fused_spec.errors import InvalidInput
from fused_spec.generation import Generation, GenerationError, GenerationOutput
from fused_spec.gpus import GPUS, gpu_of
from fused_spec.models.known_configs import config_of, known_config
from fused_spec.options import DTYPES, NAMED_DRAFTS, check_draft_name, resolve_dtype
from fused_spec.plan import plan
from fused_spec.plan_report import ACCEPTANCES, Report
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


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 (the model failed), 2 (bad input) or 130 (interrupted)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a model may emit what a terminal cannot show
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except InvalidInput as error:
        return _fail(error, 2)
    except GenerationError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own last flush fails again
        return 0


def _fail(error: Exception, status: int) -> int:
    print(f"fused-spec: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fused-spec", description="Speculative decoding of one sequence.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    generate = commands.add_parser("generate", help="continue a prompt", allow_abbrev=False)
    _add_common(generate)
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file; - is standard input")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    generate.set_defaults(command=_generate)
    chat = commands.add_parser("chat", help="talk to a model", allow_abbrev=False)
    _add_common(chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    chat.set_defaults(command=_chat)
    bench = commands.add_parser("bench", help="what a model needs of a GPU, from its config", allow_abbrev=False)
    _add_bench(bench)
    bench.set_defaults(command=_bench)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="the verifier: a folder, a .gguf file or a hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object per text instead of the text")
    for function, flags in ((Engine.from_pretrained, ENGINE_FLAGS), (Engine.generate, SAMPLING_FLAGS)):
        parameters = inspect.signature(function).parameters
        for name, settings in flags.items():
            # A list that argparse appends to must not be the default itself.
            default = None if settings.get("action") == "append" else parameters[name].default
            shown = SpeculativeSampling.name if name == "rule" else default
            extra = "" if shown is None or isinstance(shown, bool) else f" (default: {shown})"
            text = (settings["help"] + extra).replace("%", "%%")
            parser.add_argument(f"--{name.replace('_', '-')}", **{**settings, "default": default, "help": text})


def _add_bench(parser: argparse.ArgumentParser) -> None:
    loading = inspect.signature(Engine.from_pretrained).parameters
    add = parser.add_argument
    add("target", metavar="MODEL", help="the verifier: a folder, a config.json, a .gguf file, a hub id or a known name")
    add("--plan", action="store_true", help="compute memory and bandwidth; needed, since nothing is measured yet")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    names = " or ".join(NAMED_DRAFTS)
    add("--draft", metavar="MODEL", help=f"the same, {names}; left out: plain decoding")
    for name, text in {"num_draft_tokens": "drafts per round, 1 to 64", "max_length": "most tokens of a text"}.items():
        default = loading[name].default
        add(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)}; left out: bfloat16")
    add("--gpu", nargs="+", action="extend", metavar="NAME", help=f"{', '.join(GPUS)}; left out: all of them")
    context = "committed tokens that the floors are for (default: 1024, or max_length if that is less)"
    add("--context", type=int, metavar="N", help=context)
    rates = f"shares of drafts that are accepted (default: {' '.join(map(str, ACCEPTANCES))})"
    add("--acceptance", nargs="+", action="extend", type=float, metavar="A", help=rates)


def _engine(options: argparse.Namespace) -> Engine:
    values = {name: getattr(options, name) for name in ENGINE_FLAGS}
    values["rule"] = None if values["rule"] is None else parse_rule(values["rule"])
    return Engine.from_pretrained(options.target, **values)


def _stream(engine: Engine, prompt: Any, options: argparse.Namespace) -> Generation:
    values = {name: getattr(options, name) for name in SAMPLING_FLAGS}
    values["stop"] = values["stop"] or ()
    return engine.stream(prompt, **values)


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt if options.prompt is not None else _read(options.prompt_file)
    if not prompt:
        raise InvalidInput("the prompt is empty; at least one token is needed")
    engine = _engine(options)
    generation = _stream(engine, [{"role": "user", "content": prompt}] if options.chat else prompt, options)
    _print(generation, options.json)
    if not options.json:
        print(f"[{summary(generation.output)}]", file=sys.stderr)
    return 0


def _chat(options: argparse.Namespace) -> int:
    engine = _engine(options)
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(opening)
    if sys.stdin.isatty():
        print("Type a message; /reset begins anew, /exit or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            raise InvalidInput(f"standard input: {error}") from None
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                generation = _stream(engine, asked, options)
            except InvalidInput as error:
                if not sys.stdin.isatty():
                    raise
                _fail(error, 2)  # nothing is lost: the message was not added, /reset makes room
                continue
            _print(generation, options.json)
            messages = [*asked, {"role": "assistant", "content": generation.output.text}]


def _bench(options: argparse.Namespace) -> int:
    if not options.plan:
        raise InvalidInput("bench measures nothing in this version; --plan computes what follows from the config alone")
    if options.acceptance and options.draft is None:
        raise InvalidInput("--acceptance needs --draft: plain decoding has no drafts to accept")
    draft = options.draft
    if draft is not None and draft not in NAMED_DRAFTS:
        if known_config(draft) is None:
            check_draft_name(draft)
        draft = config_of(draft)
    gpus = dict.fromkeys(gpu_of(name) for name in options.gpu or GPUS)
    target, dtype = config_of(options.target), resolve_dtype(options.dtype)
    sizes = {"num_draft_tokens": options.num_draft_tokens, "max_length": options.max_length}
    report = Report(
        target=options.target,
        draft=options.draft,
        dtype=str(dtype).removeprefix("torch."),
        plans=[plan(target, draft, **sizes, dtype=dtype, gpu=gpu) for gpu in gpus],
        context=min(1024, options.max_length) if options.context is None else options.context,
        acceptances=options.acceptance or ACCEPTANCES,
    )
    print(json.dumps(report.as_dict()) if options.json else report.as_text())
    return 0


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--prompt-file {file}: {error}") from None


def _print(generation: Generation, as_json: bool) -> None:
    for chunk in generation:
        if not as_json:
            print(chunk.text, end="", flush=True)
    output = generation.output
    if as_json:
        fields = {name: value for name, value in vars(output).items() if name != "stats"}
        print(json.dumps({**fields, "stats": output.stats.as_dict()}), flush=True)
    else:
        print(flush=True)


def summary(output: GenerationOutput) -> str:
    """A finished generation in one line."""
    stats = output.stats
    parts = [f"{len(output.token_ids)} tokens", f"{output.finish_reason}", f"seed {output.seed}"]
    if stats.tokens_per_second is not None and stats.tokens_per_round is not None:
        parts += [f"{stats.tokens_per_second:.1f} tokens/s", f"{stats.tokens_per_round:.2f} tokens per round"]
    if stats.total_variation:
        parts.append(f"total variation {stats.total_variation:.4f} per token")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
