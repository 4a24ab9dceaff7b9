"""Importing the package: quick, and without the libraries that only some uses need."""

import json
import subprocess
import sys

EXTRA_SECONDS = 0.2
CODE = """
import gc, json, sys, time
import torch
gc.disable()
begin = time.process_time()
import fused_spec
taken = time.process_time() - begin
import fused_spec.cli
heavy = [name for name in ("transformers", "triton", "tokenizers", "huggingface_hub") if name in sys.modules]
print(json.dumps([taken, heavy]))
"""


def test_import_adds_little_to_torch() -> None:
    """Measured in the process that imported torch just before, so that each sample is a pair of its own.

    The least of three, in CPU time: what else the machine does can only add to a sample. Without garbage collection: a
    full one goes over torch's objects, takes 0.1 s, and falls due at some import or other, whoever makes it.
    """
    samples = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        taken, heavy = json.loads(done.stdout)
        assert heavy == []
        samples.append(taken)
    assert min(samples) <= EXTRA_SECONDS, samples
