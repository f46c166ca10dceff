"""Where bytes lie: in a file, in a compressed member of a file, or in memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ckptfix.bytes.files import Buffer, FileBuffer, OpenFile, RangeBuffer, is_url
from ckptfix.bytes.limits import Bounds
from ckptfix.core.facts import Fact
from ckptfix.core.spec import ByteSource
from ckptfix.errors import UnreadableError

BLOCK = 1 << 20
"""Bytes read at a time: so few that they are still in the processor's cache when they are looked at."""


@dataclass(frozen=True, eq=False, slots=True)
class FileBytes:
    """A range of a file."""

    file: OpenFile
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the range."""
        data = self.file.read(self.offset + start, stop - start)
        if len(data) != stop - start:
            raise self.file.ends_early(self.offset + start, stop - start, len(data))
        return memoryview(data)


@dataclass(frozen=True, eq=False, slots=True)
class MemoryBytes:
    """Bytes in memory."""

    buffer: bytes | bytearray | memoryview

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return memoryview(self.buffer).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``."""
        return memoryview(self.buffer).cast("B")[start:stop]


@dataclass(frozen=True, eq=False)
class SwappedBytes:
    """A storage of a big-endian machine: its elements of ``width`` bytes, turned round when they are read."""

    source: ByteSource
    width: int

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.source.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` as a little-endian machine has them; the two need not be at an element's
        edge."""
        first = start - start % self.width
        last = min(stop + -stop % self.width, self.nbytes // self.width * self.width)
        elements = array(_UNSIGNED[self.width], bytes(self.source.read(first, last)))
        elements.byteswap()
        return memoryview(elements).cast("B")[start - first : stop - first]


_UNSIGNED = {2: "H", 4: "I", 8: "Q"}
"""The type code of ``array`` for an unsigned number of that many bytes."""


@dataclass(frozen=True, eq=False)
class WindowBytes:
    """A range of another source."""

    source: ByteSource
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the range."""
        return self.source.read(self.offset + start, self.offset + stop)


class LateBytes:
    """The bytes of a storage whose place in the file is known only after the pickle has been read."""

    __slots__ = ("inner", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.inner: ByteSource | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``, once the place is known."""
        assert self.inner is not None, "a storage was read before its file"
        return self.inner.read(start, stop)


@dataclass(eq=False)
class SoughtBytes:
    """Bytes whose place is sought when they are asked for: finding it is a request over a network."""

    nbytes: int
    seek: Callable[[], ByteSource]

    @cached_property
    def found(self) -> ByteSource:
        """The place. Raises ``UnreadableError`` if it is not where it should be."""
        return self.seek()

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``."""
        return self.found.read(start, stop)


def located(source: ByteSource) -> FileBytes | None:
    """Return the range of a file that a source is; None if its bytes have to be made first."""
    if isinstance(source, FileBytes):
        return source
    if isinstance(source, LateBytes):
        return None if source.inner is None else located(source.inner)
    if isinstance(source, SoughtBytes):
        return located(source.found)
    if isinstance(source, WindowBytes) and (outer := located(source.source)) is not None:
        return FileBytes(outer.file, outer.offset + source.offset, source.nbytes)
    return None


def stream(source: ByteSource, start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes ``start`` to ``stop`` in blocks of at most ``BLOCK``, each valid until the next one is asked for.

    What lies in a file is read into one buffer again and again, which the next stream uses too when this one has ended:
    fresh memory would take longer than the reading."""
    place = located(source)
    if place is None:
        yield from (source.read(at, min(at + BLOCK, stop)) for at in range(start, stop, BLOCK))
        return
    try:
        buffer = _BUFFERS.pop()
    except IndexError:
        buffer = memoryview(bytearray(BLOCK))
    try:
        for position in range(start, stop, BLOCK):
            block = buffer[: min(BLOCK, stop - position)]
            place.file.fill(block, place.offset + position)
            yield block
    finally:
        _BUFFERS.append(buffer)


_BUFFERS: deque[memoryview] = deque(maxlen=4)
"""Buffers of ``BLOCK`` bytes that no stream has: as many as threads read side by side."""


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Yield bytes in memory in the same blocks as ``stream``."""
    for start in range(0, data.nbytes, BLOCK):
        yield data[start : start + BLOCK]


@dataclass(eq=False)
class Content:
    """The bytes of one input, whole: a file that is read as far as it is asked for, or a buffer in memory.

    ``path`` is what messages call it. ``member`` is the name of a file that was inside of another one.
    ``salvage`` says that the file is known to be damaged, so that a reader may doubt what it holds. ``damage`` says
    what is wrong with the files that it was inside of. ``account`` is what
    reading it may spend, where it is a part of a larger file or was packed in a smaller one."""

    path: str
    buffer: Buffer
    file: OpenFile | None = None
    member: str = ""
    salvage: bool = False
    damage: list[Fact] = field(default_factory=list)
    account: Bounds | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.buffer)  # asked for with every storage

    @classmethod
    def of_file(cls, path: str) -> Content:
        """Return the content of a file, or of a URL. Raises ``UnreadableError`` if it cannot be opened or is
        empty."""
        file = _opened(path)
        if file.size == 0:
            raise UnreadableError(
                f"{path}: the file is empty (0 bytes): the save or the download never finished; fetch it again"
            )
        return cls.of_open_file(file)

    @classmethod
    def of_open_file(cls, file: OpenFile, member: str = "") -> Content:
        """Return the content of a file that is open and not empty."""
        return cls(file.path, FileBuffer(file), file, member)

    def __len__(self) -> int:
        return self.size

    @property
    def is_remote(self) -> bool:
        """Whether every look at another place is a request over a network."""
        return self.file is not None and self.file.is_remote

    @property
    def bounds(self) -> Bounds:
        """The account of all that is parsed of the file."""
        if self.account is None:
            self.account = Bounds(self.path, len(self))
        return self.account

    def source(self, offset: int, nbytes: int) -> ByteSource:
        """Return a range of the content, which outlives it."""
        if self.file is not None:
            return FileBytes(self.file, offset, nbytes)
        return MemoryBytes(memoryview(self.buffer[:])[offset : offset + nbytes])


def _opened(path: str) -> OpenFile:
    if not is_url(path):
        return OpenFile(path)
    from ckptfix.bytes.remote import RemoteFile  # which brings the modules for HTTP

    return RemoteFile(path)


class WindowBuffer(RangeBuffer):
    """A range of another buffer."""

    def __init__(self, buffer: Buffer, start: int, stop: int) -> None:
        super().__init__(stop - start)
        self._buffer, self._start = buffer, start

    def part(self, start: int, stop: int) -> bytes:
        """Return the bytes of a range."""
        return bytes(self._buffer[self._start + start : self._start + stop])

    def find(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        """Return the first place of some bytes, -1 if there is none."""
        start, stop, _ = slice(start, stop).indices(self._length)
        found = self._buffer.find(sub, self._start + start, self._start + stop)
        return found if found < 0 else found - self._start


class WindowContent(Content):
    """A range of another content, as a content of its own; its sources point into the outer file."""

    def __init__(self, outer: Content, start: int, stop: int) -> None:
        super().__init__(outer.path, WindowBuffer(outer.buffer, start, stop), outer.file)
        self._outer, self._start = outer.source(start, stop - start), start

    def source(self, offset: int, nbytes: int) -> ByteSource:
        """Return a range of the window."""
        return WindowBytes(self._outer, offset, nbytes)
