"""Damage that the bytes of a whole storage show: whether they match the checksum in the file, and the longest run of
zeros.

A zip archive has one CRC-32 per storage, so a part of a storage cannot be verified by itself. Reading the first tensor
of a storage therefore costs a pass over all of it. The result is cached as long as the storage exists, so its other
tensors are read without another pass. A storage that is read or copied from start to end is verified on the way."""

from __future__ import annotations

import os
import warnings
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from weakref import WeakKeyDictionary

from msgspec import Struct

from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import SECTOR, SmallParts, located, stream
from ckptfix.bytes.threads import batched, side_by_side
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import np
from ckptfix.core.objects import tensors_in
from ckptfix.core.progress import Task
from ckptfix.core.spec import ByteSource, Storage, TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import DamageWarning, Opt, UnreadableError, WriteError, one_line

try:  # 20 to 60 GB/s, where the zlib of most Pythons reaches 1 to 4: a full repair takes twice as long without it
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]

# Cached results: a rule asks first, and later the reader and the writer, which need not read the bytes again.
_SOUND: WeakKeyDictionary[Storage, bool] = WeakKeyDictionary()
_BATCH = 4 << 20  # bytes whose checksum takes much longer than passing them to a thread
SKIPPED = 1 << 20  # bytes that are read if a copy skips them: padding, or tensors too small to be copied by themselves


def is_sound(storage: Storage) -> bool:
    """Return whether a storage and all of its parts match the checksums in the file, if the file has any.

    Reads it in blocks. Raises ``UnreadableError`` if bytes are missing."""
    found = _SOUND.get(storage)
    if found is None and storage.crc32 is not None:
        for _ in _verifying(storage):
            pass
        found = _SOUND[storage]
    if found is None and storage.parts:
        parts = storage.parts
        found = not any(True for _ in parts.damaged()) if isinstance(parts, SmallParts) else all(map(is_sound, parts))
        _SOUND[storage] = found
    return found is not False


def damaged_parts(storage: Storage) -> Iterator[Storage]:
    """Yield what fails its checksum in the files: the storage itself, or those of its parts that do."""
    if is_sound(storage):
        return
    if storage.crc32 is not None:
        yield storage
    elif isinstance(storage.parts, SmallParts):
        yield from storage.parts.damaged()
    else:
        for part in storage.parts:
            yield from damaged_parts(part)


def place_in(path: str, storage: Storage) -> tuple[str, int]:
    """Return the file of a storage, as it is named in the checkpoint at ``path``, and the position in it.

    The name is empty if the checkpoint is that file, or if the bytes are not in a file as they are."""
    place = located(storage.source)
    if place is None:
        return "", id(storage)
    file, whole = Path(place.file.path), Path(path)
    name = file.relative_to(whole).as_posix() if file.is_relative_to(whole) else file.name
    return "" if file == whole else name, place.offset


def is_pending(storage: Storage) -> bool:
    """Return whether the storage itself has a checksum that was not verified yet."""
    return storage.crc32 is not None and storage not in _SOUND


def is_unverified(storage: Storage) -> bool:
    """Return whether the storage or one of its parts has a checksum that was not verified yet."""
    if storage in _SOUND or storage.crc32 is not None:
        return storage not in _SOUND
    return isinstance(storage.parts, SmallParts) or any(map(is_unverified, storage.parts))


def note_checksum(storage: Storage, crc: int) -> bool:
    """Compare the CRC-32 of all bytes of a storage with the one in the file; cache and return the result."""
    found = _SOUND[storage] = crc == storage.crc32
    return found


def _verifying(storage: Storage) -> Iterator[memoryview]:
    """Yield the blocks of a whole storage; after the last one, the storage is verified."""
    crc = 0
    for block in stream(storage.source, 0, storage.nbytes):
        crc = crc32(block, crc)
        yield block
    note_checksum(storage, crc)


Alarm = Callable[[Storage], None]  # called with a damaged storage that is read


def verified_stream(storage: Storage, start: int, stop: int, alarm: Alarm) -> Iterator[memoryview]:
    """Yield bytes ``start`` to ``stop`` of a storage in blocks, and call ``alarm`` if it is damaged: before the first
    block, or after the last one if this is the first pass over a whole storage."""
    is_first = (start, stop) == (0, storage.nbytes) and is_pending(storage)
    if is_first:
        yield from _verifying(storage)
    if not is_sound(storage):
        alarm(storage)
    if not is_first:
        yield from stream(storage.source, start, stop)


