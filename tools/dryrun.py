"""Prove without a GPU what a round does on one: launches, no host reads, kernels that compile and fit.

    python tools/dryrun.py MODEL [--draft DRAFT] [--rule RULE] [--top-k K] ...   a round of speculative decoding
    python tools/dryrun.py [--vocab V] [--rule RULE] ...   a call of `fused_spec.sample` and one of `fused_spec.verify`
    python tools/dryrun.py --rounds [NAME ...]     rounds of all kinds, launches compared with tools/launches.json
    python tools/dryrun.py --table [SETTING ...]   settings of the register table, compared with tools/registers.json
    python tools/dryrun.py --write-rounds          all rounds; written there unless something is wrong
    python tools/dryrun.py --write-table           all settings; written there unless something is wrong

MODEL is a folder, a config.json, a .gguf file, a hub id or a known name; its sizes are all that is looked at. It all
runs on meta tensors, and every kernel that is launched is compiled ahead of time. The status is 1 where something reads
from the host or runs an operator that nobody counted, where a kernel spills, does not compile or leaves too little room
on a multiprocessor, where verification takes too many launches, or where numbers are not the committed ones; 2 where
the command line is wrong. Times, races and the last bits of exp need a GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examination import Examination

ARCHITECTURES = (80, 90, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("dryrun: error: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    # Behind the check: Triton decides when a kernel is defined whether it is interpreted.
    import triton

    from examination import as_json, examine, findings_of, overview, table
    from fused_spec.errors import InvalidInput
    from traced_rounds import targets

    options = _parser().parse_args(arguments)
    rounds = _wants(options, "rounds")
    try:
        calls = _calls(options)
        architectures = {name: targets(name, options.arch) if rounds else options.arch for name in calls}
        examinations = examine(calls, architectures, loads=not (rounds or _wants(options, "table")))
    except InvalidInput as error:
        print(f"dryrun: error: {error}", file=sys.stderr)
        return 2
    findings = findings_of(examinations)
    findings += _compare_or_write(options, examinations, write=not findings)
    if options.json:
        found = [as_json(examination._replace(kernels=[]) if rounds else examination) for examination in examinations]
        print(json.dumps({"triton": triton.__version__, "calls": found, "findings": findings}, indent=1))
    else:
        print(f"Triton {triton.__version__}\n{overview(examinations) if rounds else table(examinations)}")
    for finding in findings:
        print(f"dryrun: {finding}", file=sys.stderr)
    return 1 if findings else 0


def _wants(options: argparse.Namespace, which: str) -> bool:
    """Whether the "rounds" or settings of the register "table" are asked for, to be compared or written."""
    return getattr(options, which) is not None or getattr(options, f"write_{which}")


def _calls(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """What to examine, by name.

    Raises:
        InvalidInput: options do not go together, or are refused by what they are for.
    """
    import traced_rounds
    from fused_spec.errors import InvalidInput
    from register_table import SETTINGS
    from traced_calls import DRAFTS, Setting

    given = {name: value for name, value in vars(options).items() if name not in _OF_THE_TOOL}
    if _wants(options, "rounds") or _wants(options, "table"):
        if given:
            raise InvalidInput(f"{_flags(given)}: not together with committed rounds or settings")
        if _wants(options, "rounds"):
            return {name: setting.calls()["round"] for name, setting in traced_rounds.selected(options.rounds).items()}
        names = options.table or SETTINGS
        return {f"{name}/{call}": run for name in names for call, run in SETTINGS[name].calls().items()}
    kind = traced_rounds.Round if "model" in given else Setting
    unknown = given.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise InvalidInput(f"{_flags(unknown)}: {'not' if 'model' in given else 'only'} together with a MODEL")
    if kind is Setting and given.get("draft", DRAFTS[0]) not in DRAFTS:
        raise InvalidInput(f"--draft: without a MODEL {', '.join(DRAFTS)}, got {given['draft']!r}")
    return kind(**given).calls()


def _compare_or_write(options: argparse.Namespace, examinations: list["Examination"], *, write: bool) -> list[str]:
    """Differences from what is committed; none where that is to be written, which `write` permits."""
    import triton

    import register_table
    import traced_rounds

    if _wants(options, "rounds"):
        found = {
            e.call: traced_rounds.Counts(e.launches, e.products, e.verification)
            for e in examinations
            if e.verification is not None  # or it was not traced to its end, and that is a finding already
        }
        if not options.write_rounds:
            return traced_rounds.differences(traced_rounds.read(), found)
        if write:
            traced_rounds.write(found)
    elif _wants(options, "table"):
        entries = register_table.entries(examinations)
        if not options.write_table:
            return register_table.differences(register_table.read(), triton.__version__, entries)
        if write:
            register_table.write(entries)
    return []


def _flags(names: Iterable[str]) -> str:
    return ", ".join("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in sorted(names))


def _architectures(text: str) -> list[int]:
    from aot import SHARED_LIMIT

    known = ", ".join(map(str, SHARED_LIMIT))
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) in SHARED_LIMIT for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of compute capabilities out of {known}")
    return sorted({int(part) for part in parts})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return int(text)


_OF_THE_TOOL = frozenset(["arch", "json", "rounds", "write_rounds", "table", "write_table"])


def _parser() -> argparse.ArgumentParser:
    from register_table import SETTINGS
    from traced_calls import DTYPES

    parser = argparse.ArgumentParser(prog="dryrun", description="What rounds, sampling and verification do on a GPU.")
    add = parser.add_argument
    add("--arch", type=_architectures, default=list(ARCHITECTURES), help="compute capabilities, as in 80,90,100")
    add("--json", action="store_true")
    choice = parser.add_mutually_exclusive_group().add_argument
    choice("--rounds", nargs="*", metavar="NAME", help="compare rounds with the committed launches, or all")
    choice("--write-rounds", action="store_true", help="examine all rounds, and commit their launches")
    choice("--table", nargs="*", choices=SETTINGS, metavar="SETTING", help="compare settings of the register table")
    choice("--write-table", action="store_true", help="examine all settings, and write the table")

    def option(*names: str, **how: Any) -> None:
        add(*names, **how, default=argparse.SUPPRESS)  # to tell what was given, and to state each default once

    option(
        "model", nargs="?", metavar="MODEL", help="of a whole round; the rest is for rounds and calls, where not said"
    )
    option("--draft", help="with a MODEL none, ngram, self-int8, self-int4 or a model; else what verification knows")
    option("--num-draft-tokens", type=_count)
    option("--rule", help="as in cactus:delta=0.1")
    option("--temperature", type=float)
    option("--top-k", type=_count)
    option("--top-p", type=float)
    option("--min-p", type=float)
    option("--allowed", action="store_true", help="with a bitmask of allowed tokens")
    option("--dtype", choices=DTYPES)
    option("--logprobs", action="store_true", help="of rounds: with log-probabilities")
    option("--max-length", type=_positive, help="of rounds: tokens that the cache has room for")
    option("--vocab", type=_positive, help="of calls")
    option("--draft-vocab", type=_positive, help="of calls: where the drafter's is padded differently")
    option("--batch", type=_positive, help="of calls")
    option("--tensors", action="store_true", help="of calls: processing parameters as tensors, one value per request")
    option("--commit", action="store_true", help="of calls: verification also appends the tokens to their sequences")
    return parser


if __name__ == "__main__":
    sys.exit(main())
