"""Tensors in row-major order: strided ones, and those assembled from boxes of others.

They are read lazily, and in pieces if they are read in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.bytes.sources import CachedBytes, JoinedBytes, MemoryBytes, WindowBytes, are_equal, located, stream
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.lazy import np
from ckptfix.core.parts import Box, Shape, extent, full
from ckptfix.core.spec import ByteSource, Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError, WriteError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def is_range(spec: TensorSpec) -> bool:
    """Return whether the values of a strided tensor are a range of its storage."""
    return spec.is_contiguous and not spec.math_bits


def row_major(spec: TensorSpec, path: str) -> ByteSource:
    """Return the bytes of a strided tensor in row-major order, conjugated or negated if its spec has such bits."""
    if spec.storage is not None and is_range(spec):
        return _stored(spec)
    return CachedBytes(spec.nbytes, max(spec.nbytes, 1), lambda *_: _resolved(spec, path))


def row_major_bytes(spec: TensorSpec, path: str) -> memoryview:
    """Return all bytes of a strided tensor in row-major order."""
    return row_major(spec, path).read(0, spec.nbytes)


def row_major_blocks(spec: TensorSpec, path: str) -> Iterator[memoryview]:
    """Yield the bytes of a strided tensor in row-major order in blocks. Each is valid until the next."""
    if spec.storage is None:
        raise WriteError(f"{path}: a tensor on the meta device has no values to write; fill it first")
    return stream(MemoryBytes(_resolved(spec, path)) if spec.math_bits else _stored(spec), 0, spec.nbytes)


def have_same_bytes(one: TensorSpec, other: TensorSpec, path: str) -> bool:
    """Return whether two strided tensors of one dtype and shape have the same elements, bit for bit."""
    is_alike = (one.strides, one.math_bits) == (other.strides, other.math_bits)
    if is_alike and one.storage is not None and other.storage is not None:
        start, stop = one.extent
        if stop - start <= one.nbytes:  # without other bytes between the elements
            return are_equal(stream(one.storage.source, start, stop), stream(other.storage.source, *other.extent))
    return are_equal(row_major_blocks(one, path), row_major_blocks(other, path))


def _stored(spec: TensorSpec) -> ByteSource:
    """Return the stored bytes of a tensor in row-major order, without its conj and neg bits."""
    assert spec.storage is not None
    if spec.is_contiguous:
        return WindowBytes(spec.storage.source, spec.extent[0], spec.nbytes)
    return AssembledBytes(spec.shape, spec.itemsize, [(full(spec.shape), spec)])


def _resolved(spec: TensorSpec, path: str) -> memoryview:
    """Return all bytes of a tensor in row-major order, conjugated or negated."""
    if spec.storage is None:
        raise UnreadableError(f"{path}: a chunk of the meta device has no values; save the checkpoint again")
    data = _stored(spec).read(0, spec.nbytes)
    if spec.math_bits:
        width = spec.itemsize // (2 if DTYPES[spec.dtype].is_complex else 1)
        numbers = np.frombuffer(data, f"u{width}").copy()
        sign = numbers.dtype.type(1 << 8 * width - 1)
        for name, some in (("neg", numbers), ("conj", numbers[1::2])):
            if spec.math_bits.get(name):
                some ^= sign
        data = memoryview(numbers).cast("B")
    return data


def bytes_of_boxes(shape: Shape, itemsize: int, pieces: Sequence[tuple[Box, TensorSpec]]) -> ByteSource:
    """Return the row-major bytes of a tensor that is filled by pieces, each at a box.

    Pieces that are contiguous in it, such as the layers of a stack, are joined: a writer copies their ranges within the
    file system, which takes half the time."""
    sources: dict[Box, ByteSource] = {}
    for place, piece in pieces:
        if not is_run(place, shape) or piece.storage is None:
            return AssembledBytes(shape, itemsize, pieces)
        sources[place] = _stored(piece)
    first, *others = [sources[place] for place in sorted(sources) if sources[place].nbytes] or sources.values()
    return JoinedBytes((first, *others)) if others else first


def is_run(box: Box, shape: Shape) -> bool:
    """Return whether the elements of a box follow each other in a row-major tensor of this shape."""
    outer = next((axis for axis, (start, stop) in enumerate(box) if stop - start != 1), len(box))
    return box[outer + 1 :] == full(shape[outer + 1 :])


PANEL = 32 << 20  # bytes that are assembled at a time: each panel of a transposed tensor reads all of it
SLAB = 4 << 20  # bytes that are read at a time
CACHED = 16  # rows that are transposed together, so that the output stays in the cache: 2 to 4 times as fast


class AssembledBytes:
    """The row-major bytes of a tensor that is assembled from boxes of others, with any strides."""

    def __init__(self, shape: Shape, itemsize: int, pieces: Sequence[tuple[Box, TensorSpec]]) -> None:
        self.nbytes = prod(shape) * itemsize
        self._shape, self._itemsize = shape, itemsize
        self._pieces = [(place, shaped(piece, extent(place))) for place, piece in pieces if piece.numel]

    def read(self, start: int, stop: int) -> memoryview:
        found, at = np.empty(stop - start, np.uint8).data, 0
        for panel in self.pieces(start, stop):
            found[at : at + panel.nbytes] = panel
            at += panel.nbytes
        return found

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``start`` to ``stop`` in panels of whole rows. Each is valid until the next."""
        if start == stop:
            return
        inner = contiguous_strides(self._shape)
        most = min(PANEL, stop - start)  # longer rows than requested would be assembled repeatedly
        depth = next((at for at, numel in enumerate(inner) if numel * self._itemsize <= most), len(inner) - 1)
        row, rows = inner[depth] * self._itemsize, self._shape[depth]
        at = start // row
        while at * row < stop:
            outer, first = divmod(at, rows)
            last = min(first + max(PANEL // row, 1), rows, -(-stop // row) - outer * rows)
            index = [outer * rows * inner[depth] // inner[axis] % self._shape[axis] for axis in range(depth)]
            box = (*((each, each + 1) for each in index), (first, last), *full(self._shape[depth + 1 :]))
            with _buffer(PANEL) as buffer:
                self._fill(np.ndarray(extent(box), f"u{self._itemsize}" if self._itemsize <= 8 else "c16", buffer), box)
                yield buffer[max(start - at * row, 0) : min(stop - at * row, (last - first) * row)]
            at += last - first

    def _fill(self, panel: Array, box: Box) -> None:
        for place, piece in self._pieces:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, place, strict=True))
            if all(start < stop for start, stop in common):
                out = panel[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))]
                begins = (a - c for (a, _), (c, _) in zip(common, place, strict=True))
                offset = piece.offset + sum(map(int.__mul__, begins, piece.strides))
                _fill(out, piece, offset, piece.strides)


