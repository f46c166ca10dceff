"""Measures how far apart two tensors are: maximum absolute and relative difference, ULP, and bit-equality.

Bytes are compared first: equal blocks need no arithmetic, NaN equals itself, and 0.0 is not -0.0 (their difference is 0
and 0 ULP, but they are not bit-equal). Differences are computed in float64, except those of 64-bit integers, because
2^53 and 2^53 + 1 are the same float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from ckptfix.comparison.difference import Gap
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.lazy import np
from ckptfix.core.spec import Quantizer, TensorSpec
from ckptfix.reading.boxes import row_major_blocks
from ckptfix.values.decode import Array, Encoding, encoding
from ckptfix.values.walk import OVERLAP, Walk

BLOCK = 1 << 16  # elements compared at once


class SideBySide(Struct, frozen=True):
    """Two strided tensors of one shape, each with a storage, and the order in which their elements are compared."""

    a: TensorSpec
    b: TensorSpec

    @property
    def is_readable(self) -> bool:
        """Whether neither view repeats its storage so often that reading it would take forever."""
        return self.shares_an_order or all(
            spec.nbytes <= OVERLAP * (spec.extent[1] - spec.extent[0]) for spec in (self.a, self.b)
        )

    @property
    def shares_an_order(self) -> bool:
        """Whether the elements of both are in the same order in memory, with the same repetitions."""
        a, b = Walk(self.a), Walk(self.b)
        return (a.axes, a.memory_axes) == (b.axes, b.memory_axes) and a.is_bounded and b.is_bounded

    @property
    def repetition(self) -> int:
        """The number of elements of the tensors that each compared element stands for."""
        return Walk(self.a).repetition if self.shares_an_order else 1

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """Yield the elements of both as arrays of raw bytes (``numpy.void``) of equal length.

        Raises ``UnreadableError`` if the bytes are not in the file."""
        if self.shares_an_order:
            yield from _in_step(_raw(self.a, Walk(self.a).blocks()), _raw(self.b, Walk(self.b).blocks()))
        else:
            yield from _in_step(row_major_elements(self.a), row_major_elements(self.b))

    def row_major(self, position: int) -> int:
        """Return the flat row-major index of the element that is compared at a position."""
        if not self.shares_an_order:
            return position
        walk = Walk(self.a)
        distinct = position if walk.is_row_major else int(walk.logical_order(np.array([position]))[0])
        return walk.flat_index(distinct)


def row_major_elements(spec: TensorSpec) -> Iterator[Array]:
    """Yield the elements of a strided tensor in row-major order, as arrays of raw bytes (``numpy.void``)."""
    return _raw(spec, row_major_blocks(spec, ""))


def _raw(spec: TensorSpec, blocks: Iterator[memoryview]) -> Iterator[Array]:
    element = np.dtype((np.void, spec.itemsize))
    for block in blocks:
        units = np.frombuffer(block, dtype=element)
        for start in range(0, len(units), BLOCK):
            yield units[start : start + BLOCK]


def _in_step(left: Iterator[Array], right: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield two sequences of blocks as pairs of equal length, divided at the boundaries of both."""
    a = b = np.empty(0, dtype=np.dtype((np.void, 1)))
    while True:
        a = a if len(a) else next(left, a)
        b = b if len(b) else next(right, b)
        count = min(len(a), len(b))
        if not count:
            return
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]


class Tolerance(Struct, frozen=True):
    """The tolerance for equality, as in ``torch.allclose``: |a - b| ≤ ``absolute`` + ``relative`` · |b|."""

    absolute: float = 0.0
    relative: float = 0.0


EXACT = Tolerance()  # only equal bytes are equal


def measure_gap(a: TensorSpec, b: TensorSpec, tolerance: Tolerance = EXACT) -> Gap:
    """Return the gap between two tensors of the same shape. Raises ``UnreadableError`` if a file lacks the bytes."""
    if a.layout != b.layout or a.parts.keys() != b.parts.keys():
        return Gap(a.numel, unread=f"layouts {a.layout} and {b.layout}")
    if a.parts:
        return _sparse_gap(a, b, tolerance)
    if a.storage is None or b.storage is None:
        return Gap(a.numel, unread="" if a.storage is b.storage else "no data on one side (meta device)")
    if a.numel == 0 or (a.storage is b.storage and a.view == b.view):
        return Gap(a.numel)
    if {name for name, is_set in a.math_bits.items() if is_set} != {n for n, is_set in b.math_bits.items() if is_set}:
        return Gap(a.numel, unread="one is a conjugated or negated view")
    if not _same_quantizer(a.quantizer, b.quantizer):
        return Gap(a.numel, unread="quantised with different scales or zero points")
    codes = encoding(a.dtype), encoding(b.dtype)
    if a.dtype != b.dtype and (codes[0] is None or codes[1] is None or codes[0].units != codes[1].units):
        return Gap(a.numel, unread=f"{a.dtype} and {b.dtype}")
    both = SideBySide(a, b)
    if not both.is_readable:
        return Gap(a.numel, unread="a view that repeats a few elements endlessly")
    meter = _GapMeter(a, b, tolerance)
    for left, right in both.blocks():
        meter.take(left, right)
    return meter.result(both)


def _sparse_gap(a: TensorSpec, b: TensorSpec, tolerance: Tolerance) -> Gap:
    """Return the gap between the values of two sparse tensors if their indices are equal."""
    if any(a.parts[name].shape != b.parts[name].shape for name in a.parts):
        return Gap(a.numel, unread="sparse, with different positions")
    gaps = {name: measure_gap(a.parts[name], b.parts[name], tolerance) for name in a.parts}
    if any(not gap.is_equal for name, gap in gaps.items() if name != "values"):
        return Gap(a.numel, unread="sparse, with different positions")
    return gaps["values"]


