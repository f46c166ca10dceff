"""The compiled pass over the weights, if it was built for this machine: see ``kernel.c``.

It stays because without it a full repair of float32 takes a quarter more processor time, and one of float16 2.7 times
as much. The library knows nothing of Python, so one build serves every version. Calls run without Python's lock."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.values.decode import Encoding, Narrowing
from ckptfix.values.tally import Tally, tally_codes

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

LIBRARY = Path(__file__).parent / "_kernel.so"

INTERFACE = 6
"""As in ``kernel.c``. A library of another interface was built from other sources, and is not used."""

KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


class _Figures(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in "finite nan pos_inf neg_inf zeros subnormals".split()),
        *((name, ctypes.c_uint64) for name in "overflowing vanishing".split()),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_double) for name in "minimum maximum sum squares".split()),
    )


class _Cast(ctypes.Structure):
    _fields_ = (("vanishing", ctypes.c_double), ("largest", ctypes.c_double), ("wanted", ctypes.c_int))


_NO_CAST = _Cast()


class Kernel:
    """The library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan, self._count = library.ckptfix_scan, library.ckptfix_count
        pointer = ctypes.c_void_p
        self._scan.argtypes = (ctypes.c_int, pointer, ctypes.c_size_t, *map(ctypes.POINTER, (_Cast, _Figures)))
        self._count.argtypes = (pointer, ctypes.c_size_t, pointer)
        self._scan.restype = self._count.restype = None

    def takes(self, encoding: Encoding) -> bool:
        """Return whether it knows the numbers."""
        return encoding.part in KINDS or encoding.unit.itemsize == 1

    def tally(self, units: Array, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
        """Return the figures of a 1-d array of the encoding's unit, aligned; ``first`` counts units."""
        address = units.__array_interface__["data"][0]
        if encoding.unit.itemsize == 1:
            return self._tally_bytes(units, address, encoding, narrowing)
        cast = _NO_CAST if narrowing is None else _Cast(*narrowing.bounds, 1)
        found = _Figures()
        self._scan(KINDS[encoding.part], address, len(units), cast, found)
        return Tally(
            len(units),
            found.nan,
            found.pos_inf,
            found.neg_inf,
            found.zeros,
            found.subnormals,
            found.overflowing,
            found.vanishing,
            found.minimum,
            found.maximum,
            found.sum / found.finite if found.finite else 0.0,
            math.sqrt(found.squares / found.finite) if found.finite else 0.0,
            None if found.first < 0 else found.first,
        )

    def _tally_bytes(self, units: Array, address: int, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
        """Return the figures of numbers of 8 bits: the library counts how often each code is there."""
        import numpy as np

        counts = np.zeros(256, np.uint64)
        self._count(address, len(units), counts.ctypes.data)
        return tally_codes(units, counts, encoding, narrowing)


@cache
def kernel() -> Kernel | None:
    """Return the library, None if none was built, or none that this machine can run."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:  # there is none, or it was built for another machine
        return None
    return Kernel(library) if library.ckptfix_interface() == INTERFACE else None
