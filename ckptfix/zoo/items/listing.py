"""What is in a zoo: its checkpoints, which may be folders, and its other files.

Every file of the place ends in exactly one item, apart from shards that two indexes name. What a repository keeps for
itself (``.git``) has to keep its bytes: a checkpoint in there is none of the zoo."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from ckptfix.formats.shards.shard_index import Numbering
from ckptfix.zoo.items.grouping import Folders, Group, indexed, numbered, unread, whole_folders
from ckptfix.zoo.items.sniffing import HEAD, Looks, by_bytes, by_name, is_surely_other
from ckptfix.zoo.patterns import compile_patterns
from ckptfix.zoo.places import Entry, Place
from ckptfix.zoo.places.errors import PlaceError

THREADS = 32
"""Requests for first bytes that are under way at once, where a file is not on this machine."""

ABSENT = "is in the list of files, and not there; correct the list"

_REPOSITORY = frozenset({".git", ".hg", ".svn"})
_SNAPSHOT = re.compile(r"((?:.*/)?(?:models|datasets|spaces)--[^/]+)/snapshots/", re.DOTALL)
_BLOB = re.compile(r"((?:.*/)?(?:models|datasets|spaces)--[^/]+)/blobs/[^/]+$", re.DOTALL)


class Kind(str, Enum):
    """What an item of a zoo is."""

    FILE = "file"
    """A checkpoint in one file."""
    FOLDER = "folder"
    """A checkpoint in several files, taken whole."""
    OTHER = "other"
    """No checkpoint."""


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint of a zoo, or one other file."""

    name: str
    """Below the root. Of a FOLDER: what is to be opened, which is the folder itself (DCP, an unpacked torch file,
    shards without an index; ``.`` where that is the root), or the index of its shards."""
    size: int
    """Bytes of all its files."""
    stamp: str
    """What tells a changed item from an unchanged one without reading it. Of a FOLDER: a digest of its files' names,
    sizes and stamps."""
    kind: Kind
    parts: tuple[Entry, ...] = ()
    """Of a FOLDER: its files, sorted by name; empty otherwise."""
    fault: str | None = None
    """Why it cannot be read, where the listing can tell; such an item is not to be opened. An OTHER with a fault is
    a socket or a second way to a folder: there is nothing to copy."""
    is_doubtful: bool = False
    """A pickle or an archive that may hold anything: where the reader finds no weights in it, it is an OTHER."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its files: the one, or the parts."""
        return self.parts or (Entry(self.name, self.size, self.stamp),)


def list_zoo(place: Place, patterns: Sequence[str] = (), listed: Sequence[str] | None = None) -> list[Item]:
    """The items of a zoo, sorted by name: all, or those that a pattern of ``patterns`` means, or those that ``listed``
    names, as files or as folders with all that is in them.

    A checkpoint in several files is meant as soon as one of its files is, and taken whole. A name of ``listed`` that is
    not there is an item with a fault."""
    entries = list(place.walk())
    stores = _Stores(entries)
    folders = Folders(entry for entry in entries if not stores.hold(entry.name))
    names = None if listed is None else [_below(place, text) for text in listed]
    chosen = _choice(patterns, names)
    groups = list(whole_folders(place, folders))
    taken = {part.name for group in groups for part in group.parts}
    free = [entry for files in folders.files.values() for entry in files.values() if entry.name not in taken]
    seen = _looks(place, [entry for entry in free if _has_to_be_seen(entry, chosen)])
    for entry in free:
        if seen.get(entry.name) is Looks.INDEX and (group := _indexed(place, entry, folders)) is not None:
            groups.append(group)
            taken.update(part.name for part in group.parts)
    shards = numbered(folders, taken, {name for name, looks in seen.items() if looks is Looks.CHECKPOINT})
    for group in shards:
        groups.append(group)
        taken.update(part.name for part in group.parts)
    items = [_folder(group) for group in groups if chosen(group.name) or any(chosen(part.name) for part in group.parts)]
    single = (entry for entry in entries if entry.name not in taken and chosen(entry.name))
    items += [_item(entry, seen.get(entry.name), stores) for entry in single]
    items += [Item(name, 0, "", Kind.FILE, fault=ABSENT) for name in _absent(names, entries)]
    return sorted(items, key=lambda item: item.name)


