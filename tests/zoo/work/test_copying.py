"""Digests are those that sha256sum prints, copies are equal, and a file gets its name when it is on the disk."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import stat
import sys
from pathlib import Path

import pytest

from ckptfix.errors import WriteError
from ckptfix.writing.atomic import flush_file
from ckptfix.zoo.places import open_place
from ckptfix.zoo.work.copying import (
    Staged,
    copy_file,
    deliver_staged,
    forget,
    make_folder,
    put_in_place,
    sha256_of_file,
    sha256_of_files,
)

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
    assert sha256_of_files(tmp_path, names) == hashlib.sha256(lines).hexdigest()
    assert sha256_of_files(tmp_path, names[::-1]) != sha256_of_files(tmp_path, names)
    (tmp_path / "b").rename(tmp_path / "c")
    assert sha256_of_files(tmp_path, ["a/x", "c", names[2]]) != hashlib.sha256(lines).hexdigest()


def refuse(*args: object) -> int:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def half(source: int, goal: int, count: int) -> int:
    """As a system that copies a part and then refuses."""
    if os.lseek(goal, 0, os.SEEK_CUR):
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.sendfile(goal, source, None, 1000)  # None: from where it stands


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


def test_folders_are_made_once(tmp_path):
    assert make_folder(tmp_path, tmp_path) == []
    assert make_folder(tmp_path / "a/b", tmp_path) == [tmp_path / "a/b", tmp_path / "a"]
    assert make_folder(tmp_path / "a/b", tmp_path) == []


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
