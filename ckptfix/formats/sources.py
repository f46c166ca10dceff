"""Where bytes lie: in a file, in a compressed member of a file, or in memory."""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfix.checkpoint import ByteSource
from ckptfix.errors import UnreadableError

BLOCK = 4 << 20
"""Bytes read at a time when a storage is streamed."""


class OpenFile:
    """A file held open for reading until its last storage is gone, so that a rename of its path does not matter."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise UnreadableError(f"{path}: cannot be opened: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        """``count`` bytes from ``start`` on, fewer at the end of the file."""
        parts = []
        while count > 0:
            part = os.pread(self.descriptor, min(count, 1 << 30), start)
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

    file: OpenFile
    offset: int
    compressed: int
    nbytes: int
    _data: memoryview | None = field(default=None, repr=False)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the inflated member."""
        if self._data is None:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(
                    self.file.read(self.offset, self.compressed), self.nbytes + 1
                )
            except zlib.error as error:
                raise UnreadableError(
                    f"{self.file.path}: a compressed member is damaged ({error}); fetch the file again"
                ) from error
            if len(data) != self.nbytes:
                raise UnreadableError(
                    f"{self.file.path}: a compressed member does not inflate to its declared {self.nbytes} bytes; "
                    "fetch the file again"
                )
            self._data = memoryview(data)
        return self._data[start:stop]


def stream(source: ByteSource, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes ``start`` to ``stop`` in blocks of at most ``BLOCK``."""
    for position in range(start, stop, BLOCK):
        yield source.read(position, min(position + BLOCK, stop))


@dataclass(eq=False)
class Content:
    """The bytes of one input, whole: a file that is mapped while it is parsed, or a buffer in memory."""

    path: str
    buffer: mmap.mmap | bytes
    file: OpenFile | None = None

    @classmethod
    def of_file(cls, path: str) -> Content:
        """The content of a file. Raises ``UnreadableError`` where it cannot be opened or is empty."""
        file = OpenFile(path)
        if file.size == 0:
            raise UnreadableError(
                f"{path}: the file is empty (0 bytes): the save or the download never finished; fetch it again"
            )
        return cls(path, mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ), file)

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
