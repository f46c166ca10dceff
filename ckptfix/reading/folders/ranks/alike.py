"""Reads ranks whose pickle equals that of another rank except for the place of the rank.

Pickles of FSDP 2 have the rank's coordinates in the mesh of all tensors, those of FSDP 1 the offsets of each part, and
both may have the number of the GPU. If all other bytes are equal, the tensors are the same, in the rank's own storages,
and the pickle need not be run. A check of 64 ranks with 300 tensors takes 2 s instead of 10 s with FSDP 2, and 6 s
instead of 200 s with FSDP 1, whose pickles list the parts of all ranks for each tensor.

If the directories of the archives are equal too, apart from checksums, they are not parsed either, and the rank's parts
of tensors are looked up when they are read: 64 ranks with 10,000 tensors have 640,000 of them. A check takes 51 MB
instead of 543 MB, and a seventh of the time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.decoders import STORED
from ckptfix.bytes.sources import Content, MemoryBytes
from ckptfix.core.checkpoint import ContainerPath
from ckptfix.core.parts import Box, box_at, extent
from ckptfix.core.spec import ByteSource, Storage, TensorSpec
from ckptfix.errors import damaged
from ckptfix.reading.archives.zip_directory import CRC, ChecksumPlaces, StoredMembers, forget_directory
from ckptfix.reading.folders.ranks.divided import Divided, box_on_mesh
from ckptfix.reading.sniffing import is_zip
from ckptfix.reading.torch_files.torch_zip import Archive, Reading, open_archive

RankLeaves = list[tuple[ContainerPath, Any]]  # the tensors and numbers of a container, with their paths

# In pickles of protocol 2: an integer below 2 ** 31, opcodes that store in and read from the memo, and a class.
_INT, _PUT, _GET = rb"(?:K.|M..|J....)", rb"(?:q.|r....)", rb"(?:h.|j....)"
_CLASS = rb"(?:c[\w.]+\n\w+\n" + _PUT + rb"|" + _GET + rb")"
_LIST = rb"\]" + _PUT + rb"\(?(?P<%s>" + _INT + rb"{1,8})[ae]"
_DEVICE = rb"(?:cuda|[hmnx]pu)"
# What may differ: the rank in a mesh, its coordinates, names of devices (`cuda:3`), and `torch.device("cuda", 3)`.
_PLACE = (
    rb"X\x05\0\0\0_rank" + _PUT + _INT + rb"|"
    rb"X\x12\0\0\0_coordinate_on_dim" + _PUT + rb"(?:\]" + _PUT + rb")?\(?(?P<place>" + _INT + rb"{1,4})[aet\x85-\x87]|"
    rb"X[\5\6]\0\0\0" + _DEVICE + rb":[1-9]|(?:" + _GET + rb"|" + _DEVICE + _PUT + rb")K.\x86" + _PUT + rb"R"
)
_NUMBER = re.compile(_INT, re.DOTALL)
# Members of an archive that say how to read the others.
_SETTINGS = ("version", "byteorder", ".format_version", ".storage_alignment")
_COMPARED = 1 << 18  # bytes that are compared at a time
_BASES = 3  # ranks to compare others with: the last ones whose pickles were run


class AlikeRanks:
    """The ranks whose pickles were run, with which the pickles of other ranks are compared."""

    def __init__(self) -> None:
        self._bases: list[RunRank] = []

    def add(self, rank: int, content: Content, leaves: RankLeaves, groups: list[Any]) -> None:
        """Add a rank with its tensors and the parameter groups of its optimizers."""
        if (own := _Pickle.of(content)) is not None and (base := RunRank.of(rank, own, leaves, groups)) is not None:
            self._bases = [base, *self._bases][:_BASES]

    def find(self, content: Content) -> AlikeRank | None:
        """Return another rank as one that is alike; None if its pickle has to be run.

        Raises ``UnreadableError`` if it is damaged."""
        for base in self._bases:
            for archive in base.archives:
                if (twin := archive.twin(content)) is not None and (made := base.moved(twin)) is not None:
                    return made
        own = _Pickle.of(content) if self._bases else None
        for base in self._bases if own is not None else ():
            if own is not None and (made := base.moved(own)) is not None:
                # The name of a rank is longer from rank 10 on.
                base.archives = [own.without_data(), *base.archives][:_BASES]
                return made
        return None


class _TwinArchive(Archive):
    """An archive whose directory equals that of another one apart from checksums.

    Its local headers are not read: the directory gives the places of all members, so those of the data are equal too,
    and checksums verify them."""

    def crc32(self, name: str) -> int | None:
        place = self.members[name].entry + CRC
        return int.from_bytes(self.content[place : place + 4], "little")


class _Pickle(Struct):
    """The pickle of an intact archive."""

    reading: Reading
    archive: Archive
    data: bytes
    places: ChecksumPlaces | None = None

    @classmethod
    def of(cls, content: Content) -> _Pickle | None:
        """Return the pickle of a file; None if it is not an archive, or is damaged or unusual."""
        if not is_zip(content):
            return None
        archive = open_archive(content)
        index, reading = archive.index, Reading(archive)
        is_odd = index.found or index.damage or index.doubts or index.displaced or index.trailing
        if is_odd or archive.oddity is not None or reading.is_big_endian:
            return None
        if any(info.method != STORED for info in archive.members.values()):
            return None
        places = ChecksumPlaces.of(content) if archive.crc32("data.pkl") else None
        archive.members = StoredMembers(archive.members)
        archive.index.members = []
        forget_directory(content)
        data = reading.member("data.pkl")
        return None if reading.faults else cls(reading, archive, data, places)

    def twin(self, content: Content) -> _Pickle | None:
        """Return the pickle of another archive if only checksums in its directory differ; None otherwise."""
        if self.places is None or (root := self.places.folder(content)) is None:
            return None
        archive = _TwinArchive(content, root, self.archive.members, self.archive.index)
        if any(archive.crc32(name) != self.archive.crc32(name) for name in _SETTINGS if name in archive.members):
            return None
        reading = Reading(archive)
        data = reading.member("data.pkl")
        return None if reading.faults else _Pickle(reading, archive, data)

    def without_data(self) -> _Pickle:
        """Return the pickle for comparing the members of other archives, which does without its bytes."""
        return replace(self, data=b"")

    def has_members_of(self, other: _Pickle) -> bool:
        """Return whether the archive has the same storages, of the same sizes, as another one."""
        mine, others = self.archive.members, other.archive.members
        if mine is others:
            return True
        sizes = ({name: info.size for name, info in each.items() if "/" in name} for each in (mine, others))
        return mine.keys() == others.keys() and next(sizes) == next(sizes)


class _MeshPlaces(Struct):
    """The place of a rank in its pickle: its coordinates in each mesh, and the offsets and sizes of each part. Sizes
    have to equal those of the other rank."""

    meshes: list[list[int]]
    offsets: list[list[int]]
    sizes: list[bytes]

    @classmethod
    def of(cls, found: list[re.Match[bytes]]) -> _MeshPlaces:
        """Return the places from the matches in a pickle."""
        groups = [match.groupdict() for match in found]
        return cls(
            [_numbers(each["place"]) for each in groups if each["place"]],
            [_numbers(each["offsets"]) for each in groups if each.get("offsets")],
            [each["sizes"] for each in groups if each.get("sizes")],
        )


class RunRank(Struct):
    """A rank whose pickle was run, to compare others with: the bytes of its pickle, and the ranges of them that may not
    differ (``between``).

    ``spread`` are the tensors of which each rank has another part, and ``rest`` are the other leaves."""

    rank: int
    archives: list[_Pickle]
    pattern: re.Pattern[bytes]
    pickle: ByteSource
    between: list[tuple[int, int]]
    sizes: list[bytes]
    spread: dict[ContainerPath, Divided]
    rest: RankLeaves
    groups: list[Any]

    @classmethod
    def of(cls, rank: int, own: _Pickle, leaves: RankLeaves, groups: list[Any]) -> RunRank | None:
        """Return a rank to compare others with; None if the parts of its tensors are not found in its pickle."""
        data = _of_first_device(own.data, _device(own.data))
        pattern = re.compile(rb"|".join((*_of_shards(data), _PLACE)), re.DOTALL)
        found = list(pattern.finditer(data))
        stops, starts = [0, *(match.end() for match in found)], [*(match.start() for match in found), len(data)]
        places = _MeshPlaces.of(found)
        sharded = [leaf for _, leaf in leaves if isinstance(leaf, Divided) and leaf.splits is None]
        said = [([start for start, _ in box], [*extent(box)]) for leaf in sharded for box, _ in leaf.parts]
        if said != list(zip(places.offsets, map(_numbers, places.sizes), strict=True)):
            return None
        between = list(zip(stops, starts, strict=True))
        # Read again for each comparison, unless it had to be changed: those of 10,000 tensors take 4 MB.
        source = own.archive.source("data.pkl") if data is own.data else MemoryBytes(data)
        spread = {path: leaf for path, leaf in leaves if isinstance(leaf, Divided) and leaf.is_spread}
        rest = [(path, leaf) for path, leaf in leaves if path not in spread]
        return cls(rank, [own.without_data()], pattern, source, between, places.sizes, spread, rest, groups)

    def moved(self, own: _Pickle) -> AlikeRank | None:
        """Return another rank if its pickle equals this one except for its place; None otherwise."""
        if not own.has_members_of(self.archives[0]) or (places := self._places(own.data)) is None:
            return None
        every = (leaf for leaves in (self.spread.items(), self.rest) for _, leaf in leaves)
        is_on_mesh = any(isinstance(leaf, Divided) and leaf.splits for leaf in every)
        if is_on_mesh and len(places.meshes) != 1:
            return None  # with several meshes, it is unknown which tensor is on which
        at = places.meshes[0] if is_on_mesh else ()
        made = AlikeRank(own.reading, at, self.rank, self.spread, self.groups, own.archive)
        try:
            if not self._has_equal_rest(own):
                made.leaves = made.moved(self.rest, places.offsets)
        except (KeyError, ValueError, AttributeError, IndexError):
            return None  # a tensor with no storage, or several
        if own.archive.is_verified:
            for leaf in self.spread.values():
                made.part(leaf.parts[0][1])  # one that fails its checksum may be whole on another rank
        return None if own.reading.torn or own.reading.unsound else made

    def _has_equal_rest(self, own: _Pickle) -> bool:
        """Return whether another rank has the same plain tensors, by their checksums, and no others besides
        ``spread``."""
        if any(isinstance(leaf, Divided) for _, leaf in self.rest):
            return False
        stored = [storage for _, leaf in self.rest if isinstance(leaf, TensorSpec) for storage in leaf.storages]
        names = [f"data/{storage.key}" for storage in stored]
        sums = [storage.crc32 for storage in stored]
        return None not in sums and [*map(own.archive.crc32, names)] == sums

    def _places(self, data: bytes) -> _MeshPlaces | None:
        """Return the places in a pickle; None if it differs in anything else."""
        found, at, device = [], 0, _device(data)
        for start, stop in self.between[:-1]:
            if not self._has_equal(data, device, at, start, stop):
                return None
            if (match := self.pattern.match(data, at + stop - start)) is None:
                return None
            found.append(match)
            at = match.end()
        places = _MeshPlaces.of(found)
        start, stop = self.between[-1]
        is_end = len(data) - at == stop - start and self._has_equal(data, device, at, start, stop)
        return places if is_end and places.sizes == self.sizes else None

    def _has_equal(self, data: bytes, device: bytes, at: int, start: int, stop: int) -> bool:
        """Return whether a pickle has at position ``at`` the bytes ``start`` to ``stop`` of this one."""
        for first in range(start, stop, _COMPARED):
            last, place = min(first + _COMPARED, stop), at + first - start
            wide = max(place - len(device), 0)  # a device may be at the edge of a block
            theirs = _of_first_device(data[wide : place + last - first + len(device)], device)
            if theirs[place - wide :][: last - first] != self.pickle.read(first, last):
                return False
        return True


class AlikeRank(Struct):
    """A rank whose pickle equals that of the rank ``base``, except for its coordinates (``at``).

    Its parts of the tensors in ``spread``, given here as those of the base, are looked up one by one. ``leaves`` are
    its other leaves, unless those of the base are equal. ``groups`` are the same in both."""

    reading: Reading
    at: Sequence[int]
    base: int
    spread: Mapping[ContainerPath, Divided]
    groups: list[Any]
    archive: Archive
    leaves: RankLeaves = []
    rank: int = -1

    def box(self, leaf: Divided) -> Box:
        """Return the rank's box of a tensor on a mesh."""
        return box_on_mesh(leaf.shape, leaf.splits or (), self.at)

    def place(self, spec: TensorSpec) -> int:
        """Return the position in the archive of the storage of a part, of which the base has ``spec``."""
        (storage,) = spec.storages
        name = f"data/{storage.key}"
        if (start := self.archive.index.data_start(self.archive.content, self.archive.members[name])) is None:
            raise damaged(self.archive.path, f"member {name} is not where the archive's directory says")
        return start

    def place_of_checksum(self, spec: TensorSpec) -> int | None:
        """Return the position of the checksum of that storage; None if the archive has no checksums."""
        (storage,) = spec.storages
        name = f"data/{storage.key}"
        return None if self.archive.crc32(name) is None else self.archive.members[name].entry + CRC

    def checksum(self, spec: TensorSpec) -> int | None:
        """Return the checksum of that storage; None if the archive has none."""
        (storage,) = spec.storages
        return self.archive.crc32(f"data/{storage.key}")

    def part(self, spec: TensorSpec, storages: dict[int, Storage] | None = None) -> TensorSpec:
        """Return the rank's part of a tensor of which the base has ``spec``; ``storages`` carries ties."""
        (storage,) = spec.storages
        name = f"data/{storage.key}"
        storages = {} if storages is None else storages
        if id(storage) not in storages:
            storages[id(storage)] = self.reading.storage(storage.key, name, name, storage.nbytes, storage.device)
        return replace(spec, storage=storages[id(storage)])

    def moved(self, leaves: RankLeaves, offsets: list[list[int]]) -> RankLeaves:
        """Return leaves of the base as those of this rank; ``offsets`` are those of the parts of FSDP 1, in order."""
        storages: dict[int, Storage] = {}
        boxes: dict[Any, Box] = {}
        starts = iter(offsets)
        made: RankLeaves = []
        for path, leaf in leaves:
            if isinstance(leaf, TensorSpec):
                leaf = self.part(leaf, storages)
            elif isinstance(leaf, Divided) and leaf.splits is None:
                parts = [(box_at(next(starts), extent(box)), self.part(spec, storages)) for box, spec in leaf.parts]
                leaf = Divided(leaf.kind, leaf.shape, leaf.world, parts)
            elif isinstance(leaf, Divided):
                if (layout := (leaf.shape, leaf.splits)) not in boxes:
                    boxes[layout] = self.box(leaf)
                parts = [(boxes[layout], self.part(spec, storages)) for _, spec in leaf.parts]
                leaf = Divided(leaf.kind, leaf.shape, leaf.world, parts, leaf.splits)
            made.append((path, leaf))
        return made


