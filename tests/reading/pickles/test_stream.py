"""The bytes of a pickle come alike from memory and, a window at a time, from a file."""

from __future__ import annotations

import pickle

import pytest

from ckptfix.errors import UnreadableError
from ckptfix.reading.archives.windows import WindowBuffer
from ckptfix.reading.pickles.stream import PickleStream
from ckptfix.reading.pickles.unfinished import PickleEndError
from tests.reading.pickles.test_common_opcodes import PICKLES, ROWS, run


def streams(data: bytes, monkeypatch: pytest.MonkeyPatch) -> list[PickleStream]:
    monkeypatch.setattr("ckptfix.reading.pickles.stream._WINDOW", 3)
    return [PickleStream(data, "f.pth", 1), PickleStream(WindowBuffer(data, 0, len(data)), "f.pth", 1)]


def test_bytes_numbers_and_lines_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in streams(b"-\x01\x02\x03one\n\ntwo and more\nrest", monkeypatch):
        assert (stream.byte(), stream.unsigned(2), stream.position) == (1, 0x0302, 4)
        assert (stream.line(), stream.line(), stream.line()) == (b"one", b"", b"two and more")
        assert (stream.take(0), stream.take(4), stream.position) == (b"", b"rest", 26)


@pytest.mark.parametrize("count", [5, 1 << 62, -1])
def test_what_is_not_there_is_not_taken(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in streams(b"-rest", monkeypatch):
        with pytest.raises(PickleEndError, match=rf"{count} bytes are claimed at offset 1, 4 are there"):
            stream.take(count)
        with pytest.raises(UnreadableError, match="a line of the pickle does not end"):
            stream.line()
        stream.take(4)
        with pytest.raises(PickleEndError, match="ends before its STOP"):
            stream.refill()


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_file_that_is_read_in_parts_is_the_same_pickle(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.reading.pickles.stream._WINDOW", size)
    protocols = {f"protocol {protocol}": pickle.dumps(["a\nb", 1.5, -1, None, ROWS], protocol) for protocol in range(6)}
    for name, data in {**PICKLES, **protocols}.items():
        for whole in (data, data[:-1], data[: len(data) // 2], data[:-1] + b"\xff"):
            assert run(WindowBuffer(b"in front" + whole + b"behind", 8, 8 + len(whole))) == run(whole), (
                name,
                len(whole),
            )
