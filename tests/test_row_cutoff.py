"""Cutoffs in Triton: the torch path's cutoffs, and what lies above them."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_spec.kernels.filter import keep_reference
from fused_spec.kernels.launch import launch, recorded
from fused_spec.kernels.processed_rows import Laws, row_laws
from fused_spec.kernels.row_cutoff import row_cutoffs
from fused_spec.kernels.row_law import Processing, row_law, unpack_mask
from fused_spec.kernels.row_statistics import GroupStatistics, Rows, row_statistics
from traffic import traffic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cut(target: Rows, draft: Rows | None = None) -> Laws:
    return row_cutoffs(target, draft, row_statistics(target, draft, entropy=True), entropy=True)


def columns(laws: Laws) -> list[torch.Tensor]:
    return [column for column in laws if column is not None]


def one_row(logits: torch.Tensor, processing: Processing, allowed: torch.Tensor | None = None) -> Laws:
    return cut(Rows(logits[None, None], None if allowed is None else allowed[None, None], *processing))


def scaled(logits: torch.Tensor, processing: Processing, allowed: torch.Tensor | None) -> torch.Tensor:
    """z as float32, which both paths compute alike."""
    z = logits.float() * processing.scale
    return z if allowed is None else z.masked_fill(~unpack_mask(allowed, len(z)), -math.inf)


def assert_law(
    laws: Laws, row: int, logits: torch.Tensor, processing: Processing, allowed: torch.Tensor | None = None
) -> None:
    """Row `row` of `laws` is the law that the torch path makes of these logits."""
    peak, total, cutoff, mean = (column[row].item() for column in columns(laws))
    expected = row_law(logits, processing, allowed)
    if expected.fault:
        assert cutoff == -math.inf
        assert total == 0 if expected.peak == -math.inf else math.isnan(total)
        return
    assert peak == expected.peak
    z = scaled(logits, processing, allowed)
    if cutoff != expected.cutoff:
        assert_rounding(z, processing, cutoff, expected.cutoff)
    if processing.temperature == 0:
        assert (total, mean) == (1, 0)
        return
    below = (z[z >= cutoff] - peak).double()
    weights = below.exp()
    # A float32 weight is off by some 2^-23, a sum of 128 of them by as much again. z - peak is rounded alike here.
    assert total == pytest.approx(weights.sum().item(), rel=1e-6)
    assert mean == pytest.approx((weights * below.where(weights > 0, 0)).sum().item(), rel=1e-5, abs=1e-30)
    if cutoff == expected.cutoff:
        assert total == pytest.approx(expected.total, rel=1e-6)


def assert_rounding(z: torch.Tensor, processing: Processing, *cutoffs: float) -> None:
    """Two cutoffs differ by tokens only at which top-p's mass is reached within rounding."""
    exact = z.double()
    if 0 < processing.top_k < len(z):
        exact = exact.masked_fill(z < z.sort(descending=True).values[processing.top_k - 1], -math.inf)
    mass = exact.softmax(0)
    disputed = z[(z >= min(cutoffs)) & (z < max(cutoffs))].unique()
    assert len(disputed)
    for value in disputed:
        assert mass[z > value].sum().item() == pytest.approx(processing.top_p, rel=1e-6)


def make_row(kind: str, size: int) -> torch.Tensor:
    normal = torch.randn(size) * 3
    return {
        "normal": normal,
        "ties": (normal * 2).round() / 2,
        "equal": torch.full((size,), normal[0].item()),
        "peaked": normal.index_fill(0, torch.randint(size, (1,)), 30.0),
        "holes": normal.masked_fill(torch.rand(size) < 0.8, -math.inf),
        "flat": normal * 1e-3,
        "zeros": torch.where(torch.rand(size) < 0.5, 0.0, -0.0),
        "lowest": normal.masked_fill(torch.rand(size) < 0.8, torch.finfo(torch.float16).min),
    }[kind]


