"""A file that is held open: its path may go away, its bytes may not change."""

from __future__ import annotations

import os

import pytest

from ckptfix.bytes.files import OpenFile
from ckptfix.errors import UnreadableError


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    return OpenFile(str(tmp_path / "f"))


def test_a_file_that_is_renamed_removed_or_read_is_unchanged(file, tmp_path):
    file.refuse_changed()
    (tmp_path / "f").rename(tmp_path / "g")
    file.refuse_changed()
    (tmp_path / "g").chmod(0o400)
    (tmp_path / "g").unlink()
    file.refuse_changed()
    assert file.read(2, 3) == b"234"
    file.refuse_changed()


@pytest.mark.parametrize("how", ["grown", "cut", "written over"])
def test_a_file_that_somebody_writes_to_is_refused(how, file, tmp_path):
    before = (tmp_path / "f").stat().st_mtime_ns
    if how == "written over":
        with (tmp_path / "f").open("r+b") as other:
            other.write(b"x")
        os.utime(tmp_path / "f", ns=(before + 1, before + 1))  # a clock of the system may be as coarse as 4 ms
    else:
        os.truncate(tmp_path / "f", 20 if how == "grown" else 5)
        os.utime(tmp_path / "f", ns=(before, before))
    with pytest.raises(UnreadableError, match=r"/f: changed while it was read; run the same command again$"):
        file.refuse_changed()


def test_a_file_that_ends_before_a_buffer_is_full_is_named(file):
    buffer = bytearray(4)
    file.fill(memoryview(buffer), 6)
    assert bytes(buffer) == b"6789"
    with pytest.raises(UnreadableError, match=r"/f: the file ends inside a storage: 4 bytes .* at offset 8, 2 are"):
        file.fill(memoryview(buffer), 8)