def refusing(checkpoint: Checkpoint) -> Alarm:
    """Return an alarm that raises ``UnreadableError``: a damaged state_dict is never loaded into a model."""

    def refuse(storage: Storage) -> None:
        raise UnreadableError(
            f"{_damage(checkpoint, storage)}; fetch the file again, or leave the damaged tensors out with ",
            Opt("salvage", True),
        )

    return refuse


def warning(checkpoint: Checkpoint) -> Alarm:
    """Return an alarm that warns only: reading single tensors is also a way to examine the damage."""

    def warn(storage: Storage) -> None:
        warnings.warn(one_line(_damage(checkpoint, storage)), DamageWarning, stacklevel=2)

    return warn


def _damage(checkpoint: Checkpoint, storage: Storage) -> str:
    held = _held_by(checkpoint, storage)
    return f"{checkpoint.path}: {held} fails its checksum: its values are not those that were saved"


@contextmanager
def verifying(checkpoint: Checkpoint, storages: Iterable[Storage | None]) -> Iterator[Verifier]:
    """Verify storages with the bytes that the body passes to ``Verifier``; the rest is read at the end.

    Raises ``WriteError`` if a storage is damaged: a new checksum would hide the damage."""
    wanted = [storage for storage in storages if storage is not None]
    verifier = Verifier(wanted)
    yield verifier
    if not verifier.finish():
        bad = next(storage for storage in wanted if not is_sound(storage))
        what = f"{checkpoint.path}: {_held_by(checkpoint, bad)} fails its checksum, and the new file would hide that"
        if not _keys_of(checkpoint, bad):  # --salvage leaves out weights only
            raise WriteError(
                f"{what}; fetch the file again, write only the weights (-o model.safetensors), or if it is in the"
                " optimizer, drop that with ",
                Opt("drop_optimizer", True),
            )
        raise WriteError(
            f"{what}; fetch the file again, or leave the damaged tensors out with ",
            *(Opt("salvage", True), " (without ", Opt("values", False), ")"),
        )


class Verifier:
    """Verification of storages while their bytes are copied, which saves reading them once more."""

    def __init__(self, storages: Iterable[Storage]) -> None:
        self._storages = dict.fromkeys(_with_parts(storages, set()))
        self._sums: dict[OpenFile | ByteSource, list[_Sum]] = {}
        for storage in filter(is_pending, self._storages):
            place = located(storage.source)
            whole, offset = (storage.source, 0) if place is None else (place.file, place.offset)
            insort(self._sums.setdefault(whole, []), _Sum(storage, offset), key=_offset)

    def take(self, whole: OpenFile | ByteSource, offset: int, block: memoryview) -> None:
        """Take in a block of a file, or of a source that computes its bytes, from ``offset`` on."""
        if sums := self._sums.get(whole):
            sums[bisect_right(sums, offset, key=_offset) - 1].take(offset, block)

    def finish(self) -> bool:
        """Read the bytes that were not copied, and return whether all storages match their checksums."""
        for _ in side_by_side(_Sum.finish, [each for sums in self._sums.values() for each in sums]):
            pass
        # Python code verifies small parts, which takes a tenth to a half longer in two threads.
        is_good = all(is_sound(storage) for storage in self._storages if isinstance(storage.parts, SmallParts))
        return is_good and all(_SOUND.get(storage, True) for storage in self._storages)


class _Sum(Struct, eq=False):
    """The CRC-32 of the first ``done`` bytes of a storage, which begins at ``offset``."""

    storage: Storage
    offset: int
    done: int = 0
    crc: int = 0

    def take(self, offset: int, block: memoryview) -> None:
        """Take in a block if it continues the bytes done so far, or skips only a few."""
        start, end = offset - self.offset, self.storage.nbytes
        if self.done < start < min(self.done + SKIPPED, end):
            self._read(start)
        if start <= self.done < min(start + block.nbytes, end):
            rest = block[self.done - start : end - start]
            self.crc, self.done = crc32(rest, self.crc), self.done + rest.nbytes

    def finish(self) -> None:
        self._read(self.storage.nbytes)
        note_checksum(self.storage, self.crc)

    def _read(self, stop: int) -> None:
        for block in stream(self.storage.source, self.done, stop):
            self.crc = crc32(block, self.crc)
        self.done = stop


_offset = attrgetter("offset")


