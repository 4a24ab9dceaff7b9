"""Calls with a fault that the dry run must find, and the same without it.

    python tests/planted.py GROUP [flags of tools/dryrun.py]

runs the dry run over the calls of one group instead of those of the package.
"""

import sys
from collections.abc import Callable
from functools import partial

import numpy
import torch
import triton
import triton.language as tl

import dryrun
from fused_spec.kernels.launch import launch
from fused_spec.kernels.row_statistics import Rows, row_statistics
from traced_calls import DTYPES, Setting

Calls = dict[str, Callable[[], object]]
VOCAB = 151936
ON_CPU = torch.zeros(3)


@triton.jit
def copy_kernel(source, target, SIZE: tl.constexpr):
    ids = tl.arange(0, SIZE)
    tl.store(target + ids, tl.load(source + ids))


@triton.jit
def centre_kernel(source, target, SIZE: tl.constexpr):
    """Needs all of its input twice, and keeps it in registers in between."""
    ids = tl.arange(0, SIZE)
    x = tl.load(source + ids)
    tl.store(target + ids, x - tl.sum(x, 0))


@triton.jit
def product_kernel(source, target, SIZE: tl.constexpr):
    """Holds two matrices in shared memory, SIZE KiB in all."""
    rows, columns = tl.arange(0, 128), tl.arange(0, SIZE)
    a = tl.load(source + rows[:, None] * SIZE + columns[None, :]).to(tl.float16)
    b = tl.load(target + columns[:, None] * 128 + rows[None, :]).to(tl.float16)
    tl.store(target + rows[:, None] * 128 + rows[None, :], tl.dot(a, b))


@triton.jit
def mismatched_kernel(source, target, SIZE: tl.constexpr):
    tl.store(target + tl.arange(0, SIZE), tl.load(source + tl.arange(0, 2 * SIZE)))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def start(kernel: object, size: int, num_warps: int) -> None:
    launch(kernel, (1,), num_warps=num_warps, source=meta(size, size), target=meta(size, size), SIZE=size)


def logits(dtype: torch.dtype, row_stride: int = VOCAB, offset: int = 0) -> torch.Tensor:
    """Six rows somewhere in a larger buffer."""
    return meta(offset + 6 * row_stride, dtype=dtype).as_strided((1, 6, VOCAB), (6 * row_stride, row_stride, 1), offset)


def statistics(dtype: torch.dtype, row_stride: int = VOCAB, offset: int = 0) -> None:
    row_statistics(Rows(logits(dtype, row_stride, offset), None, 1.0), None)


FORBIDDEN: Calls = {
    "item": lambda: meta(3)[0].item(),
    "truth": lambda: bool(meta(3)[0] > 0),
    "tolist": lambda: meta(3).tolist(),
    "nonzero": lambda: meta(3).nonzero(),
    "masked": lambda: meta(3)[meta(3, dtype=torch.bool)],
    "equal": lambda: torch.equal(meta(3), meta(3)),
    "printed": lambda: f"{meta(3)[0]}",
    "numpy": lambda: meta(3).numpy(),
    "asarray": lambda: numpy.asarray(meta(3)),
    "to the CPU": lambda: meta(3).cpu(),
    "into the CPU": lambda: ON_CPU.copy_(meta(3)),
    "from the CPU": lambda: meta(3).copy_(ON_CPU),
    "moved": lambda: ON_CPU.to("meta"),
    "mixed devices": lambda: meta(3) + ON_CPU,
    "list": lambda: torch.tensor([1, 2], device="meta"),
    "number": lambda: torch.tensor(1.0, device="meta"),
    "as_tensor": lambda: torch.as_tensor([1.0], device="meta"),
    "new_tensor": lambda: meta(3).new_tensor([1.0]),
    "list as index": lambda: meta(3)[[0, 1]],
    "new from list": lambda: torch.Tensor([1.0]),
    "on the CPU": lambda: torch.empty(3),
    "CPU tensor in a launch": lambda: launch(copy_kernel, (1,), source=meta(2), target=ON_CPU, SIZE=2),
    "rand": lambda: torch.rand(3, device="meta"),
    "exponential": lambda: meta(3).exponential_(),
    "multinomial": lambda: torch.multinomial(meta(3), 1),
    "elementwise": lambda: meta(3) + 1,
    "fill": lambda: meta(3).fill_(0),
    "full": lambda: torch.full((3,), 1.0, device="meta"),
    "assignment": lambda: meta(3).__setitem__(0, 1.0),
    "copy": lambda: meta(3, 4).T.contiguous(),
}

GROUPS: dict[str, Calls] = {
    "kernels": {
        "sound": partial(start, copy_kernel, 64, 1),
        "spilling": partial(start, centre_kernel, 16384, 1),
        "broken": partial(start, mismatched_kernel, 64, 1),
        "shared": partial(start, product_kernel, 256, 8),
    },
    "loads": {
        f"{dtype} {name}": partial(statistics, DTYPES[dtype], **place)
        for dtype in DTYPES
        for name, place in {
            "aligned": {"offset": 64},
            "offset of 8 bytes": {"offset": 8 // DTYPES[dtype].itemsize},
            "odd row stride": {"row_stride": VOCAB + 1},
        }.items()
    },
    "forbidden": FORBIDDEN,
}


def main() -> int:
    """Run the dry run over one group."""
    group, *flags = sys.argv[1:]
    Setting.calls = lambda self: GROUPS[group]  # type: ignore[method-assign]
    return dryrun.main(flags)


if __name__ == "__main__":
    sys.exit(main())
