"""A file inside of a file reads as if it were alone."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.windows import WindowBuffer, WindowContent

DATA = b"before|inside|behind"


@pytest.fixture
def window() -> WindowBuffer:
    return WindowBuffer(DATA, 7, 13)


def test_slices_like_bytes(window: WindowBuffer) -> None:
    assert len(window) == 6
    for start, stop in ((0, 6), (2, 4), (-2, None), (None, 99), (4, 2), (7, 9), (None, None)):
        assert window[start:stop] == b"inside"[start:stop]
    assert [window[index] for index in range(6)] == list(b"inside")
    with pytest.raises(IndexError, match="no byte 6 of 6"):
        window[6]


def test_finds_only_what_is_inside(window: WindowBuffer) -> None:
    assert (window.find(b"de"), window.find(b"i"), window.find(b"i", 1)) == (4, 0, 3)
    assert (window.find(b"behind"), window.find(b"e|"), window.find(b"i", 1, 3)) == (-1, -1, -1)


def test_reads_like_a_file(window: WindowBuffer) -> None:
    assert window.read(2) == b"in"
    assert window.tell() == 2
    assert window.read() == b"side"
    assert window.read() == b""
    assert window.seek(-3, io.SEEK_END) == 3
    assert window.seek(1, io.SEEK_CUR) == 4
    assert window.read(9) == b"de"
    assert (window.seek(50), window.read()) == (50, b"")
    with pytest.raises(ValueError, match="before the start"):
        window.seek(-1)


@pytest.mark.parametrize("mapped", [True, False])
def test_an_archive_between_others(tmp_path: Path, mapped: bool) -> None:
    archives = []
    for text in ("first", "second", "third"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("a", text)
        archives.append(buffer.getvalue())
    path = tmp_path / "archives"
    path.write_bytes(b"".join(archives))
    outer = Content.of_file(str(path)) if mapped else Content(str(path), path.read_bytes())
    start = len(archives[0])
    window = WindowContent(outer, start, start + len(archives[1]))
    assert zipfile.ZipFile(window.buffer).read("a") == b"second"  # type: ignore[call-overload]  # it reads, seeks and tells
    place = archives[1].index(b"second")
    source = window.source(place, 6)
    assert bytes(source.read(1, 6)) == b"econd"
