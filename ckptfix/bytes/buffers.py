"""What slices like bytes and reads like a file, and takes nothing into memory before it is asked for.

A file that is parsed could be mapped instead. But whoever cuts it short meanwhile would end the program then, with a
signal and without a word, and so would a disk or a share that is gone. What is parsed of a checkpoint is little, and to
read it costs no more than the faults of a map."""

from __future__ import annotations

import io
from typing import Any, Protocol, overload

from ckptfix.bytes.files import OpenFile
from ckptfix.errors import UnreadableError

NEAR = 4096
"""Bytes that a look takes with it: a look at what is near costs nothing then. Of an archive, the end of a member and
the header of the next, or a row of small members."""

SEARCHED = 1 << 20
"""Bytes that are searched at a time."""


class Buffer(Protocol):
    """Bytes, or what slices like them."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int = ..., stop: int = ..., /) -> int: ...


class RangeBuffer(io.RawIOBase):
    """The base of those that know their length and give a range of their bytes."""

    def __init__(self, length: int) -> None:
        self._length, self._position = length, 0

    def part(self, start: int, stop: int) -> bytes:
        """The bytes of a range that lies inside."""
        raise NotImplementedError

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
            return self.part(index, index + 1)[0]
        start, stop, step = index.indices(self._length)
        data = self.part(start, stop) if start < stop else b""
        return data if step == 1 else data[::step]

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
        data = self[self._position : self._position + len(target)]
        target[: len(data)] = data
        self._position += len(data)
        return len(data)


class FileBuffer(RangeBuffer):
    """A file as it was when it was opened. Raises ``UnreadableError`` where it has become shorter since."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__(file.size)
        self._file, self._start, self._near = file, 0, b""

    def part(self, start: int, stop: int) -> bytes:
        """The bytes of a range."""
        begin, end = start - self._start, stop - self._start
        if begin >= 0 and end <= len(self._near):
            return self._near[begin:end]
        if stop - start >= NEAR:
            return self._read(start, stop)
        self._start, self._near = start, self._read(start, min(start + NEAR, self._length))
        return self._near[: stop - start]

    def _read(self, start: int, stop: int) -> bytes:
        data = self._file.read(start, stop - start)
        if len(data) < stop - start:
            raise UnreadableError(
                f"{self._file.path}: was cut short while it was read: it had {self._length} bytes and has "
                f"{self._file.size}; fetch it again"
            )
        return data

    def find(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        """The first place of some bytes, -1 where there is none."""
        start, stop, _ = slice(start, stop).indices(self._length)
        while start + len(sub) <= stop:
            block = self._read(start, min(start + SEARCHED + len(sub) - 1, stop))
            found = block.find(sub)
            if found >= 0:
                return start + found
            start += SEARCHED
        return -1
