"""Sources of bytes: ranges of files, memory, and bytes that are computed when they are read."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

from msgspec import Struct, field

from ckptfix.bytes.files import Buffer, FileBuffer, OpenFile, is_url, open_bytes
from ckptfix.bytes.limits import Bounds
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact
from ckptfix.core.spec import ByteSource, Storage, TensorSpec
from ckptfix.errors import Opt, UnreadableError, damaged

BLOCK = 1 << 21  # bytes read at a time; with half as many, the time that Python takes per block slows scans by a sixth


class FileBytes(Struct, frozen=True, eq=False, gc=False):
    """A range of a file."""

    file: OpenFile
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> memoryview:
        data = self.file.read(self.offset + start, stop - start)
        if len(data) != stop - start:
            raise self.file.ends_early(self.offset + start, stop - start, len(data))
        return memoryview(data)


class MemoryBytes(Struct, frozen=True, eq=False):
    buffer: bytes | bytearray | memoryview

    @property
    def nbytes(self) -> int:
        return memoryview(self.buffer).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self.buffer).cast("B")[start:stop]


class SwappedBytes(Struct, frozen=True, eq=False):
    """A storage of a big-endian machine: the bytes of each element (``width`` bytes) are swapped when read."""

    source: ByteSource
    width: int

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` in little-endian order; the range may begin and end inside an element."""
        first = start - start % self.width
        last = min(stop + -stop % self.width, self.nbytes // self.width * self.width)
        elements = array(_UNSIGNED[self.width], bytes(self.source.read(first, last)))
        elements.byteswap()
        return memoryview(elements).cast("B")[start - first : stop - first]


_UNSIGNED = {2: "H", 4: "I", 8: "Q"}  # type code of `array` for an unsigned integer, by its bytes


class WindowBytes(Struct, frozen=True, eq=False):
    """A range of another source."""

    source: ByteSource
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> memoryview:
        return self.source.read(self.offset + start, self.offset + stop)


class ComputedBytes(Struct, frozen=True, eq=False):
    """Bytes that are computed when they are read. ``compute(first, last)`` returns units ``first`` to ``last``, each
    of ``size`` bytes."""

    nbytes: int
    size: int
    compute: Callable[[int, int], memoryview]

    def read(self, start: int, stop: int) -> memoryview:
        if start >= stop:
            return memoryview(b"")
        first, last = start // self.size, -(-stop // self.size)
        return self.compute(first, last)[start - first * self.size : stop - first * self.size]


class CachedBytes(ComputedBytes, frozen=True, eq=False):
    """Computed bytes in large units, such as a whole tensor: the last ones are cached, because reads are smaller."""

    def read(self, start: int, stop: int) -> memoryview:
        size, numbers = self.size, range(start // self.size, -(-stop // self.size)) if stop > start else ()
        parts = [_unit(self, at)[max(start - at * size, 0) : stop - at * size] for at in numbers]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


@lru_cache(maxsize=2)
def _unit(source: CachedBytes, number: int) -> memoryview:
    return source.compute(number, number + 1)


class PartedBytes:
    """Bytes that come from other sources; a writer copies them as ranges of files if it can."""

    __slots__ = ()

    nbytes: int

    def within(self, start: int, stop: int) -> Iterable[tuple[ByteSource, int, int]]:
        """Return the sources of bytes ``start`` to ``stop`` in order, each with the range of its bytes; nothing if the
        pieces are too short to be copied one by one."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> memoryview:
        pieces = [part.read(first, last) for part, first, last in self.within(start, stop)]
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


class JoinedBytes(PartedBytes):
    """Several sources in sequence."""

    def __init__(self, parts: tuple[ByteSource, ...]) -> None:
        self.parts, self.nbytes = parts, sum(part.nbytes for part in parts)

    def within(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int]]:
        for part in self.parts:
            if max(start, 0) < min(stop, part.nbytes):
                yield part, max(start, 0), min(stop, part.nbytes)
            start, stop = start - part.nbytes, stop - part.nbytes


class SoughtBytes(PartedBytes):
    """Bytes whose source is looked up for each read, because a folder may have a million of them."""

    __slots__ = ()

    def seek(self) -> ByteSource:
        raise NotImplementedError

    def within(self, start: int, stop: int) -> Iterator[tuple[ByteSource, int, int]]:
        yield self.seek(), start, stop


class SmallParts(Collection[Storage]):
    """The storages of a tensor of many small parts of files. To create one takes longer than to verify it, so all of
    them are verified together."""

    __slots__ = ()

    def damaged(self) -> Iterator[Storage]:
        """Yield the parts that do not match their checksums, if they have any."""
        raise NotImplementedError

    @property
    def files(self) -> Iterable[OpenFile]:
        """The files that hold the parts."""
        raise NotImplementedError


class LastBlocks:
    """The last blocks of ``size`` bytes that were read of a source of ``nbytes`` bytes: small ranges in it are read
    nearly in order."""

    __slots__ = ("_kept", "_nbytes", "_size")

    def __init__(self, nbytes: int, size: int) -> None:
        self._nbytes, self._size = nbytes, size
        # By number. The dict is replaced and never changed, because threads read in parallel.
        self._kept: dict[int, bytes] = {}

    def read(self, start: int, stop: int, load: Callable[[int, int], bytes]) -> bytes:
        """Return bytes ``start`` to ``stop``; ``load`` reads a range of the source."""
        number, first = divmod(start, self._size)
        if (block := self._kept.get(number)) is None:
            begin = start - first
            block = load(begin, min(begin + self._size, self._nbytes))
            kept = list(self._kept.items())[1 - BLOCKS :]
            self._kept = {**dict(kept), number: block}
        last = first + stop - start
        if last <= len(block) or not block:
            return block[first:last]
        return block[first:] + self.read(stop + len(block) - last, stop, load)


BLOCKS = 4  # kept of a source: those of two threads, as groups of tensors and checksums are apart in it


class DeferredBytes:
    """The bytes of a storage whose place is set once the pickle has been read (``inner``), or is looked up on first use
    by ``seek``, which may take a request over a network."""

    __slots__ = ("inner", "nbytes", "seek")

    def __init__(self, nbytes: int, seek: Callable[[], ByteSource] | None = None) -> None:
        self.nbytes, self.seek = nbytes, seek
        self.inner: ByteSource | None = None

    @property
    def found(self) -> ByteSource:
        """The source. Raises ``UnreadableError`` if it is missing."""
        if self.inner is None:
            assert self.seek is not None, "a storage was read before its file"
            self.inner = self.seek()
        return self.inner

    def read(self, start: int, stop: int) -> memoryview:
        return self.found.read(start, stop)


def located(source: ByteSource) -> FileBytes | None:
    """Return the range of a file that holds a source's bytes; None if they are computed or in memory."""
    if isinstance(source, FileBytes):
        return source
    if isinstance(source, DeferredBytes):
        return located(source.found) if source.inner is not None or source.seek is not None else None
    if isinstance(source, WindowBytes) and (outer := located(source.source)) is not None:
        return FileBytes(outer.file, outer.offset + source.offset, source.nbytes)
    return None


def ranges_of(source: ByteSource, start: int, stop: int) -> list[FileBytes]:
    """Return the ranges of files that hold a source's bytes, in order; empty if some are computed or in memory."""
    if isinstance(source, PartedBytes):
        found = [ranges_of(*each) for each in source.within(start, stop)]
        return [each for some in found for each in some] if all(found) else []
    place = located(source)
    return [] if place is None else [FileBytes(place.file, place.offset + start, stop - start)]


def stream(source: ByteSource, start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes ``start`` to ``stop`` in blocks of ``BLOCK``, the last one shorter. Each is valid until the next.

    Files are read into one buffer, which is reused by later streams: allocating memory would take longer than
    reading."""
    place = located(source)
    if place is None and isinstance(source, WindowBytes):
        yield from stream(source.source, source.offset + start, source.offset + stop)
        return
    pieces: Iterable[memoryview] | None = None
    if isinstance(source, (JoinedBytes, SoughtBytes)):
        pieces = (block for each in source.within(start, stop) for block in stream(*each))
    elif place is None and hasattr(source, "pieces"):  # computed in pieces of the source's own size
        pieces = source.pieces(start, stop)
    if place is None and pieces is None:
        yield from (source.read(at, min(at + BLOCK, stop)) for at in range(start, stop, BLOCK))
        return
    try:
        buffer = _BUFFERS.pop()
    except IndexError:
        buffer = memoryview(bytearray(BLOCK))
    try:
        if pieces is not None:
            yield from _regrouped(pieces, stop - start, buffer)
            return
        assert place is not None, "other sources were read above"
        for position in range(start, stop, BLOCK):
            block = buffer[: min(BLOCK, stop - position)]
            place.file.fill(block, place.offset + position)
            yield block
    finally:
        _BUFFERS.append(buffer)


def _regrouped(pieces: Iterable[memoryview], nbytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield ``nbytes`` bytes from pieces of any size in blocks as long as the buffer, the last one shorter."""
    filled = 0
    for piece in pieces:
        while piece.nbytes:
            count = min(piece.nbytes, buffer.nbytes - filled)
            if not filled and count in (buffer.nbytes, nbytes):  # copying these took a tenth of a merge
                yield piece[:count]
                piece, nbytes = piece[count:], nbytes - count
                continue
            buffer[filled : filled + count] = piece[:count]
            piece, filled, nbytes = piece[count:], filled + count, nbytes - count
            if filled == buffer.nbytes or not nbytes:
                yield buffer[:filled]
                filled = 0


# Free buffers of `BLOCK` bytes, as many as threads read in parallel.
_BUFFERS: deque[memoryview] = deque(maxlen=4)


PIECE = 64 << 10  # bytes compared at a time: copies of this size need no fresh memory from the system


def are_equal(one: Iterable[memoryview], other: Iterable[memoryview]) -> bool:
    """Return whether two streams with blocks of the same sizes have the same bytes."""
    # Memoryviews are compared item by item, a bytearray by memcmp, which is worth copying each piece.
    return all(
        bytearray(mine[start : start + PIECE]) == theirs[start : start + PIECE]
        for mine, theirs in zip(one, other, strict=True)
        for start in range(0, max(mine.nbytes, theirs.nbytes), PIECE)
    )


class Content(Struct, eq=False, weakref=True):
    """All bytes of one input: a file that is read on demand, or a buffer in memory.

    ``path`` is its name in messages. If it was inside archives or compressed streams, ``member`` is its name there,
    ``damage`` is what is wrong with them, and ``wrapper`` is the form of the outermost one.
    ``shared_bounds`` are the limits of the file that it is part of or packed in. A window begins at ``start`` in the
    buffer. If it ``is_verified``, storages that fail their checksums are torn: another file may have the same ones."""

    path: str
    buffer: Buffer
    file: OpenFile | None = None
    member: str = ""
    damage: list[Fact] = field(default_factory=list)
    wrapper: str = ""
    shared_bounds: Bounds | None = None
    start: int = 0
    size: int = -1
    is_verified: bool = False

    def __post_init__(self) -> None:
        if self.size < 0:
            self.size = len(self.buffer)  # kept because it is needed for every storage

    @classmethod
    def of_file(cls, path: str) -> Content:
        """Return the content of a file or URL. Raises ``UnreadableError`` if it does not open, or is empty."""
        if is_url(path):
            from ckptfix.bytes.remote import RemoteFile  # loads the modules for HTTP

            file: OpenFile = RemoteFile(path)
        else:
            file = open_bytes(path)
        if file.size == 0:
            raise damaged(path, "the file is empty (0 bytes): the save or the download never finished")
        return cls.of_open_file(file)

    @classmethod
    def of_open_file(cls, file: OpenFile, member: str = "") -> Content:
        """Return the content of an open file, which is not empty."""
        return cls(file.path, FileBuffer(file), file, member)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: slice) -> bytes:
        start, stop, _ = index.indices(self.size)
        return bytes(self.buffer[self.start + start : self.start + max(start, stop)])

    def find(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        """Return the first position of ``sub`` from ``start`` on; -1 if it is not there."""
        start, stop, _ = slice(start, stop).indices(self.size)
        found = self.buffer.find(sub, self.start + start, self.start + stop)
        return found if found < 0 else found - self.start

    def window(self, start: int, stop: int) -> Content:
        """Return a range as a content of its own, without member, damage and limits."""
        return Content(self.path, self.buffer, self.file, start=self.start + start, size=stop - start)

    @property
    def is_remote(self) -> bool:
        """Whether each read may be a request over a network."""
        return self.file is not None and self.file.is_remote

    @property
    def bounds(self) -> Bounds:
        if self.shared_bounds is None:
            self.shared_bounds = Bounds(self.path, len(self))
        return self.shared_bounds

    def source(self, offset: int, nbytes: int) -> ByteSource:
        """Return a range of the content as a source, which stays valid after the content is gone."""
        if self.file is not None:
            return FileBytes(self.file, self.start + offset, nbytes)
        return MemoryBytes(memoryview(self.buffer[:])[self.start + offset : self.start + offset + nbytes])


SECTOR = 512  # bytes of the shortest run of zeros that may be lost data: disks and file systems lose whole sectors
_ZEROS = bytes(BLOCK)


class TornBytes(Struct, frozen=True, eq=False):
    """A storage of ``nbytes`` bytes of which only the first ``whole`` exist, in ``source``."""

    path: str
    nbytes: int
    whole: int = 0
    source: ByteSource | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``. Raises ``UnreadableError`` if some of them are lost."""
        if stop > self.whole or self.source is None:
            raise UnreadableError(
                f"{self.path}: the bytes of a storage are gone; leave the tensor out with ", Opt("salvage", True)
            )
        return self.source.read(start, stop)


def whole_bytes(source: ByteSource) -> int:
    """Return how many bytes from the start of a storage exist."""
    if isinstance(source, TornBytes):
        return source.whole
    if isinstance(source, DeferredBytes):
        if source.inner is None:
            return source.nbytes if source.seek is not None else 0
        return whole_bytes(source.inner)
    if isinstance(source, SwappedBytes):
        return whole_bytes(source.source) // source.width * source.width
    if isinstance(source, WindowBytes):
        return max(0, min(whole_bytes(source.source) - source.offset, source.nbytes))
    return source.nbytes


def is_torn(value: Any) -> bool:
    """Return whether a tensor lacks any byte that it views."""
    if not isinstance(value, TensorSpec):
        return False
    for part in value.strided_parts():
        if part.storage is None or type(source := part.storage.source) is FileBytes:
            continue
        if (whole := whole_bytes(source)) < source.nbytes and part.numel and part.extent[1] > whole:
            return True
    return False


def zero_tail(content: Content) -> int:
    """Return the position of the zeros at the end of the content; its size if its last byte is not zero."""
    end = len(content)
    step = 4096
    while end:
        start = max(0, end - step)
        block = content[start:end]
        if block != _ZEROS[: len(block)]:  # ten times as fast as rstrip, and an intact model may end in many zeros
            return start + len(block.rstrip(b"\0"))
        end, step = start, BLOCK
    return 0


def filled_end(content: Content) -> int:
    """Return where the data of a truncated content ends: before the zeros at its end, if they fill a sector."""
    zeros = zero_tail(content)
    return zeros if len(content) - zeros >= SECTOR else len(content)


SAMPLE = 1 << 16  # bytes before the zeros that are examined
DENSE = 0.01  # largest share of zeros among these numbers


def unfilled_from(content: Content, placed: Iterable[tuple[int, TensorSpec]]) -> int | None:
    """Return the position of the zeros at the end that were never filled with data; None if they may be values.

    ``placed`` gives contiguous tensors, each with its position in the content. Remote files are not examined: uploads
    are complete, and all of the zeros would be downloaded."""
    if content.is_remote:
        return None
    zeros = zero_tail(content)
    if len(content) - zeros < SECTOR:
        return None
    is_cut, follows = False, False
    for start, spec in placed:
        stop = start + spec.nbytes
        dtype, itemsize = DTYPES[spec.dtype], spec.itemsize
        if not spec.numel or not (dtype.is_float or dtype.is_complex) or stop <= zeros:
            continue
        row = max(spec.nbytes // (spec.shape[0] if len(spec.shape) > 1 else 1), 1)
        offset = zeros - start
        # Inside a number, or between two of a row: next to the edges of a row, values may be zero themselves.
        is_inside = offset % itemsize > 0 or 2 * itemsize <= offset % row <= row - 2 * itemsize
        if start >= zeros:
            follows = True
        elif is_inside and _is_dense(content, start, zeros, spec):
            is_cut = True
            follows |= stop - (zeros + row - (zeros - start) % row) >= row
    return zeros if is_cut and follows else None


def _is_dense(content: Content, start: int, zeros: int, spec: TensorSpec) -> bool:
    """Return whether almost no number of the tensor before position ``zeros`` has a last byte of zero.

    A complex number counts as two."""
    itemsize = spec.itemsize
    lasts = (itemsize // 2, itemsize) if DTYPES[spec.dtype].is_complex else (itemsize,)
    first = start + max(0, (zeros - start - SAMPLE) // itemsize) * itemsize
    data = content[first : zeros - (zeros - first) % itemsize]
    count = len(data) // itemsize
    empty = sum(not any(ends) for ends in zip(*(data[last - 1 :: itemsize] for last in lasts), strict=True))
    return count > 0 and empty <= DENSE * count