KINDS = ["normal", "ties", "equal", "peaked", "holes", "flat", "zeros", "lowest"]
SIZES = [1, 2, 3, 127, 128, 129, 1000, 1024, 1025, 5000, 20000]
PROCESSING = st.builds(
    Processing,
    st.sampled_from([1.0, 0.6, 0.37, 2.0, 0.0, 1e-3]),
    st.sampled_from([0, 1, 2, 20, 64, 65, 200, 10**6]),
    st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.05, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    PROCESSING,
    st.sampled_from([None, 0.05, 0.6]),
    st.integers(0, 2**32),
)
def test_law_is_the_torch_paths(
    kind: str, size: int, dtype: torch.dtype, processing: Processing, share: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = make_row(kind, size).to(dtype)
    allowed = None
    if share is not None:
        bits = (torch.rand(-(-size // 32), 32) < share).long() << torch.arange(32)
        allowed = bits.sum(1).to(torch.int32)
    assert_law(one_row(logits, processing, allowed), 0, logits, processing, allowed)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-24, 24).map(lambda i: i / 4), min_size=1, max_size=60),
    st.sampled_from([None, 700]),
    st.integers(0, 70),
    st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 1e-3, 0.5, 1.0]),
    st.sampled_from([1.0, 0.5, 2.0]),
)
def test_kept_set_is_the_references(
    values: list[float], size: int | None, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Quarter logits make ties common; no boundary falls within rounding of these masses but by a fluke."""
    logits = torch.tensor(values)
    if size is not None:
        logits = torch.cat([torch.full((size - len(values),), -20.0), logits])
    laws = one_row(logits, Processing(temperature, top_k, top_p, min_p))
    expected = keep_reference(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(logits / temperature >= laws.cutoff, expected > 0)
    weights = torch.where(expected > 0, (logits / temperature - laws.peak).double().exp(), 0)
    torch.testing.assert_close(weights / laws.total, expected, rtol=2e-6, atol=1e-30)


PER_REQUEST = [
    Processing(1.0, 0, 1.0, 0.0),
    Processing(0.7, 20, 0.95, 0.0),
    Processing(0.0, 20, 0.5, 0.0),
    Processing(0.7, 10**6, 1.0, 0.0),
    Processing(0.6, 0, 0.999, 0.0),
    Processing(2.0, 0, 1.0, 0.05),
    Processing(1.3, -1, 1.5, -0.5),
]


def per_request(logits: torch.Tensor, requests: list[Processing]) -> Rows:
    t, k, p, m = zip(*requests, strict=True)
    return Rows(logits, None, torch.tensor(t), torch.tensor(k), torch.tensor(p), torch.tensor(m))


@triton.jit
def unfiltered(peak, mass, weighted, top, total, mean, groups, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.zeros([1], tl.int64) + tl.program_id(0)
    t, s, _, e = row_laws(
        peak, mass, weighted, None, None, None, None, row, row >= 0, groups, tl.num_programs(0), CHUNK
    )
    tl.store(top + row, t)
    tl.store(total + row, s)
    tl.store(mean + row, e)


def merged(statistics: GroupStatistics) -> Laws:
    """What kernels without filters make of the statistics."""
    rows, groups = statistics.peak.shape
    peak, total, mean = torch.empty(rows), torch.empty(rows).double(), torch.empty(rows).double()
    launch(
        unfiltered,
        (rows,),
        peak=statistics.peak,
        mass=statistics.mass,
        weighted=statistics.weighted,
        top=peak,
        total=total,
        mean=mean,
        groups=groups,
        CHUNK=256,
    )
    return Laws(peak, total, torch.full((rows,), -math.inf), mean)


def test_parameters_of_each_request() -> None:
    """Filters that are off leave the statistics' sums, to the bit."""
    logits = torch.randn(len(PER_REQUEST), 2, 3000) * 4
    target = per_request(logits, PER_REQUEST)
    statistics = row_statistics(target, None, entropy=True)
    laws = row_cutoffs(target, None, statistics, entropy=True)
    whole = merged(statistics)
    assert len(columns(laws)) == 4
    for b, processing in enumerate(PER_REQUEST):
        off = b in (0, 3, 6)
        for row in (2 * b, 2 * b + 1):
            if off:
                assert all(torch.equal(a[row], e[row]) for a, e in zip(columns(laws), columns(whole), strict=True))
            plain = processing._replace(top_k=0, top_p=1.0, min_p=0.0) if off else processing
            assert_law(laws, row, logits[b, row % 2], plain)


def test_a_row_does_not_depend_on_the_batch() -> None:
    logits = (torch.randn(len(PER_REQUEST), 1, 2500) * 3).bfloat16()
    together = cut(per_request(logits, PER_REQUEST))
    for b in (1, 4, 5):
        alone = cut(per_request(logits[b : b + 1], PER_REQUEST[b : b + 1]))
        assert all(torch.equal(a[b], e[0]) for a, e in zip(columns(together), columns(alone), strict=True))


def test_draft_rows_of_another_vocabulary() -> None:
    target_logits = (torch.randn(2, 3, 1500) * 3).bfloat16()[:, :, :1300]
    draft_logits = torch.randn(2, 4, 2100).mul(3)[:, ::2, :2049]
    allowed = torch.randint(-(2**31), 2**31, (2, 3, 41), dtype=torch.int32)
    target = Rows(target_logits, allowed, torch.tensor([0.8, 1.0]), 20, 0.9, 0.0)
    draft = Rows(draft_logits, None, 0.5, torch.tensor([0, 100]), 1.0, torch.tensor([0.0, 0.1]))
    laws = cut(target, draft)
    for row in range(6):
        b, r = divmod(row, 3)
        processing = Processing([0.8, 1.0][b], 20, 0.9, 0.0)
        assert_law(laws, row, target_logits[b, r], processing, allowed[b, r])
    for row in range(4):
        b, r = divmod(row, 2)
        assert_law(laws, 6 + row, draft_logits[b, r], Processing(0.5, [0, 100][b], 1.0, [0.0, 0.1][b]))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf is how +inf becomes NaN
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("options", [(20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (500, 0.9, 0.1)])
def test_rows_without_a_law(temperature: float, options: tuple[int, float, float]) -> None:
    logits = torch.randn(1, 5, 1500)
    logits[0, 0, 700] = math.nan
    logits[0, 1, 1400] = math.inf
    logits[0, 2] = -math.inf
    logits[0, 3] = -math.inf
    logits[0, 3, 5] = math.nan
    laws = cut(Rows(logits, None, temperature, *options))
    assert laws.cutoff[:4].tolist() == [-math.inf] * 4
    assert laws.total[2] == 0
    assert laws.total[[0, 1, 3]].isnan().all()
    assert_law(laws, 4, logits[0, 4], Processing(temperature, *options))


def test_a_mask_that_allows_nothing() -> None:
    laws = one_row(torch.randn(100), Processing(1.0, 5, 0.9, 0.0), torch.zeros(4, dtype=torch.int32))
    assert laws.total.item() == 0
    assert laws.cutoff.item() == -math.inf


@pytest.mark.parametrize("size", [2, 129, 5000])
def test_top_k_of_every_token_is_off(size: int) -> None:
    """One token fewer cuts the last; more than are allowed cut nothing."""
    logits = torch.randn(size)
    for top_k in (size - 1, size, size + 1):
        assert_law(one_row(logits, Processing(0.7, top_k, 1.0, 0.0)), 0, logits, Processing(0.7, top_k, 1.0, 0.0))
    assert one_row(logits, Processing(0.7, size, 1.0, 0.0)).cutoff.item() == -math.inf
    logits[0] = -math.inf
    for top_k in (size - 1, size):
        assert_law(one_row(logits, Processing(0.7, top_k, 1.0, 0.0)), 0, logits, Processing(0.7, top_k, 1.0, 0.0))


LARGE = [
    (8.0, (20, 0.95, 0.0), "little"),
    (8.0, (64, 1.0, 0.0), "little"),
    (16.0, (0, 0.95, 0.0), "little"),
    (3.0, (0, 1.0, 0.2), "little"),
    (3.0, (1000, 0.9, 0.0), "all"),
    (0.1, (0, 0.95, 0.0), "all"),
]


@pytest.mark.parametrize(("scale", "options", "read"), LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_rows_are_read_little_or_whole(
    scale: float, options: tuple[int, float, float], read: str, dtype: torch.dtype
) -> None:
    """The short way looks at less than 15 % of the row again; a flat row or a large k takes the slow way."""
    size = 49152 if read == "all" else 151936
    logits = (torch.randn(size) * scale).to(dtype)
    target = Rows(logits[None, None], None, 0.8, *options)
    statistics = row_statistics(target, None, entropy=True)
    assert statistics.maxima is not None
    with traffic(logits=logits, maxima=statistics.maxima) as seen:
        laws = row_cutoffs(target, None, statistics, entropy=True)
    assert_law(laws, 0, logits, Processing(0.8, *options))
    assert len(seen.launches) == 1
    assert seen.loaded["maxima"] == statistics.maxima.nbytes
    assert seen.stored["logits"] == 0
    if read == "all":
        assert seen.loaded["logits"] == logits.nbytes
    else:
        assert seen.loaded["logits"] < 0.15 * logits.nbytes


def test_more_equal_maxima_than_are_looked_at() -> None:
    """All of 300 subgroups share their maximum, so that none can be left out: the slow way, with every tie kept."""
    logits = torch.randn(300, 128).clamp(max=1.0)
    logits[:, 77] = 5.0
    for options in ((3, 1.0, 0.0), (0, 0.5, 0.0), (400, 0.9, 0.0)):
        processing = Processing(1.0, *options)
        assert_law(one_row(logits.view(-1), processing), 0, logits.view(-1), processing)
    assert one_row(logits.view(-1), Processing(1.0, 3, 1.0, 0.0)).cutoff.item() == 5.0


def test_a_block_of_large_logits_overflows_the_room() -> None:
    """More tokens above the bound than there is room for."""
    logits = torch.cat([torch.randn(9000) * 0.01 + 9, torch.randn(30000)])
    for options in ((20, 0.9, 0.0), (0, 0.9, 0.0), (5000, 1.0, 0.01)):
        processing = Processing(1.0, *options)
        assert_law(one_row(logits, processing), 0, logits, processing)


def test_scratch_may_hold_anything() -> None:
    logits = torch.randn(2, 1, 9000) * 6
    target = Rows(logits, None, 1.0, torch.tensor([20, 0]), 0.95, 0.0)
    expected = cut(target)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN and the largest integers
    try:
        assert torch.empty(3).isnan().all()
        poisoned = cut(target)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, e) for a, e in zip(columns(poisoned), columns(expected), strict=True))


def test_one_launch_and_no_mean_unless_wanted() -> None:
    target = Rows(torch.randn(2, 3, 500), None, 1.0, 5)
    statistics = row_statistics(target, None)
    with recorded() as launches:
        laws = row_cutoffs(target, None, statistics)
    assert [call.grid for call in launches] == [(6,)]
    assert laws.weighted_total is None
    assert torch.equal(laws.cutoff, cut(target).cutoff)
