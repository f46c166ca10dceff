"""Folders of torch.distributed.checkpoint: ``.metadata`` and ``__<rank>_<n>.distcp`` files.

Ranks that save without communication (``use_collectives=False``) each write their own ``__<rank>.metadata``. A
``.distcp`` file does not name its save or rank, so one of another save is only noticed by different sizes, as a
duplicate, or by the step counters in it.

Every chunk of a tensor is a whole torch.save file at an offset of a ``.distcp`` file, whose inner record is the bytes.
So a tensor of one chunk is a range of that file, and a tensor of several chunks is assembled when it is read.
``dcp_to_torch_save`` reads everything into memory instead. Format:
https://pytorch.org/docs/stable/distributed.checkpoint.html"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.limits import Bounds, shown
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import Content, is_torn
from ckptfix.core.checkpoint import ContainerPath, PathPart
from ckptfix.core.facts import Fact, Kind, clause, clauses
from ckptfix.core.objects import Opaque
from ckptfix.core.parts import Box, box_at, extent, numel
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.core.wording import first_names
from ckptfix.errors import HostileError, UnreadableError, damaged
from ckptfix.reading.folders.chunks import (
    agree,
    check_tiling,
    compared,
    differing_of,
    gone,
    merge_parts,
    note_differing,
)
from ckptfix.reading.folders.ranks.files import are_varied, is_of_pickle, sums_of, unlike_most
from ckptfix.reading.folders.shard_index import file_inside
from ckptfix.reading.pickles.claims import dtype_name, sizes
from ckptfix.reading.pickles.payload import payload_remarks, refusing_payload
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.sniffing import is_zip
from ckptfix.reading.torch_files import torch_zip
from ckptfix.reading.weights.document import Document


class Location(Struct, frozen=True):
    """A range of a file of the folder."""

    file: str
    offset: int
    nbytes: int


class Stored(Struct, frozen=True):
    """A tensor and its chunks, or another object, which has no dtype and one location.

    The location of a chunk is None if the metadata does not have it. A chunk that several ranks saved is listed several
    times."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Location | None], ...]

    @property
    def files(self) -> set[str]:
        return {location.file for _, location in self.chunks if location is not None}

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, contiguous_strides(self.shape))


class StoredMetadata(Struct, frozen=True):
    """The content of a ``.metadata`` file: the items by flat name in the order of saving, the path of each, and the
    globals that the pickle names."""

    items: Mapping[str, Stored]
    paths: Mapping[str, ContainerPath]
    names: frozenset[str]


def merged_metadata(parts: Sequence[StoredMetadata]) -> StoredMetadata:
    """Merge the metadata of ranks (``use_collectives=False``), each of which lists the rank's own chunks.

    Tensors that several ranks saved keep all locations, so that they can be compared. Other objects are those of the
    first rank. Raises ``ValueError`` if ranks saved different tensors under one name."""
    items: dict[str, Stored] = {}
    paths: dict[str, ContainerPath] = {}
    for part in parts:
        for name, item in part.items.items():
            before = items.setdefault(name, item)
            if before is item or not before.dtype:
                continue
            if (item.dtype, item.shape) != (before.dtype, before.shape):
                raise ValueError(f"ranks saved different things under the name {name}")
            items[name] = replace(before, chunks=before.chunks + item.chunks)
        paths = {**part.paths, **paths}
    return StoredMetadata(items, paths, frozenset().union(*(part.names for part in parts)))


def parse_metadata(content: Content) -> StoredMetadata:
    """Parse a ``.metadata`` file. Raises ``UnreadableError`` if it is not valid."""

    def no_storage(key: str, nbytes: int, device: str) -> Storage:
        raise HostileError(
            f"{content.path}: tensor data in a file that should only describe tensors; do not use this checkpoint"
        )

    pickles = StoragePickle(content.path, no_storage, content.bounds)
    root, _ = pickles.run(content)
    try:
        described, stored = _fields(root)["state_dict_metadata"], _fields(root)["storage_data"]
        where = {_index(key): _location(value) for key, value in stored.items()}
        paths = {name: _path(parts) for name, parts in (_fields(root).get("planner_data") or {}).items()}
        order = dict.fromkeys([*(name for name in paths if name in described), *described])
        items = {_name(name): _item(name, _fields(described[name]), where) for name in order}
        listed = {(name, tuple(start for start, _ in box)) for name, item in items.items() for box, _ in item.chunks}
        if strange := [name for name, offsets in where if (name, offsets) not in listed]:
            raise ValueError(f"{first_names(strange)} in files, but not among the tensors, or at other offsets")
        _check_apart(where)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damaged(
            content.path,
            f"not the metadata of torch.distributed.checkpoint, or damaged ({type(error).__name__}: {error})",
        ) from error
    return StoredMetadata(items, paths, frozenset(pickles.names))


