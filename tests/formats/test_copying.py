"""However the bytes get into the new file, they are the same."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from ckptfix.errors import UnreadableError
from ckptfix.formats import copying
from ckptfix.formats.copying import copy_bytes
from ckptfix.formats.sources import BLOCK, FileBytes, LateBytes, MemoryBytes, OpenFile, WindowBytes, located
from ckptfix.progress import Task, watched_by
from tests.formats.files import opened, saved, write

DATA = bytes(torch.randint(0, 256, (3 * BLOCK + 77,), dtype=torch.uint8).numpy())


class Slow:
    """What is told of slower ways."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def advanced(self, task: Task) -> None:
        pass

    def slowed(self, reason: str, nbytes: int) -> None:
        self.told.append((reason, nbytes))


def fail(number: int, after: int = 0):
    """A call of the kernel that copies a few bytes in its first turns and then refuses."""
    real, turns = os.copy_file_range, [after]

    def refuse(source: int, goal: int, count: int, offset: int | None = None) -> int:
        if not turns[0]:
            raise OSError(number, os.strerror(number))
        turns[0] -= 1
        return real(source, goal, min(count, 1000), offset)

    return refuse


def refuse_to_send(*_: object) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.fixture
def place(tmp_path) -> FileBytes:
    path = tmp_path / "source"
    path.write_bytes(b"head" + DATA)
    return FileBytes(OpenFile(str(path)), 4, len(DATA))


def copied(source, start: int, stop: int, folder: Path) -> tuple[bytes, list[tuple[str, int]], int]:
    """What is in the new file behind a header and in front of an end, what was told, and what was counted."""
    path, slow, task = folder / "copy", Slow(), Task("writing", stop - start)
    with watched_by(slow), path.open("wb") as file:
        file.write(b"header")
        copy_bytes(source, start, stop, file, task)
        file.write(b"end")
    content = path.read_bytes()
    assert (content[:6], content[-3:]) == (b"header", b"end")
    return content[6:-3], slow.told, task.done


WAYS = {
    "by the kernel": (None, None),
    "sent": (fail(errno.EXDEV), None),
    "through a buffer": (fail(errno.ENOSYS), refuse_to_send),
    "begun by the kernel and sent": (fail(errno.EINVAL, after=3), None),
    "begun by the kernel and ended in a buffer": (fail(errno.EIO, after=2), refuse_to_send),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("start", "stop"), [(0, len(DATA)), (1, len(DATA) - 5), (7, 7), (0, 100), (5, 200_000)])
def test_every_way_gives_the_same_bytes(start, stop, way, place, tmp_path, monkeypatch):
    by_kernel, sent = WAYS[way]
    if by_kernel is not None:
        monkeypatch.setattr("os.copy_file_range", by_kernel)
    if sent is not None:
        monkeypatch.setattr("os.sendfile", sent)
    content, told, counted = copied(place, start, stop, tmp_path)
    assert content == DATA[start:stop]
    assert counted == stop - start
    if by_kernel is None or stop - start <= copying.SMALL:
        assert told == []
    else:
        assert "not copied from page to page" in told[0][0]


def test_a_system_without_the_call(place, tmp_path, monkeypatch):
    monkeypatch.delattr("os.copy_file_range")
    content, told, _ = copied(place, 0, len(DATA), tmp_path)
    assert content == DATA
    assert "has no copy_file_range" in told[0][0]


def test_bytes_that_are_no_range_of_a_file_say_why(tmp_path):
    content, told, counted = copied(MemoryBytes(DATA), 3, 1000, tmp_path)
    assert (content, told, counted) == (DATA[3:1000], [("from memory", 997)], 997)


def test_a_file_in_memory_takes_them_too(place):
    file = io.BytesIO()
    copy_bytes(place, 0, len(DATA), file, Task("writing", len(DATA)))
    assert file.getvalue() == DATA


def test_ranges_of_ranges_are_located(place):
    window = WindowBytes(WindowBytes(place, 10, 100), 5, 20)
    late = LateBytes(20)
    assert located(late) is None
    late.inner = window
    found = located(late)
    assert found is not None
    assert (found.offset, found.nbytes) == (4 + 10 + 5, 20)
    assert bytes(found.read(0, 20)) == bytes(late.read(0, 20)) == DATA[15:35]
    assert located(MemoryBytes(DATA)) is None


@pytest.mark.parametrize("way", WAYS)
def test_a_source_that_is_cut_meanwhile_is_named(way, place, tmp_path, monkeypatch):
    by_kernel, sent = WAYS[way]
    if by_kernel is not None:
        monkeypatch.setattr("os.copy_file_range", by_kernel)
    if sent is not None:
        monkeypatch.setattr("os.sendfile", sent)
    os.truncate(place.file.path, BLOCK)
    with pytest.raises(UnreadableError, match="source: the file ends inside a storage"):
        copied(place, 0, len(DATA), tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_every_way_writes_the_same_file(form, way, tmp_path, monkeypatch):
    state_dict = {"a": torch.randn(300, 400), "small": torch.ones(3), "part": torch.randn(50_000)[7:40_000]}
    checkpoint = opened(saved(state_dict, tmp_path))
    expected = write(checkpoint, form, tmp_path, "expected").read_bytes()
    by_kernel, sent = WAYS[way]
    if by_kernel is not None:
        monkeypatch.setattr("os.copy_file_range", by_kernel)
    if sent is not None:
        monkeypatch.setattr("os.sendfile", sent)
    assert write(checkpoint, form, tmp_path, "again").read_bytes() == expected
