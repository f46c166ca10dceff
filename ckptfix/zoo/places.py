"""Where a zoo is: a folder of this machine, or an fsspec URL.

A place is plain data, which a worker or another node can open again by its name. Every method raises ``PlaceError``
with a one-line cause. Transfers are retried if that may help, and verified: the size has to be right and the version
unchanged. Object stores show an upload only when it is complete; elsewhere it gets a temporary name first and is
moved."""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptfix.bytes.remote import file_system, read_range, stamp_of
from ckptfix.bytes.transfers import AbsentError, NoSpaceError, PlaceError, TransferError, explained, persistently
from ckptfix.errors import UsageError
from ckptfix.writing.atomic import flush_file, temporary_beside

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SCHEMES = ("file://", "local://")

WILD = frozenset("*?[")

# The names of files that are not complete yet. Listings leave them out.
TEMPORARY = re.compile(r"\.[^/]*\.ckptfix-tmp", re.DOTALL)
RESERVE = 1 << 20  # bytes left free on a disk: on a full one, other programs fail in obscure ways

# The schemes that show an upload, single or multipart, only when it is complete.
ATOMIC = frozenset("s3 s3a gs gcs abfs abfss az adl hf oci oss".split())

# How a file is transferred. s3fs holds ten parts of 50 MB in memory, but here several files are transferred at once and
# memory is counted; with a concurrency of 1 it fetches a stream. So does hf with a block size of 0, where the hub would
# otherwise get, and count, a request for every 5 MB.
FETCHING: dict[str, dict[str, Any]] = {
    "s3": {"max_concurrency": 1},
    "s3a": {"max_concurrency": 1},
    "hf": {"block_size": 0},
}
SENDING: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": 2}, "s3a": {"max_concurrency": 2}}


class Entry(Struct, frozen=True):
    """One file of a place, as the listing shows it."""

    name: str  # below the root, with `/` between the parts
    size: int
    stamp: str  # identifies the version of the file without reading it: mtime in ns, or an ETag
    # Why it cannot be read, if the listing shows that: a broken link, a folder without permission.
    fault: str | None = None
    # Whether it is a socket, a pipe, a device, or a link to a folder that is listed elsewhere, as `fault` says: then it
    # is not an error that the result lacks it.
    special: bool = False