def _check_apart(where: Mapping[tuple[str, tuple[int, ...]], Location]) -> None:
    """Raise ``ValueError`` if ranges of a file overlap: the archive at the end of a range that is too long is another
    one, which may have a tensor of the same shape."""
    ranges = sorted((at.file, at.offset, at.nbytes, name) for (name, _), at in where.items() if at.nbytes)
    for (file, start, nbytes, name), (next_file, next_start, _, other) in pairwise(ranges):
        if file == next_file and next_start < start + nbytes:
            raise ValueError(f"{name} and {other} in the same bytes of {file}")


def _fields(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Opaque) or not isinstance(value.state, (dict, type(None))):
        raise TypeError(f"{type(value).__name__} in the place of a record")
    return value.attributes


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} in the place of a name")
    return value


def _item(name: str, fields: Mapping[str, Any], where: Mapping[tuple[str, tuple[int, ...]], Location]) -> Stored:
    """Return the item of a ``TensorStorageMetadata``, or of a ``BytesStorageMetadata``, which has no fields."""
    if "chunks" not in fields:
        return Stored("", (), (((), where.get((name, ()))),))
    properties = fields["properties"]
    # TensorProperties is pickled as a tuple that begins with the dtype.
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.attributes["dtype"]
    places = [(sizes(chunk["offsets"]), sizes(chunk["sizes"])) for chunk in map(_fields, fields["chunks"])]
    chunks = tuple((box_at(*place), where.get((name, place[0]))) for place in places)
    return Stored(dtype_name(dtype), sizes(fields["size"]), chunks)


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    """Return the name and offsets of a ``MetadataIndex``; objects have no offsets."""
    fields = _fields(key)
    offset = fields.get("offset")
    return _name(fields["fqn"]), () if offset is None else sizes(offset)


def _location(value: Any) -> Location:
    fields = _fields(value)
    file, offset, nbytes = fields["relative_path"], fields["offset"], fields["length"]
    if not isinstance(file, str) or any(type(number) is not int or number < 0 for number in (offset, nbytes)):
        raise ValueError(f"{shown(file)} at {shown(offset)} is not a place in a file")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{file:.60} was packed by an extension, which is not read")
    return Location(file, offset, nbytes)


def _path(parts: Any) -> ContainerPath:
    if not isinstance(parts, (tuple, list)) or not parts or any(type(part) not in (str, int) for part in parts):
        raise ValueError(f"{shown(parts)} is not a path")
    return tuple(parts)


NAME = "dcp"
METADATA = ".metadata"
CHUNKS = ".distcp"
_DEPTH_LIMIT = 100
_START, _END, _END_SIZE = b"PK\3\4", b"PK\5\6", 22  # of an archive that torch writes, which has no comment
_STEP, _FEWEST_STEPS = "step", 3  # the number of step counters that a file needs to be compared with others
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_COMPARED = 8  # files with the same values as another one with which that is compared
_MOST_COMPARED = 1 << 22  # chunks that may be examined for it, which takes seconds


def looks_like(folder: Path) -> bool:
    """Return whether a folder has files of torch.distributed.checkpoint."""
    return bool(_metadata_files(folder)) or any(name.endswith(CHUNKS) for name in list_folder(folder).names)


def _metadata_files(folder: Path) -> list[Path]:
    """Return the ``.metadata`` of a folder, or those of its ranks in order."""
    if (folder / METADATA).is_file():
        return [folder / METADATA]
    ranks = {int(match[1]): match[0] for match in map(_OF_RANK.fullmatch, list_folder(folder).files) if match}
    return [folder / ranks[rank] for rank in sorted(ranks)]


def read_folder(folder: Path, salvage: bool) -> Document:
    """Return the document of a folder: the saved container, with its nesting.

    Tensors in missing or damaged files are torn. Raises ``UnreadableError`` if none is intact."""
    if not _metadata_files(folder):
        unfinished = any(name.endswith(".metadata.tmp") for name in list_folder(folder).names)
        hint = "files that begin with a dot are easily missed: fetch it too"
        raise UnreadableError(
            f"{folder}: chunks of torch.distributed.checkpoint without their {METADATA} file, which describes them;"
            f" {'the save never finished: use an earlier one' if unfinished else hint}"
        )
    reading = _FolderReading(folder, salvage)
    with refusing_payload(str(folder), reading.bounds.names):
        return reading.document()


