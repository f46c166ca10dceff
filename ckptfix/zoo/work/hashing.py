"""The sha256 of files. Reading and hashing run without Python's lock, so that a thread can do it beside other work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

BLOCK = 1 << 20


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        buffer = memoryview(bytearray(max(1, min(BLOCK, size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sha256_of_files(root: Path, names: Iterable[str]) -> str:
    """One sha256 of several files below a folder: of the lines ``DIGEST  NAME`` that sha256sum prints, in the order of
    the names given.
    """
    whole = hashlib.sha256()
    for name in names:
        line = f"{sha256_of_file(root / name)}  {name}\n"
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()
