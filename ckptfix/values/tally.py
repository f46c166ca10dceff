"""The statistics of a run of numbers: how two runs are joined, and how numpy computes them.

numpy is used for dtypes that the kernel does not support, and without a kernel. A block that fits into the processor's
cache is read some eight times while it is there; NaN, infinities, zeros and subnormals are counted only in blocks that
have any. 8-bit numbers are counted by code: everything follows from the frequencies of the 256 known values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorStatistics
from ckptfix.values.decode import Array, Encoding, Narrowing

# Numbers per block: half a megabyte of float64, which fits into the second-level cache.
BLOCK = 1 << 16

# Magnitudes whose squares, summed over a block, neither underflow nor overflow in float64.
SAFE_TO_SQUARE = (1e-140, 1e140)


COUNTS = "numel nan pos_inf neg_inf zeros subnormals overflowing vanishing".split()


def join(whole: TensorStatistics, other: TensorStatistics) -> None:
    """Add the statistics of ``other`` to ``whole``; their indices have the same origin."""
    before, here = whole.finite, other.finite
    if not before:
        whole.minimum, whole.maximum, whole.mean, whole.rms = other.minimum, other.maximum, other.mean, other.rms
    elif here:
        before_share, share = before / (before + here), here / (before + here)
        whole.minimum, whole.maximum = min(whole.minimum, other.minimum), max(whole.maximum, other.maximum)
        whole.mean = whole.mean * before_share + other.mean * share
        whole.rms = math.hypot(whole.rms * math.sqrt(before_share), other.rms * math.sqrt(share))
    for name in (*COUNTS, "words", "marks", "sample"):
        setattr(whole, name, getattr(whole, name) + getattr(other, name))
    whole.has_faint_rows |= other.has_faint_rows
    places = [place for place in (whole.first_nonfinite, other.first_nonfinite) if place is not None]
    whole.first_nonfinite = min(places, default=None)


def tally_integers(numbers: Sequence[float]) -> TensorStatistics:
    """Return the statistics of a few integers."""
    count = len(numbers)
    return TensorStatistics(
        count,
        zeros=numbers.count(0),
        minimum=float(min(numbers)),
        maximum=float(max(numbers)),
        mean=sum(numbers) / count,
        rms=math.sqrt(sum(number * number for number in numbers) / count),
    )


def tally_units(units: Array, encoding: Encoding, narrowing: Narrowing | None) -> TensorStatistics:
    """Return the statistics of a 1-d array of the encoding's units, by numpy; ``first_nonfinite`` counts units."""
    if units.dtype.itemsize == 1:
        return tally_codes(units, np.bincount(units.view(np.uint8), minlength=256), encoding, narrowing)
    whole = TensorStatistics()
    for start in range(0, len(units), BLOCK):
        found = _tally_values(encoding.decode(units[start : start + BLOCK]), encoding, narrowing)
        if found.first_nonfinite is not None:
            found.first_nonfinite += start
        join(whole, found)
    return whole


def tally_codes(units: Array, counts: Array, encoding: Encoding, narrowing: Narrowing | None) -> TensorStatistics:
    """Return the statistics of 8-bit numbers, given the frequency of each code."""
    times = counts.astype(np.float64)  # exact up to 2^53
    values, codes = encoding.code_values, encoding.finite_codes
    nan, pos_inf, neg_inf, zeros, subnormals = map(int, encoding.code_kinds @ times)
    whole = TensorStatistics(int(times.sum()), nan, pos_inf, neg_inf, zeros, subnormals)
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
    if whole.nonfinite:
        whole.first_nonfinite = int(encoding.finite_codes[units.view(np.uint8)].argmin())
    return whole


def nonfinite_units(units: Array, encoding: Encoding) -> Array:
    """Return the indices of the units that are NaN or infinite."""
    places = [
        start + np.flatnonzero(~np.isfinite(encoding.decode(units[start : start + BLOCK])))
        for start in range(0, len(units), BLOCK)
    ]
    return np.concatenate(places)


def magnitudes(values: Array) -> Array:
    """Return the bits of float32 or float64 values without the sign, doubled: integers in the order of the magnitudes.

    A processor mode that flushes subnormals does not affect them."""
    bits = np.uint32 if values.dtype.itemsize == 4 else np.uint64
    doubled: Array = values.view(bits) << bits(1)
    return doubled


def _tally_values(values: Array, encoding: Encoding, narrowing: Narrowing | None) -> TensorStatistics:
    found = TensorStatistics(len(values))
    magnitude = magnitudes(values)
    smallest, largest = magnitude.min(), magnitude.max()
    infinity, normal = (magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, encoding.smallest_normal))
    if smallest <= normal:
        found.zeros = len(values) - int(np.count_nonzero(magnitude))
        found.subnormals = int(np.count_nonzero(magnitude < normal)) - found.zeros if normal else 0
    if narrowing is not None:
        vanishes, overflows = (magnitudes(np.asarray(bound, values.dtype)) for bound in narrowing)
        if smallest <= vanishes:
            found.vanishing = int(np.count_nonzero(magnitude <= vanishes) - np.count_nonzero(magnitude == 0))
        if largest > overflows:
            found.overflowing = int(np.count_nonzero((magnitude > overflows) & (magnitude < infinity)))
    finite = values
    if largest >= infinity:
        found.nan = int(np.count_nonzero(magnitude > infinity))
        found.pos_inf = int(np.count_nonzero(values == math.inf))
        found.neg_inf = int(np.count_nonzero(values == -math.inf))
        found.first_nonfinite = int((magnitude >= infinity).argmax())
        finite = values[magnitude < infinity]
    if len(finite):
        found.minimum, found.maximum = float(finite.min()), float(finite.max())
        found.mean, found.rms = _moments(finite, max(-found.minimum, found.maximum))
    return found


def _moments(finite: Array, absmax: float) -> tuple[float, float]:
    wide, scale = finite.astype(np.float64), 1.0
    if absmax and not SAFE_TO_SQUARE[0] < absmax < SAFE_TO_SQUARE[1]:
        scale = absmax
        wide /= scale
    count = len(wide)
    mean = scale * (float(wide.sum()) / count)
    return mean, scale * math.sqrt(float(np.einsum("i,i->", wide, wide)) / count)