def _device(data: bytes) -> bytes:
    """Return the name of the GPU in a pickle, as it is written for every storage; empty for the CPU and number 0."""
    found = re.search(rb"X[\5\6]\0\0\0" + _DEVICE + rb":\d", data, re.DOTALL)
    return b"" if found is None or found[0].endswith(b"0") else found[0]


def _of_first_device(data: bytes, device: bytes) -> bytes:
    """Return (a part of) a pickle with ``:0`` in place of the number of the GPU ``device``."""
    return data.replace(device, device[:-1] + b"0") if device else data


def _of_shards(data: bytes) -> tuple[bytes, ...]:
    """Return the patterns for the place of a ``ShardedTensor``: its part of the whole, and its rank in the group; empty
    if the pickle has none."""
    words = {}
    for word in b"metadata shard_offsets shard_sizes placement _worker_name _rank local_rank global_rank".split():
        written = re.search(rb"X" + bytes((len(word), 0, 0, 0)) + word + rb"(?:q(.)|r(....))", data, re.DOTALL)
        if written is None:
            return ()
        recalled = b"h" + written[1] if written[1] is not None else b"j" + written[2]
        words[word.decode()] = rb"(?:" + re.escape(written[0]) + rb"|" + re.escape(recalled) + rb")"
    new = _CLASS + rb"\)\x81" + _PUT
    part = [words["metadata"], new, rb"N\}", _PUT, rb"\(", words["shard_offsets"], _LIST % b"offsets"]
    part += [words["shard_sizes"], _LIST % b"sizes", words["placement"], new, rb"\}", _PUT, rb"\("]
    part += [words["_worker_name"], rb"N", words["_rank"], _INT]
    return b"".join(part), words["local_rank"] + _INT + words["global_rank"] + _INT


def _numbers(packed: bytes) -> list[int]:
    return [int.from_bytes(number[1:], "little") for number in _NUMBER.findall(packed)]
