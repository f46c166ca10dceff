"""The compiled pass over the weights, where it was built and the processor is able to run it: see ``kernel.c``."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptfix.formats.compiled import MemoryGone, library
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


class Kernel:
    """The library. Calls run without Python's lock, side by side."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan = library.ckptfix_scan
        pointer = ctypes.c_void_p
        self._scan.argtypes = (ctypes.c_int, pointer, ctypes.c_size_t, *(ctypes.POINTER(t) for t in (_Cast, _Figures)))
        self._scan.argtypes += (pointer, pointer)

    def takes(self, encoding: Encoding) -> bool:
        """Whether it knows the numbers."""
        return encoding.part in KINDS or encoding.unit.itemsize == 1

    def tally(self, units: Array, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
        """The figures of a 1-d array of the encoding's unit, aligned; ``first`` counts units.

        Raises ``MemoryGone`` where they are in a mapped file that can no longer be read."""
        figures = _Figures()
        kind, address = KINDS.get(encoding.part, BYTES), units.__array_interface__["data"][0]
        if kind == BYTES:
            return self._tally_bytes(address, len(units), encoding, narrowing, figures)
        cast = _Cast() if narrowing is None else _Cast(*narrowing.bounds, 1)
        if self._scan(kind, address, len(units), cast, figures, None, None):
            raise MemoryGone
        finite: int = figures.finite
        return Tally(
            len(units),
            figures.nan,
            figures.pos_inf,
            figures.neg_inf,
            figures.zeros,
            figures.subnormals,
            figures.overflowing,
            figures.vanishing,
            figures.minimum,
            figures.maximum,
            figures.sum / finite if finite else 0.0,
            math.sqrt(figures.squares / finite) if finite else 0.0,
            None if figures.first < 0 else figures.first,
        )

    def _tally_bytes(
        self, address: int, length: int, encoding: Encoding, narrowing: Narrowing | None, figures: _Figures
    ) -> Tally:
        import numpy as np

        counts = np.empty(256, np.uint64)
        strange = encoding.strange_codes.ctypes.data
        if self._scan(BYTES, address, length, _Cast(), figures, counts.ctypes.data, strange):
            raise MemoryGone
        found = tally_codes(counts, encoding, narrowing)
        found.first = None if figures.first < 0 else figures.first
        return found


@cache
def kernel() -> Kernel | None:
    """The library; None where none was built, or none that this machine can run."""
    found = library()
    return None if found is None else Kernel(found)
