"""The bytes of a pickle are the same from memory and, a window at a time, from a file."""

import pytest

from ckptfix.bytes.sources import Content
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.stream import PickleEndError, PickleStream


def streams(data: bytes, monkeypatch: pytest.MonkeyPatch) -> list[PickleStream]:
    monkeypatch.setattr("ckptfix.reading.pickles.stream._WINDOW", 3)
    return [PickleStream(data, "f.pth", 1), PickleStream(Content("f.pth", data), "f.pth", 1)]


def test_bytes_numbers_and_lines_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in streams(b"-\x01\x02\x03one\n\ntwo and more\nrest", monkeypatch):
        assert (stream.byte(), stream.unsigned(2), stream.position) == (1, 0x0302, 4)
        assert (stream.line(), stream.line(), stream.line()) == (b"one", b"", b"two and more")
        assert (stream.take(0), stream.take(4), stream.position) == (b"", b"rest", 26)


@pytest.mark.parametrize("count", [5, 1 << 62, -1])
def test_reading_beyond_the_end_is_an_error(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in streams(b"-rest", monkeypatch):
        with pytest.raises(PickleEndError, match=rf"{count} bytes are claimed at offset 1, but only 4 are left"):
            stream.take(count)
        with pytest.raises(UnreadableError, match="a line of the pickle does not end"):
            stream.line()
        stream.take(4)
        with pytest.raises(PickleEndError, match="ends before its STOP"):
            stream.refill()
