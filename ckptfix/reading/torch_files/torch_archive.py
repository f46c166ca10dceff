"""The members of a torch file, be they in a zip archive or in the folder that somebody unpacked it into.

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any, Protocol

from msgspec import Struct, field

from ckptfix.bytes.limits import Bounds
from ckptfix.bytes.sources import TornBytes
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import ByteSource, Storage
from ckptfix.core.wording import clause, clauses
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.archives.unpacking import PackedBytes
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.weights.document import Document

SMALL_LIMIT = 64 << 20  # bytes up to which a member may be taken into memory whatever the size of the archive
NAMED_LIMIT = 3  # storages that are named one by one where they are gone


class TorchArchive(Protocol):
    """Members under their names below the archive's root (``data.pkl``, ``data/0``); ``nbytes`` is the whole's size."""

    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def members(self) -> Collection[str]: ...

    def source(self, name: str) -> ByteSource:
        """Return the bytes of a member."""
        ...

    def is_whole(self, name: str) -> bool:
        """Return whether all of a member is there."""
        ...

    def crc32(self, name: str) -> int | None:
        """Return the checksum of a member, where the archive has one."""
        ...


def read_member(archive: TorchArchive, name: str, limit: int | None = None) -> bytes:
    """Return a member. Raises ``HostileError`` above ``limit``, by default 64 MB or four times the archive."""
    source = archive.source(name)
    if source.nbytes > (max(SMALL_LIMIT, 4 * archive.nbytes) if limit is None else limit):
        raise HostileError(f"{archive.path}: member {name} declares {source.nbytes} bytes; do not use this file")
    if isinstance(source, PackedBytes):
        archive.bounds.spend(2 * source.nbytes)  # a small archive may hold any size of it, and it is there twice
    return bytes(source.read(0, source.nbytes))


# What is left of a storage, by its member (None if that is gone) and size; None if it is whole.
LeftOf = Callable[[str | None, int], ByteSource | None]


class Reading(Struct, dict=True):
    """One reading of an archive, and the damage that it meets.

    Storages that are not whole are torn where ``left_of`` knows what is left of a damaged archive; without it they are
    an error."""

    archive: TorchArchive
    left_of: LeftOf | None = None
    faults: list[Fact] = field(default_factory=list)
    torn: list[Fact] = field(default_factory=list)

    def member(self, name: str, limit: int | None = None) -> bytes:
        """Return the whole of a member that says what the tensors are. That it fails its checksum is damage."""
        data = read_member(self.archive, name, limit)
        crc32 = self.archive.crc32(name)
        if crc32 is not None and zlib.crc32(data) != crc32:
            self.faults.append(Fact(Kind.MEMBER_CHECKSUM, name))
        return data

    @property
    def whole(self) -> list[str]:
        """The members that can be read, in the order of the archive."""
        return [name for name in self.archive.members if self.archive.is_whole(name)]

    def pickle(self, *folders: str, nesting: int = 0, suffix: str = "") -> StoragePickle:
        """Return what runs the pickles whose storages lie in one of the folders, each under its key and the suffix."""

        def find(key: str, nbytes: int, device: str) -> Storage:
            members = self.archive.members
            for folder in folders:
                if (name := f"{folder}/{key}{suffix}") in members:
                    return self.storage(key, name, name, nbytes, device)
            return self.storage(key, None, f"{folders[0]}/{key}{suffix}", nbytes, device)

        return StoragePickle(self.archive.path, find, self.archive.bounds, _read_nested, nesting, self.is_big_endian)

    @cached_property
    def is_big_endian(self) -> bool:
        """Whether the archive was written on a big-endian machine; torch says so since 2.1.

        Where the word is damaged its length still tells, and whether the numbers are right has to be looked at."""
        if "byteorder" not in self.archive.members:
            return False
        try:
            word = self.member("byteorder", 16).strip()
        except UnreadableError:
            self.faults.append(Fact(Kind.BYTEORDER_LOST))
            return False
        if word not in (b"little", b"big") and not self.faults:
            self.faults.append(Fact(Kind.BYTEORDER_ODD))
        return len(word) == len(b"big")

    def storage(self, key: str, name: str | None, called: str, nbytes: int, device: str) -> Storage:
        """Return the storage of at least ``nbytes`` in a member; ``called`` is its name if that is not there."""
        archive = self.archive
        left = self.left_of(name, nbytes) if self.left_of is not None else None
        if left is not None:
            return Storage(key, left, device)
        if name is None:
            return self._torn(key, Fact(Kind.STORAGE_LACKING, called), nbytes, device, None)
        source = archive.source(name)
        if source.nbytes != nbytes:
            # torch refuses both ("record size does not match"). Of a record that is too long nothing says which of its
            # bytes are the storage's.
            cause = Fact.of(Kind.STORAGE_SIZE, name, there=source.nbytes, size=nbytes)
            return self._torn(key, cause, nbytes, device, source if source.nbytes < nbytes else None)
        return Storage(key, source, device, archive.crc32(name))

    def _torn(self, key: str, cause: Fact, nbytes: int, device: str, source: ByteSource | None) -> Storage:
        if self.left_of is None:
            raise UnreadableError(f"{self.archive.path}: {clause(cause)}; fetch it again")
        self.torn.append(cause)
        return Storage(key, TornBytes(self.archive.path, nbytes, source.nbytes if source else 0, source), device)

    @property
    def doubts(self) -> list[Fact]:
        """Return a fact for each damaged member that says what the tensors are: a name or a place may be another."""
        return [Fact.of(Kind.DOUBTFUL_NAMES, cause=fault) for fault in self.faults]

    @property
    def damage(self) -> list[Fact]:
        """What is damaged, the first few of each kind by name."""
        return [*_some(self.faults, Kind.MEMBERS_DAMAGED), *_some(self.torn, Kind.STORAGES_LACKING)]


def _read_nested(data: bytes, path: str, nesting: int, bounds: Bounds) -> tuple[Any, set[str]]:
    """Return a file of torch.save inside the pickle; its reader is imported only for the few archives with one."""
    from ckptfix.reading.torch_files.torch_legacy import read_nested

    return read_nested(data, path, nesting, bounds)


def _some(causes: list[Fact], rest: Kind) -> list[Fact]:
    more = len(causes) - NAMED_LIMIT
    return causes[:NAMED_LIMIT] + ([Fact.of(rest, more=more)] if more > 0 else [])


def read_archive(archive: TorchArchive, form: str, nesting: int = 0, left_of: LeftOf | None = None) -> Document:
    """Return the document of the members of a torch.save file; ``form`` is the name of its format."""
    reading = Reading(archive, left_of)
    # The preview of the format in torch 1.4 and 1.5 had `tensors/` in the place of `data/`.
    pickles = reading.pickle("data", "tensors", nesting=nesting)
    data = reading.member("data.pkl")
    root, end = _run(reading, pickles, data)
    remarks = payload_remarks(pickles.names)
    remarks += pickles.table.remarks()
    remarks += [
        Fact(Kind.HIDDEN_PICKLE, name)
        for name in archive.members
        if name.lower().endswith((".pkl", ".pickle", ".pt", ".pth", ".bin")) and name != "data.pkl"
    ]
    if data[end:].strip(b"\0"):
        remarks.append(Fact(Kind.HIDDEN_PICKLE, "the bytes after the end of data.pkl"))
    remarks += pickles.protocol_remarks("data.pkl")
    remarks += reading.doubts
    producer = _producer(archive.members)
    return Document(archive.path, form, root, None, pickles.names, remarks, reading.damage, producer=producer)


def _run(reading: Reading, pickles: StoragePickle, data: bytes) -> tuple[Any, int]:
    """Return what ``data.pkl`` holds, and where that ends. Where it fails its checksum too, the error says so first."""
    try:
        run = pickles.run(data)
    except UnreadableError as error:
        if not reading.faults:
            raise
        path = reading.archive.path
        cause = error.without(f"{path}: ")
        raise UnreadableError(f"{path}: {clauses(reading.faults)}, and cannot be read: ", *cause) from error
    pickles.refuse_torn()
    return run


def _producer(members: Collection[str]) -> str:
    """Return which torch writes these records: pytorch#118719 dates ``byteorder``, pytorch#147788 the last two."""
    if ".format_version" in members:
        return "torch 2.7 or later, or ckptfix"
    if "byteorder" in members:
        return "torch 2.1 to 2.6"
    return "torch 1.4 or 1.5" if any(name.startswith("tensors/") for name in members) else "torch 1.6 to 2.0"
