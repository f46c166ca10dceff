"""The format of torch.save up to 1.5, and plain pickles.

A legacy file is a row of pickles (a magic number, a protocol version, facts about the machine, the object, the list of
storage keys) and behind them each storage as an 8-byte count and its raw elements:
``torch/serialization.py::_legacy_save``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptfix.checkpoint import Remark, Storage, TensorSpec
from ckptfix.dtypes import DTYPES
from ckptfix.errors import UnreadableError
from ckptfix.finding import counted
from ckptfix.formats.bounds import shown
from ckptfix.formats.document import Document
from ckptfix.formats.pickles.payload import payload_remarks
from ckptfix.formats.pickles.torch_pickle import StoragePickle
from ckptfix.formats.pickles.unfinished import NoOpcodeError, PickleEndError, fold
from ckptfix.formats.sources import Content, LateBytes
from ckptfix.formats.torn import TornBytes, filled_end, zero_tail
from ckptfix.formats.tree import tensors_in
from ckptfix.formats.unfilled import unfilled_from
from ckptfix.formats.wrappers.windows import WindowContent

NAME = "torch-legacy"
PLAIN = "pickle"
PRODUCER = "torch 1.5 or earlier, or a later one that was asked for the old format"
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a legacy file or a plain pickle.

    Storages that the file has lost are torn. Raises ``UnreadableError`` where the pickles themselves are not whole."""

    def find_storage(key: str, nbytes: int, device: str) -> Storage:
        return Storage(key, LateBytes(nbytes), device)

    pickles = StoragePickle(content.path, find_storage, content.bounds, nesting)
    try:
        root, position = pickles.run(content.buffer)
    except PickleEndError as end:
        root = fold(end.runs, content.path) if not nesting and not pickles.storages else None
        if not root:
            raise
        damage = [f"is cut short: its pickle ends at byte {end.position}, and what came behind that has no name"]
        return Document(content.path, PLAIN, root, None, pickles.names, _plain_remarks(pickles), damage)
    except NoOpcodeError as error:
        zeros = filled_end(content)
        if nesting or pickles.storages or not 0 < zeros <= error.position:
            raise
        document = read(WindowContent(content, 0, zeros))  # zeros inside of a value would pass for its bytes
        document.damage.insert(0, f"is zeros from byte {zeros} of {len(content)} on, which were never filled")
        return document
    if root != MAGIC:
        if pickles.storages:
            raise UnreadableError(
                f"{content.path}: the data.pkl of a torch file, whose tensors are in other files beside it; name the"
                " folder that holds them all, or the file before it was unpacked"
            )
        return Document(content.path, PLAIN, root, None, pickles.names, _plain_remarks(pickles))
    version, position = _run_part(pickles, content, position, "version")
    if version != PROTOCOL:
        raise UnreadableError(
            f"{content.path}: legacy torch format version {shown(version)} is not known; fetch the file again"
        )
    # The facts about the machine say which byte order it had. They do not matter: the storages of a legacy file are
    # little-endian on every machine (torch/csrc/serialization.cpp, writeFileRaw).
    _, position = _run_part(pickles, content, position, "facts about the machine")
    root, position = _run_part(pickles, content, position, "object")
    keys, position = _run_part(pickles, content, position, "list of storages")
    located = _Storages(content, pickles, position)
    located.place(keys)
    located.doubt_end(root)
    remarks = payload_remarks(pickles.names) + pickles.protocol_remarks("the pickle")
    remarks += [Remark("tensor-subclass", "state_dict", name) for name in pickles.table.foreign]
    if located.position < len(content) and not located.damage:
        remarks.append(Remark("trailing-bytes", "end of the file", str(len(content) - located.position)))
    return Document(content.path, NAME, root, None, pickles.names, remarks, located.damage, producer=PRODUCER)


def _plain_remarks(pickles: StoragePickle) -> list[Remark]:
    return [*payload_remarks(pickles.names), Remark("plain-pickle", ".", "pickle.dump")]


def _run_part(pickles: StoragePickle, content: Content, position: int, part: str) -> tuple[Any, int]:
    """One of the pickles in front of the storages, without which none of these has a name or a type."""
    try:
        return pickles.run(content.buffer, position)
    except PickleEndError as end:
        raise UnreadableError(
            f"{content.path}: is cut short or damaged in its {part}, which a legacy torch file has in front of all "
            "tensors: none of them can be had; fetch it again"
        ) from end
    except NoOpcodeError as error:
        zeros = zero_tail(content)
        if zeros > error.position:
            raise
        raise UnreadableError(
            f"{content.path}: is zeros from byte {zeros} of {len(content)} on, which were reserved and never filled, "
            f"and begin in its {part}, which a legacy torch file has in front of all tensors: none of them can be had; "
            "fetch it again"
        ) from error


