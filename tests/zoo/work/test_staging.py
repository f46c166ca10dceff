"""Files are put in place whole, in their order."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from ckptfix.errors import WriteError
from ckptfix.zoo.places import open_place
from ckptfix.zoo.work.staging import Staged, deliver_staged, flush, forget, make_folder, put_in_place


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
    flush(tmp_path / "file")
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
