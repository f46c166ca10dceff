"""The members of a torch file, be they in a zip archive or in the folder that somebody unpacked it into.

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from ckptfix.checkpoint import ByteSource, Remark, Storage
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.payload import payload_remarks
from ckptfix.formats.torch_pickle import StoragePickle

SMALL_LIMIT = 64 << 20
"""Bytes up to which a member may be taken into memory whatever the size of the archive."""


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
    return StoragePickle(archive.path, _finder(archive, folders, left_of), nesting, is_big_endian(archive))


def _finder(
    archive: TorchArchive, folders: tuple[str, ...], left_of: LeftOf | None
) -> Callable[[str, int, str], Storage]:
    def find_storage(key: str, nbytes: int, device: str) -> Storage:
        name = next((f"{folder}/{key}" for folder in folders if f"{folder}/{key}" in archive.members), None)
        torn = left_of(name, nbytes) if left_of is not None else None
        if torn is not None:
            return Storage(key, torn, device)
        if name is None:
            raise UnreadableError(
                f"{archive.path}: storage {key} is used but not in the archive; it is damaged: fetch it again"
            )
        source = archive.source(name)
        if source.nbytes < nbytes:
            raise HostileError(
                f"{archive.path}: storage {key} declares {nbytes} bytes and its member has {source.nbytes}: damaged "
                "or hostile; fetch it again"
            )
        return Storage(key, source, device, archive.crc32(name))

    return find_storage


def read_archive(archive: TorchArchive, form: str, nesting: int = 0, left_of: LeftOf | None = None) -> Document:
    """The document of the members of a torch.save file; ``form`` is the name of its format."""
    # The preview of the format in torch 1.4 and 1.5 had `tensors/` in the place of `data/`.
    pickles = storage_pickle(archive, ("data", "tensors"), nesting, left_of)
    root, _ = pickles.run(read_member(archive, "data.pkl"))
    remarks = payload_remarks(pickles.names)
    remarks += [Remark("tensor-subclass", "state_dict", name) for name in pickles.table.foreign]
    remarks += [
        Remark("hidden-pickle", name, "a pickle that torch.load never reads")
        for name in archive.members
        if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin")) and name != "data.pkl"
    ]
    if pickles.protocol != 2:
        remarks.append(Remark("protocol", "data.pkl", str(pickles.protocol)))
    return Document(archive.path, form, root, None, pickles.names, remarks, producer=_producer(archive.members))


def _producer(members: Collection[str]) -> str:
    """Which releases of torch write these records: pytorch#118719 dates ``byteorder``, pytorch#147788 the last two."""
    if ".format_version" in members:
        return "torch 2.7 or later, or ckptfix"
    if "byteorder" in members:
        return "torch 2.1 to 2.6"
    return "torch 1.4 or 1.5" if any(name.startswith("tensors/") for name in members) else "torch 1.6 to 2.0"
