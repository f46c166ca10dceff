"""FSDP 1 and 2, HSDP, tensor parallelism: ``torch.save`` of every rank's ``state_dict()``, in files numbered by rank.

A ``ShardedTensor`` (FSDP 1) has the box of each of its shards. A ``DTensor`` (FSDP 2, HSDP, tensor parallelism, FSDP 1
with a mesh) has its placements on a mesh of ranks and the coordinates of its rank, from which its box follows. A
replicated tensor is the same box several times. Everything else is taken from the first rank, as in torch's
``full_state_dict``. How such files are named is in ``rank_sets``, and what trainers save beside them in ``beside``."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.sources import is_torn
from ckptfix.core.checkpoint import ContainerPath, path_name
from ckptfix.core.facts import Fact, Kind, clause
from ckptfix.core.finding import counted
from ckptfix.core.objects import Opaque
from ckptfix.core.parts import Box, PartsError, check_cover, extent, full, numel
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders import dcp
from ckptfix.reading.folders.chunks import (
    Flat,
    Spread,
    agree,
    compared,
    differing_of,
    gone,
    merge_parts,
    note_differing,
    sought_parts,
)
from ckptfix.reading.folders.rank_shards import FLAT, FSDP, is_sharded
from ckptfix.reading.folders.ranks import fairscale
from ckptfix.reading.folders.ranks.alike import AlikeRank, AlikeRanks, RankLeaves
from ckptfix.reading.folders.ranks.beside import OPTIMIZER, Beside, sort_groups, with_beside
from ckptfix.reading.folders.ranks.divided import Divided, divided
from ckptfix.reading.folders.ranks.files import COUNTERS, MALFORMED, RankFiles, add_rank, note_copies
from ckptfix.reading.folders.ranks.rank_sets import (
    RankSet,
    chosen_set,
    latest_sets,
    model_sets,
    rank_sets,
    set_of,
)
from ckptfix.reading.folders.ranks.small_parts import PartsRow, TwinFiles
from ckptfix.reading.foreign.weightless import is_optimizer
from ckptfix.reading.weights.document import Document

NAME = FSDP

_DEPTH = 32
# Bytes of a file that contain the first tensors in its pickle, and the marks of tensors of ranks.
_HEAD = 64 << 10
_DTENSOR = "DTensor"
_MARKS = (b"ShardedTensor", b"DTensor", b"shard_metadata")
_ARCHIVE = b"PK"
_MANY = 64  # files of one set, above which a file is read alone before it is read with the others


def find(folder: Path) -> Path | None:
    """Return the folder itself if its files are numbered by rank. What is in them may be anything."""
    return folder if any(found.count > 1 for found in rank_sets(folder).values()) else None


def is_named(folder: Path) -> bool:
    """Return whether the set of files that would be read has tensors of ranks, by the start of its first file, or by
    its name if that file is no archive."""
    if (found := chosen_set(folder)) is None:
        return False
    head = _head(next(iter(found.files.values())))
    return any(mark in head for mark in _MARKS) or (found.world > 1 and not head.startswith(_ARCHIVE))


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_HEAD)


def document(files: RankFiles) -> Document | None:
    """Return the document of a folder, or of the set of files of which one was named; None if these hold no tensors of
    ranks."""
    models = latest_sets(files.folder)
    found = set_of(files.folder / files.named.name) if files.named is not None else None
    is_all = found is None or (len(models) == 1 and (models[0] == found or found.is_optimizer))
    if files.named is not None and (not is_all or len(model_sets(files.folder)) > 1):
        files.is_by_name = True  # also for the latest of several saves, as training may write another one
    found = chosen_set(files.folder) if is_all else found
    if found is None or (files.named is not None and len(found.files) > _MANY and _is_alone(files.named, found)):
        return None
    made = _RankMerge(files, found).document()
    if made is None:
        return None
    made = made if not is_all or found.is_beside else with_beside(made, _beside(files))
    sort_groups(made.root)
    return made


def _is_alone(file: Path, ranks: RankSet) -> bool:
    """Return whether a file has no tensors of ranks, whatever the others with such a name have: each of them may be
    opened in turn, and then each would read all others."""
    reading = RankFiles(file.parent, salvage=True)
    root = reading.root(file)
    if root is None:
        return ranks.world < 2 and not any(mark in _head(file) for mark in _MARKS)
    leaves = (leaf for _, leaf in _leaves(root, (), set()))
    is_part = any(isinstance(leaf, Opaque) for leaf in leaves) or any(map(_is_dtensor, reading.names))
    return not (is_part or fairscale.has_metadata(root))


def _beside(files: RankFiles) -> Iterator[Beside]:
    """Yield the files and folders that a trainer saved beside the ranks of its model."""

    def read_set(ranks: RankSet) -> Document | None:
        others = RankFiles(files.folder, files.salvage)
        with others.merging():
            return _RankMerge(others, ranks).document()

    for found in rank_sets(files.folder).values():
        if found.is_beside:
            yield found.pattern.format("*"), partial(read_set, found)
    for child in sorted(files.folder.glob(f"{OPTIMIZER}*")):
        if child.is_dir() and dcp.looks_like(child):
            yield child.name, partial(dcp.read_folder, child, files.salvage)


def folder_of(file: Path) -> Path | None:
    """Return the folder of a rank's file if its set has other files, or should have by its name or the start of its
    content; None otherwise."""
    found = set_of(file)
    is_one = found is not None and (found.count > 1 or any(mark in _head(file) for mark in _MARKS))
    return file.parent if is_one else None


_Copies = dict[Box, list[tuple[int, TensorSpec]]]  # of a part, with their ranks


class _Collected(Struct):
    """The tensors of all ranks under one path: parts of a whole tensor, stretches of it, or a plain tensor.

    There may be ten thousand, so boxes are only sorted into a dict when they are needed."""

    held: list[tuple[int, Divided]] = field(default_factory=list)  # the parts that ranks have
    dtype: str = ""
    plain: TensorSpec | None = None
    plain_in: list[int] = field(default_factory=list)  # the ranks that have it as a plain tensor
    differs: bool = False
    # Views of the ranks' flat parameters, each with the position of these (`LOCAL_STATE_DICT` with original names).
    stretches: list[tuple[int, TensorSpec]] = field(default_factory=list)

    @property
    def first(self) -> Divided | None:
        """What the first rank with a part has."""
        return self.held[0][1] if self.held else None

    @property
    def copies(self) -> _Copies:
        """The copies of each part, with the ranks that have them."""
        found: _Copies = {}
        for rank, leaf in self.held:
            for box, part in leaf.parts:
                found.setdefault(box, []).append((rank, part))
        return found

    @property
    def place(self) -> object:
        """A value that is equal for tied tensors: the storages of all parts, or a unique number if there are none."""
        if any(part.numel for _, part in self.stretches):
            return tuple([(at, id(part.storage), part.offset, part.shape) for at, part in self.stretches])
        if self.first is None or self.plain is not None:
            return id(self)
        stored = (
            (box, id(part.storage), part.offset, part.strides) for _, leaf in self.held for box, part in leaf.parts
        )
        return self.first.shape, *chain.from_iterable(stored)


class _RankMerge:
    """A merge of files, which collects the tensors rank by rank, by their path in the container."""

    def __init__(self, files: RankFiles, ranks: RankSet) -> None:
        self.files, self.ranks, self.path = files, ranks, str(files.folder)
        self.found: dict[ContainerPath, _Collected] = {}
        # Facts that are equal on all ranks of a save, and the layouts of tensors that differ from the first rank's.
        self.said: dict[str, dict[int, Any]] = {}
        self.unlike: dict[ContainerPath, dict[int, object]] = {}
        self.kinds: set[str] = set()
        self.left_out: set[ContainerPath] = set()
        self.groups: dict[int, list[Any]] = {}  # of the optimizers of each rank that was read
        self.world = ranks.world
        self.places: dict[int, Path] = {}  # of flat parameters
        # Ranks whose parts are looked up when they are read, by the rank that they are alike, which speaks for them.
        self.twins: dict[int, list[AlikeRank]] = {}
        self.twin_of: dict[int, int] = {}
        self._layouts: dict[object, list[tuple[Box, AlikeRank]]] = {}
        # Of those layouts, one twin for each part, and the twins with copies of parts.
        self._parts: dict[object, tuple[list[tuple[Box, AlikeRank]], list[tuple[Box, AlikeRank]]]] = {}
        self._filled: set[object] = set()  # boxes that fill a tensor
        self._rows: dict[object, PartsRow | None] = {}  # the order of parts, by the boxes that fill a tensor

    def document(self) -> Document | None:
        """Return the merged document; None if no tensor is sharded and the ranks are not copies either."""
        first: Any = None
        lacking: dict[ContainerPath, Path] = {}
        alike = AlikeRanks()
        for rank, file in self.ranks.files.items():
            if 0 < self.world <= rank:
                break  # any number of ranks of another save may follow; they are damage
            if (twin := None if first is None else self._alike(alike, file)) is not None:
                leaves, groups = twin.leaves, twin.groups
                twin.rank = rank
                self.twins.setdefault(twin.base, []).append(twin)
                self.twin_of[rank] = twin.base
            else:
                if (root := self.files.root(file)) is None:
                    continue
                if first is None and fairscale.has_metadata(root):
                    return self._of_fairscale(rank, root)
                parts = root.values() if isinstance(root, dict) else ()
                groups = [part["param_groups"] for part in parts if isinstance(part, dict) and "param_groups" in part]
                layouts: dict[int, Divided] = {}
                leaves = [(path, _read(path, leaf, file, layouts)) for path, leaf in _leaves(root, (), set())]
                parts = root = _replaced(root, (), dict(leaves), {}, ())  # pickled DTensors take 2 kB each
            self.groups[rank] = groups
            known = len(self.found) if first is not None else None
            self._collect(rank, file, leaves)
            lacking.update(dict.fromkeys(list(self.found)[known:] if known is not None else (), file))
            if not (self.kinds or self._are_whole):
                return None  # without reading the files of the other ranks
            if twin is None:
                first = root if first is None else first
                alike.add(rank, self.files.content(file), leaves, groups)
        del alike  # it has copies of pickles and directories
        if not self.kinds and (not self._are_whole or lacking or any(each.differs for each in self.found.values())):
            return None
        self.kinds = self.kinds or {_DTENSOR}
        if odd := self._of_another_save():
            mixed = [fact for fact in self.files.damage if fact.kind is Kind.RANKS_OF_ANOTHER_SAVE]
            self.files.damage[:] = mixed  # other damage is recorded again when the remaining ranks are read
            rest = {rank: file for rank, file in self.ranks.files.items() if rank not in odd}
            return _RankMerge(self.files, replace(self.ranks, files=rest)).document()
        self.files.note_foreign(
            {self.ranks.files[rank].name: {"param_groups": groups} for rank, groups in self.groups.items()}
        )
        if self.world:
            self.files.note_missing(self.world, self.ranks.files, self.ranks.pattern)
        self._leave_out(first, lacking)
        made: dict[object, TensorSpec] = {}  # tensors that are tied on all ranks stay tied
        tensors = {}
        for path in [*self.found]:
            found = self.found.pop(path)  # ten thousand take 4 MB
            place = found.place
            tensors[path] = made[place] if place in made else made.setdefault(place, self._tensor(path, found))
        root = _replaced(first, (), tensors, {}, self.left_out)
        for mark in [mark for mark in self.files.remarks if mark.kind is Kind.TENSOR_SUBCLASS]:
            if mark.data["name"].rpartition(".")[2] in self.kinds:
                del self.files.remarks[mark]  # the merged tensor is a plain one
        producer = f"{' and '.join(sorted(self.kinds))} of {counted(len(self.ranks.files), 'rank')}"
        return self.files.document(NAME, root, producer)

    @cached_property
    def _small(self) -> TwinFiles:
        return TwinFiles([twin for twins in self.twins.values() for twin in twins])

    @property
    def _are_whole(self) -> bool:
        """Whether all ranks have whole tensors of a mesh: HSDP with as many replicas as ranks."""
        return any(map(_is_dtensor, self.files.names))

    def _alike(self, alike: AlikeRanks, file: Path) -> AlikeRank | None:
        """Return a rank whose file equals another's except for its place; None otherwise."""
        try:
            return alike.find(self.files.content(file))
        except UnreadableError:
            return None  # reading it on its own reports the error

    def _of_fairscale(self, rank: int, root: Any) -> Document:
        later = {other: self.files.root(file) for other, file in self.ranks.files.items() if other > rank}
        roots = {rank: root, **{other: held for other, held in later.items() if fairscale.has_metadata(held)}}
        return fairscale.document(self.files, roots, self.ranks.files, self.ranks.pattern)

    def _collect(self, rank: int, file: Path, leaves: RankLeaves) -> None:
        flat = {
            id(spec.storage): box[0][0]
            for path, leaf in leaves
            if isinstance(leaf, Divided) and _is_flat_name(path)
            for box, spec in leaf.parts
            if spec.numel
        }
        if (place := max(flat.values(), default=-1)) >= 0:
            add_rank(self.places, place, file)
        _check_views([leaf for _, leaf in leaves if isinstance(leaf, TensorSpec) and id(leaf.storage) in flat], file)
        for path, leaf in leaves:
            if isinstance(leaf, TensorSpec):
                found = self.found.setdefault(path, _Collected())
                if flat and len(leaf.shape) == 1 and (id(leaf.storage) in flat or not leaf.numel):
                    found.stretches.append((place, leaf))
                elif found.plain is None:
                    found.plain, found.plain_in = leaf, [rank]
                else:
                    found.differs = found.differs or not agree([found.plain, leaf], self.path, reads=False)
                    is_copy = (leaf.dtype, leaf.shape) == (found.plain.dtype, found.plain.shape)
                    is_better = is_copy and is_torn(found.plain) and not is_torn(leaf)
                    found.plain_in.insert(0 if is_better else len(found.plain_in), rank)
                    found.plain = leaf if is_better else found.plain
            elif isinstance(leaf, Divided):
                self._collect_parts(path, rank, leaf)
            if path[-1] in COUNTERS and (isinstance(leaf, TensorSpec) or type(leaf) is int):
                self.said.setdefault(path_name(path), {})[rank] = leaf

    def _collect_parts(self, path: ContainerPath, rank: int, leaf: Divided) -> None:
        self.kinds.add(leaf.kind)
        self.world = max(self.world, leaf.world)
        found = self.found.setdefault(path, _Collected())
        first = found.first or leaf
        dtype = next((part.dtype for _, part in leaf.parts), found.dtype)
        found.dtype = found.dtype or dtype
        layout = (leaf.shape, leaf.world, leaf.splits, dtype)
        if layout != (first.shape, first.world, first.splits, found.dtype):
            self.unlike.setdefault(path, {})[rank] = layout
        else:
            found.held.append((rank, leaf))

    def _of_another_save(self) -> list[int]:
        """Return the ranks of another save than most, with other counters or another split of a tensor."""
        names = {rank: file.name for rank, file in self.ranks.files.items()}
        said = {what: self._of_all(self._told_apart(each)) for what, each in self.said.items()}
        for path, others in self.unlike.items():
            said[f"shape, dtype or ranks of {path_name(path)}"] = {
                **dict.fromkeys(self.groups),
                **self._of_all(others),
            }
        for path, found in self.found.items():
            if found.plain is not None and found.held and any(map(numel, found.copies)):
                plain = self._of_all(dict.fromkeys(found.plain_in, True))
                said[f"shape, dtype or ranks of {path_name(path)}"] = {rank: rank in plain for rank in self.groups}
        mixed = (self.files.of_another_save(values, names, what) for what, values in said.items())
        return next(filter(None, mixed), [])

    def _of_all(self, values: Mapping[int, object]) -> dict[int, object]:
        """Return the values of ranks with those of the twins that they speak for."""
        speakers = {rank: rank if rank in values else self.twin_of.get(rank, rank) for rank in self.groups}
        return {rank: values[speaker] for rank, speaker in speakers.items() if speaker in values}

    def _told_apart(self, values: Mapping[int, Any]) -> Mapping[int, object]:
        """Return the numbers of ranks; of tensors, for each rank the name of the first with an equal one."""
        if all(type(value) is int for value in values.values()):
            return values

        def is_same(one: Any, other: Any) -> bool:
            are_tensors = isinstance(one, TensorSpec) and isinstance(other, TensorSpec)
            return agree([one, other], self.path, reads=False) if are_tensors else bool(one == other)

        return {
            rank: next(f"rank {first}" for first, other in values.items() if is_same(other, value))
            for rank, value in values.items()
        }

    def _leave_out(self, root: Any, lacking: Mapping[ContainerPath, Path]) -> None:
        """Find the entries to leave out: flat parameters whose weights exist by name, and optimizers that cannot be
        merged.

        Raises ``UnreadableError`` for a weight that the first rank does not have."""
        stretches = [found.stretches for found in self.found.values() if len(found.stretches) > 1]
        if any(part.numel for parts in stretches for _, part in parts):
            self.left_out |= {path for path in self.found if _is_flat_name(path)}
            flattened = tuple(path[-1] for path, found in self.found.items() if len(found.stretches) > 1)
            self.files.remarks[Fact.of(Kind.FLATTENED, keys=flattened)] = None
        for path in [*(path for path, found in self.found.items() if found.differs), *lacking]:
            above = [path[:depth] for depth in range(1, len(path))]
            optimizer = next((part for part in above if is_optimizer(_at(root, part))), None)
            if optimizer is None and path in lacking:
                raise UnreadableError(
                    f"{lacking[path]}: holds {path_name(path)}, which the first rank lacks: its ranks are from "
                    "different saves, or from pipeline stages, which are not merged; put the files of one save together"
                )
            if optimizer is not None and optimizer not in self.left_out:
                self.left_out.add(optimizer)
                self.files.remarks[Fact(Kind.RANK_LEFT_OUT, path_name(optimizer))] = None
        for path in [path for path in self.found if any(path[: len(part)] == part for part in self.left_out)]:
            del self.found[path]

    def _tensor(self, path: ContainerPath, found: _Collected) -> TensorSpec:
        name = path_name(path)
        if found.stretches:
            flat = Flat.joined([part for _, part in sorted(found.stretches, key=lambda each: each[0])])
            whole = Spread([flat]).tensor(name, (flat.stop,), 0, self.path)
            return gone(name, whole, self.path) if self.files.damage else whole
        if found.first is None:
            assert found.plain is not None
            if found.differs:
                note_copies(self.files.remarks, (name,))
            return found.plain
        shape, copies = found.first.shape, found.copies
        if found.plain is not None and found.plain.shape == shape:
            # A rank that has the whole of a tensor has it as a plain tensor.
            copies.setdefault(full(shape), []).append((found.plain_in[0], found.plain))
        if not any(copies.values()):
            raise UnreadableError(f"{self.path}: no rank holds a part of {name}; its files are damaged")
        every = self._twins(path, found)
        if (twins := self._of_parts(every, path, copies)) and self._are_whole_with(twins, path, found, copies):
            own = {box: part for _, leaf in found.held for box, part in leaf.parts if numel(box)}
            if (layout := (id(twins), *own)) not in self._rows:
                self._rows[layout] = self._small.row([*own], twins, shape)
            if (row := self._rows[layout]) is not None:
                spec = TensorSpec(found.dtype, shape, contiguous_strides(shape))
                if (small := row.tensor(name, spec, path, tuple(own.values()), self.path)) is not None:
                    return small
            find = partial(_pieces, path, found, twins)
            return sought_parts(name, found.dtype, shape, find, self.path)
        for box, twin in every:
            copies.setdefault(box, []).append((twin.rank, twin.part(twin.spread[path].parts[0][1])))
        used = {box: self._compared(name, same) for box, same in copies.items()}
        spec = TensorSpec(next(iter(used.values()))[0].dtype, shape, contiguous_strides(shape))
        held = sum(map(numel, used))
        intact = [box for box, same in used.items() if not all(map(is_torn, same))]
        self.files.lacking[name] += (spec.numel - sum(map(numel, intact))) * spec.itemsize
        if held < spec.numel:
            if not self.files.damage:
                self.files.note_renamed()
                moved = [mark for mark in self.files.remarks if mark.kind is Kind.RANK_RENAMED]
                for mark in moved:  # the ranks say which parts they hold, so what is left is in its place
                    del self.files.remarks[mark]
                marks = "; ".join(f"{mark.place} {clause(mark)}" for mark in moved)
                why = marks or "one was copied over another, or is from another save"
                lacks = f"its ranks hold {held} of the {spec.numel} elements of {name} ({why})"
                self.files.damage.append(Fact.of(Kind.CHUNKS_LACKING, error=lacks))
            return gone(name, spec, self.path)
        return merge_parts(name, spec.dtype, spec.shape, used, self.path)

    def _compared(self, name: str, same: list[tuple[int, TensorSpec]]) -> list[TensorSpec]:
        """Return the copies of a part to use, that of most ranks first, and record if they differ."""
        copies = [copy for _, copy in same]
        if len(copies) == 1:
            return copies
        held, reads = {self.ranks.files[rank].name: copy for rank, copy in same}, self.files.salvage
        if agree(copies, self.path, reads=reads):
            return copies if reads else [compared(name, held, self.path)]
        whole = [file for file, copy in held.items() if not is_torn(copy)]
        fact = differing_of(name, whole, lambda one, other: agree([held[one], held[other]], self.path, reads=reads))
        if fact is None:
            return copies
        note_differing(self.files.damage, fact)
        return [held[fact.data["others"][0]]]

    def _twins(self, path: ContainerPath, found: _Collected) -> list[tuple[Box, AlikeRank]]:
        """Return the twins that have a part of a tensor, each with its box."""
        held = [twins for twins in self.twins.values() if path in twins[0].spread]
        if not held or found.first is None:
            return []
        layout = (found.first.shape, found.first.splits, tuple(map(id, held)))
        if layout not in self._layouts:
            placed = [(twin.box(found.first), twin) for twins in held for twin in twins]
            self._layouts[layout] = [(box, twin) for box, twin in placed if numel(box)]
        return self._layouts[layout]

    def _of_parts(
        self, twins: list[tuple[Box, AlikeRank]], path: ContainerPath, copies: _Copies
    ) -> list[tuple[Box, AlikeRank]]:
        """Return one twin for each part that no other rank has, if all copies of each part have the same checksum; all
        twins otherwise."""
        own = {box: same[0][1] for box, same in copies.items() if numel(box)}
        if (layout := (id(twins), *own)) not in self._parts:
            firsts: dict[Box, AlikeRank] = {}
            more = [(box, twin) for box, twin in twins if box in own or firsts.setdefault(box, twin) is not twin]
            self._parts[layout] = [*firsts.items()] if more else twins, more
        kept, more = self._parts[layout]
        holders = dict(kept) if more else {}
        for box, twin in more:
            part = twin.spread[path].parts[0][1]
            first = own[box] if box in own else holders[box].spread[path].parts[0][1]
            written = first.storages[0].crc32 if box in own else holders[box].checksum(first)
            is_same = written is not None and written == twin.checksum(part)
            if not is_same or (first.nbytes, first.offset, first.strides) != (part.nbytes, part.offset, part.strides):
                return twins
        return kept

    def _are_whole_with(
        self, twins: list[tuple[Box, AlikeRank]], path: ContainerPath, found: _Collected, copies: _Copies
    ) -> bool:
        """Return whether the parts of twins and of other ranks fill a tensor, each element once."""
        assert found.first is not None
        own = {box: parts for box, parts in copies.items() if numel(box)}
        for box, parts in own.items():
            _, part = parts[0]
            if len(parts) > 1 or (part.dtype, part.shape) != (found.dtype, extent(box)) or is_torn(part):
                return False
        filled = (id(twins), *own)
        if filled not in self._filled and all(
            extent(box) == extent(twin.spread[path].parts[0][0]) for box, twin in twins
        ):
            with suppress(PartsError):
                check_cover("", [*own, *(box for box, _ in twins)], found.first.shape)
                self._filled.add(filled)
        return filled in self._filled