class LocalPlace(Struct, frozen=True):
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

        Links are followed, but each folder is entered once: a cycle or a second link becomes an entry with a fault."""
        root = os.fspath(self.root)
        try:
            os.stat(root)  # noqa: PTH116 - a string, as below, where speed matters
        except OSError as error:
            raise explained(error, self.name, "listed") from error
        yield from _files_below(root)

    def entry(self, name: str) -> Entry | None:
        """Return the file with this name; None if it does not exist or is not a regular file."""
        try:
            status = os.stat(f"{self.root}/{name}")  # noqa: PTH116 - for speed
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise explained(error, self.where(name), "examined") from error
        return _local_entry(name, status) if stat.S_ISREG(status.st_mode) else None

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
        """Copy a file to another path, completely or not at all. Raises ``PlaceError`` if it is not ``known``."""
        before = known or _present(self.entry(name), self.where(name))
        require_space(to, before.size, self.where(name))
        _copy(self.root / name, to)
        if self.entry(name) != before:
            to.unlink(missing_ok=True)
            raise _changed(self.where(name))

    def put(self, file: Path, name: str) -> None:
        """Copy a local file here, completely or not at all, replacing the file with that name."""
        try:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explained(error, self.where(name), "written") from error
        require_space(self.root / name, file.stat().st_size, self.where(name))
        _copy(file, self.root / name)

    def remove(self, name: str) -> None:
        """Remove a file, and the folders that are empty without it. A folder stays: it is in an old manifest that does
        not list its files."""
        file = self.root / name
        if file.is_dir() and not file.is_symlink():
            return
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise explained(error, self.where(name), "removed") from error
        with suppress(OSError):  # one that is not empty
            for folder in file.parents[: name.count("/")]:
                folder.rmdir()

    def where(self, name: str) -> str:
        return str(self.root / name)


def _copy(source: Path, goal: Path) -> None:
    try:
        with temporary_beside(goal) as temporary:
            shutil.copyfile(source, temporary)
            flush_file(temporary)
            temporary.replace(goal)
    except OSError as error:
        raise explained(error, str(source), f"copied to {goal}") from error


def _local_entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, str(status.st_mtime_ns))


def _files_below(root: str) -> Iterator[Entry]:
    """Yield the files below a folder sorted by name; everything that is not a file has a fault."""
    entered: dict[tuple[int, int], str] = {}  # the name under which each folder was entered
    pending: list[tuple[str, os.DirEntry[str] | None]] = [("", None)]  # a stack; folders have no entry
    while pending:  # no recursion: a path has room for 2,000 nested folders
        name, child = pending.pop()
        if child is not None:
            if not TEMPORARY.fullmatch(child.name):
                yield _found(name, child)
            continue
        path, shown, verb = f"{root}/{name}", name[:-1] or ".", "entered"
        try:
            status = os.stat(path)  # noqa: PTH116 - as above
            key = (status.st_dev, status.st_ino)
            if (known := entered.get(key) or _place_inside(path[:-1], root)) is not None:
                yield Entry(shown, 0, "", f"a link to the folder {known}, which is listed by that name", special=True)
                continue
            entered[key], verb = shown, "listed"
            with os.scandir(path) as children:
                # A folder sorts with a slash at its end, as its files do.
                inside = [
                    (f"{name}{each.name}/", None) if _is_folder(each) else (name + each.name, each) for each in children
                ]
        except OSError as error:
            yield Entry(shown, 0, "", f"the folder cannot be {verb}: {error.strerror or error}")
        else:
            pending += sorted(inside, key=lambda pair: pair[0], reverse=True)


def _place_inside(folder: str, root: str) -> str | None:
    """Return the path below the root that a linked folder has, which is walked under that name; otherwise None."""
    if folder == root or not os.path.islink(folder):  # noqa: PTH114
        return None
    real, root = os.path.realpath(folder), os.path.realpath(root)
    return os.path.relpath(real, root) if os.path.commonpath((real, root)) == root else None


def _found(name: str, child: os.DirEntry[str]) -> Entry:
    try:
        status = child.stat()
    except OSError as error:
        what = "a broken link" if child.is_symlink() else "cannot be examined"
        return Entry(name, 0, "", f"{what}: {error.strerror or error}")
    if stat.S_ISREG(status.st_mode):
        return _local_entry(name, status)
    what = "a socket" if stat.S_ISSOCK(status.st_mode) else "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device"
    return Entry(name, 0, "", f"{what}, not a file", special=True)


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link that cannot be followed: a cycle, or no permission
        return False


class RemotePlace(Struct, frozen=True):
    """A place at a URL. Credentials and endpoints come from where the backend looks for them: its environment
    variables and files, and the configuration of fsspec."""

    name: str

    @property
    def root(self) -> None:
        """None: files have to be fetched."""
        return None

    @property
    def scheme(self) -> str:
        """The part before ``://``."""
        return self.name.partition("://")[0]

    def walk(self) -> Iterator[Entry]:
        """Yield all files below the URL, sorted by name."""
        system, base = self._reached()

        def listed() -> dict[str, Any]:
            found: dict[str, Any] = system.find(base, detail=True)
            if not found:
                system.info(base)  # raises if the bucket or folder itself does not exist
            return found

        found = persistently(listed, self.name, "listed")
        system.invalidate_cache()  # its cache is as large as the listing of a million files
        prefix = f"{base}/" if base else ""
        for path in sorted(found):
            name = path.removeprefix(prefix)
            if path.endswith("/") or TEMPORARY.fullmatch(name.rpartition("/")[2]):  # a/ marks a folder
                continue
            # Folder listings of web servers do not give the sizes of files.
            entry = _remote_entry(name, found[path]) if found[path].get("size") is not None else self.entry(name)
            if entry is not None:
                yield entry

    def entry(self, name: str) -> Entry | None:
        """Return the file with this name; None if it does not exist."""
        return persistently(lambda: self._look(name), self.where(name), "examined")

    def head(self, name: str, count: int) -> bytes:
        """Return the first bytes of a file with one request, or two if the file is shorter."""
        system, path = self._reached(name)

        def read() -> bytes:
            raw = read_range(system, path, 0, count)
            if len(raw) < count and len(raw) < _present(self._look(name), self.where(name)).size:
                raise TransferError(f"{self.where(name)}: {len(raw)} of {count} bytes came")
            return raw

        return persistently(read, self.where(name), "read")

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to a local path, completely or not at all. Raises ``PlaceError`` if it is not ``known``."""
        from fsspec.callbacks import Callback

        system, path = self._reached(name)

        def fetched() -> None:
            before = known or _present(self._look(name), self.where(name))
            require_space(to, before.size, self.where(name))
            with temporary_beside(to) as temporary:
                came = Callback()
                system.get_file(path, str(temporary), callback=came, **FETCHING.get(self.scheme, {}))
                after, size = self._look(name), temporary.stat().st_size
                if after != before:
                    raise _changed(self.where(name)) if known else TransferError(f"{self.where(name)}: it changed")
                # Fetching by ranges extends the file to its full size first, so a short transfer leaves a hole.
                if size != before.size or 0 < came.value < size:
                    raise TransferError(f"{self.where(name)}: {came.value or size} of {before.size} bytes came")
                temporary.replace(to)

        persistently(fetched, self.where(name), "fetched")

    def put(self, file: Path, name: str) -> None:
        """Copy a local file here."""
        system, path = self._reached(name)
        size = file.stat().st_size

        def sent() -> None:
            self._send(system, file, path)
            there = self._look(name)
            if there is None or there.size != size:
                self._discard(system, path)
                raise TransferError(f"{self.where(name)}: {there.size if there else 0} of {size} bytes arrived")

        persistently(sent, self.where(name), "written")

    def remove(self, name: str) -> None:
        """Remove a file."""
        system, path = self._reached(name)
        persistently(lambda: self._discard(system, path), self.where(name), "removed")

    def where(self, name: str) -> str:
        return f"{self.name.rstrip('/')}/{name}"

    def _send(self, system: AbstractFileSystem, file: Path, path: str) -> None:
        if self.scheme in ATOMIC:
            system.put_file(str(file), path, **SENDING.get(self.scheme, {}))
            return
        folder = path.rpartition("/")[0]
        if folder:
            system.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/{temporary_name()}" if folder else temporary_name()
        try:
            system.put_file(str(file), temporary)
            size = system.info(temporary)["size"]
            if size != file.stat().st_size:
                raise TransferError(f"{self.name}: {size} of {file.stat().st_size} bytes of {path} arrived")
            system.mv(temporary, path)
        finally:
            self._discard(system, temporary)

    def _discard(self, system: AbstractFileSystem, path: str) -> None:
        try:
            system.rm_file(path)
        except FileNotFoundError:
            return

    def _look(self, name: str) -> Entry | None:
        """Return the file with this name as it is now, bypassing the backend's cache."""
        system, path = self._reached(name)
        system.invalidate_cache(path)
        try:
            info = system.info(path)
        except FileNotFoundError:
            return None
        return _remote_entry(name, info) if info["type"] == "file" else None

    def _reached(self, name: str = "") -> tuple[AbstractFileSystem, str]:
        """Return the file system, which fsspec caches per process, and the path in it."""
        system, base = file_system(self.name)
        if not name:
            return system, base
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise PlaceError(
                f"{self.where(name)}: the name is not valid text, and {self.scheme}:// cannot keep it; rename it"
            ) from error
        return system, f"{base}/{name}" if base else name


