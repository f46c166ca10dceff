"""The format of torch.save up to 1.5, and plain pickles.

A legacy file is a sequence of pickles (a magic number, a protocol version, facts about the machine, the object, the
list of storage keys), followed by each storage as an 8-byte count and its raw elements
(``torch/serialization.py::_legacy_save``)."""

import io
import pickletools
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from ckptfix.bytes.limits import Bounds, bounded_keys, shown
from ckptfix.bytes.sources import (
    SECTOR,
    Content,
    DeferredBytes,
    TornBytes,
    filled_end,
    unfilled_from,
    zero_tail,
)
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque, holds_tensors, tensors_in
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import UnreadableError, damaged, hostile
from ckptfix.reading.pickles.arrays import NumpyArray, arrays_in
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.stream import NoOpcodeError, PickleEndError
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.weights.document import Document
from ckptfix.reading.weights.modules import PARTS

NAME = "torch-legacy"
PRODUCER = "torch 1.5 or earlier, or a later one told to use the old format"
_DOUBT = Fact.of(Kind.BYTES_BEFORE, surplus=-1)
_UNTYPED = "storages without a dtype in the legacy format (8-bit floats, uint16 to uint64), which it cannot load"
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


def read(content: Content, nesting: int = 0) -> Document:
    """Return the document of a legacy file or a plain pickle.

    Storages that the file has lost are torn. Raises ``UnreadableError`` if the pickles are truncated or damaged."""

    def find_storage(key: str, nbytes: int, device: str) -> Storage:
        return Storage(key, DeferredBytes(nbytes), device)

    pickles = StoragePickle(content.path, find_storage, content.bounds, read_nested, nesting)
    try:
        root, position = pickles.run(content)
    except UnreadableError as error:
        zeros = filled_end(content)
        if isinstance(error, NoOpcodeError) and not nesting and not pickles.storages and 0 < zeros <= error.position:
            document = read(content.window(0, zeros))  # zeros inside a value would pass for its bytes
            document.damage.insert(0, Fact.of(Kind.ZEROS, start=zeros, nbytes=len(content)))
            return document
        if nesting or (rest := read_damaged(content, pickles, error)) is None:
            raise
        return rest
    if root != MAGIC:
        if nesting:
            raise damaged(content.path, "the torch file inside its pickle is damaged")
        return read_whole(content, pickles, root)
    version, position = _run_part(pickles, content, position, "version")
    if version != PROTOCOL:
        raise damaged(content.path, f"legacy torch format version {shown(version)} is unknown")
    # The facts about the machine include its byte order, which does not matter: the storages of a legacy file are
    # little-endian on every machine (torch/csrc/serialization.cpp, writeFileRaw).
    _, position = _run_part(pickles, content, position, "facts about the machine")
    root, position = _run_part(pickles, content, position, "object")
    keys, position = _run_part(pickles, content, position, "list of storages")
    located = _Storages(content, pickles, position)
    located.place(keys)
    located.doubt_end(root)
    remarks = payload_remarks(pickles.names) + pickles.protocol_remarks("the pickle")
    remarks += pickles.table.remarks()
    if "torch.storage.UntypedStorage" in pickles.names:
        remarks.append(Fact.of(Kind.ODD_LAYOUT, oddity=_UNTYPED))
    if located.position < len(content) and not located.damage:
        remarks.append(Fact.of(Kind.TRAILING_BYTES, nbytes=len(content) - located.position))
        if keys and zero_tail(content) > located.position:  # zeros are padding, not bytes of a storage
            remarks.append(Fact(Kind.LAST_STORAGE, str(keys[-1])))
    document = Document(content.path, NAME, root, None, pickles.names, remarks, located.damage, producer=PRODUCER)
    odd = (
        spec.storage.source for spec in tensors_in(root) if spec.storage is not None and _overlaps(spec, spec.storage)
    )
    document.doubtful = dict.fromkeys(odd, Fact(Kind.ODD_STRIDES)) | dict.fromkeys(located.cut, _DOUBT)
    return document


def _overlaps(spec: TensorSpec, storage: Storage) -> bool:
    """Return whether a tensor as large as its storage does not cover it, so that some of its elements overlap.

    A legacy file has no checksum, and a flipped bit in a stride gives other values. Genuine overlapping tensors, such
    as windows and expanded ones, have more elements than they store."""
    if spec.is_contiguous or spec.nbytes != storage.nbytes:
        return False
    start, stop = spec.extent
    return stop - start < spec.nbytes


