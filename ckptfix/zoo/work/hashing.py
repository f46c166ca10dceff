"""The sha256 of files, read once and in blocks. Reading and hashing run without Python's lock, so that a thread can do
it beside other work."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path

from ckptfix.bytes.compiled import MemoryGone, can_hash, sha256_of_two_mapped

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


def sha256_of_two(one: Path, other: Path) -> tuple[str, str]:
    """The sha256 of two files; at once where the processor can, in about the time that one of them takes."""
    if can_hash():
        try:
            return sha256_of_two_mapped(_mapped(one), _mapped(other))
        except (OSError, ValueError, MemoryGone):  # not to be mapped, empty, or cut off: reading says which
            pass
    return sha256_of_file(one), sha256_of_file(other)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb", buffering=0) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def sha256_of_files(root: Path, names: Iterable[str]) -> str:
    """One sha256 of several files below a folder: of the lines ``DIGEST  NAME`` that sha256sum prints, in the order of
    the names given.
    """
    whole = hashlib.sha256()
    for name in names:
        line = f"{sha256_of_file(root / name)}  {name}\n"
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()
