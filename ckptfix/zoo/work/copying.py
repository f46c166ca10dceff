"""Copies and digests of files, and the way of a finished file from the scratch folder to its place."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptfix.bytes.copying import CHUNK
from ckptfix.core.progress import Task
from ckptfix.errors import CkptfixError, WriteError
from ckptfix.writing.atomic import flush_file
from ckptfix.zoo.places import Place


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file, in hex. It runs without Python's lock."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:  # hashlib.file_digest needs Python 3.11, and its buffer is small
        buffer = memoryview(bytearray(max(1, min(1 << 20, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sha256_of_files(root: Path, names: Iterable[str]) -> str:
    """Return one sha256 of several files below a folder: of the lines ``DIGEST  NAME`` that sha256sum prints, in the
    order of the names."""
    whole = hashlib.sha256()
    for name in names:
        whole.update(f"{sha256_of_file(root / name)}  {name}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def copy_file(source: Path, goal: Path) -> int:
    """Copy a file with its permissions and times, inside the kernel if it can, which shares the blocks if the file
    system can. Returns the number of bytes.
    """
    with source.open("rb", buffering=0) as old, goal.open("xb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        task = Task(f"copying {source}", size)
        try:
            while moved := os.copy_file_range(old.fileno(), new.fileno(), CHUNK):
                task.advance(moved)
        except (OSError, AttributeError):  # another file system, or a system without the call: copy the rest by hand
            new.seek(task.done)
            old.seek(task.done)
            shutil.copyfileobj(old, new, 1 << 20)
        written = new.tell()
    if written != size:
        raise CkptfixError(f"{source}: changed while it was read; run the same command again")
    shutil.copystat(source, goal)
    return size


@dataclass(frozen=True)
class Staged:
    """A finished file of the scratch folder, and its name below the destination."""

    path: str
    name: str
    is_flushed: bool = False


def deliver_staged(staged: Iterable[Staged], destination: Place) -> None:
    """Put files in place in their order, each of them durable before it gets its name."""
    staged = tuple(staged)
    if destination.root is None:
        for each in staged:
            destination.put(Path(each.path), each.name)
        return
    folders: set[Path] = set()
    for each in staged:
        if not each.is_flushed:
            flush_file(Path(each.path))
    for each in staged:
        folder = (destination.root / each.name).parent
        folders.update(made.parent for made in make_folder(folder, destination.root))
        folders.add(put_in_place(each, destination.root).parent)
    for folder in folders:
        flush_file(folder)


def put_in_place(staged: Staged, root: Path) -> Path:
    """Rename one file to its name below a local root. Raises ``WriteError`` if that fails."""
    file, goal = Path(staged.path), root / staged.name
    try:
        try:
            file.replace(goal)
        except FileNotFoundError:
            make_folder(goal.parent, root)
            file.replace(goal)
    except OSError as error:
        raise WriteError(f"{staged.name}: cannot be put in place: {error.strerror}; make room for it") from error
    return goal


def make_folder(folder: Path, root: Path) -> list[Path]:
    """Make a folder below a root. Returns the folders that were made for it."""
    missing: list[Path] = []
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
    return missing


def forget(path: Path) -> None:
    """Give up the cached pages of a file that is on the disk: a zoo is not read again at once, and it would displace
    what is. The next file takes these pages, at a third of the cost of new ones."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
