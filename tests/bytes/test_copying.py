"""The bytes in the new file are the same, whichever way they are copied."""

import errno
import io
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptfix.bytes import copying
from ckptfix.bytes.copying import EDGE, PAGE, SMALL, WINDOW, Copier
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import (
    BLOCK,
    DeferredBytes,
    FileBytes,
    JoinedBytes,
    MemoryBytes,
    WindowBytes,
    located,
    ranges_of,
)
from ckptfix.bytes.threads import without_threads
from ckptfix.core.progress import Task
from ckptfix.errors import UnreadableError
from tests.reading.files import opened, saved, write

DATA = bytes(torch.randint(0, 256, (3 * BLOCK + 77,), dtype=torch.uint8).numpy())


PATTERN = bytes(range(256)) * (3 * WINDOW // 256) + b"rest"


def fail(number: int, after: int = 0):
    """A system call that copies a few bytes in its first calls and then refuses."""
    real, turns = os.copy_file_range, [after]

    def refuse(source: int, goal: int, count: int, offset: int | None = None) -> int:
        if not turns[0]:
            raise OSError(number, os.strerror(number))
        turns[0] -= 1
        return real(source, goal, min(count, 1000), offset)

    return refuse


@pytest.fixture
def place(tmp_path) -> FileBytes:
    path = tmp_path / "source"
    path.write_bytes(b"header" + DATA)
    return FileBytes(OpenFile(str(path)), 6, len(DATA))


def copied(source, start: int, stop: int, folder: Path) -> tuple[bytes, int]:
    """Return what is in the new file between a header and an end, and how many bytes were counted."""
    path, task = folder / "copy", Task("writing", stop - start)
    with path.open("w+b") as file:
        file.write(b"header")
        with Copier(file, task) as copier:
            copier.copy(source, start, stop)
        file.write(b"end")
    content = path.read_bytes()
    assert (content[:6], content[-3:]) == (b"header", b"end")
    return content[6:-3], task.done


WAYS = {
    "by the kernel": lambda: os.copy_file_range,
    "through a buffer": lambda: fail(errno.EXDEV),
    "begun by the kernel and ended in a buffer": lambda: fail(errno.EIO, after=3),
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> Any:
    monkeypatch.setattr("os.copy_file_range", WAYS[request.param]())
    return request.param


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, len(DATA)),
        (PAGE, len(DATA) - 5),
        (BLOCK + PAGE, BLOCK + PAGE + SMALL + 1),
        (1, len(DATA) - 5),
        (5, 200_000),
        (0, 100),
        (7, 7),
    ],
)
def test_all_ways_of_copying_give_the_same_bytes(start, stop, way, place, tmp_path):
    assert copied(place, start, stop, tmp_path) == (DATA[start:stop], stop - start)