def read_nested(data: bytes, path: str, nesting: int, bounds: Bounds) -> tuple[Any, set[str]]:
    """Return the root object of a torch.save file inside a pickle (``torch.storage._load_from_bytes``), which
    ``pickle.dump`` writes for each tensor, and the globals that its pickles name. It counts against ``bounds``, the
    limits of the outer file.

    torch writes such files in the legacy format only."""
    if data.startswith(b"PK"):
        raise hostile(
            path,
            "instead of a tensor's bytes there is a zip archive with its own pickle, which torch.load would run and "
            "torch never writes",
        )
    document = read(Content(path, data, shared_bounds=bounds), nesting)
    if any(remark.kind is Kind.TRAILING_BYTES for remark in document.remarks):
        raise UnreadableError(
            f"{path}: a torch file in its pickle has more bytes than its storages: the file is damaged; fetch it again"
        )
    return document.root, document.names


def _run_part(pickles: StoragePickle, content: Content, position: int, part: str) -> tuple[Any, int]:
    """Return the value of one of the pickles before the storages, and the position after it.

    Raises ``UnreadableError`` if it is damaged: without it, no storage has a name or a dtype."""
    try:
        run = pickles.run(content, position)
        pickles.refuse_torn()
        return run
    except PickleEndError as end:
        raise damaged(
            content.path,
            f"is cut short or damaged in its {part}, which comes before all tensors in a legacy torch file: none of "
            "them can be read",
        ) from end
    except NoOpcodeError as error:
        zeros = zero_tail(content)
        if zeros > error.position:
            raise
        raise damaged(
            content.path,
            f"is zeros from byte {zeros} of {len(content)} on, reserved but never filled, starting in its {part}, "
            f"which comes before all tensors in a legacy torch file: none is readable",
        ) from error


