"""A folder of this machine."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from ckptfix.zoo.places.faults import changed, deny, explained
from ckptfix.zoo.places.place import Entry
from ckptfix.zoo.places.temporary import TEMPORARY, require_space, temporary_beside

SCHEMES = ("file://", "local://")


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
        """All files below the folder, sorted by name.

        Links are followed, each folder once: to go round in a circle, or twice through one folder, ends in an entry
        with a fault."""
        root = os.fspath(self.root)
        try:
            real = os.stat(root)  # noqa: PTH116 - as fast as it goes
        except OSError as error:
            raise explained(error, self.name, "listed") from error
        yield from _Walk(root, {(real.st_dev, real.st_ino): "."}).files()

    def entry(self, name: str) -> Entry | None:
        """The file of a name; None where there is none, or no plain file."""
        try:
            status = os.stat(f"{self.root}/{name}")  # noqa: PTH116 - as above
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise explained(error, self.where(name), "looked at") from error
        return _entry(name, status) if stat.S_ISREG(status.st_mode) else None

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of a file."""
        return head_of(self.where(name), count)

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to another path."""
        before = known or deny(self.entry(name), self.where(name))
        require_space(to, before.size, self.where(name))
        _copy(self.root / name, to)
        if self.entry(name) != before:
            to.unlink(missing_ok=True)
            raise changed(self.where(name))

    def put(self, file: Path, name: str) -> None:
        """Copy a file here, and have it on the disk before its name."""
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
        """The path of a file."""
        return str(self.root / name)


def head_of(path: str, count: int) -> bytes:
    """The first bytes of a local file: one open, one read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, count)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise explained(error, path, "read") from error


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
        open_folders = [self._children("")]  # no recursion: a path has room for 2,000 folders in each other
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
        """What is in a folder by its name, that of a folder with ``/`` at its end; or the entry that it is closed."""
        try:
            with os.scandir(f"{self.root}/{folder}") as found:
                # A folder sorts as its files do, whose names go on with a slash.
                return iter(
                    sorted(((folder + child.name + "/" * _is_folder(child), child) for child in found), key=_by)
                )
        except OSError as error:
            closed = f"the folder cannot be listed: {error.strerror or error}"
            return iter([(folder, Entry(folder.rstrip("/") or ".", 0, "", closed))])

    def _enter(self, name: str, child: os.DirEntry[str]) -> Entry | None:
        """Note that a folder is entered; the entry that says why it is not."""
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
        """Where below the root a link leads: that folder is walked by its own name, now or later."""
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
        return Entry(name, 0, "", f"no file but {_special(status.st_mode)}", special=True)


_by: Callable[[tuple[str, os.DirEntry[str]]], str] = itemgetter(0)


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link that cannot be followed: in a circle, or through a closed folder
        return False


def _special(mode: int) -> str:
    for test, words in ((stat.S_ISSOCK, "a socket"), (stat.S_ISFIFO, "a pipe")):
        if test(mode):
            return words
    return "a device"
