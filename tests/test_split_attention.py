"""Split attention under Triton's interpreter against the float64 oracle, and its machine code where there is no GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fused_spec.errors import InvalidInput
from fused_spec.kernels import split_attention as module
from fused_spec.kernels.attention import attention_reference
from fused_spec.kernels.launch import Launch, recorded
from fused_spec.kernels.split_attention import ROWS, SplitBuffers, chunk_size, launch_choice, split_attention
from traffic import traffic

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""By what share a conversion may be off. To bfloat16 the interpreter truncates; a GPU rounds, which halves it."""


class Block(NamedTuple):
    """A block at positions first..first+W-1, and a cache that is NaN behind it."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor

    def rows(self, start: int, width: int) -> "Block":
        """Some of the tokens, over a cache that ends with them."""
        end = int(self.positions[start]) + width
        keys, values = self.keys.clone(), self.values.clone()
        keys[end:], values[end:] = math.nan, math.nan
        return Block(self.queries[start : start + width], keys, values, self.positions[start : start + width])


def block(
    width: int, first: int, shape: tuple[int, int, int], capacity: int, dtype: torch.dtype = torch.float32
) -> Block:
    """Random, with large scores now and then; shape is (H, Hkv, D)."""
    heads, kv_heads, dim = shape
    queries = torch.randn(width, heads, dim) * torch.logspace(-1, 0.7, heads)[:, None]
    keys, values = torch.randn(2, capacity, kv_heads, dim)
    keys[first + width :], values[first + width :] = math.nan, math.nan
    positions = torch.arange(first, first + width)
    return Block(queries.to(dtype), keys.to(dtype), values.to(dtype), positions)


def attend(case: Block, max_width: int | None = None) -> torch.Tensor:
    """What the kernels make of it, with scratch that begins as NaN."""
    width, heads, dim = case.queries.shape
    out = torch.full((width, heads * dim), math.nan, dtype=case.queries.dtype).unflatten(1, (heads, dim))
    buffers = SplitBuffers.empty(len(case.keys), max_width or width, heads, case.keys.shape[1], dim, CPU)
    for scratch in buffers:
        scratch.fill_(math.nan)
    split_attention(*case, out, buffers)
    return out


def bound(case: Block, exact: torch.Tensor) -> torch.Tensor:
    """How far [W, H, D] may be off, to first order in the roundings, whatever the order of the sums.

    A score is a sum of D products, scaled; the exponent is a difference of scores that lie in some range, and no
    exponential or product that goes into a weight adds more than two units, for which 32 are plenty. Weights are
    converted to the dtype; in float16 the least step is 2^-24. If they are off by some share, the quotient moves by
    twice that share of P |v|. Numerator and denominator have n terms each. The result is converted to the dtype.
    """
    queries, keys, values, positions = case
    _, heads, dim = queries.shape
    n = int(positions[-1]) + 1
    k, v = (x[:n].double().repeat_interleave(heads // keys.shape[1], 1) for x in (keys, values))
    hidden = torch.arange(n) > positions[:, None, None]
    q = queries.double() / dim**0.5
    scores = torch.einsum("whd,nhd->whn", q, k).masked_fill(hidden, -math.inf)
    sizes = torch.einsum("whd,nhd->whn", q.abs(), k.abs()).masked_fill(hidden, 0)
    extent = scores.amax(-1) - scores.masked_fill(hidden, math.inf).amin(-1)
    unit, own = 2.0**-24, ROUNDING[queries.dtype]
    share = unit * ((dim + 3) * sizes.amax(-1) + 2 * extent + 32)
    share = 2 * (share + n * unit + own)
    result = share[..., None] * torch.einsum("whn,nhd->whd", scores.softmax(-1), v.abs())
    if queries.dtype == torch.float16:
        result += 2.0**-24 * v.abs().sum(0)
    return 1.01 * result + own * exact.abs()


def check(case: Block) -> None:
    exact = attention_reference(*case)
    ours = attend(case)
    assert ((ours - exact).abs() <= bound(case, exact)).all()  # a NaN would not be
    if case.positions[0] > 0 and ours.dtype == torch.float32:  # one slot more or less would be noticed
        wrong = attention_reference(*case[:3], case.positions - 1)
        assert not ((wrong - exact).abs() <= bound(case, exact)).all()


CAPACITY = 200  # four chunks of 64, the last of them short
SHAPES = [(2, 2, 8), (3, 1, 64), (7, 1, 80), (6, 2, 128)]


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("width", "first"), [(1, 0), (1, 63), (1, 64), (1, 199), (2, 0), (2, 63), (6, 0), (6, 125), (6, 194)]
)
def test_narrow_blocks(width: int, first: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(block(width, first, shape, CAPACITY, dtype))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(("first", "shape"), [(0, (3, 1, 64)), (40, (2, 1, 8)), (CAPACITY - 33, (3, 3, 80))], ids=str)
def test_wide_blocks(first: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(block(33, first, shape, CAPACITY, dtype))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.float32, 256), (torch.bfloat16, 256)], ids=str)
@pytest.mark.parametrize("first", [0, 190, 320, 378])
def test_chunks_of_several_blocks(first: int, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of 192 slots, for which a program takes three steps or more."""
    monkeypatch.setattr(module, "MAX_CHUNKS", 2)
    assert chunk_size(384) == 192
    check(block(6, first, (3, 1, dim), 384, dtype))