class _Storages:
    """The storages of a file, which follow in the order of the list of keys, each after its element count."""

    def __init__(self, content: Content, pickles: StoragePickle, position: int) -> None:
        self.content, self.pickles, self.position = content, pickles, position
        self.placed: dict[DeferredBytes, int] = {}
        self.damage: list[Fact] = []
        self.end = position  # the declared end of the last storage

    def place(self, keys: Any) -> None:
        """Set the place of every storage, as far as the file matches its pickle; the other storages are torn."""
        path = self.content.path
        if not isinstance(keys, (list, tuple)) or not all(isinstance(key, (str, int)) for key in keys):
            raise damaged(path, f"the list of its storages is {shown(keys)}: the file is damaged")
        keys = [str(key) for key in keys]
        for key in keys:
            if key not in self.pickles.storages:
                raise damaged(path, f"storage {shown(key)} is listed but never used: the file is damaged")
        self.end += sum(8 + self.pickles.storages[key].nbytes for key in keys)
        for key in keys:
            if not self.damage:
                self._place(key, self.pickles.storages[key])
        if self.position > len(self.content):
            self.damage = [Fact.of(Kind.CUT_SHORT, nbytes=len(self.content), end=self.end)]
        sources = (storage.source for storage in self.pickles.storages.values())
        lacking = [source for source in sources if isinstance(source, DeferredBytes) and source.inner is None]
        for source in lacking:
            source.inner = TornBytes(path, source.nbytes)
        if lacking and not self.damage:
            self.damage.append(Fact.of(Kind.STORAGES_UNWRITTEN, storages=len(lacking)))

    def _place(self, key: str, storage: Storage) -> None:
        content, start = self.content, self.position + 8
        head = content[self.position : start]
        stored = int.from_bytes(head, "little") * DTYPES[self.pickles.dtypes[key]].itemsize
        late = storage.source
        is_placed = not isinstance(late, DeferredBytes) or late.inner is not None
        if len(head) == 8 and (stored != storage.nbytes or is_placed):
            self._tear(key, storage.nbytes, stored)
            return
        self.position = start + storage.nbytes
        if not isinstance(late, DeferredBytes):
            return
        end = len(content) if start + storage.nbytes <= len(content) else filled_end(content)
        present = max(0, min(storage.nbytes, end - start))
        source = content.source(start, present)
        late.inner = source if present == late.nbytes else TornBytes(content.path, late.nbytes, present, source)
        self.placed[late] = start
        if self.position > len(content):
            self.damage.append(Fact(Kind.CUT_SHORT))

    def _tear(self, key: str, declared: int, stored: int) -> None:
        """End the chain of storages at a count that contradicts the pickle.

        If the rest of the file is zeros, they may begin inside an earlier storage. Otherwise the end of the storage
        before is not confirmed, so that storage is lost too."""
        zeros = zero_tail(self.content)
        # A preallocated file has its full size, or a part of it that ends with whole sectors of zeros.
        is_reserved = len(self.content) >= self.end or len(self.content) - zeros >= SECTOR
        if stored == 0 and zeros < self.position + 8 and is_reserved:
            ends = self._unfilled(zeros)
        else:
            self.damage.append(Fact.of(Kind.STORAGE_COUNT, key, offset=self.position, declared=declared, stored=stored))
            ends = dict.fromkeys(list(self.placed)[-1:], 0)
        for late, whole in ends.items():
            late.inner = TornBytes(self.content.path, late.nbytes, whole, late.inner)

    def doubt_end(self, root: Any) -> None:
        """Tear the storages that reach into zeros at the end of the file, if their tensors show that these are not
        values."""
        zeros = None if self.damage else unfilled_from(self.content, self._tensors(root))
        for late, whole in (self._unfilled(zeros) if zeros is not None else {}).items():
            late.inner = TornBytes(self.content.path, late.nbytes, whole, late.inner)

    @property
    def cut(self) -> list[DeferredBytes]:
        """The storages inside which the file ends: the missing bytes may be before those that exist."""
        is_cut = self.position > len(self.content)
        return [late for late in self.placed if is_cut and isinstance(late.inner, TornBytes) and late.inner.whole]

    def _tensors(self, root: Any) -> Iterator[tuple[int, TensorSpec]]:
        """Yield each contiguous tensor with its position in the file."""
        for spec in tensors_in(root):
            source = spec.storage.source if spec.storage is not None else None
            if isinstance(source, DeferredBytes) and source in self.placed and spec.is_contiguous:
                yield self.placed[source] + spec.offset * spec.itemsize, spec

    def _unfilled(self, zeros: int) -> dict[DeferredBytes, int]:
        """Record the zeros at the end as damage. Return how many bytes exist of the storages that reach into them."""
        size = len(self.content)
        self.damage.append(Fact.of(Kind.UNFILLED, nbytes=size, zeros=size - zeros))
        return {late: max(0, zeros - start) for late, start in self.placed.items() if start + late.nbytes > zeros}


PLAIN = "pickle"


def read_whole(content: Content, pickles: StoragePickle, root: Any) -> Document:
    """Return the document of a plain pickle that was read to its end.

    Raises ``UnreadableError`` if it has missing or extra bytes and nothing shows where."""
    if pickles.storages:
        raise UnreadableError(
            f"{content.path}: the data.pkl of an unpacked torch file, whose tensors are in the files next to it; name "
            "the folder, or the original file"
        )
    if pickles.end.has_misfits or pickles.end.has_gaps:
        if first_break(content[:]) is not None and (rest := read_damaged(content, pickles, None)):
            return rest
        if pickles.end.has_misfits:
            raise damaged(
                content.path,
                "is damaged: its pickle has missing or extra bytes, and nothing shows which of its tensors are intact",
            )
    return _document(content, pickles, root, [])


def read_damaged(content: Content, pickles: StoragePickle, error: UnreadableError | None) -> Document | None:
    """Return the document of a plain pickle before its damage (``error``); None if no tensor is complete, or if
    nothing shows where the damage is."""
    if pickles.storages:
        return None
    data = content[:]
    unkept = first_break(data)
    try:
        pickles.run(data if unkept is None else data[: unkept[1]])
        return None
    except UnreadableError:
        runs, start = pickles.end.runs, pickles.end.at if unkept is None else unkept[0]
    key = _unfinished_key(runs)
    root = fold(runs, pickles.path)
    if not holds_tensors(root) and next(arrays_in(root), None) is None:
        return None
    damage = Fact.of(Kind.PICKLE_DAMAGED, start=start)
    if isinstance(error, PickleEndError):
        damage = Fact.of(Kind.PICKLE_CUT, end=error.position)
    document = _document(content, pickles, root, [damage])
    if key is not None:
        document.lost = {key: None}
    if len(runs) > 1 or len(runs[0]) > 1:  # tensors may have followed; otherwise only the STOP is missing
        document.remarks.append(Fact.of(Kind.UNNAMED_LOSS, lost=f"bytes {start} to {len(content)}"))
    return document