# Free buffers by size. Allocating one for each panel took a third of the time of a transpose.
_BUFFERS: defaultdict[int, deque[memoryview]] = defaultdict(deque)


@contextmanager
def _buffer(size: int) -> Iterator[memoryview]:
    """Provide a buffer, which is reused afterwards."""
    try:
        buffer = _BUFFERS[size].pop()
    except IndexError:
        buffer = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
    try:
        yield buffer
    finally:
        _BUFFERS[size].append(buffer)


def boxed(spec: TensorSpec, box: Box) -> TensorSpec:
    """Return a box of a strided tensor, as a view of it."""
    offset = spec.offset + sum(start * step for (start, _), step in zip(box, spec.strides, strict=True))
    return replace(spec, shape=extent(box), offset=offset)


def shaped(piece: TensorSpec, shape: Shape) -> TensorSpec:
    """Return a tensor with the elements of a piece, in row-major order, in another shape."""
    if piece.shape != shape and not piece.is_contiguous:
        piece = replace(piece, storage=Storage("", _stored(piece)), offset=0)
    return piece if piece.shape == shape else replace(piece, shape=shape, strides=contiguous_strides(shape))


def _fill(out: Array, piece: TensorSpec, offset: int, strides: Shape) -> None:
    """Copy elements of a piece's storage into an array; ``offset`` and ``strides`` are in elements."""
    assert piece.storage is not None, "what is assembled has values"
    axes = sorted(range(out.ndim), key=lambda axis: (out.shape[axis] == 1, -strides[axis]))
    steps = [strides[axis] for axis in axes if out.shape[axis] > 1] or [1]
    out = out.transpose(axes)
    out = out.reshape(out.shape[: len(steps)] or 1)  # drops the axes of size 1, which are last
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
        with _buffer(SLAB) as buffer:
            if (place := located(source)) is not None:
                data = buffer[: end - begin]
                place.file.fill(data, place.offset + begin)
            else:
                data = source.read(begin, end)
            view: Array = np.ndarray(block.shape, out.dtype, data, 0, [step * out.itemsize for step in steps])
            for at in range(0, block.shape[inner], rows):
                some = (*(slice(None),) * inner, slice(at, at + rows))
                block[some] = view[some]


def may_overlap(part: TensorSpec) -> bool:
    """Return whether elements of a strided tensor may overlap, as in an expanded one, but not in a part of a rank."""
    reach = 0
    for stride, size in sorted(zip(part.strides, part.shape, strict=False)) if part.numel else ():
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
