"""The format of torch.save of torch 0.1: a tar archive of four files.

``storages`` has a count and, for each storage, the pickle ``(key, location, storage class)``, an 8-byte count of
elements and the elements, then the pickled list of storages that are parts of others. ``tensors`` has a count and, for
each tensor, the pickle ``(key, storage key, tensor class)`` and its shape, strides and offset as little-endian numbers.
``pickle`` is the object, in which persistent ids are keys of tensors or storages. See ``_legacy_load`` in
``torch/serialization.py``."""

import struct
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.sources import Content, DeferredBytes, TornBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.objects import Global
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.archives import tar_members
from ckptfix.reading.pickles.claims import TypedStorage, checked, storage_dtype
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.weights.document import Document

NAME = "torch-tar"
PARTS = ("pickle", "tensors", "storages")
_DIMENSIONS = 64


def has_parts(content: Content) -> bool:
    """Return whether the content is a tar archive of torch 0.1, or begins with its first two files."""
    if not tar_members.sniff(content):
        return False
    parts, _ = _parts(content)
    return all(part in parts for part in PARTS) or {"sys_info", "pickle"} <= parts.keys() <= {"sys_info", *PARTS}


def _parts(content: Content) -> tuple[dict[str, tuple[int, int]], list[Fact]]:
    """Return the position and size of each of the first files, and the damage of the archive."""
    damage: list[Fact] = []
    parts: dict[str, tuple[int, int]] = {}
    for (name, start, size), _ in zip(tar_members.files(content, damage), range(len(PARTS) + 1), strict=False):
        parts.setdefault(name.removeprefix("./"), (start, size))
    return parts, damage


def read(content: Content) -> Document:
    """Return the document of a file of torch 0.1. Raises ``UnreadableError`` if it is damaged before its storages."""
    parts, damage = _parts(content)
    if missing := [part for part in PARTS if part not in parts]:
        cause = clauses(damage) or "is cut short"
        raise damaged(content.path, f"{cause}: nothing is left of its {missing[-1]}")
    reader = _Reader(content, parts)
    try:
        reader.read_storages()
        reader.read_tensors()
        root, _ = reader._run(parts["pickle"][0])
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise damaged(content.path, f"the file of torch 0.1 is damaged ({type(error).__name__}: {error})") from error
    remarks = [*payload_remarks(reader.names), Fact(Kind.TORCH_TAR)]
    damage = [] if not reader.is_cut else damage or [Fact(Kind.STORAGES_CUT)]
    return Document(content.path, NAME, root, None, reader.names, remarks, damage, producer="torch 0.1")


class _Reader(StoragePickle):
    def __init__(self, content: Content, parts: dict[str, tuple[int, int]]) -> None:
        super().__init__(content.path, lambda key, *_: Storage(key, DeferredBytes(0)), content.bounds)
        self.content, self.parts = content, parts
        self.objects: dict[int, TypedStorage | TensorSpec] = {}
        self.is_cut = False  # whether the file ends inside its storages, which torch wrote last

    def persistent(self, pid: Any) -> Any:
        """Return the value of a persistent id: a storage or tensor by its number, or the class of a module, given as
        ``(class, file, source)``."""
        return pid[0] if isinstance(pid, tuple) and pid and isinstance(pid[0], Global) else self.objects[int(pid)]

    def _run(self, position: int) -> tuple[Any, int]:
        return self.run(self.content, position)

    def read_storages(self) -> None:
        """Set the place of every storage, and of those that are parts of others, as far as the file goes."""
        position, size = self.parts["storages"]
        stop = position + size
        try:
            self._read_storages(position, stop)
        except UnreadableError:
            if stop <= len(self.content):
                raise
            self.is_cut = True

    def _read_storages(self, position: int, stop: int) -> None:
        count, position = self._run(position)
        for _ in range(count):
            (key, location, cls), position = self._run(position)
            dtype = storage_dtype(cls)
            (numel,) = self._numbers("<q", position)
            position += 8
            nbytes = numel * DTYPES[dtype].itemsize
            if not 0 <= nbytes <= stop - position:
                raise damaged(
                    self.content.path,
                    f"storage {key!s:.40} of {nbytes} bytes ends after the end of its file; it is cut short",
                )
            present = max(0, min(nbytes, len(self.content) - position))
            source = self.content.source(position, present)
            if present < nbytes:
                self.is_cut, source = True, TornBytes(self.content.path, nbytes, present, source)
            self.storages[str(key)] = storage = Storage(str(key), source, str(location))
            self.objects[int(key)] = TypedStorage(storage, dtype)
            self.table.stored_bytes += nbytes
            position += nbytes
        views, _ = self._run(position)
        for key, root_key, offset, numel in views:
            dtype = self.objects[int(root_key)].dtype
            self.objects[int(key)] = self.view(str(root_key), dtype, (key, int(offset), int(numel)))

    def read_tensors(self) -> None:
        """Read the shape, strides and offset of every tensor."""
        count, position = self._run(self.parts["tensors"][0])
        for _ in range(count):
            (key, storage_key, cls), position = self._run(position)
            storage = self.objects.get(int(storage_key)) if self.is_cut else self.objects[int(storage_key)]
            if storage is not None and not isinstance(storage, TypedStorage):
                raise self._damaged(f"tensor {key!s:.40} has no storage")
            (ndim,) = self._numbers("<i", position)
            if not 0 <= ndim <= _DIMENSIONS:
                raise self._damaged(f"tensor {key!s:.40} has {ndim} dimensions")
            # The number of dimensions has 4 bytes, and 4 unused ones follow.
            numbers = self._numbers(f"<{2 * ndim + 1}q", position + 8)
            position += 8 + 8 * len(numbers)
            shape, strides, offset = numbers[:ndim], numbers[ndim : 2 * ndim], numbers[-1]
            if min(numbers) < 0:
                raise self._damaged(f"tensor {key!s:.40} has a negative size")
            if storage is None:
                self.objects[int(key)] = self._lost(str(storage_key), cls, shape, strides, offset)
                continue
            spec = TensorSpec(storage.dtype, shape, strides, storage.storage, offset)
            self.objects[int(key)] = checked(spec, self.content.path)

    def _lost(self, key: str, cls: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> TensorSpec:
        """Return a tensor whose storage is beyond the end of the file."""
        dtype = storage_dtype(Global(cls.module, cls.name.replace("Tensor", "Storage")))
        spec = TensorSpec(dtype, shape, strides, None, offset)
        return replace(spec, storage=Storage(key, TornBytes(self.content.path, spec.extent[1])))

    def _numbers(self, form: str, position: int) -> tuple[int, ...]:
        raw = self.content[position : position + struct.calcsize(form)]
        if len(raw) < struct.calcsize(form):
            raise damaged(self.content.path, f"the file is cut short at {len(self.content)} bytes")
        return struct.unpack(form, raw)

    def _damaged(self, what: str) -> UnreadableError:
        return damaged(self.content.path, f"{what}: the file is damaged")
