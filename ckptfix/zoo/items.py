"""Lists a zoo: its checkpoints, which may be folders, and its other files.

Every file of the place is part of exactly one item, except shards that two indexes name. Files inside a repository
(``.git``) are copied unchanged, even checkpoints.

A file named like a checkpoint counts as one: a ``.pth`` that turns out to be an error page is an unreadable checkpoint
and is not copied as another file. Other files are recognised by their first bytes. Names mostly show which files form
one checkpoint; otherwise one small file is read."""

import hashlib
import os
import posixpath
import re
import shutil
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path, PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes import decoders
from ckptfix.bytes.sources import Content
from ckptfix.bytes.transfers import PlaceError
from ckptfix.errors import HostileError, UnreadableError, WeightlessError
from ckptfix.reading.archives import tar_members, unpacking
from ckptfix.reading.archives.wrapped import looks_like_checkpoint
from ckptfix.reading.folders.rank_shards import BESIDE_CHUNKS, OF_VERL, OPTIMIZERS, may_be_rank
from ckptfix.reading.folders.ranks.names import (
    NANOTRON_METADATA,
    NANOTRON_MODEL,
    NANOTRON_PART,
    NUMBERED,
    POINTERS,
    RANK_NAMES,
    RankNames,
)
from ckptfix.reading.folders.ranks.rank_sets import RankSet, sets_of_models
from ckptfix.reading.folders.shard_index import INDEX_LIMIT, WEIGHT_MAP, Numbering, parse_index
from ckptfix.reading.opening import MODELS, OF_TRAINERS
from ckptfix.reading.torch_files.torch_legacy import MAGIC
from ckptfix.zoo.naming import compile_patterns
from ckptfix.zoo.places import Entry, Place

HEAD = 4096  # bytes read from a file: what identifies it comes first
EXPANDED = 1 << 16  # the most bytes that the head of a compressed file is expanded to
_DEPTH = 3
_DECODERS: dict[str, decoders.Decoder] = {"gzip": partial(zlib.decompressobj, zlib.MAX_WBITS | 16), "xz": decoders.xz}

_CLAIMS = re.compile(
    r".*\.(pth|pt|ckpt|safetensors|th|pyth|t7|distcp)(\.(tar|t?gz|bz2|xz|zip|zst))*"
    r"|((.*_)?pytorch_model|adapter_model|model|consolidated)([-._].*)?\.bin",
    re.IGNORECASE | re.DOTALL,
)
_OTHERWISE = re.compile(
    r".*\.(json|jsonl|ya?ml|toml|ini|cfg|txt|md|rst|csv|tsv|log|html?|css|js|py|pyc|ipynb|sh|c|cpp|h|cu|so|dll|exe|jar|whl|egg"
    r"|npz|npy|docx|xlsx|pptx|pdf|png|jpe?g|gif|bmp|svg|webp|mp3|mp4|wav|flac|avi|webm|onnx|h5|hdf5|gguf|ggml|tflite|pb"
    r"|lock|gitattributes|gitignore|DS_Store)",
    re.IGNORECASE | re.DOTALL,
)
_OF_TORCH = re.compile(
    rb"[^/]*/(data\.pkl|constants\.pkl|model\.json|version|byteorder|\.format_version|\.storage_alignment|\.data/.*|code/.*"
    rb"|(data|tensors|constants)/\d+)",
    re.DOTALL,
)
_LFS = b"version https://git-lfs.github.com/spec/"
_POINTED = re.compile(r".*\.(bin|pkl|pickle|npz|model|tar|zip)", re.IGNORECASE | re.DOTALL)
_LEGACY = MAGIC.to_bytes(10, "little")
_LEGACY_OLD_PROTOCOLS = f"L{MAGIC}L\n".encode()


class Looks(Enum):
    """What a file seems to be, by its name or first bytes."""

    CHECKPOINT = "a checkpoint"
    DOUBTFUL = "a pickle or an archive that may contain a checkpoint"
    INDEX = "probably the index of a sharded checkpoint"
    OTHER = "something else"


