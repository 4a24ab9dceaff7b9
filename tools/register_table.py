"""Registers and shared memory of every kernel in the settings that matter, by Triton version and architecture.

tools/registers.json has what was last written there by `python tools/dryrun.py --write-table`:

    {Triton version: {"sm_90": {"setting/call/kernel": {"registers": 40, "shared": 32}}}}

A kernel that changes its needs is found by comparing. Whoever means the change writes the table with each version.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from examination import Examination
from traced_calls import Setting
from traced_rounds import Round

TABLE = Path(__file__).with_name("registers.json")

_FILTERS: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
_ROUNDS = {
    "qwen3-8b-qwen3-0.6b": Round("Qwen3-8B", "Qwen3-0.6B"),
    "llama-3.1-8b-int8": Round("Llama-3.1-8B", "self-int8"),
    "llama-3.1-8b-int4": Round("Llama-3.1-8B", "self-int4"),
    "smollm2-ngram": Round("SmolLM2-135M-Instruct", "ngram"),
}

SETTINGS: dict[str, Setting | Round] = {
    "plain": Setting(),
    "float32": Setting(dtype="float32"),
    "greedy": Setting(temperature=0.0),
    "filters": Setting(**_FILTERS),
    "tensors": Setting(tensors=True),
    "allowed": Setting(allowed=True),
    "paddings": Setting(draft_vocab=152064, draft="logits"),
    "no-draft-logits": Setting(draft="none"),
    "commit": Setting(commit=True, batch=3),
    "cactus": Setting(rule="cactus:delta=0.1"),
    "cactus-exact": Setting(rule="cactus:delta=0.1,solver=exact"),
    "typical": Setting(rule="typical"),
    "mentored": Setting(rule="mentored:kl=0.1"),
    "cascade-opt": Setting(rule="cascade_opt:alpha=0.1"),
    "cascade-token": Setting(rule="cascade_token:alpha=0.1"),
    **_ROUNDS,
    **{f"{name}-filters": replace(setting, **_FILTERS) for name, setting in _ROUNDS.items()},
}
"""Calls of `sample` and `verify`, and whole rounds of models."""

Entries = dict[str, dict[str, dict[str, int]]]
"""Architecture, then kernel, then what it needs."""


def entries(examinations: Iterable[Examination]) -> Entries:
    """What the table has of examinations."""
    result: Entries = {}
    for examination in examinations:
        for kernel in examination.kernels:
            for arch, code in kernel.compiled.items():
                key = f"{examination.call}/{kernel.name}"
                result.setdefault(f"sm_{arch}", {})[key] = {"registers": code.registers, "shared": code.shared}
    return result


def differences(table: dict[str, Entries], version: str, found: Entries) -> list[str]:
    """Where kernels need other than the table says; what the table does not have is not compared."""
    lines = []
    for arch, kernels in found.items():
        known = table.get(version, {}).get(arch, {})
        for kernel, needs in kernels.items():
            if kernel in known and known[kernel] != needs:
                lines.append(f"{kernel} on {arch}, Triton {version}: {needs}, and the table says {known[kernel]}")
    return lines


def read() -> dict[str, Entries]:
    """The committed table, empty where there is none yet."""
    table: dict[str, Entries] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return table


def write(found: Entries) -> None:
    """Replace the entries of this Triton version and these architectures, one kernel per line."""
    table = read()
    table[triton.__version__] = {**table.get(triton.__version__, {}), **found}
    versions = []
    for version, architectures in sorted(table.items()):
        blocks = []
        for arch, kernels in sorted(architectures.items(), key=lambda item: int(item[0].removeprefix("sm_"))):
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(needs)}" for name, needs in sorted(kernels.items()))
            blocks.append(f"  {json.dumps(arch)}: {{\n{lines}\n  }}")
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(blocks) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(versions) + "\n}\n")
