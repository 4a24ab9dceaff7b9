"""fused-spec: low-latency, single-stream speculative decoding for Llama and Qwen models."""

from fused_spec.engine import Engine
from fused_spec.errors import InvalidInput
from fused_spec.generation import Chunk, Generation, GenerationError, GenerationOutput
from fused_spec.kernels.commit import Sequences
from fused_spec.kernels.sample import Sample, sample
from fused_spec.kernels.verify import Verification, verify
from fused_spec.rules import (
    Cactus,
    CascadeOpt,
    CascadeToken,
    Ensemble,
    Lenience,
    MentoredDecoding,
    Rule,
    SpeculativeSampling,
    TypicalAcceptance,
    parse_rule,
)
from fused_spec.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "Cactus",
    "CascadeOpt",
    "CascadeToken",
    "Chunk",
    "Engine",
    "Ensemble",
    "Generation",
    "GenerationError",
    "GenerationOutput",
    "InvalidInput",
    "Lenience",
    "MentoredDecoding",
    "Rule",
    "Sample",
    "Sequences",
    "SpeculativeSampling",
    "Statistics",
    "TypicalAcceptance",
    "Verification",
    "parse_rule",
    "sample",
    "verify",
]