def test_a_long_cache() -> None:
    """65 blocks of 64 slots in 33 chunks, seen to the last slot."""
    check(block(2, 4158, (2, 1, 64), 4160))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_extreme_scores(dtype: torch.dtype) -> None:
    """Differences at which most weights vanish, to nothing or to subnormal numbers, in a chunk and between chunks."""
    case = block(3, 190, (4, 1, 16), CAPACITY, dtype)
    case.queries[:, 0] *= 300
    case.queries[:, 1] = 0
    case.keys[70:80] *= 4
    check(case)


def product_by_rows(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """The interpreter's product but for the order of its sums, which with BLAS depends on a row's place in the tile."""
    from triton.runtime.interpreter import TensorHandle

    columns = np.ascontiguousarray(b.data.T).astype(np.float32)
    return TensorHandle((a.data[:, None].astype(np.float32) * columns).sum(2) + d.data, d.dtype.scalar)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(("position", "shape"), [(5, (3, 1, 64)), (64, (7, 1, 16)), (140, (4, 2, 16))], ids=str)
def test_a_row_is_the_same_bits_in_any_block(
    position: int, shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a block it stands, however wide that is, with or without scratch for more.

    A GPU runs the same machine code for every width. That its matrix units treat the rows of a tile alike is nowhere
    documented, though nothing else is known of them.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_by_rows)
    everything = block(position + 33, 0, shape, CAPACITY, dtype)
    expected = attend(everything.rows(position, 1))
    for width, before in ((2, 0), (2, 1), (6, 0), (6, 3), (6, 5), (33, 1)):
        if before <= position:
            rows = attend(everything.rows(position - before, width), max_width=40)
            assert torch.equal(rows[before], expected[0])


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, of the row in question
def test_a_faulty_query_spoils_its_own_row_only() -> None:
    case = block(6, 100, (6, 2, 16), CAPACITY)
    expected = attend(case)
    case.queries[2, 4, 7] = math.nan
    ours = attend(case)
    assert ours[2, 4].isnan().all()
    ours[2, 4] = expected[2, 4]
    assert torch.equal(ours, expected)


def test_a_faulty_slot_spoils_the_rows_that_see_it() -> None:
    """Not silently dropped: NaN reaches the logits, and verification says so."""
    case = block(3, 100, (2, 2, 16), CAPACITY)
    case.keys[70, 1, 3] = math.nan
    ours = attend(case)
    assert ours[:, 1].isnan().all()
    assert not ours[:, 0].isnan().any()


def test_any_strides() -> None:
    """Queries and keys inside wider rows, a cache with the slots of a head side by side, results between bands."""
    case = block(6, 90, (6, 2, 16), CAPACITY)
    expected = attend(case)
    wide = torch.full((6, 300), math.nan)
    wide[:, 20:116] = case.queries.flatten(1)
    keys, values = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.keys, case.values))
    queries = wide[:, 20:116].unflatten(1, (6, 16))
    out = torch.full((6, 8, 32), -77.0)
    view = out[:, 1:7, 8:24]
    split_attention(queries, keys, values, case.positions, view, SplitBuffers.empty(CAPACITY, 6, 6, 2, 16, CPU))
    assert torch.equal(view, expected)
    view.fill_(-77)
    assert (out == -77).all()


