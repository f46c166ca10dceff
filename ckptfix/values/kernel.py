"""The compiled pass over the weights, where it was built and the processor is able to run it: see ``kernel.c``."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfix.bytes.compiled import MemoryGone, library
from ckptfix.values.decode import Encoding
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.portable import tally_codes
from ckptfix.values.tally import Tally

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
BYTES = 3
"""The kind of all that has 8 bits: the library counts the codes."""


class _Figures(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in "finite nan pos_inf neg_inf zeros subnormals".split()),
        *((name, ctypes.c_uint64) for name in "overflowing vanishing".split()),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_double) for name in "minimum maximum sum squares".split()),
    )


class _Cast(ctypes.Structure):
    _fields_ = (("vanishing", ctypes.c_double), ("largest", ctypes.c_double), ("wanted", ctypes.c_int))


class Range(NamedTuple):
    """So many numbers from an offset of an open file on. With ``is_summed``, their CRC-32 is asked for too."""

    descriptor: int
    offset: int
    length: int
    kind: int
    is_summed: bool
    narrowing: Narrowing | None


RANGE_LIMIT = 1 << 18
"""Bytes of the largest range, as in ``kernel.c``."""

_FIGURES = struct.Struct("8Qq4d")
_RANGE = struct.Struct("qQiiiiII2di4x8Qq4d")
_ASKED = struct.Struct("qQiii")
"""How a range begins; the rest is zero until the library fills it in, but for the cast."""
_CAST = struct.Struct("2di")
_CAST_AT = struct.calcsize("qQiiiiII")
_NO_CAST = _Cast()


class Kernel:
    """The library. Calls run without Python's lock, side by side."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan = library.ckptfix_scan
        pointer = ctypes.c_void_p
        self._scan.argtypes = (ctypes.c_int, pointer, ctypes.c_size_t, *(ctypes.POINTER(t) for t in (_Cast, _Figures)))
        self._scan.argtypes += (pointer, pointer, ctypes.POINTER(ctypes.c_uint32))
        self._scan_ranges = library.ckptfix_scan_ranges
        self._scan_ranges.argtypes = (pointer, ctypes.c_size_t)
        self._scan_ranges.restype = None

    def takes(self, encoding: Encoding) -> bool:
        """Whether it knows the numbers."""
        return encoding.part in KINDS or encoding.unit.itemsize == 1

    def tally(self, units: Array, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
        """The figures of a 1-d array of the encoding's unit, aligned; ``first`` counts units.

        Raises ``MemoryGone`` where they are in a mapped file that can no longer be read."""
        return self.look(units, encoding, narrowing)[0]

    def look(
        self, units: Array, encoding: Encoding, narrowing: Narrowing | None, is_summed: bool = False
    ) -> tuple[Tally, int]:
        """The same with the CRC-32 of the bytes, where that is asked for and ``can_sum()`` holds; else 0."""
        figures, crc = _Figures(), ctypes.c_uint32()
        kind, address = KINDS.get(encoding.part, BYTES), units.__array_interface__["data"][0]
        cast = _NO_CAST if narrowing is None else _Cast(*narrowing.bounds, 1)
        counts = strange = None
        if kind == BYTES:
            import numpy as np

            counts = np.zeros(256, np.uint64)
            strange = encoding.strange_codes.ctypes.data
        places = (None if counts is None else counts.ctypes.data, strange)
        if self._scan(kind, address, len(units), cast, figures, *places, crc if is_summed else None):
            raise MemoryGone
        if counts is None:
            return _tally(len(units), *_FIGURES.unpack(figures)), crc.value
        found = tally_codes(counts, encoding, narrowing)
        found.first = None if figures.first < 0 else figures.first
        return found, crc.value

    def look_in_files(self, ranges: Sequence[Range]) -> Iterator[tuple[Tally, int] | None]:
        """The same of many ranges of files, each of at most ``RANGE_LIMIT`` bytes, in one call; None for one that could
        not be read. Where ``is_summed``, ``can_sum()`` holds.
        """
        rows = bytearray(_RANGE.size * len(ranges))
        for at, (descriptor, offset, length, kind, is_summed, narrowing) in enumerate(ranges):
            _ASKED.pack_into(rows, at * _RANGE.size, offset, length, descriptor, kind, is_summed)
            if narrowing is not None:
                _CAST.pack_into(rows, at * _RANGE.size + _CAST_AT, *narrowing.bounds, 1)
        self._scan_ranges((ctypes.c_char * len(rows)).from_buffer(rows), len(ranges))
        for _, length, _, _, _, is_read, crc, _, _, _, _, *figures in _RANGE.iter_unpack(rows):
            yield (_tally(length, *figures), crc) if is_read else None


def _tally(
    numel: int,
    finite: int,
    nan: int,
    pos_inf: int,
    neg_inf: int,
    zeros: int,
    subnormals: int,
    overflowing: int,
    vanishing: int,
    first: int,
    minimum: float,
    maximum: float,
    total: float,
    squares: float,
) -> Tally:
    """The figures of the library, in their order there."""
    return Tally(
        numel,
        nan,
        pos_inf,
        neg_inf,
        zeros,
        subnormals,
        overflowing,
        vanishing,
        minimum,
        maximum,
        total / finite if finite else 0.0,
        math.sqrt(squares / finite) if finite else 0.0,
        None if first < 0 else first,
    )


@cache
def kernel() -> Kernel | None:
    """The library; None where none was built, or none that this machine can run."""
    found = library()
    return None if found is None else Kernel(found)
