"""Verification: test m drafted tokens against m + 1 rows of verifier logits and emit the tokens of the round.

Slot i holds draft n_i and verifier law q_i. Drafts are accepted in order while u_i * p_n < g(q_n); the first rejected
slot draws its token from the residual (h - p)+, and if every draft present was accepted the next row's plain q gives
one more. Nothing depends on rows past the deciding one: the torch path does not look at them, the Triton path
(kernels/verify_triton.py) takes their statistics together with the others' and leaves them at that.
"""

from dataclasses import dataclass

import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels.check import (
    Layout,
    Scalar,
    check_device,
    check_logits,
    check_out,
    check_tensor,
    check_unit_stride,
    runs_on_triton,
    seeds_and_positions,
    store,
)
from fused_spec.kernels.commit import Sequences, commit
from fused_spec.kernels.sample import kernel_key, kernel_rows, processing_per_request
from fused_spec.kernels.verify_request import Request
from fused_spec.rules import Rule

DraftStats = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(lse, cutoff, logprob), each [B, m] float32, as `sample` returned them for the drafts."""


@dataclass(frozen=True)
class Verification:
    """The outcome of one round for B requests of up to m drafts.

    Attributes:
        token_ids: [B, m+1] int64: the accepted drafts, then the resampled or bonus token, then -1.
        num_accepted: [B] int64.
        accept_prob: [B, m] float32, probability that the draft of a slot is accepted; NaN where not tested.
        tv_gain: [B, m] float32, acceptance gained over speculative sampling, min(1, g/p_n) - min(1, q_n/p_n), whose
            expectation is the total variation paid for the slot's token (of TypicalAcceptance and CascadeToken it is
            not, and can be negative). NaN where not tested.
        error: [B] int32 bits, of the rows that decided the outcome: 1 NaN or +inf in a target row (its lowest allowed
            id is emitted), 2 NaN or +inf in a draft row (rejected), 4 a row without support, 8 draft id out of range
            (rejected), 16 the drafted token has p = 0 (rejected), 32 zero residual mass (sampled from q).
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    accept_prob: torch.Tensor
    tv_gain: torch.Tensor
    error: torch.Tensor

    def first(self, num_drafts: int) -> "Verification":
        """Views for fewer drafts than there is room for; what lies beyond says that nothing was tested there."""
        self.token_ids[:, num_drafts + 1 :] = -1
        self.accept_prob[:, num_drafts:] = torch.nan
        self.tv_gain[:, num_drafts:] = torch.nan
        return Verification(
            self.token_ids[:, : num_drafts + 1],
            self.num_accepted,
            self.accept_prob[:, :num_drafts],
            self.tv_gain[:, :num_drafts],
            self.error,
        )

    @staticmethod
    def layout(batch: int, num_drafts: int) -> Layout:
        """Shapes and dtypes for B requests of m drafts."""
        return {
            "token_ids": ((batch, num_drafts + 1), torch.int64),
            "num_accepted": ((batch,), torch.int64),
            "accept_prob": ((batch, num_drafts), torch.float32),
            "tv_gain": ((batch, num_drafts), torch.float32),
            "error": ((batch,), torch.int32),
        }

    @classmethod
    def empty(cls, batch: int, num_drafts: int, device: torch.device | str = "cpu") -> "Verification":
        """Uninitialised outputs for B requests of m drafts, to be passed as `out=`."""
        layout = cls.layout(batch, num_drafts).items()
        return cls(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout})