def by_name(name: str) -> Looks | None:
    """Return what a name says: a checkpoint or an index; None if the bytes have to be read."""
    last = name.rpartition("/")[2]
    if last.endswith(".index.json"):
        return Looks.INDEX
    return Looks.CHECKPOINT if _CLAIMS.fullmatch(last) else None


def is_surely_other(name: str) -> bool:
    """Return whether no checkpoint has such a name, which saves a request for the bytes of a remote file."""
    return _OTHERWISE.fullmatch(name.rpartition("/")[2]) is not None


def by_bytes(name: str, head: bytes) -> Looks:
    """Return what a file is by its first bytes, if its name does not say."""
    if head.startswith(_LFS):
        return Looks.CHECKPOINT if _POINTED.fullmatch(name) else Looks.OTHER
    if head[:1] == b"{":
        return Looks.INDEX if f'"{WEIGHT_MAP}"'.encode() in head else Looks.OTHER
    found = _look_into(head, _DEPTH)
    return Looks.OTHER if found is Looks.DOUBTFUL and is_surely_other(name) else found


def _look_into(head: bytes, depth: int) -> Looks:
    if head[:2] == b"PK":
        return _zip(head)
    content = Content("", head)
    if (compression := unpacking.sniff(content)) is not None:
        inside = _expanded(head, compression.name)
        return Looks.DOUBTFUL if not inside or not depth else _look_into(inside, depth - 1)
    if tar_members.sniff(content):
        return _tar(content, depth)
    if head.startswith(_LEGACY_OLD_PROTOCOLS):
        return Looks.CHECKPOINT
    if not looks_like_checkpoint(head):
        return Looks.OTHER
    is_pickle = head[8:9] != b"{"
    return Looks.DOUBTFUL if is_pickle and _LEGACY not in head[:32] and b"torch" not in head else Looks.CHECKPOINT


def _zip(head: bytes) -> Looks:
    """Return what a zip archive is by the name of its first member."""
    if head[:4] != b"PK\x03\x04":
        return Looks.DOUBTFUL if head[:4] == b"PK\x05\x06" else Looks.OTHER
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return Looks.CHECKPOINT if _OF_TORCH.fullmatch(name) else Looks.DOUBTFUL


def _expanded(head: bytes, name: str) -> bytes:
    """Return the first bytes of a compressed file's content; none for bzip2, whose blocks are longer than the head."""
    if name not in _DECODERS:
        return b""
    try:
        return bytes(_DECODERS[name]().decompress(head, EXPANDED))
    except decoders.FAULTS:
        return b""


def _tar(content: Content, depth: int) -> Looks:
    """Return what a tar archive is by its members that start within the head."""
    names = set()
    for name, start, size in tar_members.files(content, []):
        names.add(PurePosixPath(name).name)
        if by_name(name) is Looks.CHECKPOINT:
            return Looks.CHECKPOINT
        if depth and _look_into(content[start : start + size], depth - 1) is Looks.CHECKPOINT:
            return Looks.CHECKPOINT
    return Looks.CHECKPOINT if {"sys_info", "pickle"} <= names else Looks.DOUBTFUL


ROOT = "."  # the name of a folder that is the whole zoo
_CHUNK = re.compile(r".*\.distcp", re.DOTALL)
_METADATA = re.compile(r"\.metadata|__\d{1,9}\.metadata")
_COMMON = re.compile("|".join(map(re.escape, BESIDE_CHUNKS)))  # what is saved beside the chunks
_MODELS = re.compile("|".join(map(re.escape, MODELS)))
_RANK = re.compile(r"shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors")


class ItemKind(str, Enum):
    FILE = "file"  # a checkpoint in one file
    FOLDER = "folder"  # a checkpoint in several files, taken as a whole
    OTHER = "other"  # not a checkpoint