class _FolderReading:
    """A reader of one folder, with its items, damage and remarks."""

    def __init__(self, folder: Path, salvage: bool) -> None:
        self.folder, self.salvage = folder, salvage
        size = sum((folder / name).stat().st_size for name in list_folder(folder).files)
        self.bounds = Bounds(str(folder), size)
        self.contents: dict[str, Content] = {}
        self.metadata = StoredMetadata({}, {}, frozenset())
        self.remarks: dict[Fact, None] = {}
        self.leaves: dict[str, Any] = {}
        self.faults: dict[Fact, list[str]] = {}
        self.clashes: list[Fact] = []
        self.absent: set[str] = set()  # files that the metadata names
        # Files with the chunks of another one, which is named if it is known. They are not read.
        self.misplaced: Mapping[str, str] = {}
        self.faulty: set[str] = set()  # files with chunks that cannot be read
        self.compared = 0  # chunks of tensors that repeat in several files
        self.unlike: set[str] = set()  # files with chunks of other shapes or dtypes than the metadata says
        # The chunks that were saved once, by file: offset, name of the tensor if it has several chunks, spec.
        self.chunks: dict[str, list[tuple[int, str, TensorSpec]]] = {}

    def document(self) -> Document:
        parts = []
        for file in _metadata_files(self.folder):
            content = Content.of_file(str(file))
            content.shared_bounds = self.bounds
            parts.append(parse_metadata(content))
        try:
            self.metadata = merged_metadata(parts)
        except ValueError as error:
            raise UnreadableError(f"{self.folder}: {error}; load it with as many ranks as saved it") from error
        named = {file for item in self.metadata.items.values() for file in item.files}
        self.absent = {file for file in named if self._place(file) is None}
        for name, item in self.metadata.items.items():
            self._read(name, item)
        self._note_repeated()
        if misplaced := self._found_misplaced():
            rest = _FolderReading(self.folder, self.salvage)
            rest.misplaced = {**self.misplaced, **misplaced}
            return rest.document()
        self._note_of_another_step()
        whole = any(isinstance(leaf, TensorSpec) and not is_torn(leaf) for leaf in self.leaves.values())
        if (self.faults or self.absent) and not whole:
            raise damaged(self.folder, f"{clauses(self._damage())}; no tensor is whole")
        used = set(self.contents) | named
        # Files of chunks without any item, which remain from an earlier save into the same folder. A rank of which the
        # planner takes nothing writes an empty file.
        others = [name for name in list_folder(self.folder).names if name.endswith(CHUNKS) and name not in used]
        strays = sorted(name for name in others if (self.folder / name).stat().st_size)
        return Document(
            str(self.folder),
            NAME,
            self._nested(),
            names=self.bounds.names,
            remarks=[
                *payload_remarks(self.bounds.names),
                *(mark for mark in self.remarks if mark.kind is not Kind.PAYLOAD),
                *(Fact(Kind.STRAY_FILE, name) for name in strays),
            ],
            damage=self._damage(),
        )

    def _read(self, name: str, item: Stored) -> None:
        try:
            self.leaves[name] = self._tensor(name, item) if item.dtype else self._load(name, item.chunks[0][1])
        except UnreadableError as error:
            if not item.files & self.absent:
                self._blame(name, str(error), [])
            if item.dtype:
                self.leaves[name] = gone(name, item.spec, str(self.folder))

    def _blame(self, name: str, place: str, causes: Sequence[Fact]) -> None:
        self.faults.setdefault(Fact.of(Kind.ITEM_DAMAGED, place, causes=tuple(causes)), []).append(name)

    def _tensor(self, name: str, item: Stored) -> TensorSpec:
        """Return the spec of a tensor, merged from its chunks."""
        places: dict[Box, list[Location | None]] = {}
        for box, location in item.chunks:
            places.setdefault(box, []).append(location)
        places = {box: self._present(locations) for box, locations in places.items()}
        check_tiling(places, item.shape, name)  # before a chunk is opened
        copies: dict[Box, list[TensorSpec]] = {}
        lost: UnreadableError | None = None
        for box, locations in places.items():
            try:
                copies[box] = self._copies(name, item.dtype, box, locations)
            except UnreadableError as error:
                lost = lost or error  # the files of the other chunks are compared by all of their chunks
            (location, *others) = locations
            if location is not None and not others and numel(box):
                chunk = copies[box][0] if box in copies else TensorSpec(item.dtype, extent(box), ())
                part_of = name if len(places) > 1 else ""
                self.chunks.setdefault(location.file, []).append((location.offset, part_of, chunk))
        if lost is not None:
            raise lost
        return merge_parts(name, item.dtype, item.shape, copies, str(self.folder))

    def _present(self, locations: list[Location | None]) -> list[Location | None]:
        """Return the locations of a chunk without those in missing files, unless there are no others."""
        return [at for at in locations if at is not None and at.file not in self.absent] or locations

    def _lacking(self) -> Iterator[Fact]:
        """Yield the missing files, and the bytes of tensors that no other file has."""
        if not self.absent:
            return
        items = self.metadata.items
        if missing := self.absent - self.misplaced.keys():
            held = sum(bool(item.files & missing) for item in items.values())
            yield Fact.of(Kind.SHARDS_MISSING, names=tuple(sorted(missing)), keys=held, nbytes=0, total=0)
        yield from (Fact.of(Kind.SHARD_MISPLACED, file, other=self.misplaced[file]) for file in sorted(self.misplaced))
        lost: dict[str, int] = {}
        for name, item in items.items():
            boxes = {box for box, at in item.chunks if item.dtype and at is not None and at.file in self.absent}
            boxes -= {box for box, at in item.chunks if at is not None and at.file not in self.absent}
            if nbytes := sum(map(numel, boxes)) * item.spec.itemsize if boxes else 0:
                lost[name] = nbytes
        if lost:
            yield Fact.of(Kind.BYTES_LACKING, nbytes=sum(lost.values()), keys=tuple(lost))

    def _note_repeated(self) -> None:
        """Remark files whose chunks have the same checksums as those of another file: one was copied over the other.

        A model and its average may be equal, each in its own file, but chunks of one tensor are not. A file of which a
        chunk cannot be read is not compared: the others may be norms that are equal in many files."""
        held = {(file, place): part for file, own in self.chunks.items() for place, _, part in own}
        seen: dict[tuple[object, ...], list[str]] = {}
        for file, chunks in self.chunks.items():
            parts = [part for _, _, part in sorted(chunks, key=itemgetter(0))]
            sums = () if any(part.storage is None for part in parts) else sums_of(parts)
            if not sums:
                continue
            others = seen.setdefault(sums, [])
            shared = {name for other in others for _, name, _ in self.chunks[other]} & {name for _, name, _ in chunks}
            shared.discard("")
            is_varied = bool(shared) and are_varied([part for _, name, part in chunks if name in shared])
            if is_varied and not any(self._is_repetition(shared, (other, file), held) for other in others[-_COMPARED:]):
                self.remarks[Fact.of(Kind.RANK_REPEATED, file, other=others[0])] = None
            others.append(file)

    def _is_repetition(
        self, names: Collection[str], files: tuple[str, str], held: Mapping[tuple[str, int], TensorSpec]
    ) -> bool:
        """Return whether the tensors themselves repeat what two files have, as in models whose layers or experts start
        as copies of others: then the parts of these layers in other files are equal too."""
        are_compared = False
        for name in names:
            self.compared += len(self.metadata.items[name].chunks)
            if self.compared > _MOST_COMPARED:
                return False
            places = {box: (at.file, at.offset) for box, at in self.metadata.items[name].chunks if at is not None}
            first, second = (
                [box for box, (found, _) in sorted(places.items(), key=lambda each: each[1]) if found == file]
                for file in files
            )
            if len(first) != len(second):
                return False
            # By axis, the range in the first file and that in the second, or None if it is the same.
            moves = {
                tuple(None if one == other else (one, other) for one, other in zip(*pair, strict=True))
                for pair in zip(first, second, strict=True)
            }
            self.compared += len(moves) * len(places)
            if self.compared > _MOST_COMPARED:
                return False
            for move, (box, at) in product(moves, places.items()):
                if any(step is not None and step[0] != span for step, span in zip(move, box, strict=True)):
                    continue
                moved = tuple(span if step is None else step[1] for step, span in zip(move, box, strict=True))
                to = places.get(moved)
                if to is None or at not in held or to not in held or {at[0], to[0]} <= {*files}:
                    continue
                if sums_of([held[at]]) != sums_of([held[to]]):
                    return False
                are_compared = True
        return are_compared

    def _found_misplaced(self) -> dict[str, str]:
        """Return the files that have the chunks of another one, each with that one, or with an empty text if it is
        unknown. Some of their chunks may have the place and the shape of others by chance.

        With ``salvage``, this includes both of two files with the same values: nothing shows which one is right."""
        ranges: dict[str, set[tuple[int, int]]] = {}
        for item in self.metadata.items.values():
            for _, at in item.chunks:
                if at is not None and at.file not in self.absent:
                    ranges.setdefault(at.file, set()).add((at.offset, at.offset + at.nbytes))
        pairs = [(mark.place, mark.data["other"]) for mark in self.remarks if mark.kind is Kind.RANK_REPEATED]
        found = dict([*pairs, *((other, file) for file, other in pairs)]) if self.salvage else {}
        unlike = self.unlike if self.unlike < ranges.keys() else set()  # otherwise, the metadata is damaged
        for file, own in ranges.items():
            if (content := self.contents.get(file)) is None:
                continue
            if file in unlike or _has_another_end(content, own) or (file in self.faulty and _is_shifted(content, own)):
                alike = [other for other, theirs in ranges.items() if other != file and _is_made_of(content, theirs)]
                found[file] = alike[0] if len(alike) == 1 else ""
        return found

    def _note_of_another_step(self) -> None:
        """Remark files whose step counters differ from those of most files.

        Every parameter of an optimizer has a counter, which one of the ranks saves. Only files with parts of the same
        parameters are compared: stages of a pipeline may have been trained for different numbers of steps."""
        parts: dict[str, set[str]] = {}
        steps: dict[str, dict[str, tuple[object, ...]]] = {}
        for name, item in self.metadata.items.items():
            parameter, _, leaf = name.rpartition(".")
            parts.setdefault(parameter, set()).update(item.files)
            counter = self.leaves.get(name)
            if leaf == _STEP and isinstance(counter, TensorSpec) and counter.numel == 1 and len(item.files) == 1:
                (file,) = item.files
                steps.setdefault(file, {})[parameter] = sums_of([counter])
        told = {file: set(own.values()) for file, own in steps.items() if len(own) >= _FEWEST_STEPS}
        if len(told) < 2 or any(len(values) > 1 or () in values for values in told.values()):
            return
        odd = set(unlike_most(told))
        for file in sorted(odd):
            theirs = {parameter for other in told.keys() - odd for parameter in steps[other]}
            if any(file in parts[parameter] for parameter in theirs):
                self.remarks[Fact.of(Kind.RANK_FOREIGN, file, names=(_STEP,))] = None

    def _copies(self, name: str, dtype: str, box: Box, locations: list[Location | None]) -> list[TensorSpec]:
        """Return the copies of a chunk, and record if their values differ."""
        copies = [self._load(name, location) for location in locations]
        for part in copies:
            if not isinstance(part, TensorSpec) or (part.dtype, part.shape) != (dtype, extent(box)):
                self.unlike.update({at.file for at in locations if at is not None} - self.faulty)
                raise UnreadableError(
                    f"the chunk of {name} at {[start for start, _ in box]} is not what {METADATA} says"
                )
        reads, path = self.salvage, str(self.folder)
        places = [location for location in locations if location is not None]
        is_in_one = len({place.file for place in places}) < len(places)
        files = [f"{place.file} at byte {place.offset}" if is_in_one else place.file for place in places]
        held = dict(zip(files, copies, strict=True))
        if agree(copies, path, reads=reads):
            return copies if reads else [compared(name, held, path)]
        whole = [file for file, copy in held.items() if not is_torn(copy)]
        fact = differing_of(name, whole, lambda one, other: agree([held[one], held[other]], path, reads=reads))
        if fact is None:
            return copies
        note_differing(self.clashes, fact)
        return [held[fact.data["others"][0]]]

    def _load(self, name: str, location: Location | None) -> Any:
        """Return the root of the torch.save file at a location. Its damage is recorded, and lost storages are torn."""
        if location is None:
            raise UnreadableError(f"{METADATA} does not say where it is")
        try:
            return self._root(name, location)
        except UnreadableError:
            self.faulty.add(location.file)
            raise

    def _root(self, name: str, location: Location) -> Any:
        outer = self._content(location.file)
        stop = location.offset + location.nbytes
        is_cut = stop > len(outer)
        if is_cut and location.offset >= len(outer):
            raise UnreadableError(f"{location.file} is cut short")
        content = outer.window(location.offset, min(stop, len(outer)))
        content.shared_bounds, content.is_verified = self.bounds, self.salvage
        if not is_zip(content):
            raise UnreadableError(
                f"{location.file} holds no torch.save file at byte {location.offset}: it is damaged or from another "
                "save"
            )
        try:
            document = torch_zip.read(content)
        except UnreadableError as error:
            if is_cut:
                raise UnreadableError(f"{location.file} is cut short") from error
            raise
        if (fault := next(filter(is_of_pickle, document.damage), None)) is not None:
            raise UnreadableError(f"{location.file} {clause(fault)}")
        if is_cut or document.damage:
            self.faulty.add(location.file)
            self._blame(name, location.file, [Fact(Kind.CUT_SHORT)] if is_cut else document.damage)
        self.remarks.update(dict.fromkeys(document.remarks))
        return document.root

    def _content(self, name: str) -> Content:
        if name not in self.contents:
            if (file := self._place(name)) is None:
                raise UnreadableError(f"{name} is missing")
            self.contents[name] = Content.of_file(str(file))
        return self.contents[name]

    def _place(self, name: str) -> Path | None:
        """Return the path of a file that the metadata names; None if it is missing or has the chunks of another one."""
        if name in self.misplaced:
            return None
        file = file_inside(self.folder, name, str(self.folder / METADATA))
        return file if os.path.isfile(file) else None  # noqa: PTH113 - Path.is_file raises for names that are too long

    def _nested(self) -> Any:
        """Return the saved container, which the planner flattened, from the paths of its leaves."""
        root = _Node()
        for name, leaf in self.leaves.items():
            *folders, last = self.metadata.paths.get(name, (name,))
            node: Any = root
            for part in folders:
                node = node.setdefault(part, _Node()) if isinstance(node, _Node) else None
            if not isinstance(node, _Node) or last in node or len(folders) > _DEPTH_LIMIT:
                raise damaged(self.folder, f"{name} has no unique place in the container; {METADATA} is damaged")
            node[last] = leaf
        return _plain(root)

    def _damage(self) -> list[Fact]:
        """Return the damage, each with the number of items that it affects."""
        facts = [replace(fact, data={**fact.data, "items": len(names)}) for fact, names in self.faults.items()]
        return [*self._lacking(), *facts, *self.clashes]