class _Storages:
    """The storages of a file, which follow in the order of a list of their keys, each behind its element count."""

    def __init__(self, content: Content, pickles: StoragePickle, position: int) -> None:
        self.content, self.pickles, self.position = content, pickles, position
        self.placed: dict[LateBytes, int] = {}
        self.damage: list[str] = []

    def place(self, keys: Any) -> None:
        """Give every storage its place, as far as the file holds what its pickle says; the rest is torn."""
        path = self.content.path
        if not isinstance(keys, (list, tuple)) or not all(isinstance(key, (str, int)) for key in keys):
            raise UnreadableError(
                f"{path}: the list of its storages is {shown(keys)}; the file is damaged: fetch it again"
            )
        needed = self.position
        behind: list[tuple[str, Storage]] = []
        for key in map(str, keys):
            if key not in self.pickles.storages:
                raise UnreadableError(
                    f"{path}: storage {shown(key)} is listed but never used; the file is damaged: fetch it again"
                )
            storage = self.pickles.storages[key]
            needed += 8 + storage.nbytes
            if not self.damage:
                self._place(key, storage)
            if self.damage:
                behind.append((key, storage))
        if behind and needed <= len(self.content):
            self._resume(behind, is_end=needed == len(self.content))
        if self.position > len(self.content):
            self.damage = [f"is cut short: it has {len(self.content)} bytes and its storages end at byte {needed}"]
        late = [source for storage in self.pickles.storages.values() if isinstance(source := storage.source, LateBytes)]
        lacking = [source for source in late if source.inner is None]
        for source in lacking:
            source.inner = TornBytes(path, source.nbytes)
        if lacking and not self.damage:
            self.damage.append(f"lacks {counted(len(lacking), 'storage')} that its tensors use")

    def _place(self, key: str, storage: Storage) -> None:
        content, start = self.content, self.position + 8
        head = bytes(content.buffer[self.position : start])
        stored = self._stored(key, head)
        late = storage.source
        if len(head) == 8 and (stored != storage.nbytes or not isinstance(late, LateBytes) or late.inner is not None):
            self._tear(key, storage.nbytes, stored)
            return
        self.position = start + storage.nbytes
        if not isinstance(late, LateBytes):
            return
        end = len(content) if start + storage.nbytes <= len(content) else filled_end(content)
        present = max(0, min(storage.nbytes, end - start))
        source = content.source(start, present)
        late.inner = source if present == late.nbytes else TornBytes(content.path, late.nbytes, present, source)
        self.placed[late] = start
        if self.position > len(content):
            self.damage.append("is cut short")

    def _stored(self, key: str, head: bytes) -> int:
        """The bytes of a storage by the count in front of it."""
        return int.from_bytes(head, "little") * DTYPES[self.pickles.dtypes[key]].itemsize

    def _resume(self, behind: list[tuple[str, Storage]], *, is_end: bool) -> None:
        """Place the storages behind a wrong count where later counts are right: bytes were overwritten there, as by a
        sector that a disk lost, and none is missing. One is whole where the next count is right too; ``is_end`` says
        that the last one ends where the file does."""
        position, places = self.position, []
        for _, storage in behind:
            places.append(position + 8)
            position += 8 + storage.nbytes
        is_proved = is_end
        for (key, storage), start in zip(reversed(behind), reversed(places), strict=True):
            late = storage.source
            is_right = self._stored(key, bytes(self.content.buffer[start - 8 : start])) == storage.nbytes
            if is_right and is_proved and isinstance(late, LateBytes) and late.inner is None:
                late.inner = self.content.source(start, late.nbytes)
            if storage.nbytes:  # zeros are the count of an empty storage, and prove nothing
                is_proved = is_right

    def _tear(self, key: str, declared: int, stored: int) -> None:
        """A count that is not what the pickle says: the chain of storages ends here, unless it is found again.

        Where the rest of the file is zeros, they may begin inside of a storage before. Else the storage before was
        never proved to end where it should, so that it is lost too."""
        zeros = zero_tail(self.content)
        if stored == 0 and zeros < self.position + 8:
            ends = self._unfilled(zeros)
        else:
            self.damage.append(
                f"is damaged before byte {self.position}: storage {key} is declared with {declared} bytes and stored "
                f"with {stored}"
            )
            ends = dict.fromkeys(list(self.placed)[-1:], 0)
        for late, whole in ends.items():
            late.inner = TornBytes(self.content.path, late.nbytes, whole, late.inner)

    def doubt_end(self, root: Any) -> None:
        """Zeros in the last storage alone leave the chain whole; whether they were ever filled, its tensors tell."""
        zeros = None if self.damage else unfilled_from(self.content, self._tensors(root))
        for late, whole in (self._unfilled(zeros) if zeros is not None else {}).items():
            late.inner = TornBytes(self.content.path, late.nbytes, whole, late.inner)

    def _tensors(self, root: Any) -> Iterator[tuple[int, TensorSpec]]:
        """Where each contiguous tensor begins."""
        for spec in tensors_in(root):
            source = spec.storage.source if spec.storage is not None else None
            if isinstance(source, LateBytes) and source in self.placed and spec.is_contiguous:
                yield self.placed[source] + spec.offset * spec.itemsize, spec

    def _unfilled(self, zeros: int) -> dict[LateBytes, int]:
        """How much is there of the storages that reach into the zeros at the end, which is damage."""
        size = len(self.content)
        self.damage.append(
            f"is not complete: of its {size} bytes the last {size - zeros} are zeros that were reserved and "
            "never filled"
        )
        return {late: max(0, zeros - start) for late, start in self.placed.items() if start + late.nbytes > zeros}
