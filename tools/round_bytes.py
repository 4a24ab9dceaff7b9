"""How many bytes the launches of a round move at least, counted from their arguments on the meta device.

A launch counts each byte of its tensors once, whether it reads it, writes it or both, and of tensors that it looks into
only what it is sure to touch: its token's row of the embedding, the slots of the cache up to its last token, one row of
logits where one is weighed again. A matrix product counts its weights, its activations and its result. So it is a lower
bound of what a launch has to get from the L2 cache or from memory and to hand back, if the tokens of a block differ. It
is the exact number for most launches; those that pick single logits, weigh a draft's row or look for a cutoff touch
some KB more. Of memory a launch may move less than that: others left it things in the cache. tests/test_round_bytes.py
compares the counts with what kernels touch under Triton's interpreter.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_spec.kernels.launch import Launch, recorded
from meta_trace import PRODUCTS
from traced_rounds import Round

Arguments = Mapping[str, Any]
_NUMBER = 8  # bytes of an int64


class Step(NamedTuple):
    """One launch of a round.

    Attributes:
        kernel: name of a kernel of ours; None of a matrix product, whose kernels only the library knows.
        num_bytes: that it moves at least.
        product: "rows x in -> out" of a matrix product.
    """

    kernel: str | None
    num_bytes: int
    product: str = ""


def steps_of(setting: Round, context: int) -> list[Step]:
    """The launches of a round in their order, with `context` tokens committed.

    Raises:
        InvalidInput: the setting is not usable.
    """
    (call,) = setting.calls().values()
    with recorded() as launches, _Products(launches) as products:
        call()
    steps: list[Step] = []
    start = 0
    for position, product in [*products.found, (len(launches), None)]:
        steps += [Step(launch.kernel.__name__, launch_bytes(launch, context)) for launch in launches[start:position]]
        steps += [product] if product is not None else []
        start = position
    return steps


def launch_bytes(launch: Launch, context: int) -> int:
    """What one launch touches at least, with `context` tokens committed when its round began."""
    arguments = launch.arguments
    partly = _PARTLY.get(launch.kernel.__name__, _all_of_it)(arguments, context)
    sizes: dict[object, int] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            place = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()
            sizes[place] = max(sizes.get(place, 0), int(partly.get(name, distinct_bytes(value))))
    return sum(sizes.values())


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's entries; those of an expanded dimension are the same ones."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(torch.Size(sizes).numel()) * tensor.element_size() if tensor.numel() else 0


class _Products(TorchDispatchMode):
    """Notes matrix products and how many launches came before each."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches
        self.found: list[tuple[int, Step | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            operands: Iterable[Any] = [*args, result]
            moved = sum(distinct_bytes(value) for value in operands if isinstance(value, torch.Tensor))
            weight = args[-1]
            shape = f"{result.shape[-2]} x {weight.shape[-2]} -> {weight.shape[-1]}"
            self.found.append((len(self._launches), Step(None, moved, shape)))
        return result


# What kernels are sure to touch of the arguments of which it is not all. Counts are bytes; the last argument is the
# number of committed tokens.


def _all_of_it(_arguments: Arguments, _context: int) -> dict[str, int]:
    return {}


def _row(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[-1] * tensor.element_size()


def _greedy(arguments: Arguments) -> bool:
    temperature = arguments["temperature"]
    return not isinstance(temperature, torch.Tensor) and temperature == 0


def _seen(arguments: Arguments, context: int) -> int:
    """Slots that the first token of a block attends to: a round's positions begin at context - 2."""
    return int(context - 2 + arguments["positions"].storage_offset() + 1)


def _round_inputs(_arguments: Arguments, _context: int) -> dict[str, int]:
    return {"tokens": 2 * _NUMBER, "block": 2 * _NUMBER}


def _ngram(_arguments: Arguments, context: int) -> dict[str, int]:
    return {"tokens": context * _NUMBER}


def _embed(arguments: Arguments, _context: int) -> dict[str, int]:
    return {"embedding": arguments["tokens"].numel() * _row(arguments["embedding"])}


def _rope_store(arguments: Arguments, _context: int) -> dict[str, int]:
    width = arguments["positions"].numel()
    return {name: width * _slot(arguments[name]) for name in ("keys", "values", "rotations")}


def _slot(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _split_attention(arguments: Arguments, context: int) -> dict[str, int]:
    slots = _seen(arguments, context) + arguments["width"] - 1
    chunks = -(-slots // arguments["CHUNK"])
    sums, peak = arguments["sums"], arguments["peak"]
    scratch = {"sums": sums[:, 0].numel(), "peak": len(peak), "mass": len(peak)}
    cache = {name: slots * _slot(arguments[name]) for name in ("keys", "values")}
    return {"positions": _NUMBER, **cache, **{name: 4 * chunks * count for name, count in scratch.items()}}


def _merge_chunks(arguments: Arguments, context: int) -> dict[str, int]:
    width, heads, size = arguments["out"].shape
    first = _seen(arguments, context)
    chunks = sum(-(-(first + token) // arguments["CHUNK"]) for token in range(width))
    numbers = {"sums": size, "peak": 1, "mass": 1}
    return {"positions": _NUMBER, **{name: 4 * heads * chunks * count for name, count in numbers.items()}}


def _row_cutoff(arguments: Arguments, _context: int) -> dict[str, int]:
    rows = dict.fromkeys(("target", "draft", "allowed", "chosen", "survivors"), 0)
    return rows | ({"maxima": 0} if _greedy(arguments) else {})


def _statistics(arguments: Arguments) -> dict[str, int]:
    """Where filters are on, a law stands for a row's statistics."""
    return {} if arguments["law_peak"] is None else dict.fromkeys(("peak", "mass", "weighted", "first"), 0)


def _pick_tokens(arguments: Arguments, _context: int) -> dict[str, int]:
    unsure = ("logits", "allowed", "first", *(("seed", "position", "masses") if _greedy(arguments) else ()))
    return _statistics(arguments) | dict.fromkeys(unsure, 0)


def _drawn(arguments: Arguments) -> bool:
    """Whether the last token of a round is drawn, whatever its drafts."""
    from fused_spec.kernels.acceptance_kernel import TYPICAL  # Triton is imported by those who trace a round

    return not _greedy(arguments) and arguments["RULE"] != TYPICAL.value


def _decide(arguments: Arguments, _context: int) -> dict[str, int]:
    rows = {name: _row(arguments[name]) if _drawn(arguments) else 0 for name in ("target", "allowed")}
    of_pairs = dict.fromkeys(("pair_low", "pair_high", "pair_cut", "pair_share"), 0)  # of tested slots
    return {**_statistics(arguments), **rows, **of_pairs, "draft": 0}


def _pick(arguments: Arguments, _context: int) -> dict[str, int]:
    unsure = ("scalars", "masses", "seed", "position", "temperature") if not _drawn(arguments) else ()
    certain = {"numbers": 2 * _NUMBER, "tokens": _NUMBER}
    return certain | dict.fromkeys(("target", "draft", "allowed", "error", *unsure), 0)


def _pair_sums(arguments: Arguments, _context: int) -> dict[str, int]:
    target, mask = arguments["target"], arguments["allowed"]
    drafts = arguments["draft_ids"].numel()
    rows = {"target": drafts * _row(target), "allowed": _row(mask), "first": 0}
    of_rows = {
        name: distinct_bytes(arguments[name]) * drafts // (target.shape[0] * target.shape[1])
        for name in ("peak", "mass", "law_peak", "law_total", "law_cutoff")
        if arguments[name] is not None
    }
    bracket = {} if arguments["RULE"] == "mentored" else {"bracket": 0}
    return {**rows, **of_rows, **_statistics(arguments), **bracket}


def _pair_bounds(arguments: Arguments, _context: int) -> dict[str, int]:
    return {} if arguments["RULE"] == "mentored" else {"bracket": 0}


def _logprob(_arguments: Arguments, _context: int) -> dict[str, int]:
    return {"logits": 0}


_PARTLY: dict[str, Callable[[Arguments, int], dict[str, int]]] = {
    "round_inputs_kernel": _round_inputs,
    "ngram_kernel": _ngram,
    "embed_kernel": _embed,
    "rope_store_kernel": _rope_store,
    "split_attention_kernel": _split_attention,
    "merge_chunks_kernel": _merge_chunks,
    "row_cutoff_kernel": _row_cutoff,
    "pick_tokens_kernel": _pick_tokens,
    "decide_kernel": _decide,
    "pick_kernel": _pick,
    "pair_sums_kernel": _pair_sums,
    "pair_bounds_kernel": _pair_bounds,
    "logprob_kernel": _logprob,
}
