from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptfix.bytes import mapping
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.mapping import Mapping, kept_mapped, map_file
from ckptfix.bytes.sources import FileBytes, MemoryBytes
from ckptfix.core.regions import Region
from ckptfix.core.spec import Storage


@pytest.fixture
def file(tmp_path: Path) -> OpenFile:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 40)
    return OpenFile(str(path))


def region(file: OpenFile, offset: int, start: int, stop: int, align: int = 1) -> Region:
    return Region(Storage("0", FileBytes(file, offset, 1000)), start, stop, align)


def test_a_region_is_the_range_of_its_file(file):
    storage = Mapping().storage(region(file, 300, 16, 32))
    assert storage is not None
    assert storage.tolist() == [value % 256 for value in range(316, 332)]


def test_files_are_mapped_once(file, monkeypatch):
    made, real = [], mmap.mmap

    def counted(*given: Any, **more: Any) -> mmap.mmap:
        made.append(given)
        return real(*given, **more)

    monkeypatch.setattr(mmap, "mmap", counted)
    mapping = Mapping()
    for start in range(5):
        assert mapping.storage(region(file, 0, start, start + 1)) is not None
    assert len(made) == 1


@pytest.mark.parametrize(("offset", "start", "is_fit"), [(4, 4, True), (4, 0, False), (3, 5, True), (0, 4, False)])
def test_elements_lie_where_a_multiple_of_their_size_is(file, offset, start, is_fit):
    assert (Mapping().storage(region(file, offset, start, start + 8, 8)) is not None) is is_fit


def test_what_lies_in_no_file_is_not_mapped():
    assert Mapping().storage(Region(Storage("0", MemoryBytes(b"1234")), 0, 4, 1)) is None


def test_nothing_is_not_mapped(file):
    assert Mapping().storage(region(file, 0, 8, 8)) is None


def test_what_is_not_in_the_file_any_more_is_left_to_the_reader(file):
    os.truncate(file.path, 340)
    mapping = Mapping()
    assert mapping.storage(region(file, 300, 0, 40)) is not None
    assert mapping.storage(region(file, 300, 0, 41)) is None
    os.truncate(file.path, 0)
    assert Mapping().storage(region(file, 300, 0, 40)) is None


def test_a_system_that_refuses_is_no_error(file, monkeypatch):
    def refuse(*given: object, **more: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert Mapping().storage(region(file, 0, 0, 8)) is None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was mapped so far."""
    found: list[object] = []
    real = mmap.mmap

    def noted(*given: Any, **more: Any) -> mmap.mmap:
        found.append(given)
        return real(*given, **more)

    monkeypatch.setattr(mmap, "mmap", noted)
    return found


def look_at_all(file: OpenFile) -> list[bytes]:
    source = FileBytes(file, 300, 1000)
    return [bytes(block) for start in range(0, 1000, 250) if (block := map_file(source, start, 250, 1))]


def test_each_range_is_mapped_alone_where_nobody_keeps_them(file, made):
    look_at_all(file)
    assert len(made) == 4


@pytest.mark.parametrize("access", [mmap.ACCESS_COPY, mmap.ACCESS_READ])
def test_blocks_are_those_of_a_range_that_is_mapped_alone(file, made, access):
    source, mapping = FileBytes(file, 300, 1000), Mapping(access)
    for start, nbytes, alignment in [(0, 9, 4), (1, 9, 4), (1, 9, 1), (4, 996, 8), (4, 997, 1), (1000, 1, 1)]:
        block, alone = mapping.block(source, start, nbytes, alignment), map_file(source, start, nbytes, alignment)
        assert (block and bytes(block)) == (alone and bytes(alone))
    assert [given for given in made if given[1] == 0] == [(file.descriptor, 0)]
    assert mapping.block(MemoryBytes(b"1234"), 0, 4, 1) is None


def test_a_block_is_of_the_file_that_is_kept(file, made):
    source = FileBytes(file, 300, 1000)
    with kept_mapped():
        block = Mapping(mmap.ACCESS_READ).block(source, 0, 9, 1)
        assert block is not None
        assert Mapping().storage(region(file, 0, 0, 9)) is not None
    assert len(made) == 1


def test_what_is_kept_is_mapped_once_until_the_last_one_lets_it_go(file, made):
    alone = look_at_all(file)
    made.clear()
    with kept_mapped():
        with kept_mapped():
            assert look_at_all(file) == alone
        assert Mapping().storage(region(file, 0, 0, 9)) is not None
        assert len(made) == 1
    assert look_at_all(file) == alone
    assert len(made) == 5


def test_a_range_behind_the_end_of_a_kept_file_is_none(file):
    with kept_mapped():
        os.truncate(file.path, 700)
        source = FileBytes(file, 300, 1000)
        assert map_file(source, 0, 400, 1) is not None
        assert map_file(source, 0, 401, 1) is None
        assert map_file(source, 500, 9, 1) is None


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is emptied elsewhere")
@pytest.mark.parametrize("stays", [False, True])
def test_pages_go_in_the_background_where_the_mapping_does_not_stay(stays, file, monkeypatch):
    monkeypatch.setattr(mapping, "WORTH_A_THREAD", 0)
    with kept_mapped(stays):
        block = map_file(FileBytes(file, 0, 10240), 0, 10240, 1)
        assert block is not None
        content = bytes(block)
    for thread in threading.enumerate():
        if thread.name == "ckptfix-unmapping":
            thread.join()
    assert (pages_of(file.path) > 0) is stays
    assert bytes(block) == content  # they come again


def pages_of(path: str) -> int:
    """Bytes of the pages that this process has of the mappings of a file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            inside = rest.endswith(path)
        elif inside and name == "Rss:":
            found += 1024 * int(rest.split()[0])
    return found
