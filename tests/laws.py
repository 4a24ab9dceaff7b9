"""Chi-square tests with a stated false-alarm rate; cells too rare for the approximation are pooled."""

import torch
from scipy.stats import chi2

from fused_spec.kernels.acceptance_reference import acceptance_reference, target_reference
from fused_spec.rules import CascadeOpt, CascadeToken, MentoredDecoding, Rule


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts [N] against a law [N]; a cell of zero probability must be empty."""
    assert counts.sum() > 0
    assert abs(law.sum().item() - 1) < 1e-9
    assert counts[law == 0].sum() == 0, f"zero-probability outcomes drawn: {counts[law == 0].nonzero().flatten()}"
    expected = law * counts.sum()
    order = expected.argsort()
    pools: list[list[float]] = [[0.0, 0.0]]  # from the rarest on, each pool grows until 5 are expected of it
    for cell in order.tolist():
        if pools[-1][1] >= 5:
            pools.append([0.0, 0.0])
        pools[-1][0] += counts[cell].item()
        pools[-1][1] += expected[cell].item()
    if len(pools) > 1 and pools[-1][1] < 5:
        last = pools.pop()
        pools[-1] = [pools[-1][0] + last[0], pools[-1][1] + last[1]]
    return sum((seen - due) ** 2 / due for seen, due in pools), len(pools) - 1


def assert_law(counts: torch.Tensor, law: torch.Tensor, false_alarm: float = 1e-6) -> None:
    """Fail if the counts would be at most this likely under the law."""
    statistic, freedom = chi_square(counts.double(), law)
    assert freedom == 0 or chi2.sf(statistic, freedom) > false_alarm, (statistic, freedom)


def emitted_law(rule: Rule, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([V] mass emitted by acceptance, [V] mass emitted by resampling) of one tested slot; their sum is h_alg."""
    accepted, resampled = torch.zeros_like(q), torch.zeros_like(q)
    pairs = isinstance(rule, MentoredDecoding | CascadeOpt | CascadeToken)
    target = target_reference(rule, p, q, 0) if pairs else None
    for token in p.nonzero().flatten().tolist():
        accept, _, residual = acceptance_reference(rule, p, q, token, target)
        accepted[token] = p[token] * accept
        if accept < 1:
            resampled += p[token] * (1 - accept) * residual
    return accepted, resampled