def _same_quantizer(a: Quantizer | None, b: Quantizer | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.scheme, a.axis) == (b.scheme, b.axis) and all(
        left.shape == right.shape and left.dtype == right.dtype and measure_gap(left, right).is_equal
        if isinstance(left, TensorSpec) and isinstance(right, TensorSpec)
        else left == right
        for left, right in ((a.scale, b.scale), (a.zero_point, b.zero_point))
    )


class _GapMeter:
    """Accumulates the gap block by block."""

    def __init__(self, a: TensorSpec, b: TensorSpec, tolerance: Tolerance) -> None:
        self._codes = encoding(a.dtype), encoding(b.dtype)
        self._same_dtype = a.dtype == b.dtype
        self._counts_ulp = self._same_dtype and DTYPES[a.dtype].is_float and self._codes[0] is not None
        self._tolerance = tolerance
        self._numel = a.numel
        self._met = self._differing = self._nonfinite = self._ulp = 0
        self._first: int | None = None
        self._absolute = self._relative = 0.0
        self._is_close = True

    def take(self, left: Array, right: Array) -> None:
        """Add a block of each side, of equal length."""
        if not self._same_dtype or not np.array_equal(left.view(np.uint8), right.view(np.uint8)):
            self._compare(left, right)
        self._met += len(left)

    def result(self, both: SideBySide) -> Gap:
        """Return the gap over all blocks."""
        return Gap(
            numel=self._numel,
            differing=self._differing * both.repetition,
            first=None if self._first is None else both.row_major(self._first),
            absolute=self._absolute,
            relative=self._relative,
            ulp=self._ulp if self._counts_ulp and self._differing else None,
            nonfinite=self._nonfinite * both.repetition,
            is_close=bool(self._differing) and self._is_close and self._tolerance != EXACT,
        )

    def _compare(self, left: Array, right: Array) -> None:
        codes_a, codes_b = self._codes
        if codes_a is None or codes_b is None:  # packed bits: equal or not
            self._count((_octets(left) != _octets(right)).any(axis=1))
            self._is_close = False
            return
        with np.errstate(all="ignore"):
            a, b = _numbers(left, codes_a), _numbers(right, codes_b)
            if self._same_dtype:
                differs = (_octets(left) != _octets(right)).any(axis=1)
            else:
                differs = ((a != b) & ~(np.isnan(a) & np.isnan(b))).reshape(len(left), -1).any(axis=1)
            self._count(differs)
            exact = _apart(left[differs], right[differs], codes_a) if self._same_dtype else None
            self._measure(a, b, np.repeat(differs, codes_a.units), exact)
            if self._counts_ulp:
                self._ulp = max(self._ulp, _most_ulp(left[differs], right[differs], codes_a))

    def _count(self, differs: Array) -> None:
        count = int(differs.sum())
        if count and self._first is None:
            self._first = self._met + int(differs.argmax())
        self._differing += count

    def _measure(self, a: Array, b: Array, differs: Array, exact: Array | None) -> None:
        """Update the maxima. ``exact`` has the difference of each differing pair if float64 is not precise enough."""
        a, b = a[differs], b[differs]
        alike = (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))
        finite = np.isfinite(a) & np.isfinite(b)
        strange = int((~finite & ~alike).sum())
        self._nonfinite += strange
        a, b = a[finite], b[finite]
        if len(a):
            # Halved first, because the difference of two finite numbers of opposite sign can overflow.
            apart = np.abs(a / 2 - b / 2) if exact is None else exact / 2
            scale = np.maximum(np.abs(a), np.abs(b)) / 2
            self._absolute = max(self._absolute, min(2 * float(apart.max()), _LARGEST))
            self._relative = max(self._relative, float(np.divide(apart, scale, where=scale > 0, out=0 * scale).max()))
            allowed = self._tolerance.absolute / 2 + self._tolerance.relative * (np.abs(b) / 2)
            self._is_close = self._is_close and bool((apart <= allowed).all())
        self._is_close = self._is_close and not strange


_LARGEST = math.nextafter(math.inf, 0.0)


def _octets(elements: Array) -> Array:
    return elements.view(np.uint8).reshape(len(elements), -1)


def _numbers(elements: Array, code: Encoding) -> Array:
    return code.decode(np.frombuffer(elements.tobytes(), dtype=code.unit)).astype(np.float64, copy=False)


def _apart(left: Array, right: Array, code: Encoding) -> Array | None:
    """Return |a - b| of 64-bit integers, computed exactly before rounding to float64; None for other dtypes."""
    if code.unit.kind not in "iu" or code.itemsize < 8:
        return None
    a, b = (np.frombuffer(side.tobytes(), dtype=code.unit) for side in (left, right))
    # Modulo 2^64, the difference is right for signed and unsigned integers.
    apart: Array = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
    return apart.astype(np.float64)


def _most_ulp(left: Array, right: Array, code: Encoding) -> int:
    """Return the maximum distance in ULP between floats of one dtype; 0.0 and -0.0 are 0 apart, NaN is skipped."""
    unsigned = np.dtype(f"<u{code.itemsize}")
    sign = np.uint64(1 << (8 * code.itemsize - 1))
    bits = [np.frombuffer(side.tobytes(), dtype=unsigned).astype(np.uint64) for side in (left, right)]
    magnitudes = [side & (sign - np.uint64(1)) for side in bits]
    high, low = np.maximum(*magnitudes), np.minimum(*magnitudes)
    apart = np.where((bits[0] ^ bits[1]) & sign, high + low, high - low)  # both are below 2^63, so the sum fits
    counted = np.isfinite(_numbers(left, code)) & np.isfinite(_numbers(right, code))
    return int(apart[counted].max()) if counted.any() else 0
