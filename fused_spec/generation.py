"""A generation under way: an iterator of chunks that keeps the output so far."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fused_spec.drafters import PREFILL_CHUNK, prefill
from fused_spec.kernels.error_bits import DRAFT_IMPOSSIBLE, EMPTY_SUPPORT, NAN_DRAFT, NAN_TARGET
from fused_spec.report import Report
from fused_spec.round import Sampling
from fused_spec.round_size import RoundSize
from fused_spec.statistics import Statistics
from fused_spec.text import TextStream

if TYPE_CHECKING:
    from fused_spec.engine import Engine

_FAULTS = {
    NAN_TARGET: "the verifier's logits are NaN or infinite",
    NAN_DRAFT: "the draft's logits are NaN or infinite",
    EMPTY_SUPPORT: "a row of logits allows no token",
    DRAFT_IMPOSSIBLE: "a draft has probability 0 under its own law",
}


class GenerationError(RuntimeError):
    """The model produced numbers that no token can be drawn from."""


@dataclass(frozen=True)
class Request:
    """A checked request for text."""

    prompt: list[int]
    limit: int  # length of prompt and text together
    sampling: Sampling
    sizes: RoundSize
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: bool


@dataclass(frozen=True)
class Chunk:
    """What one round added. `text` may lag behind `token_ids` while a character or a stop string is incomplete.

    `num_accepted` counts the accepted drafts among `token_ids`; the first chunk, from the prefill, has none.
    """

    text: str
    token_ids: list[int]
    num_accepted: int


@dataclass
class GenerationOutput:
    """A finished text, or the part of it that is known so far.

    Attributes:
        text: decoded without special tokens; ends before a stop string.
        token_ids: without the prompt; ends with the EOS token or the token that completed a stop string, if any.
        finish_reason: "eos", "stop" or "length"; None while unfinished.
        seed: what to pass as `seed` for the same text again.
        stats: counters and times.
        logprobs: natural log of the verifier's unprocessed softmax at each of token_ids, if asked for.
    """

    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Statistics = field(default_factory=Statistics)
    logprobs: list[float] | None = None


class Generation(Iterator[Chunk]):
    """Iterate to decode; `output` is complete once the iteration ends."""

    def __init__(self, engine: "Engine", request: Request) -> None:
        self.output = GenerationOutput(
            seed=request.seed,
            stats=Statistics(gain_is_variation=engine.rule.gain_is_variation),
            logprobs=[] if request.logprobs else None,
        )
        self._engine = engine
        self._rule = engine.rule
        self._request = request
        self._text = TextStream(engine.tokenizer, request.stop, before=request.prompt[-1])
        self._started = False
        self._token = object()  # says whose the engine's buffers are, and keeps neither of the two alive
        self._launched: deque[int] = deque()  # sizes of the rounds whose reports were not collected yet
        self._failure: GenerationError | None = None
        if request.limit <= len(request.prompt):
            self.output.finish_reason = "length"

    def __next__(self) -> Chunk:
        if self._failure is not None:
            raise self._failure
        if self.output.finish_reason is not None:
            raise StopIteration
        if self._started and self._engine.running is not self._token:
            raise RuntimeError("this generation was ended by a later one: an engine holds one sequence at a time")
        try:
            return self._step()
        except BaseException as error:  # an interrupt as well: what the buffers hold then is anybody's guess
            if self._failure is None:
                self._failure = GenerationError(
                    f"this generation cannot go on: {type(error).__name__} in an earlier step"
                )
            raise

    def _step(self) -> Chunk:
        begin = time.perf_counter()
        with torch.inference_mode():
            if self._started:
                chunk = self._round()
                self.output.stats.decode_seconds += time.perf_counter() - begin
            else:
                self._started, self._engine.running = True, self._token
                chunk = self._prefill()
                self.output.stats.prefill_seconds = time.perf_counter() - begin
        return chunk

    def _prefill(self) -> Chunk:
        engine, request, state = self._engine, self._request, self._engine.state
        engine.runner.begin(self._rule, request.sampling, with_logprobs=request.logprobs)
        state.start(request.prompt, request.limit, request.seed, ignore_stop_ids=request.ignore_eos)
        prompt = state.tokens[: len(request.prompt)]
        logits = prefill(engine.target, prompt, engine.cache)
        engine.drafter.prefill(prompt)
        self.output.stats.verifier_forwards += -(-len(prompt) // PREFILL_CHUNK)
        report = engine.runner.settle(logits)
        self._raise_on(report)
        return Chunk(*self._deliver(report), 0)

    def _round(self) -> Chunk:
        runner, stats = self._engine.runner, self.output.stats
        while len(self._launched) < runner.ahead:
            self._launched.append(self._request.sizes.next())
            runner.launch(self._launched[-1])
        size, report = self._launched.popleft(), runner.collect()
        stats.verifier_forwards += 1
        self._raise_on(report)
        accepted, drafted = int(report.num_accepted), int(report.drafted)
        self._request.sizes.learn(min(accepted + 1, drafted), accepted)
        text, kept = self._deliver(report)
        stats.add_round(size, drafted, accepted, len(kept), report.tv_gain[0, :drafted].tolist())
        return Chunk(text, kept, min(accepted, len(kept)))

    def _deliver(self, report: Report) -> tuple[str, list[int]]:
        """Take over what a round committed, cut behind a stop string: (text, tokens)."""
        output = self.output
        kept, text = [], ""
        for token in report.token_ids[0, : int(report.emitted)].tolist():
            kept.append(token)
            ends = not self._request.ignore_eos and token in self._engine.eos_token_ids
            text += "" if ends else self._text.push(token)
            if self._text.stopped:
                break
        if not self._text.stopped and bool(report.done):
            text += self._text.flush()
            output.finish_reason = "eos" if ends else "length"
        if self._text.stopped:
            output.finish_reason = "stop"
        output.token_ids += kept
        output.text += text
        if output.logprobs is not None:
            output.logprobs += report.logprobs[: len(kept)].tolist()
        return text, kept

    def _raise_on(self, report: Report) -> None:
        error = int(report.error)
        faults = [text for bit, text in _FAULTS.items() if error & bit]
        if faults:
            place = f"in the round that ends at token {int(report.length)}"
            self._failure = GenerationError(f"{'; '.join(faults)} ({place})")
            raise self._failure