def _pieces(
    path: ContainerPath, found: _Collected, twins: list[tuple[Box, AlikeRank]]
) -> Iterator[tuple[Box, TensorSpec]]:
    """Yield the parts of a tensor with their boxes."""
    yield from ((box, part) for _, leaf in found.held for box, part in leaf.parts if numel(box))
    yield from ((box, twin.part(twin.spread[path].parts[0][1])) for box, twin in twins)


def _is_dtensor(name: str) -> bool:
    return name.endswith(f".{_DTENSOR}")


def _read(path: ContainerPath, leaf: Any, file: Path, known: dict[int, Divided]) -> Any:
    """Return the parts of a sharded tensor; any other leaf unchanged."""
    try:
        return divided(leaf, known) if isinstance(leaf, Opaque) else leaf
    except MALFORMED as error:
        raise UnreadableError(
            f"{file}: the tensor {path_name(path)} does not say which part it is ("
            f"{type(error).__name__}: {error}); the file is damaged or from an unknown release of torch"
        ) from error


def _check_views(views: list[TensorSpec], file: Path) -> None:
    """Raise ``UnreadableError`` if views of a flat parameter overlap; those of tied weights are equal."""
    stop: dict[int, int] = {}
    for storage, start, count in sorted({(id(view.storage), view.offset, view.numel) for view in views if view.numel}):
        if start < stop.get(storage, 0):
            raise UnreadableError(f"{file}: its weights overlap in their flat parameter; the file is damaged")
        stop[storage] = start + count