def read_list(text: str) -> list[str]:
    """The names in a list of files: one a line, or each with a NUL behind it, as ``find -print0`` writes them."""
    if "\0" in text:
        return [name for name in text.split("\0") if name]
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


class _Stores:
    """The folders whose files are no checkpoints of their own, whatever their bytes are."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.caches = {match[1] for entry in entries if (match := _SNAPSHOT.match(entry.name))}

    def hold(self, name: str) -> bool:
        """Whether a file is in one."""
        return not _REPOSITORY.isdisjoint(name.split("/")[:-1]) or self.is_blob(name)

    def is_blob(self, name: str) -> bool:
        """Whether a file is what the links in ``snapshots`` of a Hugging Face cache lead to."""
        match = _BLOB.match(name)
        return match is not None and match[1] in self.caches


def _folder(group: Group) -> Item:
    return Item(group.name, group.size, group.stamp, Kind.FOLDER, group.parts, group.fault)


def _item(entry: Entry, seen: Looks | str | None, stores: _Stores) -> Item:
    """The item of a file that is part of nothing else. ``seen`` is what it looks like, or why that cannot be told."""
    kind, fault = Kind.FILE, entry.fault
    if stores.is_blob(entry.name):
        kind, fault = Kind.OTHER, "a blob of a Hugging Face cache, which snapshots/ has under its true name"
    elif isinstance(seen, str):
        fault = seen
    elif entry.special or (fault is None and seen not in (Looks.CHECKPOINT, Looks.DOUBTFUL)):
        kind = Kind.OTHER
    return Item(entry.name, entry.size, entry.stamp, kind, (), fault, is_doubtful=seen is Looks.DOUBTFUL)


def _has_to_be_seen(entry: Entry, chosen: Callable[[str], bool]) -> bool:
    """Whether it matters what a file is: it is meant, or may be the part of something that is."""
    return chosen(entry.name) or by_name(entry.name) is not None or Numbering.of(entry.name) is not None


def _looks(place: Place, entries: Sequence[Entry]) -> dict[str, Looks | str]:
    """What each file looks like, or why that cannot be told."""
    named = {entry.name: by_name(entry.name) for entry in entries}
    seen: dict[str, Looks | str] = {name: looks for name, looks in named.items() if looks is not None}
    unclear = [entry for entry in entries if entry.name not in seen and entry.size]
    if place.root is not None:
        return seen | {entry.name: _look(place, entry) for entry in unclear}
    unclear = [entry for entry in unclear if not is_surely_other(entry.name)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(partial(_look, place), unclear)
        return seen | {entry.name: looks for entry, looks in zip(unclear, found, strict=True)}


def _look(place: Place, entry: Entry) -> Looks | str:
    try:
        return by_bytes(entry.name, place.head(entry.name, min(HEAD, entry.size)))
    except PlaceError as error:
        return _fault(place, entry, error)


def _indexed(place: Place, entry: Entry, folders: Folders) -> Group | None:
    try:
        return indexed(place, entry, folders)
    except PlaceError as error:
        return unread(entry, folders, _fault(place, entry, error))


def _fault(place: Place, entry: Entry, error: PlaceError) -> str:
    return str(error).removeprefix(f"{place.where(entry.name)}: ")


def _choice(patterns: Sequence[str], names: Sequence[str] | None) -> Callable[[str], bool]:
    """What tells whether a name is meant by one of the patterns, and by the list."""
    matches = compile_patterns(patterns).fullmatch
    wanted = None if names is None else frozenset(names)

    def chosen(name: str) -> bool:
        if patterns and matches(name) is None:
            return False
        return wanted is None or any(folder in wanted for folder in _ways(name))

    return chosen


def _ways(name: str) -> Iterator[str]:
    """A name, and the folders that it is in."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _absent(names: Sequence[str] | None, entries: Sequence[Entry]) -> list[str]:
    if not names:
        return []
    there = {way for entry in entries for way in _ways(entry.name)}
    return [name for name in dict.fromkeys(names) if name not in there]


def _below(place: Place, text: str) -> str:
    """A name of a list as one below the root: lists also hold whole paths and URLs, or begin with ``./``."""
    name = text.removeprefix(f"{place.name}/")
    if place.root is not None and Path(name).is_absolute():
        name = os.path.relpath(name, place.root)
    return posixpath.normpath(name)
