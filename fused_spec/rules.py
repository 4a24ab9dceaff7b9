"""Acceptance rules: what a drafted token is tested against.

Notation: p is the draft's law, q the verifier's, n the drafted token and h the relaxed target of a rule. Both laws are
taken after temperature and filters. A rule is a frozen dataclass that holds parameters only; the arithmetic lives in
`fused_spec.kernels.acceptance`, so that every backend reads the same description.
"""

import math
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

import torch

from fused_spec.errors import InvalidInput

Parameter = float | torch.Tensor
"""A number shared by the batch, or a float tensor [B] with one value per request."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Base of all rules. `str(rule)` gives the form that `parse_rule` reads."""

    name: ClassVar[str]
    gain_is_variation: ClassVar[bool] = True
    """Whether the acceptance gained over speculative sampling is the total variation paid."""

    def __str__(self) -> str:
        parameters = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)]
        return self.name + (":" + ",".join(parameters) if parameters else "")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def __hash__(self) -> int:
        values = (getattr(self, f.name) for f in fields(self))  # 2 and 2.0 are equal, and so are their hashes
        return hash((type(self), *(tuple(v.tolist()) if isinstance(v, torch.Tensor) else v for v in values)))

    @property
    def has_tensors(self) -> bool:
        """Whether a parameter is a tensor, whose values may change."""
        return any(isinstance(getattr(self, f.name), torch.Tensor) for f in fields(self))

    def at(self, index: int, batch: int) -> "Rule":
        """The rule of one request: tensor parameters [B] replaced by their value at `index`."""
        if not self.has_tensors:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.shape != (batch,):
                    raise InvalidInput(f"{self.name}: {key} has shape {tuple(value.shape)}, expected ({batch},)")
                values[key] = float(value[index])
        return type(self)(**values)

    def for_batch(self, batch: int, device: torch.device) -> "Rule":
        """The rule as kernels take it: tensor parameters checked to be [B] and on the device, but not looked at."""
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape != (batch,):
                raise InvalidInput(f"{self.name}: {f.name} has shape {tuple(value.shape)}, expected ({batch},)")
            if value.device != device or not value.is_contiguous():
                raise InvalidInput(
                    f"{self.name}: {f.name} is on {value.device} with stride {value.stride(0)}, expected {device} and 1"
                )
        return self


_LARGEST = 1e30  # of any parameter: sums and products of a few stay finite


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b


