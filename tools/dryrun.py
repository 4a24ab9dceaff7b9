"""Prove without a GPU what sampling and verification do on one: launches, no host reads, kernels that compile and fit.

    python tools/dryrun.py [--arch 80,90,100] [--rule RULE] [--top-k K] ... [--json]
    python tools/dryrun.py --table [SETTING ...]   settings of the register table, compared with tools/registers.json
    python tools/dryrun.py --write-table           all of them, written there unless something is wrong

One call of `fused_spec.sample` and one of `fused_spec.verify` run on meta tensors, and every kernel that they launch is
compiled ahead of time. The status is 1 where a call reads from the host or runs an operator that nobody counted, or a
kernel spills or does not compile; 2 where the command line is wrong. Times, races and the last bits of exp need a GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

ARCHITECTURES = (80, 90, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("dryrun: error: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    # Behind the check: Triton decides when a kernel is defined whether it is interpreted.
    import triton

    import register_table
    from examination import as_json, examine, table
    from fused_spec.errors import InvalidInput
    from traced_calls import Setting

    options = _parser().parse_args(arguments)
    if options.table is None and not options.write_table:
        settings = {"": Setting(**{field.name: getattr(options, field.name) for field in fields(Setting)})}
    else:
        settings = {name: register_table.SETTINGS[name] for name in options.table or register_table.SETTINGS}
    try:
        calls = {f"{name}/{call}".strip("/"): run for name, s in settings.items() for call, run in s.calls().items()}
        examinations = [examine(name, call, options.arch) for name, call in calls.items()]
    except InvalidInput as error:
        print(f"dryrun: error: {error}", file=sys.stderr)
        return 2
    findings = [finding for examination in examinations for finding in examination.findings]
    entries = register_table.entries(examinations)
    if options.write_table and not findings:
        register_table.write(entries)
    elif options.table is not None:
        findings += register_table.differences(register_table.read(), triton.__version__, entries)
    if options.json:
        report = {"triton": triton.__version__, "calls": [as_json(e) for e in examinations], "findings": findings}
        print(json.dumps(report, indent=1))
    else:
        print(f"Triton {triton.__version__}\n{table(examinations)}")
    for finding in findings:
        print(f"dryrun: {finding}", file=sys.stderr)
    return 1 if findings else 0


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


def _parser() -> argparse.ArgumentParser:
    from register_table import SETTINGS
    from traced_calls import DRAFTS, DTYPES, Setting

    default = Setting()
    parser = argparse.ArgumentParser(prog="dryrun", description="What sampling and verification do on a GPU.")
    add = parser.add_argument
    add("--arch", type=_architectures, default=list(ARCHITECTURES), help="compute capabilities, as in 80,90,100")
    add("--vocab", type=_positive, default=default.vocab)
    add("--draft-vocab", type=_positive, help="where the drafter's is padded differently")
    add("--num-draft-tokens", type=_count, default=default.num_draft_tokens)
    add("--batch", type=_positive, default=default.batch)
    add("--dtype", choices=DTYPES, default=default.dtype)
    add("--rule", default=default.rule, help="as in cactus:delta=0.1")
    add("--temperature", type=float, default=default.temperature)
    add("--top-k", type=_count, default=default.top_k)
    add("--top-p", type=float, default=default.top_p)
    add("--min-p", type=float, default=default.min_p)
    add("--draft", choices=DRAFTS, default=default.draft, help="what verification knows of the drafter")
    add("--allowed", action="store_true", help="with a bitmask of allowed tokens")
    add("--tensors", action="store_true", help="processing parameters as tensors, one value per request")
    add("--commit", action="store_true", help="verification also appends the tokens to their sequences")
    choice = parser.add_mutually_exclusive_group().add_argument
    choice(
        "--table", nargs="*", choices=SETTINGS, metavar="SETTING", help="compare settings of the register table, or all"
    )
    choice("--write-table", action="store_true", help="examine all settings, and write the table")
    add("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