@torch.no_grad()
def verify(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    rule: Rule,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    temperature: Scalar = 1.0,
    top_k: Scalar = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
    allowed: torch.Tensor | None = None,
    draft_temperature: Scalar | None = None,
    draft_top_k: Scalar | None = None,
    draft_top_p: Scalar | None = None,
    draft_min_p: Scalar | None = None,
    draft_stats: DraftStats | None = None,
    uniforms: torch.Tensor | None = None,
    backend: str | None = None,
    out: Verification | None = None,
    sequences: Sequences | None = None,
) -> Verification:
    """Accept or reject drafted tokens and draw the token that follows them. Inputs are never modified.

    On the Triton path this takes three launches, four with filters, and what kernels/pair_bounds.py says for rules over
    pairs of rows. No program waits for another, no probability over the vocabulary is stored, and nothing is read on
    the host, so a call can be captured in a CUDA graph once it has run with the same buffers (docs/kernels.md). A graph
    reads tensors when it is replayed and keeps numbers as they were: pass seed, position and whatever else varies as
    tensors. What tensors on a GPU hold is not checked.

    Args:
        target_logits: [B, m+1, V] float32, bfloat16 or float16, unit stride in V, any other strides. Row i is the
            verifier's law of the token in slot i, given the drafts before it. m >= 0.
        draft_token_ids: [B, m] int64 or int32; -1 says that this and later slots hold no draft.
        draft_logits: [B, m, Vd] as above, or None for a deterministic drafter (p is one-hot at the draft). The
            vocabularies may be padded differently: ids >= V have q = 0, ids >= Vd have p = 0.
        rule: an acceptance rule; its parameters are numbers or tensors [B].
        seed: integer or integer tensor [B], 0 <= seed < 2^63.
        position: integer or integer tensor [B], index of the token that the first draft would become.
        temperature, top_k, top_p, min_p: as in `sample`, numbers or tensors [B].
        allowed: int32 bitmask [B, m+1, ceil(V/32)] for the target rows, bit i of word w for id 32 w + i. Drafts drawn
            under a mask need draft_logits that are -inf where it forbids, with or without draft_stats.
        draft_temperature, draft_top_k, draft_top_p, draft_min_p: what drafts were drawn with; None is as the target.
        draft_stats: (lse, cutoff, logprob), each [B, m] float32 in nats, from `sample`; None computes them from
            draft_logits.
        uniforms: [B, m] float32 in [0, 1), used as the acceptance draws instead of Philox.
        backend: "triton", "torch", or None: Triton where the logits are not on the CPU. Triton on CPU tensors needs
            its interpreter (TRITON_INTERPRET=1).
        out: a `Verification` to write into.
        sequences: sequences to append the tokens to, cut behind a stop id and at the limit; within the last launch on
            the Triton path.

    Returns:
        A `Verification`; `out` if given. Same arguments, same tokens on every backend and in every batch slot, except
        where a draw lies within rounding of a boundary.

    Raises:
        InvalidInput: an argument has another shape, dtype, device or range than stated here.

    Sources:
        Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318): speculative sampling. The other rules
        name theirs in `fused_spec.rules`. Salmon et al. 2011: Philox. Milakov and Gimelshein 2018 (1805.02867): the
        statistics of a row in one pass.

    Example:
        A draft that the verifier finds half as likely as the drafter did is accepted half of the time:

        >>> import torch, fused_spec as fs
        >>> draft = torch.tensor([[[0.5, 0.5]]]).log()
        >>> target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]).log()
        >>> out = fs.verify(target, torch.tensor([[0]]), draft, rule=fs.SpeculativeSampling(), seed=2, position=7)
        >>> out.accept_prob
        tensor([[0.5000]])
        >>> out.num_accepted, out.token_ids
        (tensor([0]), tensor([[ 1, -1]]))
    """
    if not isinstance(rule, Rule):
        raise InvalidInput(f"rule must be an acceptance rule such as SpeculativeSampling(), got {rule!r}")
    _check_shapes(target_logits, draft_token_ids, draft_logits, allowed, draft_stats, uniforms)
    batch, num_drafts = draft_token_ids.shape
    processing = (temperature, top_k, top_p, min_p)
    draft_processing = (
        temperature if draft_temperature is None else draft_temperature,
        top_k if draft_top_k is None else draft_top_k,
        top_p if draft_top_p is None else draft_top_p,
        min_p if draft_min_p is None else draft_min_p,
    )
    if out is None:
        out = Verification.empty(batch, num_drafts, target_logits.device)
    else:
        check_out(out, Verification, Verification.layout(batch, num_drafts))
    if sequences is not None:
        sequences.check(batch)
    if runs_on_triton(backend, target_logits.device):
        # Not at the top: the torch path needs no Triton.
        from fused_spec.kernels.decide import Drafts
        from fused_spec.kernels.verify_triton import verify_triton

        _check_devices(target_logits.device, draft_token_ids, draft_logits, draft_stats, uniforms, out, sequences)
        draft_rows = kernel_rows(target_logits if draft_logits is None else draft_logits, None, draft_processing)
        verify_triton(
            rule.for_batch(batch, target_logits.device),
            kernel_rows(target_logits, allowed, processing),
            Drafts(draft_token_ids, None if draft_logits is None else draft_rows, draft_stats),
            kernel_key(seed, position, batch, target_logits.device),
            uniforms,
            out,
            sequences,
        )
        return out
    keys = seeds_and_positions(seed, position, batch)
    target = processing_per_request(*processing, batch)
    draft = processing_per_request(*draft_processing, batch)
    for b, key in enumerate(keys):
        outcome = Request(
            target_logits=target_logits[b],
            draft_ids=draft_token_ids[b].tolist(),
            draft_logits=None if draft_logits is None else draft_logits[b],
            rule=rule.at(b, batch),
            key=key,
            target=target[b],
            draft=draft[b],
            allowed=None if allowed is None else allowed[b],
            log_probs=None if draft_stats is None else draft_stats[2][b].tolist(),
            cutoffs=None if draft_stats is None else draft_stats[1][b].tolist(),
            lses=None if draft_stats is None else draft_stats[0][b].tolist(),
            uniforms=None if uniforms is None else uniforms[b].tolist(),
        ).run()
        for name, value in outcome._asdict().items():
            store(getattr(out, name), b, value)
    if sequences is not None:
        commit(sequences, out.token_ids, out.num_accepted, draft_token_ids)
    return out