class Item(Struct, frozen=True):
    """One checkpoint of a zoo, or one other file."""

    # Relative to the root. For a FOLDER, what to open: the folder itself (DCP, an unpacked torch file, shards without
    # an index; `.` for the root), or the index of its shards.
    name: str
    size: int  # bytes of all its files
    # Identifies its version without reading it; for a FOLDER, a digest of its files' names, sizes and stamps.
    stamp: str
    kind: ItemKind
    # The files of a FOLDER, or a model and a trainer's files next to it, sorted by name; empty otherwise.
    parts: tuple[Entry, ...] = ()
    # Why it cannot be read, if the listing shows that; such an item is not opened. An OTHER with a fault, such as a
    # socket or a second link to a folder, is not copied.
    fault: str | None = None
    # A pickle or an archive that may contain anything.
    is_doubtful: bool = False
    # The checkpoint that an OTHER names as the latest. If it gets another name, it would name one that does not exist.
    names: str | None = None

    @property
    def tolerates(self) -> type[UnreadableError] | None:
        """The error on opening it that makes it an OTHER: any unreadable file if it may contain anything, or a file
        without weights if a trainer's files have its name. None if every error has to be reported."""
        if self.is_doubtful:
            return UnreadableError
        return WeightlessError if OF_TRAINERS.fullmatch(_last(self.name)) else None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its files: the parts, or the one."""
        return self.parts or (Entry(self.name, self.size, self.stamp),)

    @property
    def beside(self) -> tuple[Entry, ...]:
        """The optimizer and scheduler saved next to the model, which a repair of it may change."""
        parts = self.parts if _last(self.name) in MODELS else ()
        return tuple(part for part in parts if OF_TRAINERS.fullmatch(_last(part.name)))


class Files:
    """The files of a zoo by name and by folder, while it is listed.

    ``is_apart`` recognises files to ignore in folders: those of a repository, and blobs of a cache."""

    def __init__(self, entries: Iterable[Entry], is_apart: Callable[[str], bool]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.own = {name: entry for name, entry in self.entries.items() if entry.fault is None and not is_apart(name)}
        self.looks = {name: looks for name in self.own if (looks := by_name(name)) is not None}
        self.parts: set[str] = set()  # the files that are part of a group
        self.folders: defaultdict[str, list[Entry]] = defaultdict(list)
        # the numbered files, by folder and set
        self.shards: defaultdict[str, defaultdict[Numbering, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for name, entry in self.own.items():
            folder = name.rpartition("/")[0]
            self.folders[folder].append(entry)
            if (numbering := Numbering.of(_last(name))) is not None:
                self.shards[folder][numbering].append(entry)
        self._names = sorted(self.own)

    def named(self, folder: str, pattern: re.Pattern[str]) -> list[Entry]:
        """Return the files of a folder whose own names match."""
        return [entry for entry in self.folders.get(folder, ()) if pattern.fullmatch(_last(entry.name))]

    def below(self, folder: str) -> list[Entry]:
        """Return the files of a folder and of all its subfolders."""
        first, end = (f"{folder}/", f"{folder}0") if folder else ("", "\U0010ffff")  # "0" is the character after "/"
        return [self.own[name] for name in self._names[bisect_left(self._names, first) : bisect_left(self._names, end)]]


def _whole_folders(place: Place, files: Files) -> Iterator[Item]:
    """Yield the folders whose files form one checkpoint, by their names: torch.distributed.checkpoint, unpacked torch
    files, saves of nanotron, and the shards of ranks."""
    ranks = _ranks(place, files)
    chunks = {folder: found for folder in sorted(files.folders) if (found := _distributed(place, folder, files))}
    for optimizer in [folder for folder in chunks if _last(folder).startswith(OPTIMIZERS)]:
        # It was saved in a folder of its own, and the folder above opens as one checkpoint.
        depth = 2 if posixpath.basename(posixpath.dirname(optimizer)).startswith(OPTIMIZERS) else 1
        above = _above(optimizer, depth)
        models = [folder for folder in chunks if folder and folder != optimizer and _above(folder, depth) == above]
        if len(models) == 1 and not files.named(above, _MODELS):
            chunks[above] = chunks.pop(models[0]) + chunks.pop(optimizer)
        elif not models and above in ranks:  # accelerate's optimizer for LOCAL_STATE_DICT
            ranks[above] += chunks.pop(optimizer)
    for model in [folder for folder in chunks if f"/{folder}".endswith(f"/{OF_VERL[0]}")]:
        above = _above(model, 2)
        saved = [part for name in OF_VERL if (part := posixpath.join(above, name)) in chunks]
        whole = [entry for part in saved for entry in chunks[part]]
        others = {entry.name for entry in files.below(above)} - {entry.name for entry in whole}
        if len(saved) > 1 and not any(map(_CLAIMS.fullmatch, map(_last, others))):
            chunks = {folder: found for folder, found in chunks.items() if folder not in saved} | {above: whole}
    for folder in sorted({*files.folders, *ranks, *chunks}):
        if (
            parts := chunks.get(folder)
            or _unpacked(place, folder, files)
            or ranks.get(folder)
            or _nanotron(folder, files)
        ):
            yield _group(folder or ROOT, parts)


def _above(folder: str, depth: int) -> str:
    """Return the folder that is so many levels above; "/" if there is none."""
    parts = ["", *folder.split("/")]
    return "/".join(parts[1:-depth]) if len(parts) > depth else "/"


def _distributed(place: Place, folder: str, files: Files) -> list[Entry]:
    chunks, described, common = (files.named(folder, names) for names in (_CHUNK, _METADATA, _COMMON))
    if common and any(_last(entry.name) == ".zarray" for entry in files.below(folder)):
        return files.below(folder)  # the arrays of an older Megatron; opening them reports that
    if not chunks and not any(b"torch.distributed" in _head(place, entry) for entry in described):
        return files.named(folder, _RANK)
    return chunks + described + common


def _ranks(place: Place, files: Files) -> dict[str, list[Entry]]:
    """Return the folders in which each rank of a training saved its part, with their files."""
    kinds: dict[str, dict[RankNames, list[tuple[Hashable, Entry]]]] = defaultdict(lambda: defaultdict(list))
    for name in filter(may_be_rank, files.own):
        parts = name.split("/")
        for kind in RANK_NAMES:
            if match := kind.files.fullmatch("/".join(parts[-kind.depth :])):
                kinds["/".join(parts[: -kind.depth])][kind].append((match.groups(), files.own[name]))
    found: dict[str, list[Entry]] = {}
    for folder, held in kinds.items():
        for kind, entries in list(held.items()):
            heads = (_head(place, entry) for _, entry in entries) if len(entries) > 1 else ()
            if kind.marks and not any(mark in head for head in heads for mark in kind.marks):
                del held[kind]  # logs, or states of random number generators
        if len({(kind, rank) for kind, entries in held.items() for rank, _ in entries}) > 1:
            beside = [kind.beside for kind in held if kind.beside is not None]
            start = len(folder) + bool(folder)
            others = [e for e in files.below(folder) if any(each.fullmatch(e.name[start:]) for each in beside)]
            own = [entry for entries in held.values() for _, entry in entries]
            saves = _saves(own) if not others else []
            found |= {save[0].name: save for save in saves} or {folder: list(dict.fromkeys(own + others))}
    return found


def _saves(ranks: Iterable[Entry]) -> list[list[Entry]]:
    """Return the files of each save by itself if several saves in one folder are told apart only by their names, as
    those of DINOv2; each is opened by the name of its first file."""
    sets: dict[tuple[str, int, str], dict[int, Entry]] = defaultdict(dict)
    for entry in ranks:
        if (match := NUMBERED.fullmatch(_last(entry.name))) is None:
            return []
        sets[match["stem"], int(match["world"] or 0), match["suffix"]][int(match["rank"])] = entry
    named = [RankSet(*key, {rank: Path(entry.name) for rank, entry in held.items()}) for key, held in sets.items()]
    if len(sets_of_models(named)) < 2:
        return []
    return [[held[rank] for rank in sorted(held)] for held in sets.values()]


def _nanotron(folder: str, files: Files) -> list[Entry]:
    """Return the files of a save of nanotron: the folders of weights and optimizer, and their metadata."""
    described = files.own.get(posixpath.join(folder, NANOTRON_METADATA))
    weights = [
        entry
        for entry in files.below(posixpath.join(folder, NANOTRON_MODEL))
        if NANOTRON_PART.fullmatch(_last(entry.name))
    ]
    return [described, *weights, *files.below(posixpath.join(folder, "optimizer"))] if described and weights else []


def _unpacked(place: Place, folder: str, files: Files) -> list[Entry]:
    pickle = files.own.get(posixpath.join(folder, "data.pkl"))
    if pickle is None or b"torch" not in _head(place, pickle):
        return []
    is_unpacked = posixpath.join(folder, "version") in files.own or posixpath.join(folder, "data") in files.folders
    return files.below(folder) if is_unpacked else []


def _indexed(place: Place, index: Entry, files: Files) -> Item | None:
    """Return an index together with its existing shards; None if it is not an index after all, or an optimizer's, whose
    files are not checkpoints. If it cannot be fetched, take the numbered shards that its own name implies, or they
    would count as another checkpoint."""
    folder, _, last = index.name.rpartition("/")
    named: Iterable[str] = ()
    groups, fault = "", None
    try:
        content = Content(place.where(index.name), place.head(index.name, min(index.size, INDEX_LIMIT)))
        parsed = parse_index(content)
        named, groups = parsed.files, parsed.groups
        sets = {numbering for name in named if (numbering := Numbering.of(name)) is not None}
    except (UnreadableError, HostileError):
        return None
    except PlaceError as error:
        fault = _fault(place, index, error)
        sets = {each for each in files.shards[folder] if each.stem + each.suffix == last.removesuffix(".index.json")}
    paths = [posixpath.normpath(posixpath.join(folder, name)) for name in named]  # one may lead out of the zoo
    if groups:
        files.looks |= dict.fromkeys((*paths, posixpath.join(folder, groups)), Looks.OTHER)
        return None
    parts = {index.name: index} | {path: files.own[path] for path in paths if path in files.own}
    parts |= {entry.name: entry for each in sets for entry in files.shards[folder].get(each, ())}
    return replace(_with_trainer(_group(index.name, parts.values()), files), fault=fault)


def _numbered(files: Files) -> Iterator[Item]:
    """Yield the folders with numbered shards and no index that open as exactly these shards."""
    for folder, sets in sorted(files.shards.items()):
        # Several epochs do not open as one folder, and a single file without a total may be complete.
        held = [entries for each, entries in sets.items() if each.total or len(sets) == 1 < len(entries)]
        # Files of data sets are numbered in the same way.
        shards = [entry for entries in held for entry in entries if files.looks.get(entry.name) is Looks.CHECKPOINT]
        if shards and files.parts.isdisjoint(entry.name for entry in files.folders[folder]):
            yield _group(folder or ROOT, shards)


def _with_trainer(model: Item, files: Files) -> Item:
    """Return a model together with the trainer's files next to it, if there are any."""
    folder = model.name.rpartition("/")[0]
    named = files.named(folder, OF_TRAINERS) if _last(model.name) in MODELS else []
    found = [entry for entry in named if entry.name not in files.parts]
    return replace(_group(model.name, (*model.parts, *found)), kind=model.kind) if found else model


