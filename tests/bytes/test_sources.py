"""Streams of ranges of files share their buffers, and none sees the bytes of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfix.bytes import sources
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import BLOCK, FileBytes, stream
from ckptfix.errors import UnreadableError

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


def test_streams_side_by_side_have_buffers_of_their_own(place: FileBytes) -> None:
    for one, other in zip(stream(place, 0, 2 * BLOCK), stream(place, 7, 2 * BLOCK + 7), strict=True):
        assert bytes(one[7:]) == bytes(other[:-7])
        assert bytes(one[:9]) != bytes(other[:9])


def test_the_next_stream_has_the_buffer_of_the_last(place: FileBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    sources._BUFFERS.clear()
    list(stream(place, 0, BLOCK))
    before = list(sources._BUFFERS)
    list(stream(place, 0, SIZE))
    assert len(before) == 1
    assert list(sources._BUFFERS) == before


def test_a_stream_that_is_let_go_gives_its_buffer_back(place: FileBytes) -> None:
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
