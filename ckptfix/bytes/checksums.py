"""Whether a storage has the checksum that its file gives for it, worked out once for each storage.

A zip archive has one CRC-32 for a whole storage, so that a part of it cannot be proved by itself. The first tensor that
is read from a storage therefore costs one pass over all of it; the result is remembered as long as the storage is, and
every other view of it is read without a second look. A storage that is read from end to end is proved while it passes.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from ckptfix.bytes.sources import stream
from ckptfix.bytes.threads import background, batched, side_by_side
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import Storage
from ckptfix.errors import DamageWarning, Opt, UnreadableError, WriteError, one_line

try:  # 20 to 60 GB/s, where the zlib of most Pythons reaches 1 to 4: a full repair takes twice as long without it
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]

# What is known: a rule asks, and after it the reader and the writer, who need not read the bytes again.
_SOUND: WeakKeyDictionary[Storage, bool] = WeakKeyDictionary()
_BATCH = 4 << 20  # bytes whose proof takes much longer than handing it to a thread


def is_sound(storage: Storage) -> bool:
    """Return whether the storage, and each that it is made of, has the checksum that its file gives, or none.

    Reads it in blocks. Raises ``UnreadableError`` if the bytes are not in the file."""
    found = storage.crc32 is None or _SOUND.get(storage)
    if found is None:
        for _ in _proving(storage):
            pass
        found = _SOUND[storage]
    return found and (not storage.parts or all(map(is_sound, storage.parts)))


def prove_ahead(storages: Iterable[Storage]) -> None:
    """Work out at once, in two threads, what ``is_sound`` will be asked of many storages."""
    batches = list(batched(filter(is_unproved, storages), lambda storage: storage.nbytes, _BATCH))
    for _ in side_by_side(lambda batch: list(map(is_sound, batch)), batches):
        pass


def is_open(storage: Storage) -> bool:
    """Return whether it is not known yet if the storage itself has the checksum that its file gives."""
    return storage.crc32 is not None and storage not in _SOUND


def is_unproved(storage: Storage) -> bool:
    """Return whether it is not known yet if the storage, or one that it is made of, has its checksum."""
    return is_open(storage) or (bool(storage.parts) and any(map(is_unproved, storage.parts)))


def note_checksum(storage: Storage, crc: int) -> bool:
    """Remember whether a whole storage of this CRC-32 is sound, and return it."""
    found = _SOUND[storage] = crc == storage.crc32
    return found


def _proving(storage: Storage) -> Iterator[memoryview]:
    """Yield the blocks of a whole storage; after the last one it is known whether the storage has its checksum."""
    crc = 0
    for block in stream(storage.source, 0, storage.nbytes):
        crc = crc32(block, crc)
        yield block
    note_checksum(storage, crc)


Alarm = Callable[[Storage], None]  # what is done about a damaged storage that is read


def proved_stream(storage: Storage, start: int, stop: int, alarm: Alarm) -> Iterator[memoryview]:
    """Yield bytes ``start`` to ``stop`` of a storage in blocks; give the alarm if it is damaged: before the first
    block, or after the last of a storage that is read as a whole for the first time."""
    is_first = (start, stop) == (0, storage.nbytes) and is_open(storage)
    if is_first:
        yield from _proving(storage)
    if not is_sound(storage):
        alarm(storage)
    if not is_first:
        yield from stream(storage.source, start, stop)


def refusal(checkpoint: Checkpoint) -> Alarm:
    """Raises ``UnreadableError``: a state_dict with damage in it goes into no model."""

    def refuse(storage: Storage) -> None:
        raise UnreadableError(
            f"{_damage(checkpoint, storage)}; fetch the file again, or leave the damaged tensors out with ",
            Opt("salvage", True),
        )

    return refuse


def warning(checkpoint: Checkpoint) -> Alarm:
    """Warns, and lets the bytes through: reading a single tensor is also how one looks at the damage."""

    def warn(storage: Storage) -> None:
        warnings.warn(one_line(_damage(checkpoint, storage)), DamageWarning, stacklevel=2)

    return warn


def _damage(checkpoint: Checkpoint, storage: Storage) -> str:
    held = _held_by(checkpoint, storage)
    return f"{checkpoint.path}: {held} fails its checksum: its values are not those that were saved"


def prove(checkpoint: Checkpoint, storages: Iterable[Storage | None]) -> None:
    """Raise ``WriteError`` if one of the storages is damaged: its checksum does not go into the new file, which
    would make the damage look sound."""
    for storage in storages:
        if storage is not None and not is_sound(storage):
            raise WriteError(
                f"{checkpoint.path}: {_held_by(checkpoint, storage)} fails its checksum, and the new file would hide "
                "that; fetch the file again, or leave the damaged tensors out with ",
                *(Opt("salvage", True), " (without ", Opt("values", False), ")"),
            )


@contextmanager
def proving(checkpoint: Checkpoint, storages: Iterable[Storage | None]) -> Iterator[None]:
    """Prove the storages while the body writes; at its end the same error as that of ``prove``."""
    wanted = list(storages)
    if not wanted:  # as of most repairs: what is copied whole keeps its checksum
        yield
        return
    with background() as pool:
        proof = pool.submit(prove, checkpoint, wanted)
        yield
        proof.result()


def _held_by(checkpoint: Checkpoint, storage: Storage) -> str:
    entries = checkpoint.entries.items()
    keys = [key for key, entry in entries if any(spec.storage is storage for spec in tensors_in(entry))]
    more = f" and of {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"the storage of {keys[0]}{more}" if keys else "a storage beside the state_dict"


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file, in hex. It runs without Python's lock."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:  # hashlib.file_digest needs Python 3.11, and its buffer is small
        buffer = memoryview(bytearray(max(1, min(1 << 20, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
