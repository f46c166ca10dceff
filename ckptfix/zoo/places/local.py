"""A folder of this machine."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckptfix.bytes.transfers import NoSpaceError, explained
from ckptfix.zoo.places.place import Entry, changed, deny

SCHEMES = ("file://", "local://")

SUFFIX = ".ckptfix-tmp"
TEMPORARY = re.compile(r"\.[^/]*\.ckptfix-tmp", re.DOTALL)
"""The names of files that are not complete yet. Listings leave them out."""

RESERVE = 1 << 20
"""Bytes that a disk keeps free: a full one fails the next writer, and in ways that are hard to read."""


def temporary_name() -> str:
    """Return a new name. That of the file is not in it: it may already be as long as a name may be."""
    return f".{secrets.token_hex(6)}{SUFFIX}"


@contextmanager
def temporary_beside(goal: Path) -> Iterator[Path]:
    """A path in the folder of the goal, whose file is gone at the end unless it was renamed."""
    temporary = goal.with_name(temporary_name())
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def require_space(goal: Path, size: int, what: str) -> None:
    """Raise ``NoSpaceError`` if the disk of a path has no room for so many bytes."""
    free = shutil.disk_usage(goal.parent).free
    if size + RESERVE > free:
        raise NoSpaceError(
            f"{what}: takes {size} bytes, and {goal.parent} has {free} free; make room there, or choose another disk"
        )


@dataclass(frozen=True)
class LocalPlace:
    """A local folder, by its path or as ``file://`` URL."""

    name: str

    @property
    def root(self) -> Path:
        """The folder."""
        for scheme in SCHEMES:
            if self.name.startswith(scheme):
                return Path(self.name.removeprefix(scheme))
        return Path(self.name)

    def walk(self) -> Iterator[Entry]:
        """Yield all files below the folder, sorted by name.

        Links are followed, each folder once: a circle, or a second way into a folder, becomes an entry with a fault."""
        root = os.fspath(self.root)
        try:
            real = os.stat(root)  # noqa: PTH116 - as fast as it goes
        except OSError as error:
            raise explained(error, self.name, "listed") from error
        yield from _Walk(root, {(real.st_dev, real.st_ino): "."}).files()

    def entry(self, name: str) -> Entry | None:
        """Return the file of a name; None if there is none, or it is not a regular file."""
        try:
            status = os.stat(f"{self.root}/{name}")  # noqa: PTH116 - as above
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise explained(error, self.where(name), "looked at") from error
        return _entry(name, status) if stat.S_ISREG(status.st_mode) else None

    def head(self, name: str, count: int) -> bytes:
        """Return the first bytes of a file."""
        path = self.where(name)
        try:
            descriptor = os.open(path, os.O_RDONLY)  # one open, one read
            try:
                return os.read(descriptor, count)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise explained(error, path, "read") from error

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to another path."""
        before = known or deny(self.entry(name), self.where(name))
        require_space(to, before.size, self.where(name))
        _copy(self.root / name, to)
        if self.entry(name) != before:
            to.unlink(missing_ok=True)
            raise changed(self.where(name))

    def put(self, file: Path, name: str) -> None:
        """Copy a file here, flushed to the disk before it gets its name."""
        to = self.root / name
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explained(error, self.where(name), "written") from error
        require_space(to, file.stat().st_size, self.where(name))
        _copy(file, to)

    def remove(self, name: str) -> None:
        """Remove a file."""
        try:
            (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise explained(error, self.where(name), "removed") from error

    def where(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.root / name)


def _copy(source: Path, goal: Path) -> None:
    try:
        with temporary_beside(goal) as temporary:
            shutil.copyfile(source, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(goal)
    except OSError as error:
        raise explained(error, str(source), f"copied to {goal}") from error


def _entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, str(status.st_mtime_ns))


@dataclass
class _Walk:
    """One walk: the path of its root, and each folder that it has entered, with the name under which it did."""

    root: str
    entered: dict[tuple[int, int], str] = field(default_factory=dict)

    def files(self) -> Iterator[Entry]:
        """The files below the root, in the order of their names."""
        open_folders = [self._children("")]  # no recursion: a path has room for 2,000 nested folders
        while open_folders:
            name, child = next(open_folders[-1], ("", None))
            if child is None:
                open_folders.pop()
            elif isinstance(child, Entry):
                yield child
            elif not name.endswith("/"):
                if not TEMPORARY.fullmatch(child.name):
                    yield self._file(name, child)
            elif (fault := self._enter(name, child)) is not None:
                yield fault
            else:
                open_folders.append(self._children(name))

    def _children(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str] | Entry]]:
        """What is in a folder by name, folders with ``/`` at the end; or one entry that says why there is nothing."""
        try:
            with os.scandir(f"{self.root}/{folder}") as found:
                # A folder sorts as its files do, whose names go on with a slash.
                named = ((folder + child.name + "/" * _is_folder(child), child) for child in found)
                return iter(sorted(named, key=lambda pair: pair[0]))
        except OSError as error:
            closed = f"the folder cannot be listed: {error.strerror or error}"
            return iter([(folder, Entry(folder.rstrip("/") or ".", 0, "", closed))])

    def _enter(self, name: str, child: os.DirEntry[str]) -> Entry | None:
        """Note that a folder is entered; or return the entry that says why it is not."""
        try:
            status = child.stat()
        except OSError as error:
            return Entry(name[:-1], 0, "", f"the folder cannot be entered: {error.strerror or error}")
        key = (status.st_dev, status.st_ino)
        known = self.entered.get(key) or (self._target_inside(child) if child.is_symlink() else None)
        if known is not None:
            return Entry(name[:-1], 0, "", f"a link to the folder {known}, which is listed by that name", special=True)
        self.entered[key] = name[:-1]
        return None

    def _target_inside(self, child: os.DirEntry[str]) -> str | None:
        """Where below the root a link leads: that folder is walked under its own name, now or later."""
        real, root = os.path.realpath(child.path), os.path.realpath(self.root)
        return os.path.relpath(real, root) if os.path.commonpath((real, root)) == root else None

    def _file(self, name: str, child: os.DirEntry[str]) -> Entry:
        try:
            status = child.stat()
        except OSError as error:
            what = "a link that leads nowhere" if child.is_symlink() else "cannot be looked at"
            return Entry(name, 0, "", f"{what}: {error.strerror or error}")
        if stat.S_ISREG(status.st_mode):
            return _entry(name, status)
        what = (
            "a socket" if stat.S_ISSOCK(status.st_mode) else "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device"
        )
        return Entry(name, 0, "", f"{what}, not a file", special=True)


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link that cannot be followed: in a circle, or through a closed folder
        return False