def _remote_entry(name: str, info: Mapping[str, Any]) -> Entry:
    return Entry(name, int(info.get("size") or 0), stamp_of(info), _leads_out(name))


def _leads_out(name: str) -> str | None:
    """Return why a key, which may be any text, cannot be the path of a file below a folder; None if it can."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in name:
        return "its name is not a path below a folder (it has empty parts, dots or NUL); rename it"
    if any(unicodedata.category(character) == "Cs" for character in name):
        return "its name is not valid text; rename it"
    return None


Place = LocalPlace | RemotePlace


def open_place(text: str) -> Place:
    """Return the place with this name: a local folder, or a URL of fsspec (``s3://bucket/zoo``, ``hf://org/model``).

    Raises ``UsageError`` with the extra to install if the package for such a URL is missing. Does not check whether the
    place exists."""
    if not text:
        raise UsageError("the name is empty; give a folder or a URL")
    if is_local(text):
        return LocalPlace(text.rstrip("/") or "/")
    place = RemotePlace(text.rstrip("/") if not text.endswith("://") else text)
    file_system(place.name)  # raises if no package knows such a URL; nothing is sent yet
    return place


def is_local(text: str) -> bool:
    """Return whether a name is a local path."""
    return "://" not in text or text.startswith(SCHEMES)


def walk_if_there(place: Place) -> Iterator[Entry]:
    """Yield all files of a place that may not exist yet."""
    try:
        yield from place.walk()
    except AbsentError:
        return


def split_source(text: str) -> tuple[str, str | None]:
    """Return the place that a source names, and the pattern of the chosen files in it, None for all.

    A source is a folder, a single file, or a glob (``old/**/*.pth``, ``s3://bucket/zoo/*.pt``), whose folders before
    the first wildcard are the place. An existing local file with that name takes precedence over a glob."""
    if is_local(text):
        path = LocalPlace(text).root
        if path.is_dir():
            return text, None
        if path.exists():
            return str(path.parent), f"/{glob.escape(path.name)}"
    scheme, found, rest = text.rpartition("://")
    parts = rest.split("/")
    fixed = next((index for index, part in enumerate(parts) if WILD & set(part)), None)
    if fixed is not None:
        place = "/".join(parts[:fixed]) or ("/" if rest.startswith("/") else "" if found else ".")
        return scheme + found + place, "/" + "/".join(parts[fixed:])
    if is_local(text):
        raise AbsentError(f"{text}: does not exist; name a folder, a file, a glob or a URL")
    parent, _, name = rest.rstrip("/").rpartition("/")
    if parent and open_place(f"{scheme}{found}{parent}").entry(name) is not None:
        return f"{scheme}{found}{parent}", f"/{glob.escape(name)}"
    return text, None


def require_space(goal: Path, size: int, what: str) -> None:
    """Raise ``NoSpaceError`` if the disk of a path has less than ``size`` bytes free, plus a reserve."""
    free = shutil.disk_usage(goal.parent).free
    if size + RESERVE > free:
        raise NoSpaceError(
            f"{what}: needs {size} bytes, but {goal.parent} has only {free} free; free some space, or choose another "
            "disk"
        )


def _present(entry: Entry | None, where: str) -> Entry:
    if entry is None:
        raise AbsentError(f"{where}: does not exist, or is not a file; check the name")
    return entry


def _changed(where: str) -> PlaceError:
    return PlaceError(f"{where}: it changed since it was listed; run the same command again")


def temporary_name() -> str:
    """Return a new name without that of the file, which may already have the maximum length."""
    return f".{os.urandom(6).hex()}.ckptfix-tmp"
