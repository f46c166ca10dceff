"""Merges the parts of a tensor that ranks saved, without reading values.

Every framework gives the place of a part as a box of the whole tensor. A tensor of one part is a range of its file; a
tensor of several parts is assembled block by block when it is read. A tensor that was flattened before it was split is
assembled in one dimension and viewed in its shape."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.sources import LastBlocks, PartedBytes, SoughtBytes, TornBytes, are_equal, is_torn
from ckptfix.core.facts import Fact, Kind, clause
from ckptfix.core.parts import Box, PartsError, check_cover, extent
from ckptfix.core.spec import ByteSource, Storage, TensorSpec, computed, contiguous_strides
from ckptfix.core.wording import first_names
from ckptfix.errors import Opt, UnreadableError, damaged
from ckptfix.reading.boxes import bytes_of_boxes, have_same_bytes, row_major
from ckptfix.reading.pickles.claims import checked

# Returns the parts of a tensor with their boxes.
_FindParts = Callable[[], Iterable[tuple[Box, TensorSpec]]]


def check_tiling(boxes: Iterable[Box], shape: tuple[int, ...], name: str, path: str = "") -> None:
    """Raise ``UnreadableError`` unless the boxes cover a tensor, each element once. ``path`` is for the message."""
    try:
        check_cover(name, [*boxes], shape)
    except PartsError as error:
        raise UnreadableError(
            f"{path and f'{path}: '}the chunks of {name} do not fill it: {error.problem}; "
            "put the files of one save together"
        ) from error


def _plain(part: TensorSpec, path: str) -> TensorSpec:
    """Return a part as a strided tensor without sparse parts, quantiser, or conj and neg bits."""
    if part.storage is None or part.math_bits or part.parts or part.quantizer:
        return computed(part, "", row_major(part, path), ())
    return part


def merge_parts(
    name: str, dtype: str, shape: tuple[int, ...], copies: Mapping[Box, Sequence[TensorSpec]], path: str
) -> TensorSpec:
    """Return the row-major tensor of its parts. ``copies`` are the parts by box; several ranks may save the same part.

    Raises ``UnreadableError`` unless the parts have the dtype and cover the shape, each element once. A tensor with
    lost bytes is torn; any other is verified by the checksums of its parts."""
    check_tiling(copies, shape, name, path)
    spec = TensorSpec(dtype, shape, contiguous_strides(shape))
    pieces: list[tuple[Box, TensorSpec]] = []
    are_torn = False
    for box, same in copies.items():
        wanted = extent(box)
        for part in same:
            if part.dtype != dtype or (part.shape != wanted and (part.numel or 0 not in wanted)):
                raise UnreadableError(
                    f"{path}: the part of {name} at {[start for start, _ in box]} has a different shape or dtype"
                )
        whole = next((part for part in same if not is_torn(part)), None)
        if 0 not in wanted or 0 in shape:
            are_torn = are_torn or whole is None
            pieces.append((box, whole or same[0]))
    if len(pieces) == 1:
        return pieces[0][1]
    if are_torn or not pieces:  # no rank has a part of an empty tensor
        return gone(name, spec, path)
    storages = tuple(storage for _, part in pieces for storage in part.storages)
    pieces = [(box, _plain(part, path)) for box, part in pieces]
    storage = Storage(name, bytes_of_boxes(shape, spec.itemsize, pieces), parts=storages)
    return checked(replace(spec, storage=storage), path)


def note_differing(damage: list[Fact], fact: Fact) -> None:
    """Add a fact about a tensor of which files have different values to that about others in the same files."""
    for at, other in enumerate(damage):
        if other.kind is fact.kind and {**other.data, "keys": ()} == {**fact.data, "keys": ()}:
            keys = tuple(dict.fromkeys((*other.data["keys"], *fact.data["keys"])))
            damage[at] = Fact(fact.kind, fact.place, {**fact.data, "keys": keys})
            return
    damage.append(fact)


class SoughtParts(SoughtBytes):
    """The row-major bytes of a tensor of ``shape``, whose parts ``find`` looks up."""

    __slots__ = ("_find", "_itemsize", "_shape", "nbytes")

    def __init__(self, spec: TensorSpec, find: _FindParts) -> None:
        self.nbytes, self._shape, self._itemsize, self._find = spec.nbytes, spec.shape, spec.itemsize, find

    def seek(self) -> ByteSource:
        return bytes_of_boxes(self._shape, self._itemsize, [*self._find()])


class SoughtStorages(Collection[Storage]):
    """The storages of a tensor's parts, looked up whenever they are asked for."""

    __slots__ = ("_find",)

    def __init__(self, find: _FindParts) -> None:
        self._find = find

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Storage]:
        return (storage for _, part in self._find() for storage in part.storages)

    def __contains__(self, other: object) -> bool:
        return False  # they are new each time


