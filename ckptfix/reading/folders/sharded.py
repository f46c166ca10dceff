"""Sharded checkpoints: ``*.index.json`` with its shards, or a folder of numbered shards without an index.

The shards become one document without reading tensors. The index and the shards are compared both ways: missing shards,
keys in other shards than the index says, keys that are not in the index, and keys in two shards are damage. Loaders
that compare one way only leave random weights in the gaps (sglang PR#32279)."""

from codecs import BOM_UTF8
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import Checkpoint, PathPart, path_name
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import Opt, UnreadableError, damaged
from ckptfix.reading import safetensors
from ckptfix.reading.folders.chunks import is_same
from ckptfix.reading.folders.shard_index import (
    PACKED,
    Folder,
    LocalFolder,
    Numbering,
    ShardIndex,
    folder_of,
    name_unpacked,
    parse_index,
)
from ckptfix.reading.formats import open_content, read_document
from ckptfix.reading.weights.containers import open_document
from ckptfix.reading.weights.document import Document


def odd_shard(shards: Mapping[str, Checkpoint], total: int) -> str | None:
    """Return the shard with which the sizes would sum to ``total`` if its floats had a dtype of the other shards.

    None if there is none. Different dtypes in a shard are not suspicious by themselves: a head may be in float32, and
    many indexes have wrong totals."""
    whole = sum(spec.nbytes for shard in shards.values() for spec in shard.specs.values())
    floats = {
        name: [spec for spec in shard.specs.values() if DTYPES[spec.dtype].is_float] for name, shard in shards.items()
    }
    for name, own in floats.items():
        others = {spec.dtype for other, held in floats.items() if other != name for spec in held}
        rest = whole - sum(spec.nbytes for spec in own)
        count = sum(spec.nbytes // spec.itemsize for spec in own)
        is_apart = others.isdisjoint(spec.dtype for spec in own)
        if own and is_apart and any(rest + count * DTYPES[dtype].itemsize == total for dtype in others):
            return name
    return None


def surroundings(shard: Checkpoint) -> list[list[tuple[PathPart, Any]]] | None:
    """Return the data around the state_dict of a shard, level by level, with None in place of the next level.

    None if it has more than numbers and text."""
    levels = []
    value = shard.root
    for part in shard.container:
        if not isinstance(value, dict):
            return None
        level = [(name, None if name == part else member) for name, member in value.items()]
        if not all(member is None or isinstance(member, (bool, int, float, str)) for _, member in level):
            return None
        levels.append(level)
        value = value[part]
    return levels


NAME, NAME_SAFETENSORS = "sharded", f"sharded-{safetensors.NAME}"
# The indexes that transformers prefers if a folder has several.
PREFERRED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read(content: Content) -> Document:
    """Return the document of an index and the shards beside it."""
    if content.file is None:
        raise UnreadableError(
            f"{content.path}: an index of shards without them; unpack it beside its shards and name the folder"
        )
    return _merge(content.path, folder_of(content.path), content.path)


def _merge(path: str, folder: Folder, index: str) -> Document:
    """Return the document of the shards of an index, or of the only set of shards if the index is unreadable or
    stale."""
    stale = None
    try:
        content = Content.of_file(index)
        parsed = parse_index(content)
        if parsed.groups:
            raise UnreadableError(
                f"{index}: indexes the state of an optimizer (ColossalAI); name the folder of its model"
            )
        merge = _ShardMerge(path, folder, parsed)
    except UnreadableError as error:
        if len(_sets(folder)) != 1:
            raise
        merge = _ShardMerge(path, folder, _sets(folder)[0])  # numbered shards do not need the index
        merge.damage.append(Fact.of(Kind.INDEX_UNREADABLE, error=str(error)))
    else:
        sets, present = _sets(folder), {name_unpacked(name) for name in folder.names()}
        # The only set of shards is complete, and none of the files in the index exists.
        if len(sets) == 1 and present.isdisjoint(parsed.files) and present.issuperset(sets[0].names(present)):
            stale, merge = sets[0], _ShardMerge(path, folder, sets[0])
        if content[:3] == BOM_UTF8:
            merge.damage.append(Fact(Kind.INDEX_BOM))
    document = merge.document()
    if stale is not None:
        is_whole = not merge.damage and merge.entries.keys() == parsed.weight_map.keys()
        kept = document.remarks if is_whole else document.damage
        kept.append(Fact.of(Kind.INDEX_STALE, str(stale), names=tuple(parsed.files)))
    return document


def looks_like(folder: Path) -> bool:
    """Return whether a folder has an index or numbered shards."""
    return bool(_indexes(folder) or _sets(LocalFolder(folder)))


def read_folder(folder: Path) -> Document:
    """Return the document of a folder of shards. Raises ``UnreadableError`` if it has several checkpoints."""
    indexes = _indexes(folder)
    chosen = next((folder / name for name in PREFERRED if folder / name in indexes), None)
    if chosen is None and len(indexes) > 1:
        names = ", ".join(path.name for path in indexes)
        raise UnreadableError(f"{folder}: the folder holds {len(indexes)} indexes ({names}); name one of them")
    if indexes:
        return _merge(str(folder), LocalFolder(folder), str(chosen or indexes[0]))
    sets = _sets(LocalFolder(folder))
    if len(sets) > 1:
        names = ", ".join(str(numbering) for numbering in sets)
        are_total = any(numbering.total for numbering in sets)
        advice = "put each in its own folder" if are_total else "name a file of one of them"
        raise UnreadableError(f"{folder}: the folder holds {len(sets)} sets of shards ({names}) and no index; {advice}")
    return _ShardMerge(str(folder), LocalFolder(folder), sets[0]).document()


def read_siblings(file: Path) -> Document | None:
    """Return the document of all shards of an epoch if the file is named like a shard of torchtune, else None."""
    numbering = Numbering.of(file.name)
    if numbering is None or numbering.total or not file.is_file():
        return None
    document = _ShardMerge(str(file.parent), LocalFolder(file.parent), numbering).document()
    is_only = not _indexes(file.parent) and _sets(LocalFolder(file.parent)) == [numbering]
    return document if is_only else replace(document, path=str(file), folder=str(file.parent))


class _ShardMerge:
    """A merge of shards, with their disagreements. ``listed`` is the index, or the numbering of the shards."""

    def __init__(self, path: str, folder: Folder, listed: ShardIndex | Numbering) -> None:
        self.path, self.folder, self.listed = path, folder, listed
        index = self.index = listed if isinstance(listed, ShardIndex) else None
        self.weight_map = index.weight_map if index is not None else {}
        self.said_by = index.path if index is not None else f"{folder}/shards"
        self.opened: dict[str, Checkpoint] = {}
        self.entries: OrderedDict[str, Any] = OrderedDict()
        self.lost: dict[str, TensorSpec | None] = {}
        self.damage: list[Fact] = []
        self.absent: list[str] = []
        self.present = frozenset(folder.names())
        self.wanted = self._files()
        self.remarks: list[Fact] = []

    def document(self) -> Document:
        """Return the merged document. Raises ``UnreadableError`` if no tensor is intact, or if two shards have
        different values for a key and no index says which is right."""
        for name in self.wanted:
            self._open(name)
        self._note_absent()
        self._place()
        if not self.entries:
            raise damaged(self.path, f"{clauses(self.damage)}; no tensor is whole")
        metadata: dict[str, Mapping[str, Any]] = {}
        for shard in reversed(self.opened.values()):
            metadata.update(shard.metadata or {})
        self._note_unnamed()
        remarks: dict[Fact, None] = {}
        for shard in self.opened.values():
            for remark in shard.remarks:
                # A remark on all tensors of a shard is repeated for each, because it is not about other shards.
                is_of_all = remark.kind is Kind.DOUBTFUL_VALUES and remark.place == "."
                said = [replace(remark, place=key) for key in shard.specs] if is_of_all else [remark]
                remarks.update(dict.fromkeys(said))
        kinds = {shard.format for shard in self.opened.values()}
        return Document(
            self.path,
            NAME_SAFETENSORS if kinds == {safetensors.NAME} else NAME,
            self._root(),
            metadata or None,
            remarks=[*remarks, *self.remarks],
            damage=self.damage,
            lost=self.lost,
        )

    def _files(self) -> list[str]:
        """Return the names of expected shards: those in the index and their numbered siblings, or the whole set."""
        if isinstance(self.listed, Numbering):
            return self.listed.names(map(name_unpacked, self.present))
        named = self.listed.files
        sets = {Numbering.of(name) for name in named} - {None}
        siblings = [name for name in map(name_unpacked, sorted(self.present)) if Numbering.of(name) in sets]
        return list(dict.fromkeys([*named, *siblings]))

    def _open(self, name: str) -> None:
        stored = next((other for other in (name, *(name + suffix for suffix in PACKED)) if other in self.present), name)
        file = self.folder.find(stored, self.said_by)
        if file is None:
            self.absent.append(name)
            return
        try:
            content = open_content(file)
            checkpoint = open_document(read_document(content), salvage=True)
            shard = self.opened[name] = replace(checkpoint, member=content.member)
        except UnreadableError as error:
            self.damage.append(Fact.of(Kind.SHARD_UNREADABLE, name, error=str(error)))
            return
        if shard.member and not shard.remarked(Kind.OTHER_SUFFIX):
            self.remarks.append(Fact(Kind.PACKED_SHARD, stored))
        self.damage += [Fact.of(Kind.SHARD_DAMAGED, name, cause=fact) for fact in shard.damage]

    def _note_absent(self) -> None:
        """Record the missing shards as damage, with the number of their keys, and their size if the index tells it."""
        if not self.absent:
            return
        absent = set(self.absent)
        keys = sum(home in absent for home in self.weight_map.values())
        total = self.index.total_size if self.index is not None else None
        specs = [spec for shard in self.opened.values() for spec in (*shard.specs.values(), *shard.lost.values())]
        gone = total - sum(spec.nbytes for spec in specs if spec is not None) if total is not None else 0
        if len(self.opened) + len(self.absent) != len(self.wanted):
            gone = 0  # an unreadable shard may be part of the difference
        names = tuple(self.absent)
        self.damage.insert(0, Fact.of(Kind.SHARDS_MISSING, names=names, keys=keys, nbytes=max(gone, 0), total=total))

    def _note_unnamed(self) -> None:
        """Remark losses without names: shards that no index lists, and a total size that differs from the index."""
        whole = len(self.opened) == len(self.wanted)
        if self.index is None:
            if not whole:
                self.remarks.append(Fact.of(Kind.UNNAMED_LOSS, lost="shards that are not there, and no index names"))
            return
        specs = [spec for shard in self.opened.values() for spec in shard.specs.values()]
        sums = {sum(spec.nbytes for spec in kept) for kept in (specs, {spec.view: spec for spec in specs}.values())}
        total = self.index.total_size
        if whole and not self.lost and total is not None and total not in sums:
            place = odd_shard(self.opened, total) or "."
            self.remarks.append(Fact.of(Kind.INDEX_SIZE, place, total=total, held=min(sums)))

    def _root(self) -> Any:
        """Return the merged state_dict in the container that all shards have around theirs."""
        first, *others = self.opened.values()
        around = surroundings(first)
        if around is None or any(
            (shard.container, surroundings(shard)) != (first.container, around) for shard in others
        ):
            raise UnreadableError(
                f"{self.path}: its shards hold more than a state_dict each, and not the same in all of them (weights at"
                f" {path_name(first.container)} in the first); take the state_dict out of each by a repair with ",
                Opt("format", "safetensors"),
                ", or save the checkpoint again",
            )
        root: Any = self.entries
        for part, level in zip(reversed(first.container), reversed(around), strict=True):
            root = {name: root if name == part else value for name, value in level}
        return root

    def _place(self) -> None:
        """Take every key from the shard in the index, in the order of the index, and record differences."""
        holders: dict[str, list[str]] = {key: [] for key in self.weight_map}
        for name, shard in self.opened.items():
            for key in shard.entries:
                holders.setdefault(key, []).append(name)
        absent, moved, doubled = [], [], []
        for key, names in holders.items():
            home = self.weight_map.get(key)
            if names:
                taken = home if home in names else names[0]
                self.entries[key] = self.opened[taken].entries[key]
                if home not in (None, taken):
                    moved.append(key)
                if self._contradict(key, names):
                    doubled.append(key)
            else:
                lost = self.opened[home].lost if home in self.opened else {key: None}
                self.lost[key] = lost.get(key)
                if key not in lost:
                    absent.append(key)
        for shard in self.opened.values():
            self.lost.update({key: spec for key, spec in shard.lost.items() if key not in holders})
        unlisted = [key for key in self.entries if key not in self.weight_map] if self.index is not None else []
        if moved:
            self.remarks.append(Fact.of(Kind.INDEX_MOVED, keys=tuple(moved)))
        for keys, kind in ((absent, Kind.INDEX_PROMISES), (unlisted, Kind.INDEX_UNLISTED), (doubled, Kind.KEYS_DIFFER)):
            if keys:
                self.damage.append(Fact.of(kind, keys=tuple(keys)))

    def _contradict(self, key: str, names: list[str]) -> bool:
        """Return whether shards have different values for a key. Raises ``UnreadableError`` if the index does not
        decide between them."""
        first, *others = (self.opened[name].entries[key] for name in names)
        if all(is_same(first, other, self.path) for other in others):
            return False
        if self.weight_map.get(key) not in names:
            raise UnreadableError(
                f"{self.path}: {key} is in {' and in '.join(names)} with different values, and no index says which is"
                " meant; take the wrong one out, or save the checkpoint again"
            )
        return True


def _indexes(folder: Path) -> list[Path]:
    return [folder / name for name in LocalFolder(folder).names() if name.endswith(".index.json")]


def _sets(folder: Folder) -> list[Numbering]:
    counts = Counter(Numbering.of(name) for name in dict.fromkeys(map(name_unpacked, folder.names())))
    # A single file with a number but no total may be a complete checkpoint.
    return [numbering for numbering, count in counts.items() if numbering and (numbering.total or count > 1)]
