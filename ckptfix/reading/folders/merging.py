"""Puts the parts of a tensor that ranks saved together again, without reading a value.

Every framework says where a part belongs as a box of the whole tensor. A tensor of one part is that part's range of its
file; one of several is put together block by block when it is read, by the same mechanism as the chunks of
torch.distributed.checkpoint. A tensor that was flattened before it was split is put together in one dimension and
viewed in its shape."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.bytes.torn import TornBytes, is_torn
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.chunks import Box, ChunkedBytes, RowMajorBytes, check_tiling, tensor_of_chunks
from ckptfix.reading.pickles.claims import checked


def merge_parts(name: str, spec: TensorSpec, copies: Mapping[Box, Sequence[TensorSpec]], path: str) -> TensorSpec:
    """Return the tensor ``spec`` with the bytes of its parts; a part that several ranks saved has several copies.

    Raises ``UnreadableError`` unless the parts are of the dtype and fill the shape, each element once. A tensor that
    lacks bytes of a damaged file is torn."""
    check_tiling(list(copies), spec.shape, name)
    parts: dict[Box, TensorSpec] = {}
    for box, same in copies.items():
        if any((part.dtype, part.shape) != (spec.dtype, box.shape) for part in same):
            raise UnreadableError(f"{path}: the part of {name} at {list(box.offsets)} has another shape or dtype")
        parts[box] = next((part for part in same if not is_torn(part)), same[0])
    filled = {box: part for box, part in parts.items() if box.numel} or parts
    if len(filled) == 1:
        return next(iter(filled.values()))
    if any(map(is_torn, filled.values())):
        return gone(name, spec, path)
    return tensor_of_chunks(name, spec, filled, path)


def gone(name: str, spec: TensorSpec, path: str) -> TensorSpec:
    """Return the tensor without its bytes, which are in a file that is missing or damaged."""
    return replace(spec, storage=Storage(name, TornBytes(path, spec.nbytes)), offset=0)


def differ(one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether the checksums of two copies say that they differ; no value is read."""
    first, second = one.storage, other.storage
    if first is None or second is None or None in (first.crc32, second.crc32):
        return False
    return (first.nbytes, one.strides, one.offset) == (second.nbytes, other.strides, other.offset) and (
        first.crc32 != second.crc32
    )


class Flat:
    """A run of elements in one dimension, of which ranks or groups hold one stretch each; stretches may be missing."""

    def __init__(self, parts: Sequence[tuple[int, TensorSpec]]) -> None:
        """Take one-dimensional contiguous tensors with the element at which each begins, in order."""
        self._starts = [start for start, _ in parts]
        self._parts = [part for _, part in parts]
        self.is_torn = any(map(is_torn, self._parts))
        self.storages = tuple(part.storage for part in self._parts if part.storage is not None)
        self.stop = parts[-1][0] + parts[-1][1].numel if parts else 0

    @classmethod
    def joined(cls, parts: Sequence[TensorSpec]) -> Flat:
        """Return tensors as one run, each beginning where the one before it ends."""
        placed, start = [], 0
        for part in parts:
            placed.append((start, part))
            start += part.numel
        return cls(placed)

    def pieces(self, start: int, stop: int) -> list[TensorSpec] | None:
        """Return the elements ``start`` to ``stop`` as views of the parts; None if any of them is missing."""
        found = []
        index = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            if index >= len(self._parts):
                return None
            begin, part = self._starts[index], self._parts[index]
            count = min(begin + part.numel, stop) - start
            if begin > start or (count <= 0 and part.numel):
                return None
            if count > 0:
                found.append(
                    replace(
                        part,
                        shape=(count,),
                        offset=part.offset + start - begin,
                        requires_grad=False,
                        is_parameter=False,
                    )
                )
                start += count
            index += 1
        return found


def of_flat(name: str, shape: tuple[int, ...], flat: Flat, start: int, dtype: str, path: str) -> TensorSpec:
    """Return the tensor whose elements, in row-major order, are those of a run from ``start`` on."""
    spec = TensorSpec(dtype, shape, contiguous_strides(shape))
    pieces = flat.pieces(start, start + spec.numel)
    if pieces is None:
        return gone(name, spec, path)
    if not pieces:  # a tensor without elements
        return replace(spec, storage=Storage(name, ChunkedBytes((0,), 1, ())))
    boxes, place = {}, 0
    for piece in pieces:
        boxes[Box((place,), piece.shape)] = [piece]
        place += piece.numel
    line = merge_parts(name, replace(spec, shape=(spec.numel,), strides=(1,)), boxes, path)
    return replace(line, shape=shape, strides=contiguous_strides(shape))


class Spread:
    """Runs of as many ranks, over which every tensor is spread evenly: the same stretch of each."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self.flats = flats
        self.storages = tuple(storage for flat in flats for storage in flat.storages)
        self._stop = min(flat.stop for flat in flats)
        self._is_torn = any(flat.is_torn for flat in flats)

    def share(self, numel: int) -> int:
        """Return how many elements of a tensor each rank holds; the last ones are padded."""
        return -(-numel // len(self.flats))

    def tensor(self, name: str, shape: tuple[int, ...], start: int, dtype: str, path: str) -> TensorSpec:
        """Return the tensor of which every rank holds the stretch that begins at ``start``."""
        if len(self.flats) == 1:
            return of_flat(name, shape, self.flats[0], start, dtype, path)
        spec = TensorSpec(dtype, shape, contiguous_strides(shape))
        if self._is_torn or self._stop < start + self.share(spec.numel):
            return gone(name, spec, path)
        return checked(
            replace(spec, storage=Storage(name, _SpreadBytes(self, start, spec, path), parts=self.storages)), path
        )


class _SpreadBytes:
    """The bytes of a tensor that is spread over ranks.

    Its boxes are worked out when they are read: 10,000 tensors on 64 ranks have 640,000 of them."""

    __slots__ = ("_path", "_spec", "_spread", "_start", "nbytes")

    def __init__(self, spread: Spread, start: int, spec: TensorSpec, path: str) -> None:
        self._spread, self._start, self._spec, self._path = spread, start, spec, path
        self.nbytes = spec.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``."""
        numel, itemsize = self._spec.numel, self._spec.itemsize
        chunks = list(self._chunks(start // itemsize, -(-stop // itemsize)))
        return ChunkedBytes((numel,), itemsize, chunks).read(start, stop)

    def _chunks(self, first: int, last: int) -> Iterator[tuple[Box, RowMajorBytes]]:
        share = self._spread.share(self._spec.numel)
        for rank in range(first // share, -(-last // share)):
            begin = rank * share
            count = min(share, self._spec.numel - begin)
            pieces = self._spread.flats[rank].pieces(self._start, self._start + count)
            if pieces is None:
                raise UnreadableError(f"{self._path}: rank {rank} has lost a part of its weights; fetch it again")
            for piece in pieces:
                yield Box((begin,), piece.shape), RowMajorBytes(piece, self._path)
                begin += piece.numel
