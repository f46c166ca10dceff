"""Outputs are durable and in place before a line reports them."""

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfix.bytes.checksums import sha256_of_file
from ckptfix.errors import WriteError
from ckptfix.writing import atomic
from ckptfix.writing.atomic import flush_file
from ckptfix.zoo import committing
from ckptfix.zoo.committing import (
    Committer,
    copy_file,
    deliver_staged,
    forget,
    put_in_place,
    sha256_of_files,
)
from ckptfix.zoo.job import Done, Staged
from ckptfix.zoo.manifest import Journal, Outcome, Record, line_of
from ckptfix.zoo.places import open_place


def done(folder: Path, number: int, output: str | None = None, **more: Any) -> Done:
    name = output or f"deep/{number}.pth"
    file = folder / "scratch" / f"{number}.draft"
    file.write_bytes(b"%d" % number)
    record = Record(name, 1, "s", "x", Outcome.REPAIRED, output=name, output_size=1)
    return Done(number, record, line_of({"source": name, "layers": []}), (Staged(str(file), name),), **more)


@pytest.fixture
def books(tmp_path: Path) -> tuple[Journal, Journal]:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "new").mkdir()
    return Journal(tmp_path / "manifest"), Journal(tmp_path / "weights")


def commit(folder: Path, books: tuple[Journal, Journal], *finished: Done) -> list[Record]:
    written: list[Record] = []
    place = open_place(str(folder / "new"))
    with Committer(place, folder / "scratch", *books, lambda each: written.append(each.record)) as committer:
        for each in finished:
            committer.add(each)
    return written


def test_nothing_comes_of_nothing(books, tmp_path):
    assert commit(tmp_path, books) == []
    assert list((tmp_path / "new").iterdir()) == []


def test_outputs_are_in_place_and_written_down(books, tmp_path):
    written = commit(tmp_path, books, *(done(tmp_path, number) for number in range(20)))
    assert [record.source for record in written] == [f"deep/{number}.pth" for number in range(20)]
    assert (tmp_path / "new/deep/7.pth").read_bytes() == b"7"
    assert [len(list(book.lines())) for book in books] == [20, 20]
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_the_order_is_flush_rename_flush_append(has_syncfs, books, tmp_path, monkeypatch):
    told: list[str] = []

    def noting(name: str, real: Any, result: Any = None) -> Any:
        def noted(*args: Any) -> Any:
            told.append(name)
            return real(*args) if result is None else result

        return noted

    monkeypatch.setattr(committing, "flush_file_system", noting("flush all", None, has_syncfs or 0))
    monkeypatch.setattr(committing, "flush_file", noting("flush", atomic.flush_file))
    monkeypatch.setattr(committing, "put_in_place", noting("rename", put_in_place))
    monkeypatch.setattr(Journal, "append", noting("append", Journal.append))
    commit(tmp_path, books, done(tmp_path, 1))
    file, names = ([], []) if has_syncfs else (["flush"], ["flush", "flush"])  # a new folder is a name, too
    assert told == ["flush all", *file, "rename", "flush all", *names, "append", "append"]


def test_an_output_that_cannot_be_put_in_place_fails_alone(books, tmp_path):
    (tmp_path / "new/taken.pth").mkdir()
    written = commit(tmp_path, books, done(tmp_path, 1, "taken.pth"), done(tmp_path, 2))
    assert [record.outcome for record in written] == [Outcome.FAILED, Outcome.REPAIRED]
    assert "taken.pth" in str(written[0].error)
    assert written[0].output is None
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_is_known_gets_no_second_line(books, tmp_path):
    commit(tmp_path, books, Done(1, Record("a", 1, "s", "x", Outcome.FINE), is_known=True))
    assert (tmp_path / "manifest").read_bytes() == b""


