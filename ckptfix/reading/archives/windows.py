"""A whole file inside of a larger one, read where it is."""

from __future__ import annotations

from ckptfix.bytes.files import Buffer, RangeBuffer
from ckptfix.bytes.sources import Content, WindowBytes
from ckptfix.core.spec import ByteSource


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
