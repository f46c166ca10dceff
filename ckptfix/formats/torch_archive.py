"""The members of a torch file, be they in a zip archive or in the folder that somebody unpacked it into.

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from ckptfix.checkpoint import ByteSource, Remark, Storage
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.payload import payload_remarks
from ckptfix.formats.torch_pickle import StoragePickle
from ckptfix.formats.torn import TornBytes

SMALL_LIMIT = 64 << 20
"""Bytes up to which a member may be taken into memory whatever the size of the archive."""

NAMED_LIMIT = 3
"""Storages that are named one by one where they are gone."""


class TorchArchive(Protocol):
    """Members under their names below the archive's root (``data.pkl``, ``data/0``); ``nbytes`` is the whole's size."""

    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def members(self) -> Collection[str]: ...

    def source(self, name: str) -> ByteSource:
        """The bytes of a member."""
        ...

    def crc32(self, name: str) -> int | None:
        """The checksum of a member, where the archive has one."""
        ...


def read_member(archive: TorchArchive, name: str, limit: int | None = None) -> bytes:
    """The whole of a member. Raises ``HostileError`` where it is larger than ``limit``, by default 64 MB or four times
    the archive.
    """
    source = archive.source(name)
    if source.nbytes > (max(SMALL_LIMIT, 4 * archive.nbytes) if limit is None else limit):
        raise HostileError(f"{archive.path}: member {name} declares {source.nbytes} bytes; do not use this file")
    return bytes(source.read(0, source.nbytes))


def is_big_endian(archive: TorchArchive) -> bool:
    """Whether the archive was written on a big-endian machine; torch says so since 2.1."""
    return "byteorder" in archive.members and read_member(archive, "byteorder", 16).strip() == b"big"


LeftOf = Callable[[str | None, int], ByteSource | None]
"""What is left of a storage, by its member (None where that is gone) and size; None where it is whole."""


def storage_pickle(
    archive: TorchArchive, folders: tuple[str, ...], nesting: int = 0, left_of: LeftOf | None = None
) -> StoragePickle:
    """What runs the pickles of an archive whose storages lie in one of the folders.

    ``left_of`` knows what is left of a damaged archive; without it a storage that is not whole is an error.
    """
    return _storage_pickle(archive, _Finder(archive, folders, left_of), nesting)


def _storage_pickle(archive: TorchArchive, finder: _Finder, nesting: int) -> StoragePickle:
    return StoragePickle(archive.path, finder.find, nesting, is_big_endian(archive))


@dataclass
class _Finder:
    """Finds the storages of an archive. Those that are not whole are torn, where ``left_of`` is known, and counted."""

    archive: TorchArchive
    folders: tuple[str, ...]
    left_of: LeftOf | None
    damage: list[str] = field(default_factory=list)

    def find(self, key: str, nbytes: int, device: str) -> Storage:
        """The storage of a key."""
        archive = self.archive
        name = next((f"{folder}/{key}" for folder in self.folders if f"{folder}/{key}" in archive.members), None)
        torn = self.left_of(name, nbytes) if self.left_of is not None else None
        if torn is not None:
            return Storage(key, torn, device)
        if name is None:
            return self._torn(key, f"lacks its storage {self.folders[0]}/{key}", nbytes, device, None)
        source = archive.source(name)
        if source.nbytes < nbytes:
            cause = f"has {source.nbytes} of the {nbytes} bytes of its storage {name}"
            return self._torn(key, cause, nbytes, device, source)
        return Storage(key, source, device, archive.crc32(name))

    def _torn(self, key: str, cause: str, nbytes: int, device: str, source: ByteSource | None) -> Storage:
        if self.left_of is None:
            raise UnreadableError(f"{self.archive.path}: {cause}; fetch it again")
        self.damage.append(cause)
        return Storage(key, TornBytes(self.archive.path, nbytes, source.nbytes if source else 0, source), device)

    def causes(self) -> list[str]:
        """What is damaged, the first few by name."""
        more = len(self.damage) - NAMED_LIMIT
        return self.damage[:NAMED_LIMIT] + ([f"lacks {more} more"] if more > 0 else [])


def read_archive(archive: TorchArchive, form: str, nesting: int = 0, left_of: LeftOf | None = None) -> Document:
    """The document of the members of a torch.save file; ``form`` is the name of its format."""
    # The preview of the format in torch 1.4 and 1.5 had `tensors/` in the place of `data/`.
    finder = _Finder(archive, ("data", "tensors"), left_of)
    pickles = _storage_pickle(archive, finder, nesting)
    data = read_member(archive, "data.pkl")
    crc32 = archive.crc32("data.pkl")
    damage = ["its data.pkl fails its checksum"] if crc32 is not None and zlib.crc32(data) != crc32 else []
    root, _ = pickles.run(data)
    remarks = payload_remarks(pickles.names)
    remarks += [Remark("tensor-subclass", "state_dict", name) for name in pickles.table.foreign]
    remarks += [
        Remark("hidden-pickle", name, "a pickle that torch.load never reads")
        for name in archive.members
        if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin")) and name != "data.pkl"
    ]
    if pickles.protocol != 2:
        remarks.append(Remark("protocol", "data.pkl", str(pickles.protocol)))
    damage += finder.causes()
    return Document(archive.path, form, root, None, pickles.names, remarks, damage, producer=_producer(archive.members))


def _producer(members: Collection[str]) -> str:
    """Which releases of torch write these records: pytorch#118719 dates ``byteorder``, pytorch#147788 the last two."""
    if ".format_version" in members:
        return "torch 2.7 or later, or ckptfix"
    if "byteorder" in members:
        return "torch 2.1 to 2.6"
    return "torch 1.4 or 1.5" if any(name.startswith("tensors/") for name in members) else "torch 1.6 to 2.0"
