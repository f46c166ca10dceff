"""The figures of one tensor, gathered block by block.

A ``Scanner`` is fed with the bytes in any blocks of whole elements, so the pass that copies a tensor can scan it as
well. A block that is fit for the processor's cache is read some eight times while it is there; the detailed counts of
NaN, infinities, zeros and subnormals are made only for the blocks that have any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfix.values.decode import Encoding
from ckptfix.values.narrowing import Narrowing

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

BLOCK = 1 << 16
"""Numbers that are looked at in one go: half a megabyte of float64, which stays in the second-level cache."""

SAFE_TO_SQUARE = (1e-140, 1e140)
"""Magnitudes whose squares, and sums of a block of them, neither vanish nor overflow in float64."""


@dataclass(frozen=True)
class TensorStatistics:
    """What the numbers of a tensor look like.

    ``numel`` counts numbers: an element of a complex tensor is two. -0.0 counts among the ``zeros``. ``minimum`` to
    ``rms`` are over the finite numbers, and 0.0 where there are none. ``first_nonfinite`` is the flat row-major index
    of the first element that is NaN or infinite; None where there is none, and for sparse tensors. ``overflowing`` and
    ``vanishing`` count the finite numbers that a cast which was asked for would make infinite (or NaN) and zero.
    """

    numel: int
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zeros: int = 0
    subnormals: int = 0
    minimum: float = 0.0
    maximum: float = 0.0
    absmax: float = 0.0
    mean: float = 0.0
    rms: float = 0.0
    first_nonfinite: int | None = None
    overflowing: int = 0
    vanishing: int = 0

    @property
    def nonfinite(self) -> int:
        """How many numbers are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def all_zero(self) -> bool:
        """Whether there are numbers, and each is zero."""
        return 0 < self.numel == self.zeros

    @property
    def is_constant(self) -> bool:
        """Whether there are two numbers or more, all finite and of one value."""
        return self.numel > 1 and not self.nonfinite and self.minimum == self.maximum


def magnitudes(values: Array) -> Array:
    """The bits of float32 or float64 without the sign, doubled: integers that are ordered as the magnitudes are.

    No mode of the processor that flushes subnormals touches them."""
    import numpy as np

    bits = np.uint32 if values.dtype.itemsize == 4 else np.uint64
    doubled: Array = values.view(bits) << bits(1)
    return doubled


class Scanner:
    """Gathers the statistics of one tensor from its bytes.

    ``order`` maps positions in the order of feeding (an int64 array of element numbers) to row-major indices; None
    where that is the order in which the elements are fed. ``narrowing`` is the cast of which to count the losses.
    """

    def __init__(
        self,
        encoding: Encoding,
        order: Callable[[Array], Array] | None = None,
        narrowing: Narrowing | None = None,
    ) -> None:
        self._encoding = encoding
        self._order = order
        self._narrowing = narrowing
        self._overflowing = self._vanishing = 0
        self._seen = self._finite = 0
        self._nan = self._pos_inf = self._neg_inf = self._zeros = self._subnormals = 0
        self._minimum, self._maximum = math.inf, -math.inf
        self._mean = self._rms = 0.0
        self._first: int | None = None

    def feed(self, block: memoryview) -> None:
        """Take in the next bytes. Raises ``ValueError`` where they are no whole number of elements."""
        import numpy as np

        unit = self._encoding.unit
        if block.nbytes % (unit.itemsize * self._encoding.units):
            raise ValueError(f"{block.nbytes} bytes are no whole number of elements")
        self.feed_units(np.frombuffer(block, dtype=unit))

    def feed_units(self, units: Array) -> None:
        """Take in the next numbers, as a 1-d array of the encoding's unit."""
        import numpy as np

        with np.errstate(all="ignore"):  # NaN, infinities and subnormals are what we look for
            for start in range(0, len(units), BLOCK):
                self._take(self._encoding.decode(units[start : start + BLOCK]))

    def result(self) -> TensorStatistics:
        """The statistics of everything that was fed."""
        minimum, maximum = (self._minimum, self._maximum) if self._finite else (0.0, 0.0)
        return TensorStatistics(
            numel=self._seen,
            nan=self._nan,
            pos_inf=self._pos_inf,
            neg_inf=self._neg_inf,
            zeros=self._zeros,
            subnormals=self._subnormals,
            minimum=minimum,
            maximum=maximum,
            absmax=max(0.0, -minimum, maximum),
            mean=self._mean,
            rms=self._rms,
            first_nonfinite=self._first,
            overflowing=self._overflowing,
            vanishing=self._vanishing,
        )

    def _take(self, values: Array) -> None:
        """One block of float32 or float64."""
        import numpy as np

        magnitude = magnitudes(values)
        smallest, largest = magnitude.min(), magnitude.max()
        infinity, normal = (
            magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, self._encoding.smallest_normal)
        )
        if smallest <= normal:
            zeros = len(values) - int(np.count_nonzero(magnitude))
            self._zeros += zeros
            self._subnormals += int(np.count_nonzero(magnitude < normal)) - zeros if normal else 0
        if self._narrowing is not None:
            vanishes, overflows = (magnitudes(np.asarray(bound, values.dtype)) for bound in self._narrowing.bounds)
            if smallest <= vanishes:
                self._vanishing += int(np.count_nonzero(magnitude <= vanishes) - np.count_nonzero(magnitude == 0))
            if largest > overflows:
                self._overflowing += int(np.count_nonzero((magnitude > overflows) & (magnitude < infinity)))
        finite = values
        if largest >= infinity:
            self._count_nonfinite(values, magnitude, infinity)
            finite = values[magnitude < infinity]
        self._seen += len(values)
        if len(finite):
            low, high = float(finite.min()), float(finite.max())
            self._minimum, self._maximum = min(self._minimum, low), max(self._maximum, high)
            self._add_moments(finite, max(-low, high))

    def _count_nonfinite(self, values: Array, magnitude: Array, infinity: Any) -> None:
        import numpy as np

        self._nan += int(np.count_nonzero(magnitude > infinity))
        self._pos_inf += int(np.count_nonzero(values == math.inf))
        self._neg_inf += int(np.count_nonzero(values == -math.inf))
        if self._order is None and self._first is not None:
            return
        elements = (self._seen + np.flatnonzero(magnitude >= infinity)) // self._encoding.units
        first = int(elements[0] if self._order is None else self._order(elements).min())
        self._first = first if self._first is None else min(self._first, first)

    def _add_moments(self, finite: Array, absmax: float) -> None:
        """Merge the mean and the RMS of a block into those so far; as averages they cannot overflow."""
        import numpy as np

        wide, scale = finite.astype(np.float64), 1.0
        if absmax and not SAFE_TO_SQUARE[0] < absmax < SAFE_TO_SQUARE[1]:
            scale = absmax
            wide /= scale
        count, total = len(wide), self._finite + len(wide)
        before, here = self._finite / total, count / total
        mean = scale * (float(wide.sum()) / count)
        rms = scale * math.sqrt(float(np.einsum("i,i->", wide, wide)) / count)
        self._mean = self._mean * before + mean * here
        self._rms = math.hypot(self._rms * math.sqrt(before), rms * math.sqrt(here))
        self._finite = total
