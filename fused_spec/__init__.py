"""fused-spec: low-latency, single-stream speculative decoding for Llama and Qwen models."""

from fused_spec.engine import Engine
from fused_spec.errors import InvalidInput
from fused_spec.generation import Chunk, Generation, GenerationError, GenerationOutput
from fused_spec.kernels.sample import Sample, sample
from fused_spec.kernels.verify import Verification, verify
from fused_spec.rules import Cactus, Rule, SpeculativeSampling, parse_rule
from fused_spec.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "Cactus",
    "Chunk",
    "Engine",
    "Generation",
    "GenerationError",
    "GenerationOutput",
    "InvalidInput",
    "Rule",
    "Sample",
    "SpeculativeSampling",
    "Statistics",
    "Verification",
    "parse_rule",
    "sample",
    "verify",
]
