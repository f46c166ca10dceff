"""Streams of file ranges share their buffers, and none sees the bytes of another."""

import io
import zipfile
from pathlib import Path

import pytest

from ckptfix.bytes import sources
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import (
    BLOCK,
    Content,
    FileBytes,
    JoinedBytes,
    MemoryBytes,
    stream,
)
from ckptfix.errors import UnreadableError
from ckptfix.reading.archives.zip_recovery import list_members

SIZE = 3 * BLOCK + 5


@pytest.fixture
def place(tmp_path: Path) -> FileBytes:
    (tmp_path / "f").write_bytes(bytes(range(251)) * (SIZE // 251 + 1))
    return FileBytes(OpenFile(str(tmp_path / "f")), 0, SIZE)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, SIZE - 3])
def test_a_stream_gives_each_byte_once(place: FileBytes, count: int) -> None:
    blocks = [bytes(block) for block in stream(place, 3, 3 + count)]
    assert b"".join(blocks) == place.read(3, 3 + count)
    assert all(0 < len(block) <= BLOCK for block in blocks)


def test_parallel_streams_have_separate_buffers(place: FileBytes) -> None:
    for one, other in zip(stream(place, 0, 2 * BLOCK), stream(place, 7, 2 * BLOCK + 7), strict=True):
        assert bytes(one[7:]) == bytes(other[:-7])
        assert bytes(one[:9]) != bytes(other[:9])


def test_a_stream_reuses_the_buffer_of_an_earlier_one(place: FileBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    sources._BUFFERS.clear()
    list(stream(place, 0, BLOCK))
    before = list(sources._BUFFERS)
    list(stream(place, 0, SIZE))
    assert len(before) == 1
    assert list(sources._BUFFERS) == before


def test_an_abandoned_stream_returns_its_buffer(place: FileBytes) -> None:
    sources._BUFFERS.clear()
    begun = stream(place, 0, SIZE)
    next(begun)
    assert not sources._BUFFERS
    del begun
    assert len(sources._BUFFERS) == 1


def test_a_file_that_became_too_short_is_an_error(place: FileBytes) -> None:
    Path(place.file.path).write_bytes(b"short")
    with pytest.raises(UnreadableError, match="ends inside a storage"):
        list(stream(place, 0, SIZE))
    assert len(sources._BUFFERS) > 0


DATA = b"before|inside|behind"


@pytest.fixture
def window() -> Content:
    return Content("f", DATA).window(7, 13)


def test_slices_like_bytes(window: Content) -> None:
    assert len(window) == 6
    for start, stop in ((0, 6), (2, 4), (-2, None), (None, 99), (4, 2), (7, 9), (None, None)):
        assert window[start:stop] == b"inside"[start:stop]


def test_find_is_limited_to_the_window(window: Content) -> None:
    assert (window.find(b"de"), window.find(b"i"), window.find(b"i", 1)) == (4, 0, 3)
    assert (window.find(b"behind"), window.find(b"e|"), window.find(b"i", 1, 3)) == (-1, -1, -1)


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
    window = outer.window(start, start + len(archives[1]))
    assert [(member.name, member.place) for member in list_members(window).members] == [("a", 0)]
    place = archives[1].index(b"second")
    source = window.source(place, 6)
    assert bytes(source.read(1, 6)) == b"econd"


@pytest.mark.parametrize(
    "sizes", [(5, BLOCK, 3), (BLOCK, 2 * BLOCK), (2 * BLOCK + 2, BLOCK, 1), (1, 2, 3), (BLOCK + 2, 0, BLOCK, BLOCK - 1)]
)
def test_joined_sources_are_streamed_in_the_blocks_of_any_other(sizes: tuple[int, ...]):
    joined = JoinedBytes(tuple(MemoryBytes(bytes([number]) * size) for number, size in enumerate(sizes)))
    blocks = [bytes(block) for block in stream(joined, 2, joined.nbytes)]
    assert list(map(len, blocks[:-1])) == [BLOCK] * ((joined.nbytes - 3) // BLOCK)
    assert b"".join(blocks) == bytes(joined.read(2, joined.nbytes))
