"""What a migration wants of the place where a zoo lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptfix.zoo.places.errors import AbsentError


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a place, as the listing tells it."""

    name: str
    """Below the root, with ``/`` between the parts."""
    size: int
    stamp: str
    """What tells a changed file from an unchanged one without reading it: mtime in ns, or an ETag."""
    fault: str | None = None
    """Why it cannot be read, where the listing can tell: a link that leads nowhere, a folder that is closed."""
    special: bool = False
    """A socket, a pipe, a device, a link to a folder that is listed elsewhere: ``fault`` says which. Nobody misses
    it in the result."""


class Place(Protocol):
    """A root with files below it. It is plain data, so that a worker or another node gets it as it is; or opens it
    again by its name.

    Every method raises a ``PlaceError`` with its cause in one line. Transfers are tried again where that may help.
    """

    @property
    def name(self) -> str:
        """As it was given, without a slash at the end."""

    @property
    def root(self) -> Path | None:
        """The local folder; None where files have to be fetched."""

    def walk(self) -> Iterator[Entry]:
        """All files below the root, sorted by name."""

    def entry(self, name: str) -> Entry | None:
        """The file of a name; None where there is none."""

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of a file, ``count`` at most."""

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to a local path, where it is whole or absent.

        With ``known``, what a listing said of it, no other version is taken: one that changed since is an error."""

    def put(self, file: Path, name: str) -> None:
        """Copy a local file here, where it is whole or absent, and takes the place of one of that name."""

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""

    def where(self, name: str) -> str:
        """What messages call a file of the place: its path or URL."""


def walk_if_there(place: Place) -> Iterator[Entry]:
    """All files of a place that is perhaps not there yet: an object store has no empty folders."""
    try:
        yield from place.walk()
    except AbsentError:
        return