def _group(name: str, entries: Iterable[Entry]) -> Item:
    parts = tuple(sorted(entries, key=lambda entry: entry.name))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.name}\0{part.size}\0{part.stamp}\n".encode("utf-8", "surrogateescape"))
    return Item(name, sum(part.size for part in parts), digest.hexdigest()[:32], ItemKind.FOLDER, parts)


def _head(place: Place, entry: Entry) -> bytes:
    return place.head(entry.name, min(HEAD, entry.size)) if entry.size else b""


def _last(name: str) -> str:
    return name.rpartition("/")[2]


THREADS = 32  # concurrent requests for the first bytes of remote files
ABSENT = "is in the list of files but does not exist; correct the list"

_REPOSITORY = frozenset({".git", ".hg", ".svn"})
_STORE = r"((?:.*/)?(?:models|datasets|spaces)--[^/]+)"
_SNAPSHOT = re.compile(rf"{_STORE}/snapshots/", re.DOTALL)
_BLOB = re.compile(rf"{_STORE}/blobs/[^/]+$", re.DOTALL)


def list_zoo(place: Place, patterns: Sequence[str] = (), listed: Sequence[str] | None = None) -> list[Item]:
    """Return the items of a zoo, sorted by name: all, or those that match one of ``patterns`` and that ``listed``
    names, as files or as folders with everything in them.

    A checkpoint in several files is taken as a whole if any of its files is chosen. A name in ``listed`` that does not
    exist becomes an item with a fault."""
    entries = list(place.walk())
    caches = {match[1] for entry in entries if (match := _SNAPSHOT.match(entry.name))}
    files = Files(entries, lambda name: not _REPOSITORY.isdisjoint(name.split("/")[:-1]) or _is_blob(name, caches))
    known = frozenset(way for entry in entries if listed for way in _ways(entry.name))
    names = None if listed is None else [_below(place, text, known) for text in listed]
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
    items = list(_naming(place, items, files))
    absent = dict.fromkeys(name for name in names or () if name not in known)
    items += [Item(name, 0, "", ItemKind.FILE, fault=ABSENT) for name in absent]
    return sorted(items, key=lambda item: item.name)


