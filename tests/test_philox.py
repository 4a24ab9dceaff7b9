"""Philox: published vectors, ranges, and streams that share nothing."""

from fused_spec.kernels.philox import ACCEPT, DRAFT, RESAMPLE, acceptance_uniform, philox, sampling_uniform


def test_known_answers() -> None:
    """The vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones, ones, ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = philox((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniforms_are_the_stated_bits() -> None:
    seed, position = 2**62 + 12345, 2**33 + 7
    key, low, high = (seed % 2**32, seed // 2**32), position % 2**32, position // 2**32
    accept = philox(key, (low, high, ACCEPT, 0))
    assert acceptance_uniform(seed, position) == (accept[0] >> 8) / 2**24
    for stream in (DRAFT, RESAMPLE):
        words = philox(key, (low, high, stream, 0))
        assert sampling_uniform(seed, position, stream) == (words[0] * 2**21 + (words[1] >> 11)) / 2**53


def test_no_two_streams_positions_or_seeds_share_a_number() -> None:
    numbers = [
        *(sampling_uniform(seed, at, stream) for seed in range(40) for at in range(40) for stream in (DRAFT, RESAMPLE)),
        *(sampling_uniform(seed + 2**32, at, DRAFT) for seed in range(40) for at in range(40)),
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    # The mean of n uniforms has standard deviation 1 / sqrt(12 n); six of them is a false alarm of 2e-9.
    assert abs(sum(numbers) / len(numbers) - 0.5) < 6 / (12 * len(numbers)) ** 0.5
