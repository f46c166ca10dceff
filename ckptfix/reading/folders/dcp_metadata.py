"""The ``.metadata`` file of torch.distributed.checkpoint: which tensors there are, in which chunks, and where they are.

It is a pickle of the dataclasses in ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``; their fields
are read from inert objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfix.bytes.limits import shown
from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import PathPart
from ckptfix.core.objects import Opaque
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.folders.chunks import Box
from ckptfix.reading.pickles.claims import dtype_name, sizes
from ckptfix.reading.pickles.torch_pickle import StoragePickle


@dataclass(frozen=True)
class Location:
    """A range of a file of the folder."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its chunks; the location of a chunk is None where the metadata does not give it.

    A chunk that several ranks saved is there several times.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Location | None], ...]

    @property
    def files(self) -> set[str]:
        """The files that hold its chunks."""
        return {location.file for _, location in self.chunks if location is not None}

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its bytes."""
        return TensorSpec(self.dtype, self.shape, contiguous_strides(self.shape))


@dataclass(frozen=True)
class StoredObject:
    """Something that is no tensor, pickled by torch.save."""

    location: Location | None

    @property
    def files(self) -> set[str]:
        """The file that holds it."""
        return {self.location.file} if self.location is not None else set()


@dataclass(frozen=True)
class StoredMetadata:
    """What a ``.metadata`` file says: the items by flat name, in the order in which they were saved, and the path of
    each in the container.
    """

    items: Mapping[str, StoredTensor | StoredObject]
    paths: Mapping[str, tuple[PathPart, ...]]
    names: frozenset[str]


def merged(parts: Sequence[StoredMetadata]) -> StoredMetadata:
    """The metadata that ranks wrote one by one (``use_collectives=False``), as one: each knows its own chunks.

    What several ranks have saved whole, be it a tensor or another object, is that of the first; a tensor keeps the
    locations of all, so that they can be compared."""
    items: dict[str, StoredTensor | StoredObject] = {}
    paths: dict[str, tuple[PathPart, ...]] = {}
    for part in parts:
        for name, item in part.items.items():
            before = items.setdefault(name, item)
            if before is item or not isinstance(before, StoredTensor):
                continue
            if not isinstance(item, StoredTensor) or (item.dtype, item.shape) != (before.dtype, before.shape):
                raise ValueError(f"ranks saved different things under the name {name}")
            items[name] = replace(before, chunks=before.chunks + item.chunks)
        paths = {**part.paths, **paths}
    return StoredMetadata(items, paths, frozenset().union(*(part.names for part in parts)))


def parse_metadata(content: Content) -> StoredMetadata:
    """The parsed metadata. Raises ``UnreadableError`` where the file is no such pickle."""

    def no_storage(key: str, nbytes: int, device: str) -> Storage:
        raise HostileError(f"{content.path}: tensor data in a file that describes tensors; do not use this checkpoint")

    pickles = StoragePickle(content.path, no_storage, content.bounds)
    root, _ = pickles.run(content.buffer)
    try:
        described, stored = _fields(root)["state_dict_metadata"], _fields(root)["storage_data"]
        where = {_index(key): _location(value) for key, value in stored.items()}
        paths = {name: _path(parts) for name, parts in (_fields(root).get("planner_data") or {}).items()}
        order = dict.fromkeys([*(name for name in paths if name in described), *described])
        items = {_name(name): _item(name, _fields(described[name]), where) for name in order}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnreadableError(
            f"{content.path}: not the metadata of torch.distributed.checkpoint, or damaged"
            f" ({type(error).__name__}: {error}); fetch the file again"
        ) from error
    return StoredMetadata(items, paths, frozenset(pickles.names))


def _fields(value: Any) -> Mapping[str, Any]:
    """The fields of a dataclass."""
    if not isinstance(value, Opaque) or not isinstance(value.state, (dict, type(None))):
        raise TypeError(f"{type(value).__name__} in the place of a record")
    return value.attributes


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} in the place of a name")
    return value


def _item(
    name: str, fields: Mapping[str, Any], where: Mapping[tuple[str, tuple[int, ...]], Location]
) -> StoredTensor | StoredObject:
    """A ``TensorStorageMetadata``, or a ``BytesStorageMetadata``, which has no fields."""
    if "chunks" not in fields:
        return StoredObject(where.get((name, ())))
    properties = fields["properties"]
    # TensorProperties pickles as a tuple that begins with the dtype.
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.attributes["dtype"]
    boxes = [Box(sizes(chunk["offsets"]), sizes(chunk["sizes"])) for chunk in map(_fields, fields["chunks"])]
    chunks = tuple((box, where.get((name, box.offsets))) for box in boxes)
    return StoredTensor(dtype_name(dtype), sizes(fields["size"]), chunks)


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    """Name and offsets of a ``MetadataIndex``; an object has no offsets."""
    fields = _fields(key)
    offset = fields.get("offset")
    return _name(fields["fqn"]), () if offset is None else sizes(offset)


def _location(value: Any) -> Location:
    """A ``_StorageInfo``."""
    fields = _fields(value)
    file, offset, nbytes = fields["relative_path"], fields["offset"], fields["length"]
    if not isinstance(file, str) or any(type(number) is not int or number < 0 for number in (offset, nbytes)):
        raise ValueError(f"{shown(file)} at {shown(offset)} is no place in a file")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{file:.60} was packed by an extension, which is not read")
    return Location(file, offset, nbytes)


def _path(parts: Any) -> tuple[PathPart, ...]:
    if not isinstance(parts, (tuple, list)) or not parts or any(type(part) not in (str, int) for part in parts):
        raise ValueError(f"{shown(parts)} is no path")
    return tuple(parts)