def test_scratch_for_wider_blocks() -> None:
    """Only the rows of this block are written."""
    case = block(2, 100, (6, 2, 16), CAPACITY)
    buffers = SplitBuffers.empty(CAPACITY, 5, 6, 2, 16, CPU)
    for scratch in buffers:
        scratch.fill_(-77)
    split_attention(*case, torch.empty(2, 6, 16), buffers)
    for scratch in buffers:
        assert (scratch[12:] == -77).all()
        assert (scratch[:12, :2] != -77).all()
        assert (scratch[:12, 2:] == -77).all()  # chunks that nobody sees


def test_what_a_row_leaves_of_a_chunk_that_only_later_rows_see() -> None:
    """Nothing, and no NaN."""
    case = block(2, 63, (3, 1, 16), CAPACITY)
    buffers = SplitBuffers.empty(CAPACITY, 2, 3, 1, 16, CPU)
    split_attention(*case, torch.empty(2, 3, 16), buffers)
    assert (buffers.peak[:3, 1] == -math.inf).all()
    assert (buffers.mass[:3, 1] == 0).all()
    assert (buffers.sums[:3, 1] == 0).all()


def test_slots_further_apart_than_32_bits_count() -> None:
    """4.4 GB of addresses, of which a few pages are touched."""
    case = block(1, 2, (4, 2, 16), 3, torch.bfloat16)
    expected = attend(case)
    for strides in ((1_100_000_000, 32, 1), (32, 2_200_000_000, 1)):
        apart = [torch.empty(2_200_000_200, dtype=torch.bfloat16).as_strided((3, 2, 16), strides) for _ in range(2)]
        for far, near in zip(apart, case[1:3], strict=True):
            far.copy_(near)
        assert torch.equal(attend(case._replace(keys=apart[0], values=apart[1])), expected)


@pytest.mark.parametrize("width", [1, 5])
def test_bytes(width: int) -> None:
    """Every visible slot is read, and none behind the block; scratch for those alone is written."""
    case = block(width, 100, (8, 2, 16), 640, torch.bfloat16)
    out, buffers = torch.empty(width, 8, 16, dtype=torch.bfloat16), SplitBuffers.empty(640, width, 8, 2, 16, CPU)
    with traffic(keys=case.keys, values=case.values, out=out, **buffers._asdict()) as seen:
        split_attention(*case, out, buffers)
    assert len(seen.launches) == 2
    slots = (100 + width) * 2 * 16 * 2
    parts = width * 8 * 2 * 4  # float32 of two chunks for every row
    scratch = {"sums": 16 * parts, "peak": parts, "mass": parts}
    none = dict.fromkeys(("keys", "values", "out", *scratch), 0)
    assert seen.of_launch(0) == {**none, "keys": slots, "values": slots}
    assert seen.of_launch(0, "stored") == {**none, **scratch}
    assert seen.of_launch(1) == {**none, **scratch}
    assert seen.of_launch(1, "stored") == {**none, "out": width * 8 * 16 * 2}


def on_meta(width: int, shape: tuple[int, int, int], capacity: int, dtype: torch.dtype) -> Block:
    heads, kv_heads, dim = shape
    keys, values = (torch.empty(capacity, kv_heads, dim, dtype=dtype, device="meta") for _ in range(2))
    positions = torch.empty(width, dtype=torch.int64, device="meta")
    return Block(torch.empty(width, heads, dim, dtype=dtype, device="meta"), keys, values, positions)


