"""Which files of a zoo are one checkpoint together: the folders and shards that ``ckptfix.formats`` reads as one.

Names tell most of it. What a name leaves open is looked up in one small file: an index is read for the shards that it
names, a ``data.pkl`` for whether it is of torch."""

from __future__ import annotations

import hashlib
import posixpath
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ckptfix.errors import UnreadableError
from ckptfix.formats.raw.sources import Content
from ckptfix.formats.shards.shard_index import INDEX_LIMIT, Numbering, parse_index
from ckptfix.zoo.items.sniffing import HEAD
from ckptfix.zoo.places import Entry, Place

ROOT = "."
"""The name of a folder that is the whole zoo."""

_CHUNK = re.compile(r".*\.distcp", re.DOTALL)
_RANK_METADATA = re.compile(r"__\d{1,9}\.metadata")
_RANK_SHARD = re.compile(r"shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors")


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


class Folders:
    """The files of a zoo by their folders, each with the files in it by the last part of their names."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.files: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
        for entry in entries:
            if entry.fault is None:
                folder, _, last = entry.name.rpartition("/")
                self.files[folder][last] = entry

    def below(self, folder: str) -> Iterator[Entry]:
        """The files of a folder and of all folders in it."""
        yield from self.files.get(folder, {}).values()
        first = bisect_left(self._sorted, f"{folder}/" if folder else "")
        for name in self._sorted[first:]:
            if folder and not name.startswith(f"{folder}/"):
                return
            if name != folder:
                yield from self.files[name].values()

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.files)


def whole_folders(place: Place, folders: Folders) -> Iterator[Group]:
    """The folders that are one checkpoint by the names in them: of torch.distributed.checkpoint, unpacked torch files,
    and the shards of ranks.
    """
    for folder, files in sorted(folders.files.items()):
        parts = _distributed(place, files) or _unpacked(place, folder, folders) or _ranks(files)
        if parts:
            yield _group(folder or ROOT, parts)


def _distributed(place: Place, files: Mapping[str, Entry]) -> list[Entry]:
    chunks = [entry for last, entry in files.items() if _CHUNK.fullmatch(last)]
    described = [entry for last, entry in files.items() if last == ".metadata" or _RANK_METADATA.fullmatch(last)]
    if not chunks and not any(b"torch.distributed" in _head(place, entry) for entry in described):
        return []
    return chunks + described


def _unpacked(place: Place, folder: str, folders: Folders) -> list[Entry]:
    files, inside = folders.files[folder], f"{folder}/data" if folder else "data"
    if "data.pkl" not in files or not ("version" in files or inside in folders.files):
        return []
    return list(folders.below(folder)) if b"torch" in _head(place, files["data.pkl"]) else []


def _ranks(files: Mapping[str, Entry]) -> list[Entry]:
    return [entry for last, entry in files.items() if _RANK_SHARD.fullmatch(last)]


def indexed(place: Place, index: Entry, folders: Folders) -> Group | None:
    """The index with its shards, as far as they are there; None where it is no index after all."""
    folder = index.name.rpartition("/")[0]
    content = Content(place.where(index.name), place.head(index.name, min(index.size, INDEX_LIMIT)))
    try:
        named = parse_index(content).files
    except UnreadableError:
        return None
    sets = {Numbering.of(name) for name in named} - {None}
    siblings = [last for last in folders.files[folder] if Numbering.of(last) in sets]
    parts = {index.name: index}
    for name in (*named, *siblings):
        path = posixpath.normpath(posixpath.join(folder, name))
        home, _, last = path.rpartition("/")
        if last in folders.files.get(home, {}):  # what leads out of the zoo is in no folder of it
            parts[path] = folders.files[home][last]
    return _group(index.name, parts.values())


def unread(index: Entry, folders: Folders, fault: str) -> Group:
    """An index that could not be fetched, with the numbered shards that its own name stands for: without it they would
    pass for another checkpoint.
    """
    folder, _, last = index.name.rpartition("/")
    whole = last.removesuffix(".index.json")
    shards = [
        entry
        for name, entry in folders.files[folder].items()
        if (numbering := Numbering.of(name)) is not None and f"{numbering.stem}{numbering.suffix}" == whole
    ]
    return replace(_group(index.name, [index, *shards]), fault=fault)


def numbered(folders: Folders, taken: Collection[str], checkpoints: Collection[str]) -> Iterator[Group]:
    """The folders with numbered shards and no index, as long as nothing else in them is what opening them would give.

    ``checkpoints`` are the files that look like one: data sets are numbered in the same way."""
    for folder, files in sorted(folders.files.items()):
        shards = [entry for last, entry in files.items() if Numbering.of(last) and entry.name in checkpoints]
        if shards and not any(entry.name in taken for entry in files.values()):
            yield _group(folder or ROOT, shards)


def _group(name: str, parts: Iterable[Entry]) -> Group:
    return Group(name, tuple(sorted(parts, key=lambda entry: entry.name)))


def _head(place: Place, entry: Entry) -> bytes:
    return place.head(entry.name, min(HEAD, entry.size)) if entry.size else b""
