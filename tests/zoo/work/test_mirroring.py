"""Copies bit for bit."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from ckptfix.zoo.work.mirroring import copy_file


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
