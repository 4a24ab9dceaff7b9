"""Argument checks shared by the public operations: one line, what came and what is allowed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fused_spec.errors import InvalidInput

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e30
"""Beyond these, logits / temperature leaves float32 too little room; 0 is exactly greedy."""

Scalar = float | torch.Tensor
"""A number shared by the batch, or a tensor [B] with one value per request."""

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of a dataclass of tensors, by name."""


def check_logits(name: str, logits: torch.Tensor, dims: str) -> None:
    """Raise unless `logits` is a floating tensor with these dimensions, unit stride along V and at least one token."""
    if not isinstance(logits, torch.Tensor) or logits.dim() != dims.count(",") + 1:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InvalidInput(f"{name}: expected a tensor {dims}, got {shape}")
    if logits.dtype not in LOGIT_DTYPES:
        raise InvalidInput(f"{name}: expected float32, bfloat16 or float16, got {logits.dtype}")
    if logits.shape[-1] < 1 or logits.stride(-1) != 1:
        raise InvalidInput(
            f"{name}: expected unit stride and at least one token in the last dimension, "
            f"got shape {tuple(logits.shape)} and strides {logits.stride()}"
        )


def check_tensor(name: str, tensor: torch.Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless `tensor` has exactly this shape and one of these dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"{name}: expected a tensor of shape {tuple(shape)}, got {type(tensor).__name__}")
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidInput(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidInput(f"{name}: expected {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_unit_stride(name: str, tensor: torch.Tensor | None) -> None:
    """Raise unless the entries of the last dimension, if there is a tensor, lie next to each other."""
    if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidInput(f"{name}: expected unit stride in the last dimension, got strides {tensor.stride()}")


def check_out(out: object, kind: type, layout: Layout) -> None:
    """Raise unless an `out=` is a dataclass of tensors of this kind, each with the shape and dtype of the layout."""
    if type(out) is not kind:
        raise InvalidInput(f"out: expected a {kind.__name__}, got {type(out).__name__}")
    for name, (shape, dtype) in layout.items():
        check_tensor(f"out {name}", getattr(out, name), shape, (dtype,))


def store(tensor: torch.Tensor, index: int, value: float | list[int] | list[float]) -> None:
    """tensor[index] = value; on a CPU without the several calls that torch makes of it."""
    if tensor.device.type == "cpu":
        tensor.numpy()[index] = value
    else:
        tensor[index] = torch.tensor(value)


def check_per_request(name: str, value: Scalar, batch: int, *, integer: bool = False) -> None:
    """Raise unless `value` is a number or a tensor [B] of numbers, of integers where these are asked for."""
    kind = "an integer" if integer else "a number"
    if isinstance(value, torch.Tensor):
        if (
            tuple(value.shape) != (batch,)
            or value.dtype == torch.bool
            or value.is_complex()
            or (integer and value.is_floating_point())
        ):
            shown = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            raise InvalidInput(f"{name}: expected {kind} or a tensor of them of shape ({batch},), got {shown}")
    elif isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise InvalidInput(f"{name}: expected {kind} or a tensor of them of shape ({batch},), got {value!r}")


def per_request(name: str, value: Scalar, batch: int, *, integer: bool = False) -> list[float]:
    """The values of a scalar or tensor [B] argument as a list of B Python numbers."""
    check_per_request(name, value, batch, integer=integer)
    return list(value.tolist()) if isinstance(value, torch.Tensor) else [value] * batch


def kernel_argument(
    name: str, value: Scalar, batch: int, device: torch.device, *, integer: bool = False
) -> float | torch.Tensor:
    """A scalar or tensor [B] argument as a kernel takes it; a tensor has to lie on the device, in a piece."""
    check_per_request(name, value, batch, integer=integer)
    if isinstance(value, torch.Tensor):
        check_device(name, value, device)
        check_unit_stride(name, value)
        return value
    return int(value) if integer else float(value)


def check_device(name: str, tensor: torch.Tensor | None, device: torch.device) -> None:
    """Raise unless the tensor, if there is one, is where the logits are."""
    if tensor is not None and tensor.device != device:
        raise InvalidInput(f"{name}: expected a tensor on {device}, where the logits are, got one on {tensor.device}")


def _known(value: Scalar) -> list[float]:
    """The numbers in an argument that can be looked at without waiting for a device."""
    if isinstance(value, torch.Tensor):
        return list(value.tolist()) if value.device.type == "cpu" else []
    return [value]


def check_key(seed: int | torch.Tensor, position: int | torch.Tensor) -> None:
    """Raise unless seeds and positions are in range; tensors on a device are not looked at."""
    for value in _known(seed):
        if not 0 <= value < 2**63:
            raise InvalidInput(f"seed: expected 0 <= seed < 2^63, got {value}")
    for value in _known(position):
        if not 0 <= value < 2**63:
            raise InvalidInput(f"position: expected a token index, 0 <= position < 2^63, got {value}")


def seeds_and_positions(seed: int | torch.Tensor, position: int | torch.Tensor, batch: int) -> list[tuple[int, int]]:
    """Checked (seed, position) of each request."""
    seeds = per_request("seed", seed, batch, integer=True)
    positions = per_request("position", position, batch, integer=True)
    for s, p in zip(seeds, positions, strict=True):
        check_key(int(s), int(p))
    return [(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]


def check_processing(temperature: Scalar, top_k: Scalar, top_p: Scalar, min_p: Scalar) -> None:
    """Raise unless the processing parameters are legal; tensors on a device are not looked at."""
    for value in _known(temperature):
        if not (value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE):
            raise InvalidInput(
                f"temperature must be 0 (greedy) or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE:g}], got {value}"
            )
    for value in _known(top_k):
        if not isinstance(value, int) or not 0 <= value < 2**63:
            raise InvalidInput(f"top_k must be an integer >= 0 and < 2^63 (0 keeps every token), got {value}")
    for value in _known(top_p):
        if not 0 < value <= 1:
            raise InvalidInput(f"top_p must be in (0, 1] (1 keeps every token), got {value}")
    for value in _known(min_p):
        if not 0 <= value <= 1:
            raise InvalidInput(f"min_p must be in [0, 1] (0 keeps every token), got {value}")


_everywhere: list[str] = []


@contextmanager
def default_backend(name: str) -> Iterator[None]:
    """Inside the `with` block, calls that name no backend take this path ("triton" or "torch") on every device.

    With "triton" a whole model and its rounds run on CPU tensors under Triton's interpreter.
    """
    runs_on_triton(name, torch.device("cpu"))
    _everywhere.append(name)
    try:
        yield
    finally:
        _everywhere.pop()


def runs_on_triton(backend: str | None, device: torch.device) -> bool:
    """Which path a call takes: Triton's off the CPU and torch's on it, unless one is asked for."""
    if backend is None:
        return _everywhere[-1] == "triton" if _everywhere else device.type != "cpu"
    if backend not in ("torch", "triton"):
        raise InvalidInput(f"backend must be None, 'torch' or 'triton', got {backend!r}")
    return backend == "triton"
