"""What the bytes of a whole storage say about damage: its checksum, or a hole of zeros where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfix.checkpoint import Checkpoint, Storage
from ckptfix.formats.checksums import is_sound
from ckptfix.formats.sources import stream

WORD = 8
"""Bytes that are looked at together when a hole is searched."""


@dataclass(frozen=True)
class Hole:
    """The longest run of zero words of a storage, in bytes."""

    start: int
    stop: int


class Integrity:
    """Checks storages, each once: an edited view of a checkpoint shares most of them."""

    def __init__(self) -> None:
        # The storage is kept beside what is known of it, or its id could be that of another one.
        self._holes: dict[int, tuple[Storage, Hole]] = {}

    def is_sound(self, storage: Storage) -> bool:
        """Whether the storage has the checksum that its file gives, or none. Reads it in blocks.

        Raises ``UnreadableError`` where the bytes are not in the file.
        """
        return is_sound(storage)

    def hole(self, storage: Storage) -> Hole:
        """The longest run of zeros in a storage. Raises ``UnreadableError`` where the bytes are not in the file."""
        if id(storage) not in self._holes:
            self._holes[id(storage)] = (storage, _longest_hole(storage))
        return self._holes[id(storage)][1]


def storages_of(checkpoint: Checkpoint) -> Iterator[tuple[Storage, list[str]]]:
    """Every storage of the state_dict with the keys of the tensors that lie in it."""
    found: dict[int, tuple[Storage, list[str]]] = {}
    for key, spec in checkpoint.specs.items():
        for part in spec.strided_parts():
            if part.storage is not None:
                keys = found.setdefault(id(part.storage), (part.storage, []))[1]
                if key not in keys[-1:]:
                    keys.append(key)
    yield from found.values()


def _longest_hole(storage: Storage) -> Hole:
    import numpy as np

    longest, last = (0, 0), -1  # `last` is the last word that is not zero
    words = storage.nbytes // WORD
    position = 0
    for block in stream(storage.source, 0, words * WORD):
        units = np.frombuffer(block, dtype=np.uint64)
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
