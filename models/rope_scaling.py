"""Rotary embedding beyond the length a model was trained on: which frequencies turn slower, and by how much.

A scaling maps the plain frequencies f_i = theta^(-2i/D) [D/2] to those in use; YaRN also stretches the rotated vectors.
Everything is float32, in the order of operations of transformers, since models are tuned to those digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from fused_spec.errors import InvalidInput
from fused_spec.models.config_reader import REQUIRED, ConfigReader

_LENGTH = "original_max_position_embeddings"


class RopeScaling(Protocol):
    """A rule for frequencies, and the length that rotated queries and keys are multiplied by."""

    @property
    def amplitude(self) -> float: ...
    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor: ...


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by a factor: position interpolation (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    amplitude = 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Frequencies [D/2] in use."""
        return frequencies / self.factor


@dataclass(frozen=True)
class DividedFrequencies:
    """Each frequency divided by a number of its own, as a GGUF file's `rope_freqs.weight` [D/2] has them."""

    divisors: tuple[float, ...]
    amplitude = 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Frequencies [D/2] in use."""
        return frequencies / torch.tensor(self.divisors, dtype=torch.float32)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: waves longer than L / low are slowed by the factor, shorter than L / high are kept, linear between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int
    amplitude = 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Frequencies [D/2] in use."""
        turns = self.original_length / (2 * math.pi / frequencies)  # within the original length
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - kept) * frequencies / self.factor + kept * frequencies
        slowed = torch.where(turns < self.low_freq_factor, frequencies / self.factor, blended)
        return torch.where(turns > self.high_freq_factor, frequencies, slowed)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): slowed below beta_slow turns, kept above beta_fast, linear between.

    Turns are those a pair makes within the original length; the ramp is linear in the pair's index.
    """

    factor: float
    original_length: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Frequencies [D/2] in use."""
        pairs = len(frequencies)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_length / (times * 2 * math.pi)) / math.log(theta)

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low if high != low else 0.001
        slowed = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
        kept = 1 - slowed
        return frequencies / self.factor * (1 - kept) + frequencies * kept


def yarn_amplitude(factor: float, multiplier: float = 1.0) -> float:
    """What YaRN multiplies rotated vectors by, 0.1 ln(factor) + 1, to keep the entropy of attention."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def hf_rope(read: ConfigReader, context: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    A file that has both must mean the same by them.
    """
    theta = read.positive("rope_theta", default=10000.0)
    found: list[tuple[float, RopeScaling | None]] = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = read.get(key, {})
        if not isinstance(rope, dict):
            raise read.refuse(key, rope, "an object or null")
        # one dictionary per layer type instead of one for all: no model of ours
        if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise read.refuse(key, nested, "one set of parameters for all layers")
        inner = ConfigReader(rope, f"{read.where}: {key}")
        inner.only("partial_rotary_factor", 1.0)
        length = read.size(_LENGTH, default=inner.size(_LENGTH, default=context))
        if rope:
            found.append((inner.positive("rope_theta", default=theta), _hf_scaling(inner, length, context)))
    if not found:
        return theta, None
    if found[0] != found[-1]:
        raise read.refuse("rope_scaling", read.get("rope_scaling"), "absent, or with the meaning of rope_parameters")
    return found[0]


def _hf_scaling(read: ConfigReader, length: int, context: int) -> RopeScaling | None:
    kinds = [read.get(key) for key in ("rope_type", "type")]
    kind = next((kind for kind in kinds if kind is not None), "default")
    if kind in ("default", "none"):
        read.only("factor", 1.0)
        return None
    if kind == "linear":
        return LinearScaling(read.positive("factor"))
    if kind == "llama3":
        low, high = read.positive("low_freq_factor"), read.positive("high_freq_factor")
        if high <= low:
            raise read.refuse("high_freq_factor", high, f"a number above low_freq_factor, which is {low}")
        return Llama3Scaling(read.positive("factor"), low, high, length)
    if kind == "yarn":
        factor = read.positive("factor", default=REQUIRED if length == context else context / length)
        scales = [read.get(key) for key in ("mscale", "mscale_all_dim")]
        amplitude = yarn_amplitude(factor)
        if all(scales):
            over, under = read.positive("mscale"), read.positive("mscale_all_dim")
            amplitude = yarn_amplitude(factor, over) / yarn_amplitude(factor, under)
        return YarnScaling(
            factor,
            length,
            read.positive("attention_factor", default=amplitude),
            read.positive("beta_fast", default=32.0),
            read.positive("beta_slow", default=1.0),
            read.flag("truncate", default="truncate" not in read.values),  # a null is false in transformers
        )
    key = "rope_type" if kinds[0] is not None else "type"
    raise read.refuse(key, kind, "'default', 'linear', 'llama3', 'yarn'")


def gguf_rope_scaling(read: ConfigReader, context: int) -> RopeScaling | None:
    """The scaling of GGUF metadata. A factor without a type means linear; `scale_linear` is its older name."""
    kind = read.get("rope.scaling.type")
    read.only("rope.scaling.yarn_log_multiplier", 0.0)
    if kind != "yarn":
        read.only("rope.scaling.attn_factor", 1.0)
    factor = read.positive("rope.scaling.factor", default=read.positive("rope.scale_linear", default=1.0))
    if kind == "none" or (kind is None and factor == 1):
        return None
    if kind in (None, "linear"):
        return LinearScaling(factor)
    if kind == "yarn":
        for key in ("yarn_ext_factor", "yarn_attn_factor"):
            read.only(f"rope.scaling.{key}", 1.0)
        length = read.size("rope.scaling.original_context_length", default=context)
        stretch = read.positive("rope.scaling.attn_factor", default=1.0)
        return YarnScaling(
            factor,
            length,
            stretch * yarn_amplitude(factor),
            read.positive("rope.scaling.yarn_beta_fast", default=32.0),
            read.positive("rope.scaling.yarn_beta_slow", default=1.0),
        )
    raise read.refuse("rope.scaling.type", kind, "'none', 'linear', 'yarn' or absent")


def divided_frequencies(divisors: torch.Tensor, head_dim: int, where: str) -> DividedFrequencies:
    """From the tensor `rope_freqs.weight` of a GGUF file.

    Raises InvalidInput unless it holds D/2 numbers that float32 can divide by.
    """
    values = divisors.float().flatten()
    if values.numel() != head_dim // 2 or not bool(((values >= 1e-30) & (values <= 1e30)).all()):
        raise InvalidInput(f"{where}: tensor rope_freqs.weight must hold {head_dim // 2} numbers from 1e-30 to 1e+30")
    return DividedFrequencies(tuple(values.tolist()))
