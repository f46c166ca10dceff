"""The CRC-32 of zip and gzip at the speed of memory, where a fast one is installed.

ISA-L folds with the processor's carry-less multiplication: 20 to 60 GB/s, where the zlib that most Pythons are built
with reaches 1 to 4. It is installed wherever torch runs on a processor that it knows; zlib gives the same numbers.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["crc32", "joined"]

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32


_POLYNOMIAL = 0xEDB88320
_ONE, _BYTE = 1 << 31, 1 << 23
"""The polynomials 1 and x^8: the highest power is the lowest bit."""


def joined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two runs of bytes, one behind the other, from those of each; the second run has ``nbytes``."""
    return _times(first, _moved_by(nbytes)) ^ second if first else second


@lru_cache
def _moved_by(nbytes: int) -> int:
    """The remainder of the polynomial that moves a run so many bytes ahead."""
    power, square = _ONE, _BYTE
    while nbytes:
        power = _times(power, square) if nbytes & 1 else power
        square, nbytes = _times(square, square), nbytes >> 1
    return power


def _times(a: int, b: int) -> int:
    """The product of two polynomials, as its remainder."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