def _is_flat_name(path: ContainerPath) -> bool:
    return str(path[-1]).rpartition(".")[2] in FLAT


def _at(value: Any, path: ContainerPath) -> Mapping[Any, Any]:
    """Return the dict at a path; empty if there is none."""
    for part in path:
        value = value[part] if isinstance(value, dict) and part in value else {}
    return value if isinstance(value, dict) else {}


def _leaves(value: Any, path: ContainerPath, seen: set[int]) -> Iterator[tuple[ContainerPath, Any]]:
    """Yield the tensors, sharded tensors and integers in a container with their paths.

    A container in several places, or in itself, is visited once."""
    if isinstance(value, TensorSpec) or (isinstance(value, Opaque) and is_sharded(value)) or type(value) is int:
        if path:
            yield path, value
        return
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen or len(path) >= _DEPTH:
        return
    seen.add(id(value))
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, (str, int)):
            yield from _leaves(child, (*path, key), seen)


def _replaced(
    value: Any,
    path: ContainerPath,
    tensors: Mapping[ContainerPath, Any],
    made: dict[int, Any],
    left_out: Collection[ContainerPath],
) -> Any:
    """Return a container with its tensors replaced; a container in several places stays one object."""
    if path in tensors:
        return tensors[path]
    if not isinstance(value, (dict, list, tuple)) or len(path) >= _DEPTH:
        return value
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict):
        new: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        made[id(value)] = new
        for key, child in value.items():
            if (*path, key) not in left_out:
                is_path = isinstance(key, (str, int))
                new[key] = _replaced(child, (*path, key), tensors, made, left_out) if is_path else child
        if isinstance(value, OrderedDict):
            new.__dict__.update(value.__dict__)  # torch's _metadata
        return new
    items: list[Any] = []
    made[id(value)] = items
    items.extend(_replaced(child, (*path, index), tensors, made, left_out) for index, child in enumerate(value))
    if isinstance(value, tuple):
        made[id(value)] = tuple(items)
    return made[id(value)]
