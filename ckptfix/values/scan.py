"""The figures of one tensor, gathered block by block.

A ``Scanner`` is fed with the bytes in any blocks of whole elements, so the pass that copies a tensor can scan it as
well. A block is looked at by the compiled kernel where there is one that knows its numbers, else by numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptfix.core.statistics import TensorStatistics
from ckptfix.values.decode import Encoding
from ckptfix.values.kernel import kernel
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.portable import nonfinite_units, tally_units
from ckptfix.values.tally import Tally

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def statistics_of(tally: Tally) -> TensorStatistics:
    """What was counted, as the figures of a tensor."""
    minimum, maximum = (tally.minimum + 0.0, tally.maximum + 0.0) if tally.finite else (0.0, 0.0)  # -0.0 is 0.0
    return TensorStatistics(  # in its order, which takes half the time of names
        tally.numel,
        tally.nan,
        tally.pos_inf,
        tally.neg_inf,
        tally.zeros,
        tally.subnormals,
        minimum,
        maximum,
        max(0.0, -minimum, maximum),
        tally.mean,
        tally.rms,
        tally.first,
        tally.overflowing,
        tally.vanishing,
    )


class Scanner:
    """Gathers the figures of one tensor, or of a part of it, from its bytes.

    ``order`` maps positions in the order of feeding (an int64 array of element numbers) to row-major indices; None
    where that is the order in which the elements are fed. ``narrowing`` is the cast of which to count the losses.
    ``position`` is that of the first element that is fed.
    """

    def __init__(
        self,
        encoding: Encoding,
        order: Callable[[Array], Array] | None = None,
        narrowing: Narrowing | None = None,
        position: int = 0,
    ) -> None:
        self._encoding = encoding
        self._order = order
        self._narrowing = narrowing
        self._position = position
        self.tally = Tally()

    def feed(self, block: memoryview) -> None:
        """Take in the next bytes. Raises ``ValueError`` where they are no whole number of elements."""
        import numpy as np

        unit = self._encoding.unit
        if block.nbytes % (unit.itemsize * self._encoding.units):
            raise ValueError(f"{block.nbytes} bytes are no whole number of elements")
        self.feed_units(np.frombuffer(block, dtype=unit))

    def feed_units(self, units: Array) -> None:
        """Take in the next numbers, as a 1-d array of the encoding's unit."""
        if not len(units):
            return
        found = self._look_at(units)
        if found.first is not None:
            found.first = self._index(found.first) if self._order is None else self._least_index(units)
        self._position += len(units) // self._encoding.units
        self.tally.add(found)

    def result(self) -> TensorStatistics:
        """The statistics of everything that was fed."""
        return statistics_of(self.tally)

    def _look_at(self, units: Array) -> Tally:
        import numpy as np

        compiled = kernel()
        if compiled is not None and compiled.takes(self._encoding) and units.flags.aligned:
            return compiled.tally(units, self._encoding, self._narrowing)
        with np.errstate(all="ignore"):  # NaN, infinities and subnormals are what we look for
            return tally_units(units, self._encoding, self._narrowing)

    def _index(self, unit: int) -> int:
        return self._position + unit // self._encoding.units

    def _least_index(self, units: Array) -> int:
        """The row-major index of the first number that is not finite, of a block that has some."""
        assert self._order is not None
        found = self._position + nonfinite_units(units, self._encoding) // self._encoding.units
        return int(self._order(found).min())
