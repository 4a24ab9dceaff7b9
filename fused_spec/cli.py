"""Command line: `fused-spec generate`, `fused-spec chat` and `fused-spec bench`.

Every flag of the first two is a parameter of `Engine.from_pretrained` or `Engine.generate`, with its default. A mask of
allowed tokens has no form on a command line.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fused_spec import __version__
from fused_spec.cli_bench import add_bench, run_bench
from fused_spec.cli_flags import ENGINE_FLAGS, SAMPLING_FLAGS, add_flags, engine_of
from fused_spec.engine import Engine
from fused_spec.errors import InvalidInput
from fused_spec.generation import Generation, GenerationError, GenerationOutput
from fused_spec.timing import MachineBusy


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0; 1: the model failed, or the machine is too busy to measure; 2: bad input; 130: interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a model may emit what a terminal cannot show
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except InvalidInput as error:
        return _fail(error, 2)
    except (GenerationError, MachineBusy) as error:
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
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
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
    bench = commands.add_parser("bench", help="how fast a model decodes, or what it needs of a GPU", allow_abbrev=False)
    add_bench(bench)
    bench.set_defaults(command=run_bench)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="the verifier: a folder, a .gguf file or a hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object per text instead of the text")
    add_flags(parser, Engine.from_pretrained, ENGINE_FLAGS)
    add_flags(parser, Engine.generate, SAMPLING_FLAGS)


def _stream(engine: Engine, prompt: Any, options: argparse.Namespace) -> Generation:
    values = {name: getattr(options, name) for name in SAMPLING_FLAGS}
    values["stop"] = values["stop"] or ()
    return engine.stream(prompt, **values)


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt if options.prompt is not None else _read(options.prompt_file)
    if not prompt:
        raise InvalidInput("the prompt is empty; at least one token is needed")
    engine = engine_of(options)
    generation = _stream(engine, [{"role": "user", "content": prompt}] if options.chat else prompt, options)
    _print(generation, options.json)
    if not options.json:
        print(f"[{summary(generation.output)}]", file=sys.stderr)
    return 0


def _chat(options: argparse.Namespace) -> int:
    engine = engine_of(options)
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
