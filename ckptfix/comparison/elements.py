"""The stored numbers of two tensors side by side, in blocks of bounded size.

Two tensors that lie in memory in the same order are read in that order, front to back. Only where the orders differ
(one is a transposed view) is the storage of each held in memory, one tensor at a time, and read row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfix.core.spec import TensorSpec
from ckptfix.values.walk import OVERLAP, Walk

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

BLOCK = 1 << 16
"""Elements that are compared in one go."""


@dataclass(frozen=True)
class SideBySide:
    """Two strided tensors of one shape, each with a storage, and the order in which their elements are met."""

    a: TensorSpec
    b: TensorSpec

    @property
    def is_readable(self) -> bool:
        """Whether neither view repeats its storage so often that going through it would take for ever."""
        return self.shares_an_order or all(
            spec.nbytes <= OVERLAP * (spec.extent[1] - spec.extent[0]) for spec in (self.a, self.b)
        )

    @property
    def shares_an_order(self) -> bool:
        """Whether the elements of both lie in memory in one order, and the same of them are repeated."""
        a, b = Walk(self.a), Walk(self.b)
        return (a.axes, a.memory_axes) == (b.axes, b.memory_axes) and a.is_bounded and b.is_bounded

    @property
    def repetition(self) -> int:
        """How many elements of the tensors each element that is met stands for."""
        return Walk(self.a).repetition if self.shares_an_order else 1

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """The elements of both as arrays of raw bytes (``numpy.void``), equally many at a time.

        Raises ``UnreadableError`` where the bytes are not in the file."""
        if self.shares_an_order:
            yield from _in_step(_raw(self.a, Walk(self.a).blocks()), _raw(self.b, Walk(self.b).blocks()))
        else:
            yield from _in_step(_rows(self.a), _rows(self.b))

    def row_major(self, position: int) -> int:
        """The flat row-major index of the element that is met at a position."""
        if not self.shares_an_order:
            return position
        import numpy as np

        walk = Walk(self.a)
        distinct = position if walk.is_row_major else int(walk.logical_order(np.array([position]))[0])
        return walk.flat_index(distinct)


def row_major_blocks(spec: TensorSpec) -> Iterator[Array]:
    """The elements of a strided tensor in row-major order, as arrays of raw bytes (``numpy.void``)."""
    walk = Walk(spec)
    if walk.is_row_major and walk.repetition == 1 and walk.is_bounded:
        yield from _raw(spec, walk.blocks())
    else:
        yield from _rows(spec)


def _raw(spec: TensorSpec, blocks: Iterator[memoryview]) -> Iterator[Array]:
    import numpy as np

    element = np.dtype((np.void, spec.itemsize))
    for block in blocks:
        units = np.frombuffer(block, dtype=element)
        for start in range(0, len(units), BLOCK):
            yield units[start : start + BLOCK]


def _rows(spec: TensorSpec) -> Iterator[Array]:
    import numpy as np

    assert spec.storage is not None, "only a tensor with a storage has elements"
    start, stop = spec.extent
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(spec.storage.source.read(start, stop), dtype=np.dtype((np.void, spec.itemsize))),
        spec.shape,
        [stride * spec.itemsize for stride in spec.strides],
        writeable=False,
    )
    yield from _slices(view)


def _slices(view: Array) -> Iterator[Array]:
    """The elements of an array in row-major order, at most ``BLOCK`` at a time where it has more than one dimension."""
    import numpy as np

    if view.size <= BLOCK or view.ndim == 0:
        yield np.ascontiguousarray(view).reshape(-1)
        return
    step = max(BLOCK * len(view) // view.size, 1)
    for start in range(0, len(view), step):
        part = view[start : start + step]
        yield from (
            _slices(part[0]) if len(part) == 1 and part.size > BLOCK else (np.ascontiguousarray(part).reshape(-1),)
        )


def _in_step(left: Iterator[Array], right: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Two runs of equally many elements, cut at the edges of both."""
    import numpy as np

    a = b = np.empty(0, dtype=np.dtype((np.void, 1)))
    while True:
        a = a if len(a) else next(left, a)
        b = b if len(b) else next(right, b)
        count = min(len(a), len(b))
        if not count:
            return
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]
