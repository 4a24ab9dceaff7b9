"""The Triton path of `verify`: three launches, and what filters and pair rules add.

    1  row_statistics   every row once, split over the vocabulary
    2  decide           accept or reject; masses of the row that decides, split over the vocabulary
    3  pick_and_commit  the last token, by one program per request

Filters add one launch (row_cutoffs), rules that look at pairs of rows those of kernels/pair_bounds.py. Nothing is read
on the host.
"""

from typing import Any

import torch

from fused_spec.kernels.check import Scalar
from fused_spec.kernels.commit import Sequences
from fused_spec.kernels.decide import DecisionBuffers, Drafts, decide_and_weigh, rule_branch
from fused_spec.kernels.pair_bounds import pair_bounds
from fused_spec.kernels.pick import pick_and_commit
from fused_spec.kernels.row_cutoff import row_cutoffs
from fused_spec.kernels.row_statistics import Rows, row_statistics
from fused_spec.rules import CascadeOpt, CascadeToken, MentoredDecoding, Rule, TypicalAcceptance


def verify_triton(
    rule: Rule,
    target: Rows,
    drafts: Drafts,
    key: tuple[Scalar, Scalar],
    uniforms: torch.Tensor | None,
    out: Any,
    sequences: Sequences | None,
) -> None:
    """Run a round whose arguments were checked; `out` is a `Verification`."""
    unknown = drafts.rows if drafts.statistics is None else None  # draft rows whose statistics have to be found
    tests = target.logits.shape[1] > 1
    entropy = tests and isinstance(rule, TypicalAcceptance)
    statistics = row_statistics(target, unknown, entropy=entropy)
    filtered = target.filtered or (unknown is not None and unknown.filtered)
    laws = row_cutoffs(target, unknown, statistics, entropy=entropy) if filtered else None
    bounds = None
    if tests and isinstance(rule, MentoredDecoding | CascadeOpt | CascadeToken):
        bounds = pair_bounds(rule, target, drafts.rows, drafts.token_ids, statistics, laws, drafts.statistics)
    outcome = DecisionBuffers(out.num_accepted, out.accept_prob, out.tv_gain, out.error)
    choice = decide_and_weigh(rule, target, drafts, statistics, laws, bounds, key, uniforms, outcome)
    pick_and_commit(rule_branch(rule, target), target, drafts, choice, key, out.token_ids, out.error, sequences)