def test_the_kernel_copies_only_ranges_of_equal_alignment(place, tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr("os.copy_file_range", refuse)
    copied(place, 64, len(DATA), tmp_path)
    with pytest.raises(AssertionError, match="the kernel was asked"):
        copied(place, 2 * PAGE, len(DATA), tmp_path)


def test_writes_end_at_aligned_offsets(place, tmp_path, monkeypatch):
    ends: list[int] = []
    for name in ("copy_file_range", "write"):
        real = getattr(os, name)

        def noted(first: int, second: int, *more: int, real: Any = real) -> int:
            moved: int = real(first, second, *more)
            ends.append(os.lseek(second if more else first, 0, os.SEEK_CUR))
            return moved

        monkeypatch.setattr(f"os.{name}", noted)
    for source, start in ((place, 0), (place, 1), (MemoryBytes(DATA), 0)):
        copied(source, start, len(DATA), tmp_path)
        assert len(ends) >= len(DATA) // WINDOW
        assert {end % EDGE for end in ends[:-1]} == {0}
        ends.clear()


def test_ranges_read_back_equal_are_recorded(way, place, tmp_path):
    with (tmp_path / "copy").open("w+b") as file, Copier(file, Task("writing", 0)) as copier:
        copier.write(b"header")
        copier.copy(place, 0, len(DATA))
        copier.copy(place, 0, SMALL)
        copier.copy(WindowBytes(place, 100, len(DATA) - 100), 7, SMALL + 8)
        copier.copy(made := MemoryBytes(DATA), 0, len(DATA))
        copier.copy(joined := JoinedBytes((WindowBytes(place, 9, SMALL), place)), SMALL - 5, SMALL + 7)
    found = [(copied.source, copied.offset, copied.nbytes, copied.start) for copied in copier.copied]
    behind = 6 + len(DATA)
    assert found == [
        (place.file, 6, len(DATA), 6),
        (place.file, 6, SMALL, behind),
        (place.file, 6 + 107, SMALL + 1, behind + SMALL),
        (made, 0, len(DATA), behind + 2 * SMALL + 1),
        (joined, SMALL - 5, 12, behind + 2 * SMALL + 1 + len(DATA)),
    ]
    assert (tmp_path / "copy").read_bytes()[-12:] == DATA[9 + SMALL - 5 : 9 + SMALL] + DATA[:7]


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("wrong", [0, WINDOW - 1, WINDOW, len(DATA) - 1])
def test_ranges_read_back_different_are_not_recorded(wrong, is_made, way, place, tmp_path, monkeypatch):
    real = os.preadv

    def misread(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        if descriptor != place.file.descriptor and offset <= 6 + wrong < offset + count:
            buffers[0][6 + wrong - offset] ^= 1
        return count

    monkeypatch.setattr("os.preadv", misread)
    with (tmp_path / "copy").open("w+b") as file, Copier(file, Task("writing", 0)) as copier:
        copier.write(b"header")
        copier.copy(MemoryBytes(DATA) if is_made else place, 0, len(DATA))
        copier.write(bytes(WINDOW))  # what follows is outside the windows that contain damage
        copier.copy(place, 0, len(DATA) - 5)
    assert [(copied.nbytes, copied.start) for copied in copier.copied] == [(len(DATA) - 5, 6 + len(DATA) + WINDOW)]


def test_small_ranges_are_written_and_read_back_together(place, tmp_path, monkeypatch):
    calls: list[str] = []
    for name in ("write", "preadv"):
        real = getattr(os, name)

        def noted(descriptor: int, *more: Any, name: str = name, real: Any = real) -> int:
            if descriptor != place.file.descriptor:
                calls.append(name)
            done: int = real(descriptor, *more)
            return done

        monkeypatch.setattr(f"os.{name}", noted)
    with (tmp_path / "copy").open("w+b") as file, Copier(file, Task("writing", 0)) as copier:
        for start in range(100):
            copier.write(b"name")
            copier.copy(place, start, start + 50)
    assert calls == ["write", "preadv"]
    assert [copied.start for copied in copier.copied] == [4 + 54 * number for number in range(100)]
    assert (tmp_path / "copy").read_bytes() == b"".join(b"name" + DATA[at : at + 50] for at in range(100))


def test_a_window_with_a_wrong_byte_is_not_recorded(place, tmp_path, monkeypatch):
    real = os.preadv

    def misread(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        if descriptor != place.file.descriptor and not offset:
            buffers[0][100] ^= 1
        return count

    monkeypatch.setattr("os.preadv", misread)
    with (tmp_path / "copy").open("w+b") as file, Copier(file, Task("writing", 0)) as copier:
        copier.copy(place, 0, 90)
        copier.copy(place, 1, WINDOW)  # it continues in the next window
        copier.copy(place, 7, 77)
    assert [(copied.nbytes, copied.start) for copied in copier.copied] == [(70, 90 + WINDOW - 1)]


def test_a_file_that_cannot_be_read_back_is_written_as_well(way, place, tmp_path):
    with (tmp_path / "copy").open("wb") as file, Copier(file, Task("writing", 0)) as copier:
        copier.copy(place, 0, len(DATA))
    assert (tmp_path / "copy").read_bytes() == DATA
    assert copier.copied == []


def test_a_system_without_the_call(place, tmp_path, monkeypatch):
    monkeypatch.delattr("os.copy_file_range")
    assert copied(place, 0, len(DATA), tmp_path) == (DATA, len(DATA))


def test_bytes_that_are_not_a_range_of_a_file(tmp_path):
    assert copied(MemoryBytes(DATA), 3, 1000, tmp_path) == (DATA[3:1000], 997)


def test_a_file_in_memory_takes_them_too(place):
    file = io.BytesIO()
    with Copier(file, Task("writing", len(DATA))) as copier:
        copier.copy(place, 0, len(DATA))
    assert file.getvalue() == DATA


def test_ranges_of_ranges_are_located(place):
    window = WindowBytes(WindowBytes(place, 10, 100), 5, 20)
    late = DeferredBytes(20)
    assert located(late) is None
    late.inner = window
    found = located(late)
    assert found is not None
    assert (found.offset, found.nbytes) == (6 + 10 + 5, 20)
    assert bytes(found.read(0, 20)) == bytes(late.read(0, 20)) == DATA[15:35]
    assert located(MemoryBytes(DATA)) is None


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (3, 10), (5, 35), (20, 40), (40, 59), (7, 7)])
def test_joined_sources_are_copied(start, stop, place):
    parts = (WindowBytes(place, 10, 20), WindowBytes(place, 50, 30), WindowBytes(place, 3, 10))
    joined = JoinedBytes(parts)
    assert joined.nbytes == 60
    wanted = (DATA[10:30] + DATA[50:80] + DATA[3:13])[start:stop]
    assert bytes(joined.read(start, stop)) == wanted
    assert b"".join(each.read(0, each.nbytes) for each in ranges_of(joined, start, stop)) == wanted
    assert ranges_of(JoinedBytes((*parts, MemoryBytes(DATA))), 0, 70) == []


@pytest.mark.parametrize("start", [0, 1])
def test_a_source_that_is_cut_meanwhile_is_named(start, way, place, tmp_path):
    os.truncate(place.file.path, BLOCK)
    with pytest.raises(UnreadableError, match="source: the file ends inside a storage"):
        copied(place, start, len(DATA), tmp_path)


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_every_way_writes_the_same_file(form, tmp_path, monkeypatch):
    state_dict = {"a": torch.randn(300, 1000), "small": torch.ones(3), "part": torch.randn(50_000)[7:40_000]}
    checkpoint = opened(saved(state_dict, tmp_path))
    expected = write(checkpoint, form, tmp_path, "expected").read_bytes()
    for refused in (fail(errno.EXDEV), fail(errno.EIO, after=3)):
        monkeypatch.setattr("os.copy_file_range", refused)
        assert write(checkpoint, form, tmp_path, "again").read_bytes() == expected


@pytest.mark.parametrize("source", ["a range", "from memory"])
@pytest.mark.parametrize(("start", "stop"), [(0, len(DATA)), (1, len(DATA) - 5), (0, 100), (7, 7)])
@pytest.mark.parametrize("mode", ["wb", "w+b"])
def test_the_checksum_of_what_is_copied_is_given(mode, start, stop, source, way, place, tmp_path):
    given = place if source == "a range" else MemoryBytes(DATA)
    with (tmp_path / "copy").open(mode) as file, Copier(file, Task("writing", 0)) as copier:
        copier.write(b"header")
        assert copier.copy(given, start, stop, is_summed=True) == zlib.crc32(DATA[start:stop])
    assert (tmp_path / "copy").read_bytes() == b"header" + DATA[start:stop]


@pytest.mark.parametrize("size", [1, 4096, EDGE + 1, WINDOW, WINDOW + 7, len(PATTERN)])
@pytest.mark.parametrize("begin", [b"", b"header"])
def test_bytes_of_all_sizes_are_appended(begin, size, tmp_path):
    pieces = [PATTERN[start : start + size] for start in range(0, len(PATTERN), size)][:1000]
    with (tmp_path / "file").open("w+b") as file:
        file.write(begin)
        with Copier(file) as copier:
            for piece in pieces:
                copier.write(memoryview(piece))
                assert copier.tell() <= len(begin) + len(PATTERN)
        file.write(b"end")
    assert (tmp_path / "file").read_bytes() == begin + b"".join(pieces) + b"end"


def test_a_file_in_memory_gets_them_too():
    file = io.BytesIO()
    with Copier(file) as copier:
        copier.write(PATTERN)
    assert file.getvalue() == PATTERN


def test_a_call_that_writes_less_than_it_was_given_is_made_again(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr("os.write", lambda descriptor, block: real(descriptor, block[:1000]))
    with (tmp_path / "file").open("w+b") as file, Copier(file) as copier:
        copier.write(PATTERN[: EDGE + 5])
    assert (tmp_path / "file").read_bytes() == PATTERN[: EDGE + 5]


def test_seek_moves_the_position_of_writes(tmp_path):
    with (tmp_path / "file").open("w+b") as file, Copier(file) as copier:
        copier.write(b"....")
        copier.write(PATTERN)
        end = copier.tell()
        copier.seek(1)
        copier.write(b"ab")
        copier.seek(end)
        copier.write(b"end")
    assert (tmp_path / "file").read_bytes() == b".ab." + PATTERN + b"end"


def test_buffers_are_reused_and_bounded(tmp_path):
    copying._BUFFERS.clear()
    with (tmp_path / "first").open("w+b") as file, Copier(file) as first:
        pass
    with (tmp_path / "second").open("w+b") as file, Copier(file) as second:
        assert second._window is first._window
        assert not copying._BUFFERS
    assert len(copying._BUFFERS) == 1 < (copying._BUFFERS.maxlen or 0) <= 4


def test_nothing_is_written_after_an_error(tmp_path):
    def fail() -> None:
        with (tmp_path / "file").open("w+b") as file, Copier(file) as copier:
            copier.write(b"abc")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="macOS has none")
def test_flushing_starts_while_bytes_are_copied(place, tmp_path, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(copying, "FLUSHED", WINDOW)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    assert copied(place, 0, len(DATA), tmp_path) == (DATA, len(DATA))
    assert sizes
    assert sizes[0] < len(DATA)


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="macOS has none")
@pytest.mark.parametrize("failing", [0, 1, len(DATA) // WINDOW - 1])
def test_the_error_of_a_flush_is_raised(failing, place, tmp_path, monkeypatch):
    flushes: list[int] = []

    def flush(descriptor: int) -> None:
        flushes.append(os.fstat(descriptor).st_size)
        if len(flushes) == failing + 1:
            raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(copying, "FLUSHED", WINDOW)
    monkeypatch.setattr(os, "fdatasync", flush)
    with pytest.raises(OSError, match="broken"), without_threads():
        copied(place, 0, len(DATA), tmp_path)
    assert len(flushes) == failing + 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_blocks_are_allocated_ahead_for_a_large_file(is_refused, place, tmp_path, monkeypatch):
    if is_refused:
        monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(fallocate=lambda *_: -1))
    monkeypatch.setattr(copying, "FLUSHED", len(DATA))
    with (tmp_path / "copy").open("w+b") as file, Copier(file, Task("writing", len(DATA))) as copier:
        before = os.fstat(file.fileno())
        copier.copy(place, 0, len(DATA))
    assert before.st_size == 0
    assert (tmp_path / "copy").read_bytes() == DATA
    if before.st_blocks == 0 and not is_refused:
        pytest.skip("this file system sets none aside")
    assert (before.st_blocks * 512 >= len(DATA)) != is_refused
