"""The bytes of a pickle, taken one after another, from memory or from a file.

Sizes in the stream are claims: nothing is taken before it is known to be there."""

from __future__ import annotations

from typing import Protocol

from ckptfix.reading.pickles.unfinished import PickleEndError

_WINDOW = 1 << 16
"""Bytes of a file that are read at a time."""


class Bytes(Protocol):
    """What the machine reads from: bytes, or a file that slices like them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int, /) -> int: ...


class PickleStream:
    """Takes the bytes of ``data`` from ``position`` on. Raises ``PickleEndError`` where there are no more.

    ``window`` are those that are at hand, all of them or so many of a file, and ``place`` is the next one of them."""

    def __init__(self, data: Bytes, path: str, position: int) -> None:
        self.path = path
        self._data, self._size = data, len(data)
        self.window, self._start, self.place = (data, 0, position) if isinstance(data, bytes) else (b"", position, 0)

    @property
    def position(self) -> int:
        """The place in the data of the next byte."""
        return self._start + self.place

    def refill(self) -> None:
        """Go on to the next bytes of a file, those at hand being used up."""
        self._start, self.place = self.position, 0
        self.window = self._data[self._start : self._start + _WINDOW]
        if not self.window:
            raise PickleEndError(
                f"{self.path}: the pickle ends before its STOP; the file is cut short: fetch it again", self._start
            )

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes of the stream."""
        place, start = self.place, self.position
        if 0 <= count <= len(self.window) - place:
            self.place = place + count
            return self.window[place : place + count]
        if count < 0 or count > self._size - start:
            raise PickleEndError(
                f"{self.path}: {count} bytes are claimed at offset {start}, {self._size - start} are there; the "
                "file is cut short or damaged: fetch it again",
                start,
            )
        self.window, self._start, self.place = b"", start + count, 0
        return self._data[start : start + count]

    def byte(self) -> int:
        """The next byte, as a number."""
        return self.take(1)[0]

    def unsigned(self, width: int) -> int:
        """The next little-endian unsigned integer of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """The bytes up to the next newline."""
        end = self.window.find(b"\n", self.place)
        if end >= 0:
            return self.take(end + 1 - self.place)[:-1]
        end = self._data.find(b"\n", self.position)
        if end < 0:
            raise PickleEndError(
                f"{self.path}: a line of the pickle does not end; the file is cut short: fetch it again", self.position
            )
        return self.take(end + 1 - self.position)[:-1]