def test_a_full_disk_stops_the_migration(books, tmp_path, monkeypatch):
    def full(self: Journal, entries: object) -> None:
        raise WriteError("manifest.jsonl: cannot be written: No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(WriteError, match="No space left"):
        commit(tmp_path, books, *(done(tmp_path, number) for number in range(3)))


def test_a_bug_of_ours_stops_the_migration_too(books, tmp_path, monkeypatch):
    def broken(self: Journal, entries: object) -> None:
        raise TypeError("'bytes' object is not a mapping")

    monkeypatch.setattr(Journal, "append", broken)
    with pytest.raises(TypeError, match="not a mapping"):
        commit(tmp_path, books, done(tmp_path, 1))


def test_after_an_exception_what_is_finished_is_still_written_down(books, tmp_path):
    committer = Committer(open_place(str(tmp_path / "new")), tmp_path / "scratch", *books)
    with contextlib.suppress(KeyboardInterrupt), committer:
        committer.add(done(tmp_path, 1))
        raise KeyboardInterrupt
    assert [json.loads(line)["source"] for line in (tmp_path / "manifest").open()] == ["deep/1.pth"]


BLOCK = 1 << 20


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_a_file(tmp_path: Path, size: int):
    raw = os.urandom(size)
    (tmp_path / "file").write_bytes(raw)
    assert sha256_of_file(tmp_path / "file") == hashlib.sha256(raw).hexdigest()


def test_several_files_are_one_digest_of_names_and_contents(tmp_path: Path):
    names = ["a/x", "b", os.fsdecode(b"\xe9")]
    (tmp_path / "a").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(os.fsencode(name) * 3)
    lines = b"".join(
        hashlib.sha256(os.fsencode(name) * 3).hexdigest().encode() + b"  " + os.fsencode(name) + b"\n" for name in names
    )

    def digest(names: list[str]) -> str:
        return sha256_of_files((name, tmp_path / name) for name in names)

    assert digest(names) == hashlib.sha256(lines).hexdigest()
    assert digest(names[::-1]) != digest(names)
    (tmp_path / "b").rename(tmp_path / "c")
    assert digest(["a/x", "c", names[2]]) != hashlib.sha256(lines).hexdigest()


def refuse(*args: object) -> int:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def half(source: int, goal: int, count: int) -> int:
    """As a system that copies a part and then refuses."""
    if os.lseek(goal, 0, os.SEEK_CUR):
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.sendfile(goal, source, None, 1000)  # None: from the current position


@pytest.mark.parametrize("way", [None, refuse, half], ids=["kernel", "another file system", "stops in the middle"])
@pytest.mark.parametrize("size", [0, 1, 5000, 3 << 20])
def test_every_way_gives_the_same_file(way, size, tmp_path, monkeypatch):
    if way is not None:
        monkeypatch.setattr(os, "copy_file_range", way, raising=False)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18))
    assert copy_file(source, tmp_path / "goal") == size
    assert (tmp_path / "goal").read_bytes() == source.read_bytes()
    status = (tmp_path / "goal").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, 10**18)


def test_files_get_their_names(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "new").mkdir()
    staged = [Staged(str(tmp_path / "a"), "x/y/a.pth"), Staged(str(tmp_path / "b"), "b.pth", is_flushed=True)]
    deliver_staged(staged, open_place(str(tmp_path / "new")))
    assert (tmp_path / "new/x/y/a.pth").read_bytes() == b"a"
    assert (tmp_path / "new/b.pth").read_bytes() == b"b"
    assert not (tmp_path / "a").exists()


def test_a_place_that_is_taken_by_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "taken").mkdir()
    with pytest.raises(WriteError, match="taken: cannot be put in place"):
        put_in_place(Staged(str(tmp_path / "a"), "taken"), tmp_path)
    assert (tmp_path / "a").exists()


def pages_in_memory(path) -> int:
    """How many pages of a file the system has in memory."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        count = -(-len(mapped) // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * count)()
        place = ctypes.c_char.from_buffer(mapped)
        done = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(mapped)), seen)
        del place
        assert done == 0
        return sum(each & 1 for each in seen)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says what is in memory")
def test_a_file_that_is_forgotten_is_on_the_disk_alone(tmp_path):
    (tmp_path / "file").write_bytes(b"weights" * 100_000)
    flush_file(tmp_path / "file")
    before = pages_in_memory(tmp_path / "file")
    forget(tmp_path / "file")
    if not is_in_memory(tmp_path):
        assert pages_in_memory(tmp_path / "file") < before
    assert (tmp_path / "file").read_bytes() == b"weights" * 100_000


def is_in_memory(folder) -> bool:
    """Whether a folder is on a file system whose pages are all that there is."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    mount = max((line for line in lines if folder.is_relative_to(line[1])), key=lambda line: len(line[1]))
    return mount[2] in ("tmpfs", "ramfs")


def test_what_is_gone_need_not_be_forgotten(tmp_path):
    forget(tmp_path / "none")
