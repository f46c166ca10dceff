"""Where a zoo is: a folder of this machine, or an fsspec URL."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.bytes.transfers import AbsentError, PlaceError
from ckptfix.errors import UsageError
from ckptfix.zoo.patterns import literal
from ckptfix.zoo.places.local import SCHEMES, LocalPlace
from ckptfix.zoo.places.place import Entry, Place
from ckptfix.zoo.places.remote import RemotePlace

__all__ = ["AbsentError", "Entry", "Place", "PlaceError", "open_place", "split_source", "walk_if_there"]

WILD = frozenset("*?[")


def open_place(text: str) -> Place:
    """Return the place of a name: a local folder, or any URL of fsspec (``s3://bucket/zoo``, ``hf://org/model``).

    Raises ``UsageError`` if the package for such a URL is missing, and says which extra brings it. Listing it shows
    whether it exists."""
    if not text:
        raise UsageError("a place without a name; name a folder or a URL")
    if is_local(text):
        return LocalPlace(text.rstrip("/") or "/")
    place = RemotePlace(text.rstrip("/") if not text.endswith("://") else text)
    place.reach()
    return place


def is_local(text: str) -> bool:
    """Whether a name is a folder of this machine."""
    return "://" not in text or text.startswith(SCHEMES)


def walk_if_there(place: Place) -> Iterator[Entry]:
    """Yield all files of a place that may not exist yet: an object store has no empty folders."""
    try:
        yield from place.walk()
    except AbsentError:
        return


def split_source(text: str) -> tuple[str, str | None]:
    """Return the place that a source names, and the pattern of the files meant in it; None for all.

    A source is a folder, a single file, or a glob (``old/**/*.pth``, ``s3://bucket/zoo/*.pt``), whose folders up to the
    first wildcard are the place. A local file of exactly that name comes before any glob."""
    if is_local(text):
        path = LocalPlace(text).root
        if path.is_dir():
            return text, None
        if path.exists():
            return str(path.parent), f"/{literal(path.name)}"
    scheme, found, rest = text.rpartition("://")
    parts = rest.split("/")
    fixed = next((index for index, part in enumerate(parts) if WILD & set(part)), None)
    if fixed is not None:
        place = "/".join(parts[:fixed]) or ("/" if rest.startswith("/") else "" if found else ".")
        return scheme + found + place, "/" + "/".join(parts[fixed:])
    if is_local(text):
        raise AbsentError(f"{text}: is not there; name a folder, a file, a glob or a URL")
    parent, _, name = rest.rstrip("/").rpartition("/")
    if parent and open_place(f"{scheme}{found}{parent}").entry(name) is not None:
        return f"{scheme}{found}{parent}", f"/{literal(name)}"
    return text, None