def _groups(place: Place, files: Files, chosen: Callable[[str], bool]) -> Iterator[Item]:
    """Yield the checkpoints in several files, and read the first bytes of unclear files along the way."""

    def taken(groups: Iterable[Item | None]) -> Iterator[Item]:
        for group in filter(None, groups):
            files.parts.update(part.name for part in group.parts)
            yield group

    yield from taken(_whole_folders(place, files))
    _look_at(place, files, chosen)
    indexes = sorted(name for name, looks in files.looks.items() if looks is Looks.INDEX and name not in files.parts)
    yield from taken(_indexed(place, files.own[name], files) for name in indexes)
    yield from taken(list(_numbered(files)))
    checkpoints = (files.own[name] for name, looks in sorted(files.looks.items()) if looks is Looks.CHECKPOINT)
    models = [each for each in checkpoints if _last(each.name) in MODELS and each.name not in files.parts]
    items = (_with_trainer(Item(each.name, each.size, each.stamp, ItemKind.FILE, (each,)), files) for each in models)
    yield from taken(item for item in items if item.beside)


# fvcore (detectron2) and mmengine name a file, the latter by its path. DINOv2 has such a file for each rank.
_OF_RANK = re.compile(r"(?<=last_checkpoint)\.rank_\d{1,7}")
_POINTERS = {**POINTERS, "last_checkpoint": posixpath.basename}