def _document(content: Content, pickles: StoragePickle, root: Any, damage: list[Fact]) -> Document:
    remarks = [*payload_remarks(pickles.names), Fact(Kind.PLAIN_PICKLE)]
    return Document(content.path, PLAIN, root, None, pickles.names, remarks, damage)


_NOTHING = Global("", "")  # differs from every value
_LONG = 16  # bytes of a value that may be the data of a tensor

_DATA = frozenset({
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE", "BINUNICODE8", "UNICODE", "BINSTRING",
    "STRING",
})  # fmt: skip
_KEEPS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})


def first_break(data: bytes) -> tuple[int, int] | None:
    """Return the start and end of the first long string that is not put into the memo, if most of the others are."""
    strings = _long_strings(data)
    unkept = [(start, stop) for start, stop, is_kept in strings if not is_kept]
    return unkept[0] if unkept and len(strings) > 3 * len(unkept) else None


def _long_strings(data: bytes) -> list[tuple[int, int, bool]]:
    """Return the values of a pickle that may be data of tensors: start, end, and whether they are put into the memo."""
    stream = io.BytesIO(data)
    found: list[tuple[int, int, bool]] = []
    begin = None  # start of a long string whose next opcode was not seen yet
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in strings
        try:
            for opcode, value, place in pickletools.genops(stream):
                if begin is not None:
                    found.append((begin, place or 0, opcode.name in _KEEPS))
                is_long = opcode.name in _DATA and isinstance(value, (str, bytes, bytearray)) and len(value) >= _LONG
                begin = place if is_long else None
        except (ValueError, OverflowError):
            if begin is not None:
                found.append((begin, stream.tell(), False))
    return found


def _unfinished_key(runs: list[list[Any]]) -> str | None:
    """Return the key of the incomplete value in the innermost dict; None in a module, where it is not a whole name."""
    if any(isinstance(value, str) and value in PARTS for run in runs for value in run):
        return None
    for outer, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        if outer and isinstance(outer[-1], dict):
            pairs = zip_longest(run[::2], run[1::2], fillvalue=_NOTHING)
            return next((key for key, value in pairs if isinstance(key, str) and not _is_whole(value)), None)
    return None


def fold(runs: list[list[Any]], path: str) -> Any:
    """Return the dict, list or object at the bottom of the stack with all complete values in it; None if there is
    none."""
    for outer, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        _set_states(run)
        if outer:
            _fill(outer[-1], run, path)
    bottom = runs[0]
    _set_states(bottom)
    for target, key, value in zip(bottom[::2], bottom[1::2], bottom[2::2], strict=False):
        _fill(target, [key, value], path)
    return bottom[0] if bottom and isinstance(bottom[0], (dict, list, Opaque)) else None


def _set_states(run: list[Any]) -> None:
    """Set the state of objects at the end of a run that was being built, such as that of a module."""
    while len(run) > 1 and isinstance(run[-2], Opaque) and run[-2].state is None and isinstance(run[-1], dict):
        owner, state = run[-2], run.pop()
        if not state.keys().isdisjoint(PARTS):
            state.update((name, {}) for name in PARTS if name not in state)
        owner.state = state


def _fill(target: Any, values: list[Any], path: str) -> None:
    """Add the complete values of an open run to its list or dict. Those of a tuple or of a call are lost."""
    if isinstance(target, list):
        target.extend(value for value in values if _is_whole(value))
    elif isinstance(target, dict):
        for key, value in zip(values[::2], values[1::2], strict=False):
            parts = key if isinstance(key, tuple) else (key,)
            if not all(isinstance(part, (str, int)) for part in parts) or not _is_whole(value):
                return
            bounded_keys([key], path)
            target[key] = value


def _is_whole(value: Any) -> bool:
    """Return whether a value is complete: neither a class without arguments nor an object without its state."""
    if isinstance(value, NumpyArray):
        return value.dtype is not None
    return not isinstance(value, Global) and not (isinstance(value, Opaque) and not value.args and not value.state)
