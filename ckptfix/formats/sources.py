"""Where bytes lie: in a file, in a compressed member of a file, or in memory."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfix.checkpoint import ByteSource
from ckptfix.errors import UnreadableError

BLOCK = 4 << 20
"""Bytes read at a time when a storage is streamed."""


_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would block for ever


class OpenFile:
    """A file held open for reading until its last storage is gone, so that a rename of its path does not matter.

    ``descriptor`` is that of a file without a name, which is closed in the same way."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS) if descriptor is None else descriptor
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            hint = "; check the path" if isinstance(error, FileNotFoundError) else ""
            raise UnreadableError(f"{path}: cannot be opened: {reason}{hint}") from error
        weakref.finalize(self, os.close, self.descriptor)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise UnreadableError(f"{path}: is no regular file; save what it gives to one first")

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        """``count`` bytes from ``start`` on, fewer at the end of the file."""
        parts = []
        while count > 0:
            try:
                part = os.pread(self.descriptor, min(count, 1 << 30), start)
            except OSError as error:
                raise UnreadableError(f"{self.path}: cannot be read at offset {start}: {error.strerror}") from error
            if not part:
                break
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, eq=False)
class FileBytes:
    """A range of a file."""

    file: OpenFile
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the range."""
        data = self.file.read(self.offset + start, stop - start)
        if len(data) != stop - start:
            raise UnreadableError(
                f"{self.file.path}: the file ends inside a storage: {stop - start} bytes were expected at offset "
                f"{self.offset + start}, {len(data)} are there; fetch the file again"
            )
        return memoryview(data)


@dataclass(frozen=True, eq=False)
class MemoryBytes:
    """Bytes in memory."""

    buffer: bytes | bytearray | memoryview

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return memoryview(self.buffer).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``."""
        return memoryview(self.buffer).cast("B")[start:stop]


@dataclass(eq=False)
class DeflatedBytes:
    """A deflated member of a zip archive, inflated on first use and never beyond the size that was declared."""

    packed: ByteSource
    path: str
    nbytes: int
    _data: memoryview | None = field(default=None, repr=False)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the inflated member."""
        if self._data is None:
            try:
                packed = self.packed.read(0, self.packed.nbytes)
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, self.nbytes + 1)
            except zlib.error as error:
                raise UnreadableError(
                    f"{self.path}: a compressed member is damaged ({error}); fetch the file again"
                ) from error
            if len(data) != self.nbytes:
                raise UnreadableError(
                    f"{self.path}: a compressed member does not inflate to its declared {self.nbytes} bytes; "
                    "fetch the file again"
                )
            self._data = memoryview(data)
        part = self._data[start:stop]
        if stop >= self.nbytes:
            self._data = None  # read to its end: a large archive must not pile up in memory
        return part


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
        """Bytes ``start`` to ``stop`` as a little-endian machine has them; the two need not be at an element's edge."""
        first = start - start % self.width
        last = min(stop + -stop % self.width, self.nbytes // self.width * self.width)
        elements = array(_UNSIGNED[self.width], bytes(self.source.read(first, last)))
        elements.byteswap()
        return memoryview(elements).cast("B")[start - first : stop - first]


_UNSIGNED = {2: "H", 4: "I", 8: "Q"}
"""The type code of ``array`` for an unsigned number of so many bytes."""


def stream(source: ByteSource, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes ``start`` to ``stop`` in blocks of at most ``BLOCK``."""
    for position in range(start, stop, BLOCK):
        yield source.read(position, min(position + BLOCK, stop))


@dataclass(eq=False)
class Content:
    """The bytes of one input, whole: a file that is mapped while it is parsed, or a buffer in memory.

    ``path`` is what messages call it. ``member`` is the name of a file that was inside of another one.
    ``salvage`` says that the file is known to be damaged, so that a reader may doubt what it holds."""

    path: str
    buffer: mmap.mmap | bytes
    file: OpenFile | None = None
    member: str = ""
    salvage: bool = False

    @classmethod
    def of_file(cls, path: str) -> Content:
        """The content of a file. Raises ``UnreadableError`` where it cannot be opened or is empty."""
        file = OpenFile(path)
        if file.size == 0:
            raise UnreadableError(
                f"{path}: the file is empty (0 bytes): the save or the download never finished; fetch it again"
            )
        return cls.of_open_file(file)

    @classmethod
    def of_open_file(cls, file: OpenFile, member: str = "") -> Content:
        """The content of a file that is open and not empty."""
        return cls(file.path, mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ), file, member)

    def __len__(self) -> int:
        return len(self.buffer)

    def source(self, offset: int, nbytes: int) -> ByteSource:
        """A range of the content, which outlives the mapping."""
        if self.file is not None:
            return FileBytes(self.file, offset, nbytes)
        return MemoryBytes(memoryview(self.buffer)[offset : offset + nbytes])

    def close(self) -> None:
        """End the mapping; sources stay valid."""
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()


@dataclass(frozen=True, eq=False)
class WindowBytes:
    """A range of another source."""

    source: ByteSource
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the range."""
        return self.source.read(self.offset + start, self.offset + stop)
