"""Lists folders: each is read once for all formats that look for their names in it, and no name costs a system call.

A folder may have 100,000 files, and each of them may be opened in turn."""

import os
import time
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

_SETTLED = 2_000_000_000  # nanoseconds
_OF_MACOS = "._"  # beginning of the files with attributes that macOS writes beside each file on other file systems


class Listing(Struct, frozen=True):
    """The names in a folder, in order: of files, of subfolders, and of all else. A link counts as what it leads to.

    The ``._name`` that macOS writes beside each file on other file systems is left out."""

    files: tuple[str, ...]
    folders: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names: first the files, then the subfolders."""
        return self.files + self.folders + self.others


def list_folder(folder: Path) -> Listing:
    """Return the names in a folder. Raises ``OSError`` if it cannot be read."""
    stamp = stamp_of(folder)
    return _list(folder) if stamp is None else _known(folder, stamp)


def stamp_of(folder: Path) -> int | None:
    """Return a number that is another one after the folder has changed; None if it was changed just now: it may change
    again without a new modification time."""
    changed = folder.stat().st_mtime_ns
    return changed if time.time_ns() - changed > _SETTLED else None


@lru_cache(maxsize=4)
def _known(folder: Path, stamp: int) -> Listing:
    return _list(folder)


def _list(folder: Path) -> Listing:
    files, folders, others = list[str](), list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_OF_MACOS):
                continue
            try:
                kind = files if entry.is_file() else folders if entry.is_dir() else others
            except OSError:  # such as a link to itself
                kind = others
            kind.append(entry.name)
    return Listing(*(tuple(sorted(names)) for names in (files, folders, others)))
