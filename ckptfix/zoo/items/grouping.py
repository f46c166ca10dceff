"""Which files of a zoo are one checkpoint together: the folders and shards that ``reading.opening`` reads as one.

Names say most of it. If they do not, one small file is read: an index for the shards that it names, a ``data.pkl`` to
see whether torch wrote it."""

from __future__ import annotations

import hashlib
import posixpath
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from ckptfix.bytes.sources import Content
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.folders.ranks import fsdp, llama, megatron, zero
from ckptfix.reading.folders.shard_index import INDEX_LIMIT, Numbering, parse_index
from ckptfix.zoo.items.sniffing import HEAD, Looks, by_name
from ckptfix.zoo.places import Entry, Place

ROOT = "."
"""The name of a folder that is the whole zoo."""

_CHUNK = re.compile(r".*\.distcp", re.DOTALL)
_METADATA = re.compile(r"\.metadata|__\d{1,9}\.metadata")
_RANK = re.compile(r"shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors")


class Kind(str, Enum):
    """What an item of a zoo is."""

    FILE = "file"
    """A checkpoint in one file."""
    FOLDER = "folder"
    """A checkpoint in several files, taken as a whole."""
    OTHER = "other"
    """Not a checkpoint."""


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint of a zoo, or one other file."""

    name: str
    """Below the root. Of a FOLDER: what is to be opened, which is the folder itself (DCP, an unpacked torch file,
    shards without an index; ``.`` for the root), or the index of its shards."""
    size: int
    """Bytes of all its files."""
    stamp: str
    """Identifies its version without reading it. Of a FOLDER: a digest of its files' names, sizes and stamps."""
    kind: Kind
    parts: tuple[Entry, ...] = ()
    """The files of a FOLDER, sorted by name; empty otherwise."""
    fault: str | None = None
    """Why it cannot be read, if the listing shows that; such an item is not opened. An OTHER with a fault is a socket
    or a second way to a folder: there is nothing to copy."""
    is_doubtful: bool = False
    """A pickle or an archive that may hold anything: if the reader finds no weights in it, it is an OTHER."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its files: the one, or the parts."""
        return self.parts or (Entry(self.name, self.size, self.stamp),)