_Ranges = Collection[tuple[int, int]]  # of bytes, each of which is the archive of a chunk


def _has_another_end(content: Content, ranges: _Ranges) -> bool:
    """Return whether a file goes on with another archive after its ranges, or is shorter but ends with an archive, as
    a file that is cut short does not."""
    size, end = len(content), max(stop for _, stop in ranges)
    return content[end : end + len(_START)] == _START if size > end else size < end and _ends_at(content, size)


def _is_shifted(content: Content, ranges: _Ranges) -> bool:
    """Return whether an archive neither begins nor ends where one should be, in bytes that were written."""
    return any(
        stop <= len(content)
        and content[start : start + len(_START)] not in (_START, bytes(len(_START)))
        and not _ends_at(content, stop)
        for start, stop in ranges
    )


def _is_made_of(content: Content, ranges: _Ranges) -> bool:
    """Return whether ranges are exactly the archives in a file."""
    is_all = len(content) == max(stop for _, stop in ranges)
    return is_all and all(
        content[start : start + len(_START)] == _START and _ends_at(content, stop) for start, stop in ranges
    )


def _ends_at(content: Content, stop: int) -> bool:
    return content[max(stop - _END_SIZE, 0) : stop].startswith(_END)


class _Node(dict[PathPart, Any]):
    """A dict or list of the container; dicts that were saved as leaves are plain."""


def _plain(value: Any) -> Any:
    """Return the container as plain dicts and lists; the planner numbers the items of lists from 0."""
    if not isinstance(value, _Node):
        return value
    if all(isinstance(key, int) for key in value) and sorted(value) == list(range(len(value))):
        return [_plain(value[index]) for index in range(len(value))]
    made = {key: _plain(member) for key, member in value.items()}
    if {"state", "param_groups"} <= made.keys():
        made["state"] = _numbered(made["state"], made["param_groups"])
    return made


def _numbered(state: Any, groups: Any) -> Any:
    """Return an optimizer's state by the numbers in its groups. The planner writes them as text, under which torch's
    ``load_state_dict`` finds no parameter, without an error."""
    listed = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    listed = [number for part in listed if isinstance(part, list) for number in part]
    numbers = {str(number): number for number in listed if isinstance(number, int)}
    if not isinstance(state, dict) or not state.keys() <= numbers.keys():
        return state
    return {numbers[key]: value for key, value in state.items()}
