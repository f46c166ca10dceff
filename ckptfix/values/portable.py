"""The figures of numbers by numpy alone: of kinds that the kernel does not know, and where there is no kernel.

A block that is fit for the processor's cache is read some eight times while it is there; the detailed counts of NaN,
infinities, zeros and subnormals are made only for the blocks that have any. Numbers of 8 bits are counted by code: what
256 codes stand for is known, so everything follows from how often each is there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckptfix.values.decode import Encoding
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.tally import Tally

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

BLOCK = 1 << 16
"""Numbers that are looked at in one go: half a megabyte of float64, which stays in the second-level cache."""

SAFE_TO_SQUARE = (1e-140, 1e140)
"""Magnitudes whose squares, and sums of a block of them, neither vanish nor overflow in float64."""


def tally_units(units: Array, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
    """The figures of a 1-d array of the encoding's unit; ``first`` counts units."""
    import numpy as np

    if units.dtype.itemsize == 1:
        codes = units.view(np.uint8)
        found = tally_codes(np.bincount(codes, minlength=256), encoding, narrowing)
        if found.nonfinite:
            found.first = int(encoding.strange_codes[codes].argmax())
        return found
    whole = Tally()
    for start in range(0, len(units), BLOCK):
        found = _tally_values(encoding.decode(units[start : start + BLOCK]), encoding, narrowing)
        found.first = None if found.first is None else start + found.first
        whole.add(found)
    return whole


def tally_codes(counts: Array, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
    """The figures of numbers of 8 bits of which it is known how often each code is there, all but ``first``."""
    import numpy as np

    times = counts.astype(np.float64)  # exact up to 2^53
    values, codes = encoding.code_values, encoding.finite_codes
    nan, pos_inf, neg_inf, zeros, subnormals = map(int, encoding.code_kinds @ times)
    whole = Tally(int(times.sum()), nan, pos_inf, neg_inf, zeros, subnormals)
    if narrowing is not None:
        magnitude = np.abs(values)
        whole.overflowing = int(times[codes & (magnitude > narrowing.largest)].sum())
        whole.vanishing = int(times[(magnitude > 0) & (magnitude <= narrowing.vanishing)].sum())
    if whole.finite:
        present = values[(times > 0) & codes]
        whole.minimum, whole.maximum = float(present.min()), float(present.max())
        weights = times[codes] / whole.finite
        whole.mean = float(np.dot(values[codes], weights))
        whole.rms = math.sqrt(float(np.dot(values[codes] ** 2, weights)))
    return whole


def nonfinite_units(units: Array, encoding: Encoding) -> Array:
    """Where the numbers are that are NaN or infinite."""
    import numpy as np

    places = [
        start + np.flatnonzero(~np.isfinite(encoding.decode(units[start : start + BLOCK])))
        for start in range(0, len(units), BLOCK)
    ]
    return np.concatenate(places)


def magnitudes(values: Array) -> Array:
    """The bits of float32 or float64 without the sign, doubled: integers that are ordered as the magnitudes are.

    No mode of the processor that flushes subnormals touches them."""
    import numpy as np

    bits = np.uint32 if values.dtype.itemsize == 4 else np.uint64
    doubled: Array = values.view(bits) << bits(1)
    return doubled


def _tally_values(values: Array, encoding: Encoding, narrowing: Narrowing | None) -> Tally:
    """The figures of one block of float32 or float64."""
    import numpy as np

    found = Tally(len(values))
    magnitude = magnitudes(values)
    smallest, largest = magnitude.min(), magnitude.max()
    infinity, normal = (magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, encoding.smallest_normal))
    if smallest <= normal:
        found.zeros = len(values) - int(np.count_nonzero(magnitude))
        found.subnormals = int(np.count_nonzero(magnitude < normal)) - found.zeros if normal else 0
    if narrowing is not None:
        vanishes, overflows = (magnitudes(np.asarray(bound, values.dtype)) for bound in narrowing.bounds)
        if smallest <= vanishes:
            found.vanishing = int(np.count_nonzero(magnitude <= vanishes) - np.count_nonzero(magnitude == 0))
        if largest > overflows:
            found.overflowing = int(np.count_nonzero((magnitude > overflows) & (magnitude < infinity)))
    finite = values
    if largest >= infinity:
        found.nan = int(np.count_nonzero(magnitude > infinity))
        found.pos_inf = int(np.count_nonzero(values == math.inf))
        found.neg_inf = int(np.count_nonzero(values == -math.inf))
        found.first = int((magnitude >= infinity).argmax())
        finite = values[magnitude < infinity]
    if len(finite):
        found.minimum, found.maximum = float(finite.min()), float(finite.max())
        found.mean, found.rms = _moments(finite, max(-found.minimum, found.maximum))
    return found


def _moments(finite: Array, absmax: float) -> tuple[float, float]:
    """The mean and the RMS."""
    import numpy as np

    wide, scale = finite.astype(np.float64), 1.0
    if absmax and not SAFE_TO_SQUARE[0] < absmax < SAFE_TO_SQUARE[1]:
        scale = absmax
        wide /= scale
    count = len(wide)
    mean = scale * (float(wide.sum()) / count)
    return mean, scale * math.sqrt(float(np.einsum("i,i->", wide, wide)) / count)