class Files:
    """The files of a zoo by name and by folder, while it is listed.

    ``is_apart`` recognises files that belong to no folder: those of a repository, and blobs of a cache."""

    def __init__(self, entries: Iterable[Entry], is_apart: Callable[[str], bool]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.own = {name: entry for name, entry in self.entries.items() if entry.fault is None and not is_apart(name)}
        self.looks = {name: looks for name in self.own if (looks := by_name(name)) is not None}
        self.parts: set[str] = set()
        """The files that are part of a group."""
        self._folders: defaultdict[str, list[Entry]] = defaultdict(list)
        self.shards: defaultdict[str, defaultdict[Numbering, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        """The numbered files by folder and set."""
        for name, entry in self.own.items():
            folder = name.rpartition("/")[0]
            self._folders[folder].append(entry)
            if (numbering := Numbering.of(_last(name))) is not None:
                self.shards[folder][numbering].append(entry)
        self._names = sorted(self.own)

    def folders(self) -> list[str]:
        """The folders that have files, in order."""
        return sorted(self._folders)

    def named(self, folder: str, pattern: re.Pattern[str]) -> list[Entry]:
        """The files of a folder whose own names match."""
        return [entry for entry in self._folders[folder] if pattern.fullmatch(_last(entry.name))]

    def has_folder(self, folder: str) -> bool:
        """Whether a folder has files."""
        return folder in self._folders

    def has_parts(self, folder: str) -> bool:
        """Whether some files of a folder are already part of a group."""
        return any(entry.name in self.parts for entry in self._folders[folder])

    def below(self, folder: str) -> list[Entry]:
        """The files of a folder and of all folders in it."""
        first, end = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")  # "0" comes next after "/"
        return [self.own[name] for name in self._names[bisect_left(self._names, first) : bisect_left(self._names, end)]]


def whole_folders(place: Place, files: Files) -> Iterator[Item]:
    """The folders that are one checkpoint by the names in them: of torch.distributed.checkpoint, unpacked torch files,
    and the shards of ranks.
    """
    for folder in files.folders():
        parts = (
            _distributed(place, folder, files)
            or _unpacked(place, folder, files)
            or files.named(folder, _RANK)
            or _ranks(place, folder, files)
        )
        if parts:
            yield _group(folder or ROOT, parts)
    for folder in sorted({folder.rpartition("/")[0] for folder in files.folders() if _is_megatron(folder)}):
        parts = [entry for entry in files.below(folder) if _is_megatron(entry.name.rpartition("/")[0])]
        if len({entry.name.rpartition("/")[0] for entry in parts}) > 1:
            yield _group(folder or ROOT, parts)


def _distributed(place: Place, folder: str, files: Files) -> list[Entry]:
    chunks, described = files.named(folder, _CHUNK), files.named(folder, _METADATA)
    if not chunks and not any(b"torch.distributed" in _head(place, entry) for entry in described):
        return []
    return chunks + described


def _ranks(place: Place, folder: str, files: Files) -> list[Entry]:
    """Return the files of a folder in which the ranks of a training saved a part each."""
    if optim := files.named(folder, zero.OPTIM):
        return optim + files.named(folder, zero.MODEL)
    if len(shards := files.named(folder, llama.FILE)) > 1:
        params = files.own.get(posixpath.join(folder, llama.PARAMS))
        return shards + ([params] if params else [])
    ranks = files.named(folder, fsdp.FILE)
    # Files are numbered by rank that hold other things: states of random numbers, logs.
    return ranks if len(ranks) > 1 and any(b"torch.distributed" in _head(place, entry) for entry in ranks) else []


def _is_megatron(folder: str) -> bool:
    return megatron.RANK.fullmatch(_last(folder)) is not None


def _unpacked(place: Place, folder: str, files: Files) -> list[Entry]:
    pickle = files.own.get(posixpath.join(folder, "data.pkl"))
    if pickle is None or b"torch" not in _head(place, pickle):
        return []
    is_unpacked = posixpath.join(folder, "version") in files.own or files.has_folder(posixpath.join(folder, "data"))
    return files.below(folder) if is_unpacked else []


def indexed(place: Place, index: Entry, files: Files) -> Item | None:
    """The index with those of its shards that are there; None if it is not an index after all."""
    folder = index.name.rpartition("/")[0]
    content = Content(place.where(index.name), place.head(index.name, min(index.size, INDEX_LIMIT)))
    try:
        named = parse_index(content).files
    except (UnreadableError, HostileError):
        return None
    sets = {numbering for name in named if (numbering := Numbering.of(name)) is not None}
    paths = (posixpath.normpath(posixpath.join(folder, name)) for name in named)  # one may lead out of the zoo
    parts = {index.name: index} | {path: files.own[path] for path in paths if path in files.own}
    parts |= {entry.name: entry for numbering in sets for entry in files.shards[folder].get(numbering, ())}
    return _group(index.name, parts.values())


def unread(index: Entry, files: Files, fault: str) -> Item:
    """An index that could not be fetched, with the numbered shards that its own name stands for: without it they would
    pass for another checkpoint.
    """
    folder, _, last = index.name.rpartition("/")
    whole = last.removesuffix(".index.json")
    sets = [
        entries for numbering, entries in files.shards[folder].items() if numbering.stem + numbering.suffix == whole
    ]
    return replace(_group(index.name, [index, *chain.from_iterable(sets)]), fault=fault)


def numbered(files: Files) -> Iterator[Item]:
    """The folders with numbered shards and no index, if opening them would give nothing else of them."""
    for folder, sets in sorted(files.shards.items()):
        # Data sets are numbered in the same way.
        named = chain.from_iterable(sets.values())
        shards = [entry for entry in named if files.looks.get(entry.name) is Looks.CHECKPOINT]
        if shards and not files.has_parts(folder):
            yield _group(folder or ROOT, shards)


def _group(name: str, entries: Iterable[Entry]) -> Item:
    parts = tuple(sorted(entries, key=lambda entry: entry.name))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.name}\0{part.size}\0{part.stamp}\n".encode("utf-8", "surrogateescape"))
    return Item(name, sum(part.size for part in parts), digest.hexdigest()[:32], Kind.FOLDER, parts)


def _head(place: Place, entry: Entry) -> bytes:
    return place.head(entry.name, min(HEAD, entry.size)) if entry.size else b""


def _last(name: str) -> str:
    return name.rpartition("/")[2]
