"""The distinct elements of a strided tensor, in the order in which they are stored.

Neither the order of dimensions nor repeated elements (stride 0) change which numbers a tensor holds. So the scan reads
the storage once from front to back, whatever the view; only the index of the first bad element needs row-major
order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct

from ckptfix.bytes.sources import stream
from ckptfix.core.lazy import np
from ckptfix.core.spec import ByteSource, TensorSpec, contiguous_strides
from ckptfix.values.decode import Array

CHUNK = 1 << 22  # bytes per read
OVERLAP = 64  # how often, on average, a view may repeat the elements of its storage; more is an attack
Dims = tuple[tuple[int, int], ...]  # sizes and strides, in elements


class Walk(Struct, frozen=True, dict=True):
    """A walk through a non-empty strided tensor with a storage."""

    spec: TensorSpec

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The dimensions that lead to other elements, in logical order."""
        sizes = zip(self.spec.shape, self.spec.strides, strict=True)
        return tuple(axis for axis, (size, stride) in enumerate(sizes) if size > 1 and stride != 0)

    @cached_property
    def memory_axes(self) -> tuple[int, ...]:
        """The same dimensions, from the longest stride to the shortest."""
        return tuple(sorted(self.axes, key=lambda axis: -self.spec.strides[axis]))

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is contiguous, as nearly all are: then nothing else has to be computed."""
        return self.spec.is_contiguous

    @property
    def distinct(self) -> int:
        """The number of elements in the walk; each counts for ``repetition`` elements of the tensor."""
        return self.spec.numel if self.is_plain else math.prod(self.spec.shape[axis] for axis in self.axes)

    @property
    def repetition(self) -> int:
        """How often zero strides repeat each element."""
        return 1 if self.is_plain else self.spec.numel // self.distinct

    @property
    def is_bounded(self) -> bool:
        """Whether the walk is not much longer than its storage."""
        start, stop = self.spec.extent
        fits = OVERLAP * (stop - start) // self.spec.itemsize
        return self.spec.numel <= fits or self.distinct <= fits

    @property
    def is_row_major(self) -> bool:
        """Whether memory order is row-major order."""
        return self.is_plain or self.memory_axes == self.axes

    @property
    def is_run(self) -> bool:
        """Whether the walk includes every element between its first and its last one."""
        return self.is_plain or self._merged in ((), ((self.distinct, 1),))

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """Yield the bytes of the distinct elements, in memory order, in blocks of bounded size, each valid until the
        next.

        With ``start`` and ``stop``, only these elements of a run. Raises ``UnreadableError`` if bytes are missing."""
        storage, itemsize = self.spec.storage, self.spec.itemsize
        assert storage is not None, "a walk needs a storage"
        if self.is_run:
            begin, end = (self.spec.offset + at for at in (start, self.distinct if stop is None else stop))
            yield from stream(storage.source, begin * itemsize, end * itemsize)
        else:
            yield from self._scattered_blocks(storage.source)

    def _scattered_blocks(self, source: ByteSource) -> Iterator[memoryview]:
        """Yield the blocks of a walk that skips elements, or repeats one."""
        itemsize, dims_in_memory = self.spec.itemsize, self._merged
        overlap = -(-self.distinct // _span(dims_in_memory))  # an overlapping view has more bytes than are read for it
        for offset, dims in _pieces(self.spec.offset, dims_in_memory, max(CHUNK // itemsize // overlap, 1)):
            start, stop = offset * itemsize, (offset + _span(dims)) * itemsize
            if dims in ((), ((_span(dims), 1),)):
                yield from stream(source, start, stop)
            else:
                block = source.read(start, stop)
                view = np.lib.stride_tricks.as_strided(
                    np.frombuffer(block, dtype=np.dtype((np.void, itemsize))),
                    [size for size, _ in dims],
                    [stride * itemsize for _, stride in dims],
                    writeable=False,
                )
                yield memoryview(view.tobytes())

    def logical_order(self, positions: Array) -> Array:
        """Return positions in the walk as row-major indices among the distinct elements."""
        shape = self.spec.shape
        found = np.unravel_index(positions, [shape[axis] for axis in self.memory_axes])
        places = dict(zip(self.memory_axes, found, strict=True))
        return np.asarray(
            np.ravel_multi_index([places[axis] for axis in self.axes], [shape[axis] for axis in self.axes])
        )

    def flat_index(self, index: int) -> int:
        """Return a row-major index among the distinct elements as an index among all elements."""
        steps = contiguous_strides(self.spec.shape)
        flat = 0
        for axis in reversed(self.axes):
            index, place = divmod(index, self.spec.shape[axis])
            flat += place * steps[axis]
        return flat

    @cached_property
    def _merged(self) -> Dims:
        """The dimensions in memory order, adjacent ones joined if the outer one continues where the inner one ends."""
        dims: list[tuple[int, int]] = []
        for axis in self.memory_axes:
            size, stride = self.spec.shape[axis], self.spec.strides[axis]
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        return tuple(dims)


def _span(dims: Dims) -> int:
    """Return the number of elements of the storage from the first to the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in dims)


def _pieces(offset: int, dims: Dims, limit: int) -> Iterator[tuple[int, Dims]]:
    """Split a view into views that span at most ``limit`` elements of the storage."""
    if _span(dims) <= limit:
        yield offset, dims
        return
    (size, stride), inner = dims[0], dims[1:]
    step = max((limit - _span(inner)) // stride + 1, 1) if _span(inner) <= limit else 1
    for start in range(0, size, step):
        count = min(step, size - start)
        rest = ((count, stride), *inner) if count > 1 else inner
        yield from _pieces(offset + start * stride, rest, limit)
