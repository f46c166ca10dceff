"""A tensor whose bytes lie in several boxes, put together block by block when it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptfix.core.spec import ByteSource, Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.claims import checked


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in elements of each dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether the box is a part of a tensor of this shape."""
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(self.offsets, self.shape, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        """Whether two boxes have an element in common."""
        return all(
            offset < theirs + their_size and theirs < offset + size
            for offset, size, theirs, their_size in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        )


def check_tiling(boxes: Sequence[Box], shape: tuple[int, ...], name: str) -> None:
    """Raise ``UnreadableError`` unless the boxes fill a tensor of this shape, each element once."""
    if not all(box.lies_in(shape) for box in boxes):
        raise UnreadableError(f"a chunk of {name} lies outside of its shape {list(shape)}")
    covered = sum(box.numel for box in boxes)
    if covered != math.prod(shape) or _any_overlap(boxes, len(shape)):
        raise UnreadableError(f"the chunks of {name} have {covered} of the {math.prod(shape)} elements of its shape")


def _any_overlap(boxes: Sequence[Box], dimensions: int) -> bool:
    """Whether any two boxes share an element: a sweep along the dimension that parts them most."""
    boxes = [box for box in boxes if box.numel]
    if dimensions == 0 or len(boxes) < 2:
        return len(boxes) > 1
    axis = max(range(dimensions), key=lambda dimension: len({box.offsets[dimension] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        active = [other for other in active if other.offsets[axis] + other.shape[axis] > box.offsets[axis]]
        if any(box.overlaps(other) for other in active):
            return True
        active.append(box)
    return False


@dataclass(frozen=True, eq=False)
class RowMajorBytes:
    """The bytes of a tensor in row-major order, however it is strided in its storage."""

    spec: TensorSpec
    path: str

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.spec.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``; a tensor that is not contiguous is put in order as a whole."""
        storage = self.spec.storage
        if storage is None:
            raise UnreadableError(f"{self.path}: a chunk of the meta device has no values; save the checkpoint again")
        if self.spec.is_contiguous and not self.spec.math_bits:
            first = self.spec.extent[0]
            return storage.source.read(first + start, first + stop)
        from ckptfix.reading.tensors import row_major_bytes

        return memoryview(row_major_bytes(self.spec, self.path)).cast("B")[start:stop]


class ChunkedBytes:
    """The row-major bytes of a tensor of ``shape`` whose chunks are boxes with sources of their own."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, chunks: Sequence[tuple[Box, ByteSource]]) -> None:
        self.nbytes = math.prod(shape) * itemsize
        self._chunks = [_Placed(shape, itemsize, box, source) for box, source in chunks if box.numel]

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the whole tensor."""
        out = bytearray(stop - start)
        for chunk in self._chunks:
            for place, inner, count in chunk.runs(start, stop):
                out[place - start : place - start + count] = chunk.source.read(inner, inner + count)
        return memoryview(out)


def tensor_of_chunks(name: str, spec: TensorSpec, parts: Mapping[Box, TensorSpec], path: str) -> TensorSpec:
    """The tensor ``spec`` with the bytes of its chunks, whose checksums speak for it."""
    sources = [(box, RowMajorBytes(part, path)) for box, part in parts.items()]
    storages = tuple(storage for part in parts.values() for storage in part.storages)
    storage = Storage(name, ChunkedBytes(spec.shape, spec.itemsize, sources), parts=storages)
    return checked(replace(spec, storage=storage), path)


class _Placed:
    """A chunk as runs of bytes that lie together both in it and in the whole tensor.

    From the innermost dimension outwards, dimensions that the chunk spans in full are one run; the next one outwards
    belongs to it too, as far as the chunk goes. The dimensions outside of it count the runs.
    """

    def __init__(self, shape: tuple[int, ...], itemsize: int, box: Box, source: ByteSource) -> None:
        self.source = source
        depth = len(shape)
        while depth and box.shape[depth - 1] == shape[depth - 1]:
            depth -= 1
        outer = max(depth - 1, 0)
        whole, part = contiguous_strides(shape), contiguous_strides(box.shape)
        self._first = itemsize * sum(offset * step for offset, step in zip(box.offsets, whole, strict=True))
        self._counts = box.shape[:outer]
        self._steps = tuple(step * itemsize for step in whole[:outer])
        self._inner_steps = tuple(step * itemsize for step in part[:outer])
        self._run = itemsize * math.prod(box.shape[outer:])
        # How far the runs below one index of a dimension reach, so that those outside of a range are passed over.
        self._reach = [self._run] * (outer + 1)
        for dimension in reversed(range(outer)):
            self._reach[dimension] = (self._counts[dimension] - 1) * self._steps[dimension] + self._reach[dimension + 1]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The runs in a range of the whole: place in the whole, place in the chunk, number of bytes."""
        yield from self._below(0, self._first, 0, start, stop)

    def _below(self, dimension: int, place: int, inner: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        if dimension == len(self._counts):
            first, last = max(place, start), min(place + self._run, stop)
            if first < last:
                yield first, inner + first - place, last - first
            return
        step, reach = self._steps[dimension], self._reach[dimension + 1]
        low = max((start - place - reach) // step + 1, 0)
        high = min(-((place - stop) // step), self._counts[dimension])
        for index in range(low, high):
            yield from self._below(
                dimension + 1, place + index * step, inner + index * self._inner_steps[dimension], start, stop
            )