def test_launches_on_meta_tensors() -> None:
    """Two, whose grids depend on shapes alone; all that is compiled in is the same for every width."""
    constants = []
    for width in (1, 2, 6, 65):
        case = on_meta(width, (32, 8, 128), 4160, torch.bfloat16)
        buffers = SplitBuffers.empty(4160, 65, 32, 8, 128, torch.device("meta"))
        with recorded() as launches:
            split_attention(*case, torch.empty_like(case[0]), buffers)
        assert [launch.kernel.__name__ for launch in launches] == ["split_attention_kernel", "merge_chunks_kernel"]
        assert [launch.grid for launch in launches] == [(-(-width * 4 // ROWS), 33, 8), (width, 32)]
        constants.append([(launch.num_warps, numbers(launch)) for launch in launches])
    assert all(other == constants[0] for other in constants)


def numbers(launch: Launch) -> dict[str, object]:
    """What a launch passes besides tensors and the width."""
    return {
        name: value
        for name, value in launch.arguments.items()
        if not isinstance(value, torch.Tensor) and name != "width"
    }


def test_chunks() -> None:
    for capacity in (1, 63, 64, 200, 4096, 4097, 4160, 32768, 131_072, 1_000_000):
        size = chunk_size(capacity)
        assert size % 64 == 0
        assert -(-capacity // size) <= 64
        assert size == 64 or -(-capacity // (size - 64)) > 64


def test_launch_choice() -> None:
    half, single = torch.bfloat16, torch.float32
    assert launch_choice(128, half, 64) == (64, 4, 2)
    assert launch_choice(128, half, 128) == launch_choice(128, torch.float16, 128) == (64, 4, 3)
    assert launch_choice(80, half, 128) == launch_choice(128, half, 128)
    assert launch_choice(64, half, 128) == (64, 4, 3)
    assert launch_choice(256, half, 128) == (32, 8, 3)
    assert launch_choice(128, single, 64) == (32, 8, 3)
    assert launch_choice(64, single, 64) == (64, 8, 2)
    assert launch_choice(256, single, 64) == (16, 16, 3)
    for dim in (8, 16, 64, 80, 96, 128, 192, 256):
        for dtype in ROUNDING:
            assert 64 % launch_choice(dim, dtype, 64).block == 0  # no step crosses a chunk's end


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "queries": ({"queries": torch.zeros(2, 6, 16, dtype=torch.float64)}, "queries: expected float32, bfloat16"),
    "heads": ({"queries": torch.zeros(2, 5, 16)}, "expected a multiple of 2 heads"),
    "dtype": ({"keys": torch.zeros(100, 2, 16).half()}, "keys: expected float32, got float16"),
    "values": ({"values": torch.zeros(99, 2, 16)}, r"values: expected shape \(100, 2, 16\)"),
    "stride": ({"keys": torch.zeros(100, 2, 32)[..., ::2]}, "keys: expected unit stride"),
    "positions": ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions: expected int64"),
    "out": ({"out": torch.zeros(2, 96)}, r"out: expected shape \(2, 6, 16\)"),
    "width": ({"buffers": SplitBuffers.empty(100, 1, 6, 2, 16, CPU)}, "buffers: expected at least 12 rows"),
    "capacity": ({"buffers": SplitBuffers.empty(64, 2, 6, 2, 16, CPU)}, "expected at least 12 rows of 2 chunks"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    change, said = REFUSALS[name]
    cache = torch.zeros(100, 2, 16)
    arguments = {
        "queries": torch.zeros(2, 6, 16), "keys": cache, "values": cache, "positions": torch.arange(2),
        "out": torch.zeros(2, 6, 16), "buffers": SplitBuffers.empty(100, 2, 6, 2, 16, CPU),
    }  # fmt: skip
    with pytest.raises(InvalidInput, match=said):
        split_attention(**{**arguments, **change})
    with pytest.raises(InvalidInput, match="num_heads must be a multiple of num_kv_heads = 2, got 5"):
        SplitBuffers.empty(100, 1, 5, 2, 16, CPU)


COMPILE = """
import json, sys
import torch
sys.path += {paths}
from aot import compile_launch
from fused_spec.kernels.launch import recorded
from fused_spec.kernels.split_attention import SplitBuffers, split_attention
from test_split_attention import on_meta
for dtype, heads, kv_heads, dim, arch in {cases}:
    case = on_meta(6, (heads, kv_heads, dim), 4160, getattr(torch, dtype))
    buffers = SplitBuffers.empty(4160, 6, heads, kv_heads, dim, torch.device("meta"))
    with recorded() as launches:
        split_attention(*case, torch.empty_like(case[0]), buffers)
    print(json.dumps([compile_launch(launch, arch)._asdict() for launch in launches]))
"""


def test_machine_code(tmp_path: Path) -> None:
    """Nothing spills, and keys and values come 128 bits at a time; the one narrow load is the position."""
    cases = [("bfloat16", 32, 8, 128, 90), ("float16", 9, 3, 64, 80), ("float32", 32, 8, 128, 100)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    script = COMPILE.format(paths=[str(ROOT / "tools"), str(ROOT / "tests")], cases=cases)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        split, merge = json.loads(line)
        assert split["local"] == merge["local"] == 0
        assert split["registers"] <= 128
        assert set(split["loads"]) == {"32", "128"}
        assert split["loads"]["32"] == 1
    assert len(done.stdout.splitlines()) == len(cases)