def _check_devices(
    device: torch.device,
    draft_token_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_stats: DraftStats | None,
    uniforms: torch.Tensor | None,
    out: Verification,
    sequences: Sequences | None,
) -> None:
    check_device("draft_token_ids", draft_token_ids, device)
    check_device("draft_logits", draft_logits, device)
    check_device("uniforms", uniforms, device)
    for name, tensor in zip(("lse", "cutoff", "logprob"), draft_stats or (), strict=False):
        check_device(f"draft_stats {name}", tensor, device)
    for name, tensor in vars(out).items():
        check_device(f"out {name}", tensor, device)
    for name in ("num_accepted", "error"):
        check_unit_stride(f"out {name}", getattr(out, name))
    for name, tensor in ({} if sequences is None else sequences._asdict()).items():
        check_device(f"sequences {name}", tensor, device)
        check_unit_stride(f"sequences {name}", tensor)


def _check_shapes(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    allowed: torch.Tensor | None,
    draft_stats: DraftStats | None,
    uniforms: torch.Tensor | None,
) -> None:
    check_logits("target_logits", target_logits, "[B, m+1, V]")
    batch, rows, vocab_size = target_logits.shape
    if rows < 1:
        raise InvalidInput(f"target_logits: expected [B, m+1, V] with m >= 0, got {tuple(target_logits.shape)}")
    num_drafts = rows - 1
    check_tensor("draft_token_ids", draft_token_ids, (batch, num_drafts), (torch.int64, torch.int32))
    if draft_logits is not None:
        check_logits("draft_logits", draft_logits, "[B, m, Vd]")
        check_tensor("draft_logits", draft_logits, (batch, num_drafts, draft_logits.shape[2]), (draft_logits.dtype,))
    if allowed is not None:
        check_tensor("allowed", allowed, (batch, rows, -(-vocab_size // 32)), (torch.int32,))
    if draft_stats is not None:
        if draft_logits is None or not isinstance(draft_stats, tuple) or len(draft_stats) != 3:
            raise InvalidInput("draft_stats: expected (lse, cutoff, logprob) together with draft_logits")
        for name, tensor in zip(("lse", "cutoff", "logprob"), draft_stats, strict=True):
            check_tensor(f"draft_stats {name}", tensor, (batch, num_drafts), (torch.float32,))
    if uniforms is not None:
        check_tensor("uniforms", uniforms, (batch, num_drafts), (torch.float32,))
        if uniforms.device.type == "cpu" and not bool(((uniforms >= 0) & (uniforms < 1)).all()):
            raise InvalidInput("uniforms: expected numbers in [0, 1)")
