"""The bytes of a tensor that is put together from boxes of others, without reading one before it is asked for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.bytes.sources import JoinedBytes, WindowBytes, located
from ckptfix.core.lazy import np
from ckptfix.core.parts import Box, Shape, extent, full
from ckptfix.core.spec import ByteSource, Storage, TensorSpec, contiguous_strides

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def bytes_of_boxes(shape: Shape, itemsize: int, pieces: Sequence[tuple[Box, TensorSpec]]) -> ByteSource:
    """Return the row-major bytes of a tensor of this shape, of pieces that fill its boxes.

    Pieces that follow each other in it, such as the layers of a stack, are joined: those that are ranges of their
    storages a writer copies within the file system, which takes half the time."""
    sources: dict[Box, ByteSource] = {}
    whole = full(shape)
    for place, piece in pieces:
        outer = next((axis for axis, (start, stop) in enumerate(place) if stop - start != 1), len(place))
        if place[outer + 1 :] != whole[outer + 1 :] or piece.storage is None:
            return AssembledBytes(shape, itemsize, pieces)
        if piece.is_contiguous:
            sources[place] = WindowBytes(piece.storage.source, piece.offset * piece.itemsize, piece.nbytes)
        else:
            sources[place] = _ordered(piece)
    first, *others = [sources[place] for place in sorted(sources) if sources[place].nbytes] or sources.values()
    return JoinedBytes((first, *others)) if others else first


PANEL = 32 << 20  # bytes that are put together at a time: for each panel of a transposed tensor, all of it is read
SLAB = 4 << 20  # bytes that are read at a time
CACHED = 16  # rows that are transposed together, so that what they write is still in the cache: 2 to 4 times as fast


class AssembledBytes:
    """The row-major bytes of a tensor that is put together from boxes of others, with their axes in any order."""

    def __init__(self, shape: Shape, itemsize: int, pieces: Sequence[tuple[Box, TensorSpec]]) -> None:
        self.nbytes = prod(shape) * itemsize
        self._shape, self._itemsize = shape, itemsize
        self._pieces = [(place, shaped(piece, extent(place))) for place, piece in pieces if piece.numel]

    def read(self, start: int, stop: int) -> memoryview:
        found = bytearray()
        for panel in self.pieces(start, stop):
            found += panel
        return memoryview(found)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``start`` to ``stop``, in panels of whole rows, each valid until the next one is asked for."""
        if start == stop:
            return
        inner = contiguous_strides(self._shape)
        most = min(PANEL, stop - start)  # a row that is longer than what is asked for would be made again and again
        depth = next((at for at, numel in enumerate(inner) if numel * self._itemsize <= most), len(inner) - 1)
        row, rows = inner[depth] * self._itemsize, self._shape[depth]
        at = start // row
        while at * row < stop:
            outer, first = divmod(at, rows)
            last = min(first + max(PANEL // row, 1), rows, -(-stop // row) - outer * rows)
            index = [outer * rows * inner[depth] // inner[axis] % self._shape[axis] for axis in range(depth)]
            box = (*((each, each + 1) for each in index), (first, last), *full(self._shape[depth + 1 :]))
            with _room(PANEL) as room:
                self._fill(np.ndarray(extent(box), f"u{self._itemsize}" if self._itemsize <= 8 else "c16", room), box)
                yield room[max(start - at * row, 0) : min(stop - at * row, (last - first) * row)]
            at += last - first

    def _fill(self, panel: Array, box: Box) -> None:
        for place, piece in self._pieces:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, place, strict=True))
            if all(start < stop for start, stop in common):
                out = panel[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))]
                begins = (a - c for (a, _), (c, _) in zip(common, place, strict=True))
                offset = piece.offset + sum(map(int.__mul__, begins, piece.strides))
                _fill(out, piece, offset, piece.strides)


# Rooms that nothing is in, by size. A third of the time of a transpose went to fresh memory for each panel.
_ROOMS: defaultdict[int, deque[memoryview]] = defaultdict(deque)


@contextmanager
def _room(size: int) -> Iterator[memoryview]:
    """Provide memory that is used again afterwards."""
    try:
        room = _ROOMS[size].pop()
    except IndexError:
        room = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
    try:
        yield room
    finally:
        _ROOMS[size].append(room)


def boxed(spec: TensorSpec, box: Box) -> TensorSpec:
    """Return a box of a strided tensor, as a view of it."""
    offset = spec.offset + sum(start * step for (start, _), step in zip(box, spec.strides, strict=True))
    return replace(spec, shape=extent(box), offset=offset)


def _ordered(piece: TensorSpec) -> AssembledBytes:
    return AssembledBytes(piece.shape, piece.itemsize, [(full(piece.shape), piece)])


def shaped(piece: TensorSpec, shape: Shape) -> TensorSpec:
    """Return the piece with its elements, in row-major order, in another shape."""
    if piece.shape != shape and not piece.is_contiguous:
        piece = replace(piece, storage=Storage("", _ordered(piece)), offset=0)
    return piece if piece.shape == shape else replace(piece, shape=shape, strides=contiguous_strides(shape))


def _fill(out: Array, piece: TensorSpec, offset: int, strides: Shape) -> None:
    """Copy elements of the storage of a piece, from an offset on and with these strides, into an array."""
    assert piece.storage is not None, "what is assembled has values"
    axes = sorted(range(out.ndim), key=lambda axis: (out.shape[axis] == 1, -strides[axis]))
    steps = [strides[axis] for axis in axes if out.shape[axis] > 1] or [1]
    out = out.transpose(axes)
    out = out.reshape(out.shape[: len(steps)] or 1)  # what is left out is of one element
    inner_shape: Shape = out.shape[1:]
    reach = 1 + sum((size - 1) * step for size, step in zip(inner_shape, steps[1:], strict=True))
    if reach * out.itemsize > SLAB and out.ndim > 1:
        for at in range(len(out)):
            _fill(out[at], piece, offset + at * steps[0], tuple(steps[1:]))
        return
    count = max(SLAB // out.itemsize - reach, 0) // max(steps[0], 1) + 1
    inner = min(range(out.ndim), key=lambda axis: out.strides[axis])
    rows = CACHED if inner != out.ndim - 1 else max(out.shape)
    for first in range(0, len(out), count):
        block = out[first : first + count]
        begin = offset + first * steps[0]
        end = begin + (len(block) - 1) * steps[0] + reach
        source, begin, end = piece.storage.source, begin * out.itemsize, end * out.itemsize
        with _room(SLAB) as room:
            if (place := located(source)) is not None:
                data = room[: end - begin]
                place.file.fill(data, place.offset + begin)
            else:
                data = source.read(begin, end)
            view: Array = np.ndarray(block.shape, out.dtype, data, 0, [step * out.itemsize for step in steps])
            for at in range(0, block.shape[inner], rows):
                some = (*(slice(None),) * inner, slice(at, at + rows))
                block[some] = view[some]
