"""Rounds as captured graphs against the same rounds run one by one on the device: token for token.

One engine replays the graphs of many texts: other prompts, lengths, seeds, temperatures, filters and masks than they
were recorded on, with ends of text at every place of a block. While rounds are launched, anything that waits for the
device is an error. Where kernels are interpreted, which is slow, whole texts take torch's path.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from check_models import DRAFTERS, counting_engine, one_by_one, replays, with_graphs
from check_run import Check, Finding, Setting
from fused_spec import Engine, GenerationOutput
from fused_spec.kernels import check as kernel_checks
from fused_spec.kernels.check import default_backend
from fused_spec.rules import Cactus

PROMPT = [*range(12, 24), *range(12, 24)]


def requests(vocab: int) -> list[dict[str, Any]]:
    """Arguments of `generate`: every kind of graph, then limits and EOS tokens at every place of a block."""
    mask = torch.full((-(-vocab // 32),), -1, dtype=torch.int32)
    mask[0] = 0x7FF5FF0F
    kinds: list[dict[str, Any]] = [
        {"seed": 1, "temperature": 0.9},
        {"temperature": 0.0, "logprobs": True},
        {"seed": 3, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"seed": 4, "temperature": 1.3, "allowed": mask},
        {"seed": 5, "logprobs": True},
    ]
    texts = [{"prompt": PROMPT, "max_new_tokens": 40, "ignore_eos": True, **kind} for kind in kinds]
    other = {"prompt": [9, 9, 8], "seed": 9, "temperature": 0.5, "top_k": 5, "max_new_tokens": 17}
    limits = [{"prompt": PROMPT[:5], "max_new_tokens": n, "seed": n, "ignore_eos": True} for n in range(1, 9)]
    ends = [{"prompt": PROMPT[: 12 + n], "max_new_tokens": 30, "seed": n, "temperature": 0.5} for n in range(10)]
    return [*texts, other, *limits, *ends, texts[0]]


class _HostReads(TorchFunctionMode):
    """Refuses what reads a tensor on the host; stands in for CUDA's own watch on a CPU."""

    _readers = frozenset(["item", "tolist", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__"])

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ in self._readers:
            raise RuntimeError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Anything that waits for the device raises inside the `with` block."""
    if device.type != "cuda":  # where arguments are looked at, as they are not elsewhere
        with patch.object(kernel_checks, "_known", lambda value: []), _HostReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def watched(engine: Engine) -> Engine:
    """The engine; launching a round must not wait for the device from now on."""
    launch = engine.runner.launch

    def launch_unwaiting(size: int) -> None:
        with no_waiting(engine.target.device):
            launch(size)

    engine.runner.launch = launch_unwaiting  # type: ignore[method-assign]
    return engine


def counted(output: GenerationOutput) -> dict[str, object]:
    """Everything that two runs of one text share."""
    stats = {name: value for name, value in output.stats.as_dict().items() if "second" not in name}
    return {"tokens": output.token_ids, "reason": output.finish_reason, "logprobs": output.logprobs, **stats}


def check_graphs(drafter: str, size: int | str, setting: Setting) -> Finding:
    """The texts of an engine with graphs and of one without."""
    options: dict[str, Any] = {"rule": Cactus(0.01), "num_draft_tokens": size, "eos": (17,)}
    with default_backend("torch") if setting.reduced else nullcontext():
        graphs = with_graphs(counting_engine(drafter, setting, **options))
        if not setting.reduced:  # torch's path reads on the host
            watched(graphs)
        return compare(graphs, one_by_one(counting_engine(drafter, setting, **options)))


def compare(graphs: Engine, eager: Engine) -> Finding:
    """Raise unless all texts are the same, and had rejected drafts and ends in them."""
    tokens = drafted = accepted = ends = 0
    for number, request in enumerate(requests(graphs.target.config.vocab_size)):
        ours = graphs.generate(**request)
        # With sizes chosen on the way, graphs' host chooses a round earlier, from one report less.
        sizes: dict[str, Any] = {"round_sizes": ours.stats.round_sizes} if graphs.num_draft_tokens == "auto" else {}
        theirs = counted(eager.generate(**request, **sizes))
        for name, value in counted(ours).items():
            if value != theirs[name]:
                raise AssertionError(f"request {number}: {name} {value} as graphs, {theirs[name]} one by one")
        tokens, ends = tokens + len(ours.token_ids), ends + (ours.finish_reason == "eos")
        drafted, accepted = drafted + ours.stats.drafted, accepted + ours.stats.accepted
    if graphs.round_sizes != (0,) and not 0 < accepted < drafted:
        raise AssertionError(f"{accepted} of {drafted} drafts accepted: nothing is learnt from that")
    if not ends:
        raise AssertionError("no text ended with its EOS token")
    numbers = {"tokens": tokens, "drafted": drafted, "accepted": accepted, "eos": ends, "replays": replays(graphs)}
    return Finding(f"{tokens} tokens equal, {accepted}/{drafted} accepted, {numbers['replays']} replays", numbers)


def check_waiting(setting: Setting) -> Finding:
    """No launch of a round waits; a planted wait is noticed, or the watch would be worthless."""
    probe = torch.ones(1, device=setting.device)
    if not _raises(probe.item, setting.device):
        raise AssertionError("a planted wait was not noticed")
    launched = 0
    for drafter in DRAFTERS[-1:] if setting.reduced else DRAFTERS:
        engine = watched(with_graphs(counting_engine(drafter, setting)))
        engine.generate(PROMPT, max_new_tokens=4 if setting.reduced else 60, seed=2)
        launched += replays(engine)
    return Finding(f"{launched} launches, none waited; a planted wait was noticed", {"launches": launched})


def _raises(call: Callable[[], object], device: torch.device) -> bool:
    try:
        with no_waiting(device):
            call()
    except RuntimeError:
        return True
    return False


def check_poison(setting: Setting) -> Finding:
    """NaN in every slot that no round may rely on, between rounds, changes no token."""
    rounds = 0
    for drafter in DRAFTERS[-1:] if setting.reduced else DRAFTERS:
        options: dict[str, Any] = {"max_new_tokens": 4 if setting.reduced else 40, "seed": 3}
        clean = with_graphs(counting_engine(drafter, setting)).generate(PROMPT, **options)
        engine = with_graphs(counting_engine(drafter, setting))
        generation = engine.stream(PROMPT, **options)
        for _ in generation:
            length = int(engine.state.length)  # waits for rounds launched ahead, whose end it is
            own = getattr(engine.drafter, "cache", engine.cache)
            for cache in (own, engine.cache):
                valid = length - (1 if cache is engine.cache else 2)
                cache.keys[:, valid:], cache.values[:, valid:] = math.nan, math.nan
            rounds += 1
        if generation.output.token_ids != clean.token_ids:
            raise AssertionError(f"{drafter}: {generation.output.token_ids}, not {clean.token_ids}")
    return Finding(f"{rounds} rounds over poisoned caches, tokens equal", {"rounds": rounds})


CHECKS: dict[str, Check] = {
    **{f"graphs/{drafter}": partial(check_graphs, drafter, 4) for drafter in DRAFTERS},
    **{f"graphs/{drafter}-auto": partial(check_graphs, drafter, "auto") for drafter in ("ngram", "model")},
    "graphs/waiting": check_waiting,
    "graphs/poison": check_poison,
}
