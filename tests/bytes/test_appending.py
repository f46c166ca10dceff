"""What is appended through the window is in the file as if it had been written to it."""

from __future__ import annotations

import io
import os

import pytest

from ckptfix.bytes import appending
from ckptfix.bytes.appending import EDGE, WINDOW, Appender

DATA = bytes(range(256)) * (3 * WINDOW // 256) + b"rest"


@pytest.mark.parametrize("size", [1, 4096, EDGE + 1, WINDOW, WINDOW + 7, len(DATA)])
@pytest.mark.parametrize("begin", [b"", b"header"])
def test_bytes_of_all_sizes_are_appended(begin, size, tmp_path):
    pieces = [DATA[start : start + size] for start in range(0, len(DATA), size)][:1000]
    with (tmp_path / "file").open("w+b") as file:
        file.write(begin)
        with Appender(file) as appender:
            for piece in pieces:
                appender.write(memoryview(piece))
                assert appender.tell() <= len(begin) + len(DATA)
        file.write(b"end")
    assert (tmp_path / "file").read_bytes() == begin + b"".join(pieces) + b"end"


def test_a_file_in_memory_gets_them_too():
    file = io.BytesIO()
    with Appender(file) as appender:
        appender.write(DATA)
    assert file.getvalue() == DATA


def test_a_call_that_writes_less_than_it_was_given_is_made_again(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr("os.write", lambda descriptor, block: real(descriptor, block[:1000]))
    with (tmp_path / "file").open("w+b") as file, Appender(file) as appender:
        appender.write(DATA[: EDGE + 5])
    assert (tmp_path / "file").read_bytes() == DATA[: EDGE + 5]


def test_bytes_go_where_they_are_sought(tmp_path):
    with (tmp_path / "file").open("w+b") as file, Appender(file) as appender:
        appender.write(b"....")
        appender.write(DATA)
        end = appender.tell()
        appender.seek(1)
        appender.write(b"ab")
        appender.seek(end)
        appender.write(b"end")
    assert (tmp_path / "file").read_bytes() == b".ab." + DATA + b"end"


def test_the_memory_of_windows_is_used_again_and_bounded(tmp_path):
    appending._BUFFERS.clear()
    with (tmp_path / "first").open("w+b") as file, Appender(file) as first:
        pass
    with (tmp_path / "second").open("w+b") as file, Appender(file) as second:
        assert second._window is first._window
        assert not appending._BUFFERS
    assert len(appending._BUFFERS) == 1 < (appending._BUFFERS.maxlen or 0) <= 4


def test_nothing_more_is_written_behind_an_error(tmp_path):
    def fail() -> None:
        with (tmp_path / "file").open("w+b") as file, Appender(file) as appender:
            appender.write(b"abc")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "file").read_bytes() == b""
