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
from itertools import islice
from pathlib import Path

from ckptfix.zoo.index import BLOCK, explaining
from ckptfix.zoo.items.files import Files, Taken
from ckptfix.zoo.items.grouping import Group, indexed, numbered, unread, whole_folders
from ckptfix.zoo.items.sniffing import HEAD, Looks, by_bytes, is_surely_other
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
    """The items of a zoo, sorted by name; see ``walk_zoo``."""
    with explaining():
        return sorted(walk_zoo(place, patterns, listed), key=lambda item: item.name)


def walk_zoo(place: Place, patterns: Sequence[str] = (), listed: Sequence[str] | None = None) -> Iterator[Item]:
    """The items of a zoo, in no order: all, or those that a pattern of ``patterns`` means, or those that ``listed``
    names, as files or as folders with all that is in them.

    A checkpoint in several files is meant as soon as one of its files is, and taken whole. A name of ``listed`` that is
    not there is an item with a fault. All items are never in memory at the same time."""
    names = None if listed is None else [_below(place, text) for text in listed]
    absent = dict.fromkeys(names or ())
    chosen = _choice(patterns, names)
    stores = _Stores()
    with Files() as files:
        files.fill(_noted(place.walk(), stores, absent), stores.is_of_repository)
        for cache in stores.caches:
            files.keep_out(f"{cache}/blobs")
        for group in _groups(place, files, chosen):
            if chosen(group.name) or any(chosen(part.name) for part in group.parts):
                yield Item(group.name, group.size, group.stamp, Kind.FOLDER, group.parts, group.fault)
        for entry, looks in files.single():
            if chosen(entry.name):
                yield _item(entry, looks, stores)
    for name in absent:
        yield Item(name, 0, "", Kind.FILE, fault=ABSENT)


def _noted(entries: Iterable[Entry], stores: _Stores, absent: dict[str, None]) -> Iterator[Entry]:
    """The entries, once it is noted what they tell: which stores there are, and which names are not absent."""
    for entry in entries:
        stores.note(entry.name)
        if absent:
            for way in _ways(entry.name):
                absent.pop(way, None)
        yield entry


def _groups(place: Place, files: Files, chosen: Callable[[str], bool]) -> Iterator[Group]:
    """The checkpoints in several files. What is part of none is then seen, as far as it matters."""
    for group in whole_folders(place, files):
        files.take(group.parts, Taken.BY_FOLDER)
        yield group
    _look_at(place, files, chosen)
    for entry in files.indexes():
        if (found := _indexed(place, entry, files)) is not None:
            files.take(found.parts, Taken.BY_INDEX)
            yield found
    for group in numbered(files):
        files.take(group.parts, Taken.BY_NUMBER)
        yield group


def read_list(text: str) -> list[str]:
    """The names in a list of files: one a line, or each with a NUL behind it, as ``find -print0`` writes them."""
    if "\0" in text:
        return [name for name in text.split("\0") if name]
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


class _Stores:
    """The folders whose files are no checkpoints of their own, whatever their bytes are."""

    def __init__(self) -> None:
        self.caches: set[str] = set()

    def note(self, name: str) -> None:
        """Note what the name of a file tells of them."""
        if match := _SNAPSHOT.match(name):
            self.caches.add(match[1])

    def is_of_repository(self, name: str) -> bool:
        """Whether a file is what a repository keeps for itself."""
        return not _REPOSITORY.isdisjoint(name.split("/")[:-1])

    def is_blob(self, name: str) -> bool:
        """Whether a file is what the links in ``snapshots`` of a Hugging Face cache lead to."""
        match = _BLOB.match(name)
        return match is not None and match[1] in self.caches


def _item(entry: Entry, looks: Looks | None, stores: _Stores) -> Item:
    """The item of a file that is part of nothing else. Its fault may be why it cannot be told what it looks like."""
    kind, fault = Kind.FILE, entry.fault
    if stores.is_blob(entry.name):
        kind, fault = Kind.OTHER, "a blob of a Hugging Face cache, which snapshots/ has under its true name"
    elif entry.special or (fault is None and looks not in (Looks.CHECKPOINT, Looks.DOUBTFUL)):
        kind = Kind.OTHER
    return Item(entry.name, entry.size, entry.stamp, kind, (), fault, is_doubtful=looks is Looks.DOUBTFUL)


def _look_at(place: Place, files: Files, chosen: Callable[[str], bool]) -> None:
    """Find out what files are whose names do not tell: they are meant, or may be the part of something that is."""
    unclear = (entry for entry, is_shard in files.unclear() if is_shard or chosen(entry.name))
    look = partial(_look, place)
    if place.root is not None:
        while block := list(islice(unclear, BLOCK)):
            files.note(zip(block, map(look, block), strict=True))
        return
    unclear = (entry for entry in unclear if not is_surely_other(entry.name))
    with ThreadPoolExecutor(THREADS) as pool:
        while block := list(islice(unclear, BLOCK)):
            files.note(zip(block, pool.map(look, block), strict=True))


def _look(place: Place, entry: Entry) -> Looks | str:
    try:
        return by_bytes(entry.name, place.head(entry.name, min(HEAD, entry.size)))
    except PlaceError as error:
        return _fault(place, entry, error)


def _indexed(place: Place, entry: Entry, files: Files) -> Group | None:
    try:
        return indexed(place, entry, files)
    except PlaceError as error:
        return unread(entry, files, _fault(place, entry, error))


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


def _below(place: Place, text: str) -> str:
    """A name of a list as one below the root: lists also hold whole paths and URLs, or begin with ``./``."""
    name = text.removeprefix(f"{place.name}/")
    if place.root is not None and Path(name).is_absolute():
        name = os.path.relpath(name, place.root)
    return posixpath.normpath(name)