def sought_parts(name: str, dtype: str, shape: tuple[int, ...], find: _FindParts, path: str) -> TensorSpec:
    """Return the row-major tensor of plain parts that fill it; ``find`` looks them up.

    A folder may have a million of them, of which each takes 400 bytes of memory."""
    spec = TensorSpec(dtype, shape, contiguous_strides(shape))
    storage = Storage(name, SoughtParts(spec, find), parts=SoughtStorages(find))
    return checked(replace(spec, storage=storage), path)


class ComparedBytes:
    """The row-major bytes of a tensor that several files have; all copies are compared when they are read."""

    def __init__(self, name: str, copies: Mapping[str, TensorSpec], path: str) -> None:
        self.nbytes = next(iter(copies.values())).nbytes
        self._name, self._path = name, path
        self._copies = {file: row_major(copy, path) for file, copy in copies.items()}

    def read(self, start: int, stop: int) -> memoryview:
        held = {file: copy.read(start, stop) for file, copy in self._copies.items()}
        found = differing_of(self._name, list(held), lambda one, other: are_equal([held[one]], [held[other]]))
        if found is not None:
            raise UnreadableError(
                f"{self._path}: {clause(found)}; fetch {first_names(found.data['names'])} again, or take the values of "
                f"{found.data['others'][0]} with ",
                Opt("salvage", True),
            )
        return next(iter(held.values()))


def compared(name: str, copies: Mapping[str, TensorSpec], path: str) -> TensorSpec:
    """Return the first of several copies, given by their files, after ``agree(…, reads=False)``. Copies without
    checksums are compared when they are read."""
    whole = {file: copy for file, copy in copies.items() if not is_torn(copy)} or dict(list(copies.items())[:1])
    first, *_ = whole.values()
    storages = [storage for copy in whole.values() for storage in copy.storages]
    if len(whole) == 1 or all(storage.crc32 is not None for storage in storages):
        return first
    return computed(first, name, ComparedBytes(name, whole, path), first.storages)


def differing_of(name: str, files: Sequence[str], is_same: Callable[[str, str], bool]) -> Fact | None:
    """Return the fact that files have different values of a tensor, with those that differ from most others, or from
    the first if there is no majority; None if all are the same."""
    groups: list[list[str]] = []
    for file in files:
        if (own := next((group for group in groups if is_same(group[0], file)), None)) is None:
            groups.append(own := [])
        own.append(file)
    usual = max(groups, key=len)
    if len(groups) < 2:
        return None
    if 2 * len(usual) <= len(files):
        usual = groups[0]
    odd = tuple(file for file in files if file not in usual)
    return Fact.of(Kind.RANKS_DIFFER, keys=(name,), names=odd, others=tuple(usual), is_minor=2 * len(odd) < len(files))


def gone(name: str, spec: TensorSpec, path: str) -> TensorSpec:
    """Return the tensor with its bytes marked as lost, because their file is missing or damaged."""
    return replace(spec, storage=Storage(name, TornBytes(path, spec.nbytes)), offset=0)


