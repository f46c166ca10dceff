"""Files that are written and proven, and wait in a scratch folder to be put in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptfix.errors import WriteError
from ckptfix.zoo.places import Place


@dataclass(frozen=True)
class Staged:
    """A file of the scratch folder, and its name below the destination."""

    path: str
    name: str
    is_flushed: bool = False


def deliver_staged(staged: Iterable[Staged], destination: Place) -> None:
    """Put files in place, each of them durable before it gets its name, in their order."""
    staged = tuple(staged)
    if destination.root is None:
        for each in staged:
            destination.put(Path(each.path), each.name)
        return
    folders: set[Path] = set()
    for each in staged:
        if not each.is_flushed:
            flush(Path(each.path))
    for each in staged:
        folder = (destination.root / each.name).parent
        folders.update(made.parent for made in make_folder(folder, destination.root))
        folders.add(put_in_place(each, destination.root).parent)
    for folder in folders:
        flush(folder)


def put_in_place(staged: Staged, root: Path) -> Path:
    """Rename one file to its name below a local root. Raises ``WriteError`` where that cannot be."""
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
    """Make a folder below a root. Gives the folders that were made for it."""
    missing: list[Path] = []
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
    return missing


def flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def forget(path: Path) -> None:
    """Let go of the pages of a file that is on the disk: nobody reads a zoo again at once, and it would push out of
    memory what others need. The next file takes these pages, at a third of what it costs to get new ones.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), _opened(path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