def _check(rule: Rule, parameter: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise unless the parameter (each entry of a tensor) is a finite number in the legal range."""
    value = getattr(rule, parameter)
    numbers = [value]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.is_floating_point():
        numbers = value.tolist() if value.device.type == "cpu" else []  # looking elsewhere would wait for a device
    for number in numbers:
        legal = isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= _LARGEST
        if not legal or not low <= number <= high or (open_low and number == low):
            opening = "(" if open_low or low == -math.inf else "["
            interval = f"{opening}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
            shown = f"a {value.dtype} tensor {value.tolist()}" if isinstance(value, torch.Tensor) else repr(value)
            raise InvalidInput(
                f"{rule.name}: {parameter} must be a finite number (or a float tensor [B]) in {interval}, got {shown}"
            )


@dataclass(frozen=True, eq=False)
class SpeculativeSampling(Rule):
    """Lossless: accept with probability min(1, q_n / p_n), else resample from (q - p)+.

    The emitted tokens follow q exactly (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
    """

    name: ClassVar[str] = "speculative_sampling"


@dataclass(frozen=True, eq=False)
class Cactus(Rule):
    """Constrained acceptance (arXiv 2604.04987): the drafted token's probability is raised within a divergence budget.

    solver="taylor" accepts with probability min(1, g / p_n), g = min(q_n + sqrt(2 delta q_n (1 - q_n)), 1); the relaxed
    target h (h_n = g, the rest of q scaled to fit) is the optimum for chi^2(h||q) <= 2 delta, so KL(h||q) is at most
    ln(1 + 2 delta), which exceeds delta. solver="exact" takes g as the largest root of the binary KL d(g||q_n) = delta
    (1 where delta >= -ln q_n) and so keeps KL(h||q) <= delta. delta = 0 is SpeculativeSampling, bit for bit.

    Args:
        delta: budget in nats, >= 0; a number or a float tensor [B].
        solver: "taylor" or "exact".
    """

    delta: Parameter
    solver: str = "taylor"
    name: ClassVar[str] = "cactus"

    def __post_init__(self) -> None:
        _check(self, "delta", 0.0)
        if self.solver not in ("taylor", "exact"):
            raise InvalidInput(f"cactus: solver must be 'taylor' or 'exact', got {self.solver!r}")


@dataclass(frozen=True, eq=False)
class TypicalAcceptance(Rule):
    """Medusa's rule (Cai et al. 2024, arXiv 2401.10774): accept iff q_n > min(epsilon, alpha exp(-H(q))), H in nats.

    A rejected slot takes the arg max of q. No drawn number decides, and nothing bounds how far the output strays from
    q: the gain over speculative sampling is no total variation and can be negative. Usual: alpha = sqrt(epsilon).

    Args:
        epsilon: [0, 1]. alpha: >= 0. Numbers or float tensors [B].
    """

    epsilon: Parameter = 0.09
    alpha: Parameter = 0.3
    name: ClassVar[str] = "typical"
    gain_is_variation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self, "epsilon", 0.0, 1.0)
        _check(self, "alpha", 0.0)


@dataclass(frozen=True, eq=False)
class Lenience(Rule):
    """Accept with probability min(1, q_n / (lenience p_n)), else resample from (q - p)+ (Leviathan et al. 2023, A.5).

    Args:
        lenience: (0, 1]; 1 is SpeculativeSampling, bit for bit. A number or a float tensor [B].
    """

    lenience: Parameter
    name: ClassVar[str] = "lenience"

    def __post_init__(self) -> None:
        _check(self, "lenience", 0.0, 1.0, open_low=True)


@dataclass(frozen=True, eq=False)
class Ensemble(Rule):
    """The output follows the mixture weight q + (1 - weight) p wherever a draft is tested.

    Accept with probability min(1, (weight q_n + (1 - weight) p_n) / p_n), else resample from (q - p)+.

    Args:
        weight: [0, 1], the verifier's share; 1 is SpeculativeSampling, bit for bit. A number or a float tensor [B].
    """

    weight: Parameter
    name: ClassVar[str] = "ensemble"

    def __post_init__(self) -> None:
        _check(self, "weight", 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class MentoredDecoding(Rule):
    """Accept as often as KL(q||pi) <= kl allows (Tran-Thien 2023, "An optimal lossy variant of speculative decoding").

    Drafts are tested against pi, which maximises sum min(p, pi) under that budget with pi_x = 0 where q_x = 0: pi is
    q / a where p > q / a, q / b where p < q / b, and p in between.

    Args:
        kl: budget in nats, >= 0; 0 is SpeculativeSampling, bit for bit. A number or a float tensor [B].
    """

    kl: Parameter
    name: ClassVar[str] = "mentored"

    def __post_init__(self) -> None:
        _check(self, "kl", 0.0)


@dataclass(frozen=True, eq=False)
class CascadeOpt(Rule):
    """Speculative cascade, "OPT" deferral (Narasimhan et al. 2024, arXiv 2405.19261): per slot, pi is q or p.

    pi = q if max p < max q - alpha TV(p, q), else p.

    Args:
        alpha: any real; the larger, the more is left to the draft. A number or a float tensor [B].
    """

    alpha: Parameter
    name: ClassVar[str] = "cascade_opt"

    def __post_init__(self) -> None:
        _check(self, "alpha", -math.inf)


@dataclass(frozen=True, eq=False)
class CascadeToken(Rule):
    """Speculative cascade, token-specific rule "V3" (Narasimhan et al. 2024, arXiv 2405.19261).

    pi = p on A and q for the mass that p has outside it, A = {x: q_x >= (1 - alpha) max q}. The gain over speculative
    sampling is not a total variation and can be negative.

    Args:
        alpha: [0, 1]; 1 leaves everything to the draft. A number or a float tensor [B].
    """

    alpha: Parameter
    name: ClassVar[str] = "cascade_token"
    gain_is_variation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self, "alpha", 0.0, 1.0)


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        SpeculativeSampling,
        Cactus,
        TypicalAcceptance,
        Lenience,
        Ensemble,
        MentoredDecoding,
        CascadeOpt,
        CascadeToken,
    )
}


def parse_rule(text: str) -> Rule:
    """Read a rule as the command line writes it: `cactus:delta=0.25,solver=exact`.

    Raises:
        InvalidInput: unknown rule or parameter, a parameter given twice, missing, not a number or out of range.
    """
    name, _, rest = text.partition(":")
    rule = RULES.get(name)
    if rule is None:
        raise InvalidInput(f"unknown rule {name!r}; known: {', '.join(sorted(RULES))}")
    known = {f.name: f for f in fields(rule)}
    values: dict[str, float | str] = {}
    for item in rest.split(",") if rest else []:
        key, equals, value = item.partition("=")
        if key not in known or not equals:
            raise InvalidInput(
                f"{name}: unknown parameter {item!r}; known: {', '.join(known) or 'none'} (as name=value)"
            )
        if key in values:
            raise InvalidInput(f"{name}: {key} is given twice")
        values[key] = value if known[key].type is str else _number(name, key, value)
    for key, field in known.items():
        if key not in values and field.default is MISSING:
            raise InvalidInput(f"{name}: {key} is required, as in {name}:{key}=0.25")
    return rule(**values)


def _number(rule: str, key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{rule}: {key} must be a number, got {text!r}") from None
