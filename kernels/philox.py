"""Philox4x32-10: random numbers as a pure function of (seed, position, stream).

    key = (seed mod 2^32, seed div 2^32),  counter = (position mod 2^32, position div 2^32, stream, 0)

Nothing is shared between calls, so a result depends neither on tiling, batch slot and backend nor on any other user of
a generator. Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

DRAFT, ACCEPT, RESAMPLE = 0, 1, 2
"""Streams: drafting; acceptance tests; residual, bonus and first tokens. One number must never serve two of them."""

STREAMS = {"draft": DRAFT, "resample": RESAMPLE}

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32; all words are unsigned 32-bit integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def _words(seed: int, position: int, stream: int) -> tuple[int, int, int, int]:
    return philox((seed & _MASK, seed >> 32), (position & _MASK, position >> 32, stream, 0))


def acceptance_uniform(seed: int, position: int) -> float:
    """u in [0, 1) with 24 bits, exact in float32, for the draft that would become the token at `position`."""
    return (_words(seed, position, ACCEPT)[0] >> 8) * 2.0**-24


def sampling_uniform(seed: int, position: int, stream: int) -> float:
    """U in [0, 1) with 53 bits, exact in float64, for the token at `position`."""
    word_0, word_1, _, _ = _words(seed, position, stream)
    return ((word_0 << 21) + (word_1 >> 11)) * 2.0**-53
