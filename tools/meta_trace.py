"""What a call would do on a GPU, traced on meta tensors: its launches, and a refusal of what a captured graph forbids.

A captured CUDA graph replays kernels only. Under `traced` every torch operator is looked at before it runs, and three
kinds are let through: views and allocations, which launch nothing, and matrix products, which count as one launch each.
All else is a host read, a copy between devices, a use of a random generator, or a kernel that nobody counted.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_spec.kernels.launch import Launch, recorded

VIEWS = frozenset(
    [
        *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
        *("view_as_complex", "view_as_real"),
    ]
)
ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
PRODUCTS = frozenset(["addmm", "baddbmm", "bmm", "mm"])
ALLOWED = (
    "allowed are kernels started by kernels/launch.py, views, allocation by empty, and matrix products, all of them on "
    "the meta device"
)

# On the meta device these build a tensor from host data, or look at one, without calling an operator. They are replaced
# while tracing: a TorchFunctionMode would see every look at a shape besides, which takes twice as long.
_HOST_FUNCTIONS = {
    (torch, "tensor"): "torch.tensor copies host data",
    (torch, "as_tensor"): "torch.as_tensor copies host data",
    (torch, "asarray"): "torch.asarray copies host data",
    (torch.Tensor, "new"): "Tensor.new copies host data",
    (torch.Tensor, "new_tensor"): "Tensor.new_tensor copies host data",
    (torch.Tensor, "numpy"): "Tensor.numpy is a host read",
    (torch.Tensor, "__array__"): "a conversion to numpy is a host read",
    (torch.Tensor, "__repr__"): "printing a tensor is a host read",
    (torch.Tensor, "__format__"): "printing a tensor is a host read",
}


class Forbidden(Exception):
    """A traced call did what a captured graph cannot hold; the message names it and says what is allowed."""


class Verified(NamedTuple):
    """What a call that verifies drafts may return: the launches that took, and how many it may take."""

    launches: int
    budget: int

    def findings(self) -> list[str]:
        """What is wrong with that."""
        over = self.launches > self.budget
        return [f"verification takes {self.launches} launches, more than {self.budget}"] if over else []


class Trace(NamedTuple):
    """What a traced call would start on a GPU, apart from what it allocates, and what it returned."""

    launches: list[Launch]
    products: list[str]
    result: object


def traced(call: Callable[[], object]) -> Trace:
    """Run a call whose tensors are all on the meta device.

    Raises:
        Forbidden: it does something that a captured graph cannot hold.
    """
    operators = _Operators()
    with recorded() as launches, _no_host_functions(), operators:
        result = call()
    for launch in launches:
        for name, value in launch.arguments.items():
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                raise _forbidden(f"{launch.kernel.__name__} gets {name} on {value.device}, and other tensors elsewhere")
    return Trace(launches, operators.products, result)


def place(error: BaseException) -> str:
    """File and line at which an exception arose: the innermost that is neither a library's nor this module's."""
    outside = [os.path.dirname(_file(module)) for module in (torch, numpy)]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not any(frame.filename.startswith(folder) for folder in outside)
    ]
    return f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown place"


def _file(module: ModuleType) -> str:
    assert module.__file__ is not None
    return module.__file__


def _forbidden(what: str) -> Forbidden:
    return Forbidden(f"{what}; {ALLOWED}")


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _objection(operator: Any, operands: object) -> str | None:
    """Why an operator must not run; None if it may."""
    name = str(operator)
    elsewhere = {str(tensor.device) for tensor in _tensors(operands) if tensor.device.type != "meta"}
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return f"{name} uses a random generator"
    if torch.Tag.data_dependent_output in operator.tags:
        return f"{name} is a host read"
    if torch.Tag.dynamic_output_shape in operator.tags:
        return f"{name} is a host read: the shape of its result may depend on values"
    if elsewhere:
        return f"{name} mixes devices or copies between them: an operand is on {', '.join(sorted(elsewhere))}"
    if operator.overloadpacket.__name__ in VIEWS | ALLOCATIONS | PRODUCTS:
        return None
    return f"{name} is not on the list of allowed operators"


class _Operators(TorchDispatchMode):
    """Lets allowed operators through and notes the matrix products among them."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy" and kwargs.get("device", torch.device("meta")).type != "meta":
            raise _forbidden(f"{func} is a host read: it copies to {kwargs['device']}")
        objection = _objection(func, [args, kwargs])
        if objection is not None:
            raise _forbidden(objection)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.device.type != "meta":
                raise _forbidden(f"{func} makes a tensor on {tensor.device}")
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products.append(str(func))
        return result


@contextmanager
def _no_host_functions() -> Iterator[None]:
    """Refuses functions that leave no operator behind on the meta device."""
    with ExitStack() as stack:
        for (owner, name), what in _HOST_FUNCTIONS.items():
            stack.enter_context(patch.object(owner, name, _refusal(what)))
        yield


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise _forbidden(what)

    return refuse
