"""The format of torch.save up to 1.5, and plain pickles.

A legacy file is a row of pickles (a magic number, a protocol version, facts about the machine, the object, the list of
storage keys) and behind them each storage as an 8-byte count and its raw elements:
``torch/serialization.py::_legacy_save``."""

from __future__ import annotations

from typing import Any

from ckptfix.checkpoint import Remark, Storage
from ckptfix.dtypes import DTYPES
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.payload import payload_remarks
from ckptfix.formats.sources import Content
from ckptfix.formats.torch_pickle import StoragePickle

NAME = "torch-legacy"
PLAIN = "pickle"
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


def sniff(content: Content) -> bool:
    """Whether the content starts as a pickle does: a PROTO opcode, or one of the opcodes of protocols 0 and 1."""
    head = bytes(content.buffer[:2])
    return (head[:1] == b"\x80" and head[1:2] <= b"\x05") or head[:1] in (b"(", b"c", b"]", b"}", b"L", b"I")


class _LateSource:
    """The bytes of a storage whose place in the file is known only after the pickle has been read."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.inner: Any = None

    def read(self, start: int, stop: int) -> memoryview:
        data: memoryview = self.inner.read(start, stop)
        return data


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a legacy file or a plain pickle.

    Raises ``UnreadableError`` where the file is cut short, ``HostileError`` where a storage declares more than the file
    holds."""

    def find_storage(key: str, nbytes: int, device: str) -> Storage:
        if nbytes > len(content):
            raise HostileError(
                f"{content.path}: storage {key} declares {nbytes} bytes, the whole file has {len(content)}:"
                " it is cut short or hostile; fetch it again"
            )
        return Storage(key, _LateSource(nbytes), device)

    pickles = StoragePickle(content.path, find_storage, nesting)
    root, position = pickles.run(content.buffer)
    if root != MAGIC:
        if pickles.storages:
            raise UnreadableError(
                f"{content.path}: a plain pickle that refers to storages outside of it; this is part of a torch file"
            )
        remarks = [*payload_remarks(pickles.names), Remark("plain-pickle", ".", "pickle.dump")]
        return Document(content.path, PLAIN, root, None, pickles.names, remarks)
    version, position = pickles.run(content.buffer, position)
    if version != PROTOCOL:
        raise UnreadableError(
            f"{content.path}: legacy torch format version {version!r:.40} is not known; fetch the file again"
        )
    system, position = pickles.run(content.buffer, position)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise UnreadableError(
            f"{content.path}: the file was written on a big-endian machine, which ckptfix does not read yet"
        )
    root, position = pickles.run(content.buffer, position)
    keys, position = pickles.run(content.buffer, position)
    _locate_storages(content, pickles, keys, position)
    remarks = payload_remarks(pickles.names)
    remarks += [Remark("tensor-subclass", "state_dict", name) for name in pickles.table.foreign]
    return Document(content.path, NAME, root, None, pickles.names, remarks)


def _locate_storages(content: Content, pickles: StoragePickle, keys: Any, position: int) -> None:
    """Give every storage its place: they follow in the order of ``keys``, each behind its element count."""
    for key in keys:
        if str(key) not in pickles.storages:
            raise UnreadableError(
                f"{content.path}: storage {key!s:.40} is listed but never used; the file is damaged: fetch it again"
            )
        storage = pickles.storages[str(key)]
        late = storage.source
        count = int.from_bytes(content.buffer[position : position + 8], "little")
        nbytes = count * DTYPES[pickles.dtypes[str(key)]].itemsize
        position += 8
        if position + nbytes > len(content):
            raise UnreadableError(
                f"{content.path}: the file is cut short: it has {len(content)} bytes and storage {key} ends at "
                f"{position + nbytes}; fetch it again"
            )
        if nbytes != storage.nbytes or not isinstance(late, _LateSource):
            raise UnreadableError(
                f"{content.path}: storage {key} is declared with {storage.nbytes} bytes and stored with {nbytes}; "
                "fetch the file again"
            )
        late.inner = content.source(position, nbytes)
        position += nbytes
    unplaced = [
        key
        for key, storage in pickles.storages.items()
        if isinstance(storage.source, _LateSource) and storage.source.inner is None
    ]
    if unplaced:
        raise UnreadableError(
            f"{content.path}: storage {unplaced[0]} is used but not in the file; it is cut short: fetch it again"
        )