def _with_parts(storages: Iterable[Storage], met: set[int]) -> Iterator[Storage]:
    """Yield the storages and their parts, each tuple of parts once: tensors sharded over the same ranks share it."""
    for storage in storages:
        yield storage
        if id(storage.parts) not in met and not _SOUND.get(storage) and not isinstance(storage.parts, SmallParts):
            met.add(id(storage.parts))
            yield from _with_parts(storage.parts, met)


def _held_by(checkpoint: Checkpoint, storage: Storage) -> str:
    keys = _keys_of(checkpoint, storage)
    more = f" and of {len(keys) - 1} more" if len(keys) > 1 else ""
    held = f"the storage of {keys[0]}{more}" if keys else "a storage beside the state_dict"
    files = dict.fromkeys(name for part in damaged_parts(storage) if (name := place_in(checkpoint.path, part)[0]))
    return f"{held} (in {first_names(list(files))})" if files else held


def _keys_of(checkpoint: Checkpoint, storage: Storage) -> list[str]:
    entries = checkpoint.entries.items()
    return [key for key, entry in entries if any(spec.storage is storage for spec in tensors_in(entry))]


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Releases Python's lock."""
    import hashlib  # loads OpenSSL, which a first answer does not need

    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:  # hashlib.file_digest needs Python 3.11, and has a small buffer
        buffer = memoryview(bytearray(max(1, min(1 << 20, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


WORD = 8  # bytes that are tested together in the search for zeros

# Every `_STEP`-th word is tested first: a hole of a sector or more contains at least one of them.
_STEP = SECTOR // WORD // 2


class Hole(Struct, frozen=True):
    """The longest run of zero words of a storage, as byte offsets. Runs shorter than ``SECTOR`` may be missed."""

    start: int
    stop: int


# Cached results: an edited view of a checkpoint shares most storages.
_HOLES: WeakKeyDictionary[Storage, Hole] = WeakKeyDictionary()


def soundness(storages: Collection[Storage]) -> list[bool]:
    """Return whether each storage matches its checksum. Runs in threads: checksums take longer than reading."""
    batches = list(batched(filter(is_unverified, storages), lambda storage: storage.nbytes, _BATCH))
    sizes = [sum(storage.nbytes for storage in batch) for batch in batches]
    task = Task("verifying checksums", sum(sizes))
    for nbytes, _ in zip(sizes, side_by_side(lambda batch: list(map(is_sound, batch)), batches), strict=True):
        task.advance(nbytes)
    return list(map(is_sound, storages))


def longest_holes(storages: Sequence[Storage]) -> list[Hole]:
    """Return the longest run of zeros in each storage. Raises ``UnreadableError`` if bytes are missing."""
    unknown = [storage for storage in storages if storage not in _HOLES]
    for storage, hole in zip(unknown, side_by_side(_longest_hole, unknown), strict=True):
        _HOLES[storage] = hole
    return [_HOLES[storage] for storage in storages]


def storages_of(checkpoint: Checkpoint) -> Iterator[tuple[Storage, list[str]]]:
    """Yield every storage of the state_dict with the keys of its entries (tensors and packed parameters)."""
    found: dict[int, tuple[Storage, list[str]]] = {}
    for key, entry in checkpoint.entries.items():
        for part in entry.strided_parts() if isinstance(entry, TensorSpec) else tensors_in(entry):
            storage = part.storage
            if storage is not None:
                keys = found.setdefault(id(storage), (storage, []))[1]
                if not keys or keys[-1] != key:
                    keys.append(key)
    yield from found.values()


def _longest_hole(storage: Storage) -> Hole:
    longest, last = (0, 0), -1  # `last` is the last word that is not zero
    words = storage.nbytes // WORD
    position = 0
    for block in stream(storage.source, 0, words * WORD):
        units = np.frombuffer(block, dtype=np.uint64)
        if units[::_STEP].all():
            # No hole of a sector is inside this block: one may end at its first word, and one may begin near its end.
            longest = max(longest, (position - 1 - last, last + 1))
            last = position + len(units) - len(units[-_STEP:]) + int(np.flatnonzero(units[-_STEP:])[-1])
            position += len(units)
            continue
        filled = np.flatnonzero(units)
        if len(filled):
            edges = np.concatenate(([last], filled + position))
            lengths = np.diff(edges) - 1
            at = int(lengths.argmax())
            longest = max(longest, (int(lengths[at]), int(edges[at]) + 1))
            last = int(edges[-1])
        position += len(units)
    length, start = max(longest, (words - 1 - last, last + 1))
    return Hole(start * WORD, (start + length) * WORD)