def _naming(place: Place, items: Sequence[Item], files: Files) -> Iterator[Item]:
    """Yield items; those that name the latest checkpoint next to them, with its name."""
    checkpoints = {part.name: item.name for item in items if item.kind is ItemKind.FOLDER for part in item.parts}
    checkpoints |= {item.name: item.name for item in items if item.kind is not ItemKind.OTHER}
    for item in items:
        read = (
            _POINTERS.get(_OF_RANK.sub("", _last(item.name)))
            if item.kind is ItemKind.OTHER and item.name in files.own
            else None
        )
        if read is not None and 0 < item.size <= HEAD:
            with suppress(PlaceError, ValueError):
                word = place.head(item.name, item.size).decode().strip()
                named = posixpath.join(posixpath.dirname(item.name), read(word))
                item = replace(item, names=checkpoints.get(named))
        yield item


def read_list(text: str) -> list[str]:
    """Return the names in a list of files: one per line, or each followed by NUL, as from ``find -print0``."""
    if "\0" in text:
        return [name for name in text.split("\0") if name]
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _is_blob(name: str, caches: set[str]) -> bool:
    """Return whether a file is a blob of a Hugging Face cache, to which links in ``snapshots`` lead."""
    match = _BLOB.match(name) if caches else None
    return match is not None and match[1] in caches


