"""The digests are those that sha256sum prints."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ckptfix.zoo.work.hashing import BLOCK, sha256_of_file, sha256_of_files


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
