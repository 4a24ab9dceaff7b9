"""What a round tells the host, in one piece of memory: a single copy takes all of it before the next round."""

import torch

from fused_spec.kernels.verify import Verification


class Report:
    """The outcome of a round of up to m drafts and where it left the sequence. Of fewer drafts, the first slots count.

    Attributes:
        token_ids: [1, m+1] int64, as `verify` gives them; the first `emitted` were committed.
        num_accepted: [1] int64.
        emitted: [1] int64, how many tokens the round committed; 0 once the sequence is done.
        drafted: [1] int64, how many drafts there were to test.
        length: [1] int64, committed tokens, the prompt's included.
        accept_prob, tv_gain: [1, m] float32, of the tested drafts.
        logprobs: [m+1] float32, unprocessed log-probabilities of the tokens, if asked for.
        error: [1] int32 bits, see `Verification`.
        done: [1] bool.
    """

    def __init__(self, num_drafts: int, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        m = num_drafts
        fields: list[tuple[str, torch.dtype, tuple[int, ...]]] = [  # by falling alignment
            ("token_ids", torch.int64, (1, m + 1)),
            ("num_accepted", torch.int64, (1,)),
            ("emitted", torch.int64, (1,)),
            ("drafted", torch.int64, (1,)),
            ("length", torch.int64, (1,)),
            ("accept_prob", torch.float32, (1, m)),
            ("tv_gain", torch.float32, (1, m)),
            ("logprobs", torch.float32, (m + 1,)),
            ("error", torch.int32, (1,)),
            ("done", torch.bool, (1,)),
        ]
        counts = [torch.Size(shape).numel() for _, _, shape in fields]
        sizes = [count * dtype.itemsize for count, (_, dtype, _) in zip(counts, fields, strict=True)]
        self._memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device, pin_memory=pinned)
        views = {
            name: part.view(dtype).view(shape)
            for part, (name, dtype, shape) in zip(self._memory.split(sizes), fields, strict=True)
        }
        self.token_ids, self.num_accepted = views["token_ids"], views["num_accepted"]
        self.emitted, self.drafted = views["emitted"], views["drafted"]
        self.length, self.done = views["length"], views["done"]
        self.accept_prob, self.tv_gain = views["accept_prob"], views["tv_gain"]
        self.logprobs, self.error = views["logprobs"], views["error"]

    def verification(self, num_drafts: int) -> Verification:
        """The part that `verify` writes, for a round of so many drafts."""
        return Verification(
            token_ids=self.token_ids[:, : num_drafts + 1],
            num_accepted=self.num_accepted,
            accept_prob=self.accept_prob[:, :num_drafts],
            tv_gain=self.tv_gain[:, :num_drafts],
            error=self.error,
        )

    def take(self, other: "Report") -> None:
        """Copy another one's contents; into pinned memory without waiting for it."""
        self._memory.copy_(other._memory, non_blocking=True)
