"""What the bytes of a whole storage say about damage: its checksum, or a hole of zeros if there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ckptfix.bytes.checksums import is_sound, is_unproved
from ckptfix.bytes.sources import SECTOR, stream
from ckptfix.bytes.threads import side_by_side
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.objects import tensors_in
from ckptfix.core.progress import Task
from ckptfix.core.spec import Storage, TensorSpec

WORD = 8  # bytes that are looked at together when a hole is searched

# A hole of a sector has a whole row of so many words in it, however it lies, and so the first word of that row.
_STEP = SECTOR // WORD // 2


@dataclass(frozen=True)
class Hole:
    """The longest run of zero words of a storage, in bytes. Runs below ``SECTOR`` bytes need not be found."""

    start: int
    stop: int


# What is known: an edited view of a checkpoint shares most storages.
_HOLES: WeakKeyDictionary[Storage, Hole] = WeakKeyDictionary()


def soundness(storages: Sequence[Storage]) -> list[bool]:
    """Return whether each storage has the checksum of its file, two at a time: a checksum takes longer than reading."""
    unproved = list(filter(is_unproved, storages))
    task = Task("proving checksums", sum(storage.nbytes for storage in unproved))
    for storage, _ in zip(unproved, side_by_side(is_sound, unproved), strict=True):
        task.advance(storage.nbytes)
    return list(map(is_sound, storages))


def longest_holes(storages: Sequence[Storage]) -> list[Hole]:
    """Return the longest run of zeros in each storage. Raises ``UnreadableError`` if bytes are not in the file."""
    unknown = [storage for storage in storages if storage not in _HOLES]
    for storage, hole in zip(unknown, side_by_side(_longest_hole, unknown), strict=True):
        _HOLES[storage] = hole
    return [_HOLES[storage] for storage in storages]


def storages_of(checkpoint: Checkpoint) -> Iterator[tuple[Storage, list[str]]]:
    """Yield every storage of the state_dict with the keys of the entries in it: tensors, and packed parameters."""
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
    import numpy as np

    longest, last = (0, 0), -1  # `last` is the last word that is not zero
    words = storage.nbytes // WORD
    position = 0
    for block in stream(storage.source, 0, words * WORD):
        units = np.frombuffer(block, dtype=np.uint64)
        if units[::_STEP].all():
            # No hole begins and ends in here, none reaches over the first word, and the last word ends one at most.
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
