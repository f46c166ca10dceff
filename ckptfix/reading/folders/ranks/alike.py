"""Reads ranks whose pickle is that of the first one but for the place of the rank.

What FSDP 2 saves of a rank says where this is in the mesh that all its tensors share, and perhaps the number of its
GPU. If all other bytes are the same, so are the tensors, in the storages of the rank, and the pickle is not run."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.decoders import STORED
from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import PathPart
from ckptfix.core.objects import Opaque
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.reading.torch_files.torch_archive import Reading
from ckptfix.reading.torch_files.torch_zip import open_archive

Leaves = list[tuple[tuple[PathPart, ...], Any]]  # the tensors and numbers of a container, with their paths

# In pickles of protocol 2: a number below 2 ** 16, what keeps a value in the memo, and what recalls one.
_INT, _PUT, _GET = rb"(?:K.|M..)", rb"(?:q.|r....)", rb"(?:h.|j....)"
_DEVICE = rb"(?:cuda|[hmnx]pu)"
# What differs: the rank of a mesh, its place in it, the names of devices (`cuda:3`), and `torch.device("cuda", 3)`.
_PLACE = re.compile(
    rb"X\x05\0\0\0_rank" + _PUT + _INT + rb"|"
    rb"X\x12\0\0\0_coordinate_on_dim" + _PUT + rb"(?:\]" + _PUT + rb")?\(?(?P<place>" + _INT + rb"{1,4})[aet\x85-\x87]|"
    rb"X[\5\6]\0\0\0" + _DEVICE + rb":\d|(?:" + _GET + rb"|" + _DEVICE + _PUT + rb")K.\x86" + _PUT + rb"R",
    re.DOTALL,
)
_NUMBER = re.compile(_INT, re.DOTALL)


class AlikeRanks:
    """The files of ranks beside that of the first one, of which the tensors and the groups of optimizers are known."""

    def __init__(self, first: Content, leaves: Leaves, groups: list[Any]) -> None:
        self.groups, self._leaves = groups, leaves
        self._first = _Pickle.of(first)

    def leaves(self, content: Content) -> Leaves | None:
        """Return the tensors of another rank; None if its file has to be read by itself.

        Raises ``UnreadableError`` if it is damaged."""
        own = _Pickle.of(content)
        if own is None or self._first is None or (own.names, own.rest) != (self._first.names, self._first.rest):
            return None
        if len(own.places) != 1:
            return None  # of several meshes, nothing says which tensor is on which
        storages: dict[int, Storage] = {}

        def moved(spec: TensorSpec) -> TensorSpec:
            (storage,) = spec.storages
            if id(storage) not in storages:
                name = f"data/{storage.key}"
                storages[id(storage)] = own.reading.storage(storage.key, name, name, storage.nbytes, storage.device)
            return replace(spec, storage=storages[id(storage)])

        made: Leaves = []
        try:
            for path, leaf in self._leaves:
                if isinstance(leaf, TensorSpec):
                    leaf = moved(leaf)
                elif isinstance(leaf, Opaque):
                    local, spec = leaf.attributes["_local_tensor"], leaf.attributes["_spec"]
                    mesh = spec.attributes["mesh"]
                    mesh = Opaque(mesh.cls, state={**mesh.attributes, "_coordinate_on_dim": own.places[0]})
                    spec = Opaque(spec.cls, state={**spec.attributes, "mesh": mesh})
                    leaf = Opaque(leaf.cls, state={"_local_tensor": moved(local), "_spec": spec})
                made.append((path, leaf))
        except (KeyError, ValueError, AttributeError):
            return None  # a `ShardedTensor`, or a tensor that has no storage or several
        return made


class _Pickle(Struct):
    """The pickle of an archive about which there is nothing to say: the coordinates in each mesh that it names, and
    ``rest`` without what is of its rank alone."""

    reading: Reading
    names: set[str]
    places: list[list[int]]
    rest: bytes

    @classmethod
    def of(cls, content: Content) -> _Pickle | None:
        """Return the pickle of a file; None if there is anything to say about the archive."""
        archive = open_archive(content)
        listing, reading = archive.listing, Reading(archive)
        is_odd = listing.found or listing.damage or listing.doubts or listing.displaced or listing.trailing
        if is_odd or archive.oddity is not None or reading.is_big_endian:
            return None
        if any(info.compress_type != STORED for info in archive.members.values()):
            return None
        places: list[list[int]] = []

        def note(found: re.Match[bytes]) -> bytes:
            if found["place"]:
                places.append([int.from_bytes(number[1:], "little") for number in _NUMBER.findall(found["place"])])
            return b"\xff"

        rest = _PLACE.sub(note, reading.member("data.pkl"))
        return None if reading.faults else cls(reading, set(archive.members), places, rest)
