"""What a migration wants of the place where a zoo is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptfix.bytes.transfers import AbsentError, PlaceError


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a place, as the listing shows it."""

    name: str
    """Below the root, with ``/`` between the parts."""
    size: int
    stamp: str
    """Identifies the version of the file without reading it: mtime in ns, or an ETag."""
    fault: str | None = None
    """Why it cannot be read, if the listing shows that: a link that leads nowhere, a folder without permission."""
    special: bool = False
    """A socket, a pipe, a device, or a link to a folder that is listed elsewhere: ``fault`` says which. It is not
    missed in the result."""


class Place(Protocol):
    """A root with files below it: plain data that a worker or another node can open again by its name.

    Every method raises a ``PlaceError`` with its cause in one line. Transfers are retried if that may help.
    """

    @property
    def name(self) -> str:
        """As it was given, without a slash at the end."""

    @property
    def root(self) -> Path | None:
        """The local folder; None if files have to be fetched."""

    def walk(self) -> Iterator[Entry]:
        """Yield all files below the root, sorted by name."""

    def entry(self, name: str) -> Entry | None:
        """Return the file of a name; None if there is none."""

    def head(self, name: str, count: int) -> bytes:
        """Return the first bytes of a file, ``count`` at most."""

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to a local path, which is complete or absent afterwards.

        With ``known``, what a listing said of it, another version is an error."""

    def put(self, file: Path, name: str) -> None:
        """Copy a local file here, complete or not at all, and replace the one of that name."""

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is not an error."""

    def where(self, name: str) -> str:
        """Return what messages call a file of the place: its path or URL."""


def deny(entry: Entry | None, where: str) -> Entry:
    """Return the entry; raise ``AbsentError`` for None."""
    if entry is None:
        raise AbsentError(f"{where}: is not there, or is not a file; check the name")
    return entry


def changed(where: str) -> PlaceError:
    """Return the error that a file is no longer the one that was listed."""
    return PlaceError(f"{where}: it changed since it was listed; run the same command again")