def _item(entry: Entry, files: Files, is_blob: bool) -> Item:
    looks, kind, fault = files.looks.get(entry.name), ItemKind.FILE, entry.fault
    if is_blob:
        kind, fault = ItemKind.OTHER, "a blob of a Hugging Face cache, which is in snapshots/ under its real name"
    elif entry.special or (fault is None and looks not in (Looks.CHECKPOINT, Looks.DOUBTFUL)):
        kind = ItemKind.OTHER
    return Item(entry.name, entry.size, entry.stamp, kind, (), fault, is_doubtful=looks is Looks.DOUBTFUL)


def _look_at(place: Place, files: Files, chosen: Callable[[str], bool]) -> None:
    """Read the first bytes of files with unclear names, if they are chosen or may be part of what is chosen."""
    shards = {entry.name for sets in files.shards.values() for entries in sets.values() for entry in entries}

    def look(entry: Entry) -> None:
        try:
            files.looks[entry.name] = by_bytes(entry.name, _head(place, entry))
        except PlaceError as error:
            files.entries[entry.name] = replace(entry, fault=_fault(place, entry, error))

    unclear = [
        entry
        for name, entry in files.own.items()
        if entry.size and not (name in files.looks or name in files.parts) and (name in shards or chosen(name))
    ]
    if place.root is not None:
        for entry in unclear:
            look(entry)
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(look, (entry for entry in unclear if not is_surely_other(entry.name))))


def _fault(place: Place, entry: Entry, error: PlaceError) -> str:
    return str(error).removeprefix(f"{place.where(entry.name)}: ")


def _choice(patterns: Sequence[str], names: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a function that decides whether a name is chosen, by the patterns and the list."""
    matches = compile_patterns(patterns).fullmatch
    wanted = None if names is None else frozenset(names)

    def chosen(name: str) -> bool:
        if patterns and matches(name) is None:
            return False
        return wanted is None or any(folder in wanted for folder in _ways(name))

    return chosen


def _ways(name: str) -> Iterator[str]:
    """Yield a name and the folders that contain it, the innermost first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _below(place: Place, text: str, known: Container[str]) -> str:
    """Return a listed name relative to the root: lists also contain full paths and URLs, and names with ``./``.

    A zoo ``old`` may have a folder ``old``, so a known name is taken as it is."""
    if (name := posixpath.normpath(text)) in known:
        return name
    name = text.removeprefix(f"{place.name}/")
    if place.root is not None and Path(name).is_absolute():
        name = os.path.relpath(name, place.root)
    return posixpath.normpath(name)


@contextmanager
def on_this_machine(place: Place, item: Item, folder: Path) -> Iterator[Path]:
    """Provide the local path of an item: its own, or that of a copy in ``folder``, which is removed at the end.

    Raises ``CkptfixError`` if it cannot be fetched, or has changed since it was listed."""
    try:
        yield fetch_item(place, item, folder)
    finally:
        if place.root is None:
            shutil.rmtree(folder, ignore_errors=True)


def fetch_item(place: Place, item: Item, folder: Path) -> Path:
    """Return the local path of an item: its own, or that of a copy below ``folder``."""
    if place.root is not None:
        return place.root / item.name
    for entry in item.entries:
        goal = folder / entry.name
        goal.parent.mkdir(parents=True, exist_ok=True)
        place.fetch(entry.name, goal, entry)
    return folder / item.name
