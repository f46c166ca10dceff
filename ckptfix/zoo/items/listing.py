"""What is in a zoo: its checkpoints, which may be folders, and its other files.

Every file of the place ends in exactly one item, apart from shards that two indexes name. What a repository keeps for
itself (``.git``) has to keep its bytes: a checkpoint in there does not belong to the zoo."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ckptfix.zoo.items.grouping import Files, Item, Kind, indexed, numbered, unread, whole_folders
from ckptfix.zoo.items.sniffing import HEAD, Looks, by_bytes, is_surely_other
from ckptfix.zoo.patterns import compile_patterns
from ckptfix.zoo.places import Entry, Place, PlaceError

THREADS = 32
"""Requests for first bytes that are under way at once, if files are not on this machine."""

ABSENT = "is in the list of files, and not there; correct the list"

_REPOSITORY = frozenset({".git", ".hg", ".svn"})
_STORE = r"((?:.*/)?(?:models|datasets|spaces)--[^/]+)"
_SNAPSHOT = re.compile(rf"{_STORE}/snapshots/", re.DOTALL)
_BLOB = re.compile(rf"{_STORE}/blobs/[^/]+$", re.DOTALL)


def list_zoo(place: Place, patterns: Sequence[str] = (), listed: Sequence[str] | None = None) -> list[Item]:
    """Return the items of a zoo, sorted by name: all, or those that match one of ``patterns``, or those that ``listed``
    names, as files or as folders with everything in them.

    A checkpoint in several files is chosen with any of its files, and taken as a whole. A name of ``listed`` that is
    not there becomes an item with a fault."""
    entries = list(place.walk())
    caches = {match[1] for entry in entries if (match := _SNAPSHOT.match(entry.name))}
    files = Files(entries, lambda name: _is_of_repository(name) or _is_blob(name, caches))
    names = None if listed is None else [_below(place, text) for text in listed]
    chosen = _choice(patterns, names)
    items = [
        group
        for group in _groups(place, files, chosen)
        if chosen(group.name) or any(chosen(part.name) for part in group.parts)
    ]
    items += [
        _item(entry, files, _is_blob(name, caches))
        for name, entry in files.entries.items()
        if name not in files.parts and chosen(name)
    ]
    absent = dict.fromkeys(names or ())
    for entry in entries if absent else ():
        for way in _ways(entry.name):
            absent.pop(way, None)
    items += [Item(name, 0, "", Kind.FILE, fault=ABSENT) for name in absent]
    return sorted(items, key=lambda item: item.name)


def _groups(place: Place, files: Files, chosen: Callable[[str], bool]) -> Iterator[Item]:
    """Yield the checkpoints in several files. What is part of none is then looked at, as far as it matters."""

    def taken(group: Item) -> Item:
        files.parts.update(part.name for part in group.parts)
        return group

    yield from map(taken, whole_folders(place, files))
    whole = frozenset(files.parts)
    _look_at(place, files, chosen)
    for name in sorted(name for name, looks in files.looks.items() if looks is Looks.INDEX and name not in whole):
        entry = files.own[name]
        try:
            found = indexed(place, entry, files)
        except PlaceError as error:
            found = unread(entry, files, _fault(place, entry, error))
        if found is not None:
            yield taken(found)
    yield from map(taken, list(numbered(files)))


def read_list(text: str) -> list[str]:
    """Return the names in a list of files: one a line, or each followed by NUL, as ``find -print0`` writes them."""
    if "\0" in text:
        return [name for name in text.split("\0") if name]
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _is_of_repository(name: str) -> bool:
    """Whether a repository keeps the file for itself."""
    return not _REPOSITORY.isdisjoint(name.split("/")[:-1])


def _is_blob(name: str, caches: set[str]) -> bool:
    """Whether the links in ``snapshots`` of a Hugging Face cache lead to the file."""
    match = _BLOB.match(name) if caches else None
    return match is not None and match[1] in caches


def _item(entry: Entry, files: Files, is_blob: bool) -> Item:
    """The item of a file that is part of nothing else."""
    looks, kind, fault = files.looks.get(entry.name), Kind.FILE, entry.fault
    if is_blob:
        kind, fault = Kind.OTHER, "a blob of a Hugging Face cache, which snapshots/ has under its true name"
    elif entry.special or (fault is None and looks not in (Looks.CHECKPOINT, Looks.DOUBTFUL)):
        kind = Kind.OTHER
    return Item(entry.name, entry.size, entry.stamp, kind, (), fault, is_doubtful=looks is Looks.DOUBTFUL)


def _look_at(place: Place, files: Files, chosen: Callable[[str], bool]) -> None:
    """Read the first bytes of files whose names say nothing, if they are chosen, or may be part of what is chosen."""
    shards = {entry.name for sets in files.shards.values() for entries in sets.values() for entry in entries}
    unclear = [
        entry
        for name, entry in files.own.items()
        if entry.size and not (name in files.looks or name in files.parts) and (name in shards or chosen(name))
    ]
    look = partial(_look, place)
    if place.root is not None:
        found = [look(entry) for entry in unclear]
    else:
        unclear = [entry for entry in unclear if not is_surely_other(entry.name)]
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(look, unclear))
    for entry, looks in zip(unclear, found, strict=True):
        if isinstance(looks, Looks):
            files.looks[entry.name] = looks
        else:
            files.entries[entry.name] = Entry(entry.name, entry.size, entry.stamp, looks)


def _look(place: Place, entry: Entry) -> Looks | str:
    try:
        return by_bytes(entry.name, place.head(entry.name, min(HEAD, entry.size)))
    except PlaceError as error:
        return _fault(place, entry, error)


def _fault(place: Place, entry: Entry, error: PlaceError) -> str:
    return str(error).removeprefix(f"{place.where(entry.name)}: ")


def _choice(patterns: Sequence[str], names: Sequence[str] | None) -> Callable[[str], bool]:
    """Return what decides whether a name is chosen, by the patterns and by the list."""
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
