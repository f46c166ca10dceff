"""Which files of a zoo are one checkpoint together: the folders and shards that ``reading.opening`` reads as one.

Names tell most of it. What a name leaves open is looked up in one small file: an index is read for the shards that it
names, a ``data.pkl`` for whether it is of torch."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckptfix.bytes.sources import Content
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.shard_index import INDEX_LIMIT, Numbering, parse_index
from ckptfix.zoo.items.files import Files, Role, whole_of
from ckptfix.zoo.items.sniffing import HEAD
from ckptfix.zoo.places import Entry, Place

ROOT = "."
"""The name of a folder that is the whole zoo."""


@dataclass(frozen=True)
class Group:
    """Files that are one checkpoint: what is to be opened, and the files, sorted by name."""

    name: str
    parts: tuple[Entry, ...]
    fault: str | None = None
    """Why it cannot be said which files are parts."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.parts)

    @property
    def stamp(self) -> str:
        """A digest that changes with each of the files."""
        digest = hashlib.sha256()
        for part in self.parts:
            line = f"{part.name}\0{part.size}\0{part.stamp}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]


def whole_folders(place: Place, files: Files) -> Iterator[Group]:
    """The folders that are one checkpoint by the names in them: of torch.distributed.checkpoint, unpacked torch files,
    and the shards of ranks.
    """
    for folder in files.folders_with_roles():
        parts = (
            _distributed(place, folder, files) or _unpacked(place, folder, files) or files.in_role(folder, Role.RANK)
        )
        if parts:
            yield _group(folder or ROOT, parts)


def _distributed(place: Place, folder: str, files: Files) -> list[Entry]:
    chunks, described = files.in_role(folder, Role.CHUNK), files.in_role(folder, Role.METADATA)
    if not chunks and not any(b"torch.distributed" in _head(place, entry) for entry in described):
        return []
    return chunks + described


def _unpacked(place: Place, folder: str, files: Files) -> list[Entry]:
    for pickle in files.in_role(folder, Role.PICKLE):
        if files.get(posixpath.join(folder, "version")) or files.has_folder(posixpath.join(folder, "data")):
            return files.below(folder) if b"torch" in _head(place, pickle) else []
    return []


def indexed(place: Place, index: Entry, files: Files) -> Group | None:
    """The index with its shards, as far as they are there; None where it is no index after all."""
    folder = index.name.rpartition("/")[0]
    content = Content(place.where(index.name), place.head(index.name, min(index.size, INDEX_LIMIT)))
    try:
        named = parse_index(content).files
    except UnreadableError:
        return None
    sets = {numbering for name in named if (numbering := Numbering.of(name)) is not None}
    parts = {index.name: index}
    for name in named:
        path = posixpath.normpath(posixpath.join(folder, name))
        if (part := files.get(path)) is not None:  # what leads out of the zoo is no file of it
            parts[path] = part
    for whole in {whole_of(numbering) for numbering in sets}:
        siblings = files.shards_of(folder, whole)
        parts |= {part.name: part for part in siblings if Numbering.of(part.name.rpartition("/")[2]) in sets}
    return _group(index.name, parts.values())


def unread(index: Entry, files: Files, fault: str) -> Group:
    """An index that could not be fetched, with the numbered shards that its own name stands for: without it they would
    pass for another checkpoint.
    """
    folder, _, last = index.name.rpartition("/")
    return replace(_group(index.name, [index, *files.shards_of(folder, last.removesuffix(".index.json"))]), fault=fault)


def numbered(files: Files) -> Iterator[Group]:
    """The folders with numbered shards and no index, where nothing else in them is what opening them would give."""
    for folder in files.folders_with_shards():
        if not files.has_parts(folder) and (shards := files.shards_in(folder)):
            yield _group(folder or ROOT, shards)


def _group(name: str, parts: Iterable[Entry]) -> Group:
    return Group(name, tuple(sorted(parts, key=lambda entry: entry.name)))


def _head(place: Place, entry: Entry) -> bytes:
    return place.head(entry.name, min(HEAD, entry.size)) if entry.size else b""