def is_same(one: Any, other: Any, path: str) -> bool:
    """Return whether two entries are equal; tensors are compared byte for byte."""
    if not isinstance(one, TensorSpec) or not isinstance(other, TensorSpec):
        return bool(one == other)
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if (one.quantizer and one.quantizer.form) != (other.quantizer and other.quantizer.form):
        return False
    pairs = zip(one.strided_parts(), other.strided_parts(), strict=True)
    return all(have_same_bytes(before, after, path) for before, after in pairs)


def agree(copies: Sequence[TensorSpec], path: str, *, reads: bool = True) -> bool:
    """Return whether intact copies are equal, by their checksums or byte for byte.

    Without ``reads``, all bytes are compared only if checksums differ, which may be due to bytes beside the tensor.
    Copies without checksums are compared by their first bytes, and ``compared`` does the rest."""
    first, *others = [copy for copy in copies if copy.storage is not None and not is_torn(copy)] or copies[:1]
    for other in others:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            return False
        sums = [
            (copy.storage.crc32, copy.storage.nbytes, copy.offset, copy.strides)
            for copy in (first, other)
            if copy.storage is not None and copy.storage.crc32 is not None
        ]
        is_known = sums[0] == sums[1] if len(sums) == 2 else not reads and _start(first) == _start(other)
        is_known = is_known and first.quantizer is other.quantizer is None  # the same codes may be other numbers
        if not is_known and not is_same(first, other, path):
            return False
    return True


def _start(spec: TensorSpec) -> bytes:
    """Return the first bytes of a tensor if it is contiguous in a storage, else none."""
    if spec.storage is None or not spec.is_contiguous:
        return b""
    first, last = spec.extent
    return bytes(spec.storage.source.read(first, min(last, first + _COMPARED)))


_COMPARED = 512
_FLAT_BLOCK = 8 << 10  # bytes of a block that is read at a time


