"""A whole file inside of a larger one, read where it lies."""

from __future__ import annotations

import io
import mmap
from typing import Any, cast, overload

from ckptfix.checkpoint import ByteSource
from ckptfix.formats.sources import Content, WindowBytes


class WindowBuffer(io.RawIOBase):
    """A range of a mapped file that slices like bytes and reads like a file; nothing of it is copied before it is
    asked for.
    """

    def __init__(self, buffer: mmap.mmap | bytes, start: int, stop: int) -> None:
        self._buffer, self._start, self._length, self._position = buffer, start, stop - start, 0

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> bytes: ...
    def __getitem__(self, index: int | slice) -> int | bytes:
        if isinstance(index, int):
            if not 0 <= index < self._length:
                raise IndexError(f"no byte {index} of {self._length}")
            return int(self._buffer[self._start + index])
        start, stop, step = index.indices(self._length)
        return bytes(self._buffer[self._start + start : self._start + max(start, stop)])[::step]

    def find(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        """The first place of some bytes, -1 where there is none."""
        start, stop, _ = slice(start, stop).indices(self._length)
        found = self._buffer.find(sub, self._start + start, self._start + stop)
        return found if found < 0 else found - self._start

    def seekable(self) -> bool:
        """Always."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The place of the next byte that is read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start, from here or from the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"the place {base + offset} lies before the start")
        self._position = base + offset
        return self._position

    def readinto(self, target: Any) -> int:
        """Fill the target from here on, as far as there are bytes."""
        data = self[self._position : self._position + len(target)] if self._position < self._length else b""
        target[: len(data)] = data
        self._position += len(data)
        return len(data)


class WindowContent(Content):
    """A range of another content, as a content of its own; its sources point into the outer file."""

    def __init__(self, outer: Content, start: int, stop: int) -> None:
        # A reader slices a buffer, searches it, or hands it to zipfile: a window can do all of it.
        super().__init__(outer.path, cast(Any, WindowBuffer(outer.buffer, start, stop)), outer.file)
        self._outer, self._start = outer.source(start, stop - start), start

    def source(self, offset: int, nbytes: int) -> ByteSource:
        """A range of the window."""
        return WindowBytes(self._outer, offset, nbytes)
