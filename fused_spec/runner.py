"""Who runs the rounds of a sequence: the host, one after the other, or graphs launched ahead of it.

Both run `decode_round`. A graph is that function, recorded once with everything it starts on the device; replayed, it
reads the same buffers anew, so that one graph serves all texts, lengths, seeds and temperatures.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from fused_spec.drafters import Drafter
from fused_spec.models.transformer import Cache, Transformer
from fused_spec.report import Report
from fused_spec.round import Drafts, RoundState, Sampling, decode_round, settle
from fused_spec.rules import Rule


class Speculation(NamedTuple):
    """Models and buffers that rounds are made of."""

    verifier: Transformer
    cache: Cache
    drafter: Drafter
    state: RoundState


class Runner(Protocol):
    """Runs rounds and hands out their reports in the order in which they were launched.

    Attributes:
        ahead: how many rounds to keep launched before the report of the oldest one is asked for.
    """

    ahead: int

    def begin(self, rule: Rule, sampling: Sampling, *, with_logprobs: bool) -> None:
        """Prepare for a new sequence, before anything of it is in the buffers."""

    def settle(self, logits: torch.Tensor) -> Report:
        """Draw and commit the token that follows a prompt, from logits [1, V]."""

    def launch(self, size: int) -> None:
        """Start a round of `size` drafts."""

    def collect(self) -> Report:
        """The report of the oldest round that was not collected yet, on the host; good until the next call."""


class EagerRunner:
    """Runs each round when it is launched, and lets the host look at its report where it is."""

    ahead = 1

    def __init__(self, parts: Speculation) -> None:
        self._parts = parts

    def begin(self, rule: Rule, sampling: Sampling, *, with_logprobs: bool) -> None:
        """Keep the settings."""
        self._rule, self._sampling, self._with_logprobs = rule, sampling, with_logprobs

    def settle(self, logits: torch.Tensor) -> Report:
        """Commit the first token."""
        none = Drafts(self._parts.state.block[None, 2:2])
        settle(self._parts.state, logits, none, self._rule, self._sampling, with_logprobs=self._with_logprobs)
        return self._parts.state.report

    def launch(self, size: int) -> None:
        """Run the round."""
        verifier, cache, drafter, state = self._parts
        decode_round(
            state, verifier, cache, drafter, self._rule, self._sampling, size=size, with_logprobs=self._with_logprobs
        )

    def collect(self) -> Report:
        """The state's own report: there is no other round under way."""
        return self._parts.state.report


class Recorder(Protocol):
    """Makes graphs of functions; see fused_spec/cuda_graph.py.

    Attributes:
        pinned: whether memory that the device copies to has to be pinned.
    """

    pinned: bool

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function once, record it, and return what replays it."""

    def mark(self) -> Callable[[], None]:
        """A function that waits until the device has done everything launched before now."""


class GraphKind(NamedTuple):
    """What a graph is recorded for; all else is read from buffers.

    Attributes:
        size: m.
        filtered, greedy, masked: whether tokens are cut, T is 0, and a mask of allowed tokens is given.
        logprobs: whether log-probabilities are asked for.
    """

    size: int
    filtered: bool
    greedy: bool
    masked: bool
    logprobs: bool


class SamplingBuffers:
    """The numbers of a `Sampling` on the device, as graphs read them."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._temperature, self._top_p, self._min_p = torch.zeros(3, 1, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(1, dtype=torch.int64, device=device)
        self._allowed = torch.zeros(-(-vocab_size // 32), dtype=torch.int32, device=device)

    def fill(self, sampling: Sampling) -> None:
        """Take over the numbers, and the mask if there is one."""
        self._temperature.fill_(float(sampling.temperature))
        self._top_k.fill_(int(sampling.top_k))
        self._top_p.fill_(max(float(sampling.top_p), torch.finfo(torch.float32).tiny))  # not 0, however small
        self._min_p.fill_(float(sampling.min_p))
        if sampling.allowed is not None:
            self._allowed.copy_(sampling.allowed)

    def sampling(self, kind: GraphKind) -> Sampling:
        """What a graph of this kind works with: what is neutral in all its texts is a number, and costs no launch."""
        cut = {"top_k": self._top_k, "top_p": self._top_p, "min_p": self._min_p} if kind.filtered else {}
        return Sampling(
            temperature=0.0 if kind.greedy else self._temperature, allowed=self._allowed if kind.masked else None, **cut
        )


class GraphRunner:
    """Replays a recorded round, a second one before the host looks at the first.

    A round launched ahead of an end of text changes nothing. Reports are copied into memory of the host behind each
    replay; nothing waits but `collect`, and that for its own round only.

    Attributes:
        replays: rounds launched as graphs so far.
    """

    ahead = 2

    def __init__(self, parts: Speculation, sizes: tuple[int, ...], recorder: Recorder) -> None:
        """`sizes`: every m that rounds may have."""
        state = parts.state
        self.replays = 0
        self._parts, self._recorder = parts, recorder
        self._sizes = sorted(sizes, reverse=True)  # the largest first: the smaller ones fit into its memory
        self._graphs: dict[GraphKind, Callable[[], None]] = {}
        self._rule: Rule | None = None
        self._buffers = SamplingBuffers(parts.verifier.config.vocab_size, state.tokens.device)
        most = state.block.numel() - 2
        self._reports = tuple(Report(most, pinned=recorder.pinned) for _ in range(self.ahead + 1))
        self._free = deque(self._reports)
        self._under_way: deque[tuple[Report, Callable[[], None]]] = deque()

    def begin(self, rule: Rule, sampling: Sampling, *, with_logprobs: bool) -> None:
        """Fill the buffers that graphs read, and record the graphs that are not there yet."""
        self._free = deque(self._reports)  # whatever rounds of an earlier sequence are still under way
        self._under_way.clear()
        if rule is not self._rule and (rule.has_tensors or rule != self._rule):  # its numbers are part of the graphs
            self._graphs.clear()
            self._rule = rule
        self._buffers.fill(sampling)
        self._kind = GraphKind(0, sampling.filtered, sampling.greedy, sampling.allowed is not None, with_logprobs)
        self._parts.state.rest()
        for size in self._sizes:
            kind = self._kind._replace(size=size)
            if kind not in self._graphs:
                self._graphs[kind] = self._recorder.record(self.round_of(rule, kind))

    def round_of(self, rule: Rule, kind: GraphKind) -> Callable[[], None]:
        """The function that a graph is made of."""
        verifier, cache, drafter, state = self._parts
        sampling = self._buffers.sampling(kind)

        def run() -> None:
            decode_round(state, verifier, cache, drafter, rule, sampling, size=kind.size, with_logprobs=kind.logprobs)

        return run

    def settle(self, logits: torch.Tensor) -> Report:
        """Commit the first token; not part of a graph."""
        assert self._rule is not None
        state = self._parts.state
        none, sampling = Drafts(state.block[None, 2:2]), self._buffers.sampling(self._kind)
        settle(state, logits, none, self._rule, sampling, with_logprobs=self._kind.logprobs)
        self._send()
        return self.collect()

    def launch(self, size: int) -> None:
        """Replay a graph."""
        self._graphs[self._kind._replace(size=size)]()
        self.replays += 1
        self._send()

    def collect(self) -> Report:
        """Wait for the oldest round and hand out its report."""
        report, wait = self._under_way.popleft()
        wait()
        self._free.append(report)
        return report

    def _send(self) -> None:
        report = self._free.popleft()
        report.take(self._parts.state.report)
        self._under_way.append((report, self._recorder.mark()))