class Flat:
    """A run of elements in one dimension, split into stretches of ranks or groups, some of which may be missing."""

    def __init__(self, parts: Sequence[tuple[int, TensorSpec]]) -> None:
        """Create a run from contiguous one-dimensional tensors of one dtype, each with its first element, in order."""
        self._starts = [start for start, _ in parts]
        self.parts = [part for _, part in parts]
        self.is_torn = any(map(is_torn, self.parts))
        self.stop = parts[-1][0] + parts[-1][1].numel if parts else 0
        self._blocks = LastBlocks(self.stop * parts[0][1].itemsize if parts else 0, _FLAT_BLOCK)

    @classmethod
    def joined(cls, parts: Sequence[TensorSpec]) -> Flat:
        """Return the run of consecutive tensors."""
        placed, start = [], 0
        for part in parts:
            placed.append((start, part))
            start += part.numel
        return cls(placed)

    def count(self, start: int, stop: int) -> int:
        """Return how many of the elements ``start`` to ``stop`` are in intact parts."""
        placed = zip(self._starts, self.parts, strict=True)
        return sum(
            max(min(stop, begin + part.numel) - max(start, begin), 0) for begin, part in placed if not is_torn(part)
        )

    def within(self, start: int, stop: int, path: str) -> Iterator[tuple[ByteSource, int, int]]:
        """Yield the sources of bytes ``start`` to ``stop`` of the run, each with the range of its bytes.

        A tensor on 64 ranks has 64 stretches: as boxes or views, each would take ten times as long as reading it."""
        itemsize = self.parts[0].itemsize
        index = max(bisect_right(self._starts, start // itemsize) - 1, 0)
        while start < stop:
            if index >= len(self.parts):
                raise damaged(path, "a rank has lost a part of its weights")
            part = self.parts[index]
            inner = start - self._starts[index] * itemsize
            count = min(part.nbytes - inner, stop - start)
            if part.storage is not None and count > 0:
                base = part.offset * itemsize + inner
                yield part.storage.source, base, base + count
                start += count
            index += 1

    def read(self, start: int, stop: int, path: str) -> bytes:
        """Return bytes ``start`` to ``stop`` of the run, from cached blocks: small tensors are read in sequence."""
        return self._blocks.read(start, stop, partial(self._load, path))

    def _load(self, path: str, start: int, stop: int) -> bytes:
        return b"".join(part.read(*place) for part, *place in self.within(start, stop, path))

    def pieces(self, start: int, stop: int) -> list[TensorSpec] | None:
        """Return elements ``start`` to ``stop`` as views of the parts; None if any of them is missing."""
        found = []
        index = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            if index >= len(self.parts):
                return None
            begin, part = self._starts[index], self.parts[index]
            count = min(begin + part.numel, stop) - start
            if begin > start or (count <= 0 and part.numel):
                return None
            if count > 0:
                offset = part.offset + start - begin
                found.append(TensorSpec(part.dtype, (count,), (1,), part.storage, offset))
                start += count
            index += 1
        return None if self.is_torn and any(map(is_torn, found)) else found


class Spread:
    """The runs of all ranks, over which every tensor is spread evenly: it is the same stretch of each run."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        """Create it from the run of each rank. Raises ``ValueError`` if they have different dtypes."""
        self.flats = flats
        parts = [part for flat in flats for part in flat.parts]
        if len(dtypes := {part.dtype for part in parts}) > 1:
            raise ValueError(f"one run of {' and '.join(sorted(dtypes))}")
        self._dtype = next(iter(dtypes), "float32")
        self._storages = tuple(part.storage for part in parts if part.storage is not None)
        self._stop = min(flat.stop for flat in flats)
        self._is_torn = any(flat.is_torn for flat in flats)

    def share(self, numel: int) -> int:
        """Return how many elements of a tensor each rank has; the last ranks are padded."""
        return -(-numel // len(self.flats))

    def tensor(self, name: str, shape: tuple[int, ...], start: int, path: str) -> TensorSpec:
        """Return the row-major tensor whose stretch begins at element ``start`` on every rank."""
        spec = TensorSpec(self._dtype, shape, contiguous_strides(shape))
        storages = self._storages
        if len(self.flats) > 1:
            share = self.share(spec.numel)
            is_gone = self._is_torn or self._stop < start + share
            if is_gone and share:  # a small tensor has no elements on the last ranks
                holding = self.flats[: -(-spec.numel // share)]
                is_gone = any(flat.is_torn or flat.stop < start + share for flat in holding)
        else:
            pieces = self.flats[0].pieces(start, start + spec.numel)
            if pieces is not None and len(pieces) == 1:
                return replace(spec, storage=pieces[0].storage, offset=pieces[0].offset)
            is_gone, storages = pieces is None, tuple(piece.storage for piece in pieces or () if piece.storage)
        if is_gone:
            return gone(name, spec, path)
        return replace(spec, storage=Storage(name, SpreadBytes(self, start, spec, path), parts=storages))


class SpreadBytes(PartedBytes):
    """The bytes of a tensor that is spread over ranks.

    Their places are computed on reading, because 10,000 tensors on 64 ranks have 640,000 stretches."""

    __slots__ = ("_is_fine", "_path", "_share", "_spread", "_start", "nbytes")

    def __init__(self, spread: Spread, start: int, spec: TensorSpec, path: str) -> None:
        self._spread, self._path, self.nbytes = spread, path, spec.nbytes
        self._share, self._start = spread.share(spec.numel) * spec.itemsize, start * spec.itemsize
        self._is_fine = self._share < min(_FLAT_BLOCK, self.nbytes)

    def within(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int]]:
        for flat, first, last in () if self._is_fine else self._stretches(start, stop):
            yield from flat.within(first, last, self._path)

    def read(self, start: int, stop: int) -> memoryview:
        if not self._is_fine:
            return super().read(start, stop)
        return memoryview(
            b"".join(flat.read(first, last, self._path) for flat, first, last in self._stretches(start, stop))
        )

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[Flat, int, int]]:
        share, begin = self._share, self._start
        for rank in range(start // share, -(-stop // share)) if stop > start else ():
            at = begin - rank * share
            yield self._spread.flats[rank], max(start + at, begin), min(stop + at, begin + share)
