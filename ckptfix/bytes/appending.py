"""Appends to a file through one window of it.

Most storages of a checkpoint are small, and a few words stand between them. Each would take a call that writes it, and
one that reads it back; together they take one of each for half a megabyte.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ckptfix.bytes.files import OpenFile

WINDOW = 512 << 10
"""Bytes that are written, and read back, at a time: so few that they are in the processor's cache still."""

EDGE = 64 << 10
"""Calls that write end at multiples of this. The system keeps the pages of one call side by side in memory: of fewer it
makes more pieces, and for more it has to look, on virtual machines even to ask the host."""

A = TypeVar("A", bound="Appender")


class Copied(NamedTuple):
    """A range of a file that was copied, and was equal when it was read back from ``start`` of the new file on."""

    file: OpenFile
    offset: int
    nbytes: int
    start: int


class Appender:
    """Appends to a file; at the end of the context, it has all of it.

    Ranges of other files are read back with the window in which they lie, and are in ``copied`` where they are equal.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.copied: list[Copied] = []
        self._file = file
        file.flush()
        self._descriptor = _descriptor(file)
        self._is_readable = self._descriptor is not None and file.readable()
        try:
            self._window, self._written = _BUFFERS.pop()
        except IndexError:
            self._window, self._written = bytearray(WINDOW), bytearray(WINDOW)
        self._view = memoryview(self._window)
        self._ranges: list[Copied] = []  # those that lie in the window, the last one perhaps in part
        self._begin_at(file.tell())

    def __enter__(self: A) -> A:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is None:
            self.seek(self.tell())
        _BUFFERS.append((self._window, self._written))

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._begin + self._filled

    def seek(self, position: int) -> None:
        """Go to another place of the file."""
        self._end_window()
        self._file.seek(position)
        self._begin_at(position)

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes that are at hand."""
        done = 0
        while done < len(data):
            part = data[done : done + self._room]
            self._space(len(part))[:] = part
            self._add(len(part))
            done += len(part)

    # The window: what comes from ``_begin`` of the file on
    # ------------------------------------------------------------------------------------------------------------------

    def _begin_at(self, position: int) -> None:
        """Begin an empty window, which will be full at an edge of the file."""
        self._begin, self._filled, self._room = position, 0, WINDOW - position % EDGE

    def _space(self, count: int) -> memoryview:
        """Where the next bytes go, of which there is room for so many."""
        return self._view[self._filled : self._filled + count]

    def _add(self, count: int, is_in_file: bool = False) -> None:
        """So many bytes more are in the window; if the file has them already, they are the only ones."""
        self._filled += count
        self._room -= count
        if is_in_file or not self._room:
            self._end_window(is_in_file)

    def _end_window(self, is_in_file: bool = False) -> None:
        """Write what is in the window, unless the file has it, see whether it came there, and begin the next one."""
        if not self._filled:
            return
        if not is_in_file:
            self._write_window()
        end = self.tell()
        if self._ranges:
            last = self._ranges[-1]
            ended = len(self._ranges) - (last.start + last.nbytes > end)
            if self._reads_back():
                self.copied += self._ranges[:ended]
                del self._ranges[:ended]
            else:
                self._ranges.clear()
        self._begin_at(end)

    def _write_window(self) -> None:
        window, done = self._view[: self._filled], 0
        if self._descriptor is None:
            self._file.write(window)
            return
        while done < self._filled:
            done += os.write(self._descriptor, window[done : done + EDGE - (self._begin + done) % EDGE])

    def _reads_back(self) -> bool:
        """Whether the file has the bytes of the window."""
        assert self._descriptor is not None, "a file was read back that cannot be"
        count, done = self._filled, 0
        while done < count:
            read = os.preadv(self._descriptor, [memoryview(self._written)[done:count]], self._begin + done)
            if not read:
                return False
            done += read
        # Only whole buffers are compared by memcmp without a copy, so they are made the same behind what was read.
        memoryview(self._written)[count:] = self._view[count:]
        return self._window == self._written


_BUFFERS: deque[tuple[bytearray, bytearray]] = deque(maxlen=2)
"""Windows that nobody has: fresh memory for each file would take as long as all calls that read it back."""


def _descriptor(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except OSError:  # io.UnsupportedOperation: a file in memory
        return None
