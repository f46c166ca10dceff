"""A place behind an fsspec URL: an object store, the Hugging Face hub, a server, a file system in memory.

Every transfer is verified by a second look: the size, and that the version is still the one from before. Object stores
show an upload when it is complete. Elsewhere it goes under a temporary name first and is moved."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.bytes.remote import file_system, read_range, stamp_of
from ckptfix.bytes.transfers import PlaceError, TransferError, persistently
from ckptfix.zoo.places.local import TEMPORARY, require_space, temporary_beside, temporary_name
from ckptfix.zoo.places.place import Entry, changed, deny

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

ATOMIC = frozenset("s3 s3a gs gcs abfs abfss az adl hf oci oss".split())
"""The schemes that show an upload, in one piece or in many, only when it is complete."""

FETCHING: dict[str, dict[str, Any]] = {
    "s3": {"max_concurrency": 1},
    "s3a": {"max_concurrency": 1},
    "hf": {"block_size": 0},
}
SENDING: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": 2}, "s3a": {"max_concurrency": 2}}
"""How a file is transferred. s3fs holds each of its 50 MB parts in memory, ten at a time; here several files are under
way at once, and memory is counted. One at a time is fetched as a stream. So is what comes from the hub, which would
otherwise get, and count, a request for every 5 MB."""


@dataclass(frozen=True)
class RemotePlace:
    """A place behind a URL. Keys and endpoints come from where the backend looks for them: its environment variables
    and files, and the configuration of fsspec."""

    name: str

    @property
    def root(self) -> None:
        """None: files have to be fetched."""
        return None

    @property
    def scheme(self) -> str:
        """The part before ``://``."""
        return self.name.partition("://")[0]

    def reach(self) -> None:
        """Raise ``UsageError`` if no package knows such a URL; nothing is sent yet."""
        self._reached()

    def walk(self) -> Iterator[Entry]:
        """Yield all files below the URL, sorted by name."""
        system, base = self._reached()

        def listed() -> dict[str, Any]:
            found: dict[str, Any] = system.find(base, detail=True)
            if not found:
                system.info(base)  # raises where the bucket or folder itself is not there
            return found

        found = persistently(listed, self.name, "listed")
        system.invalidate_cache()  # what it remembers of a listing of a million files is as large as the listing
        prefix = f"{base}/" if base else ""
        for path in sorted(found):
            name = path.removeprefix(prefix)
            if path.endswith("/") or TEMPORARY.fullmatch(name.rpartition("/")[2]):  # a/ marks a folder
                continue
            # The pages that a web server makes of its folders do not say how large a file is.
            entry = _entry(name, found[path]) if found[path].get("size") is not None else self.entry(name)
            if entry is not None:
                yield entry

    def entry(self, name: str) -> Entry | None:
        """Return the file of a name; None if there is none."""
        return persistently(lambda: self._look(name), self.where(name), "looked at")

    def head(self, name: str, count: int) -> bytes:
        """Return the first bytes of a file, in one request; in two if there are fewer than asked for."""
        system, path = self._reached(name)

        def read() -> bytes:
            raw = read_range(system, path, 0, count)
            if len(raw) < count and len(raw) < deny(self._look(name), self.where(name)).size:
                raise TransferError(f"{self.where(name)}: {len(raw)} of {count} bytes came")
            return raw

        return persistently(read, self.where(name), "read")

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to a local path."""
        from fsspec.callbacks import Callback

        system, path = self._reached(name)

        def fetched() -> None:
            before = known or deny(self._look(name), self.where(name))
            require_space(to, before.size, self.where(name))
            with temporary_beside(to) as temporary:
                came = Callback()
                system.get_file(path, str(temporary), callback=came, **FETCHING.get(self.scheme, {}))
                after, size = self._look(name), temporary.stat().st_size
                if after != before:
                    raise changed(self.where(name)) if known else TransferError(f"{self.where(name)}: it changed")
                # Fetching ranges makes the file as large as it has to be first, and a short transfer leaves a hole.
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
        """Return the URL of a file."""
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
            return  # as it should be

    def _look(self, name: str) -> Entry | None:
        """The file of a name as it is now, past what the backend remembers of a listing."""
        system, path = self._reached(name)
        system.invalidate_cache(path)
        try:
            info = system.info(path)
        except FileNotFoundError:
            return None
        return _entry(name, info) if info["type"] == "file" else None

    def _reached(self, name: str = "") -> tuple[AbstractFileSystem, str]:
        """The file system, and the path in it. fsspec keeps one of each kind for a process and its threads."""
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


def _entry(name: str, info: Mapping[str, Any]) -> Entry:
    return Entry(name, int(info.get("size") or 0), stamp_of(info), _leads_out(name))


def _leads_out(name: str) -> str | None:
    """Why a key cannot be the path of a file below a folder, which any text can be a key of."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in name:
        return "its name is not a path below a folder (it has empty parts, dots or NUL); rename it"
    if any(unicodedata.category(character) == "Cs" for character in name):
        return "its name is not valid text; rename it"
    return None
