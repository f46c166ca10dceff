"""Whether a storage has the checksum that its file gives for it, worked out once for each storage."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from ckptfix.checkpoint import Checkpoint, Storage
from ckptfix.errors import WriteError
from ckptfix.formats.sources import stream

_SOUND: WeakKeyDictionary[Storage, bool] = WeakKeyDictionary()
"""What is known: a rule asks, and after it the writer, who need not read the bytes again."""


def is_sound(storage: Storage) -> bool:
    """Whether the storage has the checksum that its file gives, or none. Reads it in blocks.

    Raises ``UnreadableError`` where the bytes are not in the file.
    """
    if storage.crc32 is None:
        return True
    if storage not in _SOUND:
        crc = 0
        for block in stream(storage.source, 0, storage.nbytes):
            crc = zlib.crc32(block, crc)
        _SOUND[storage] = crc == storage.crc32
    return _SOUND[storage]


def prove(checkpoint: Checkpoint, storages: Iterable[Storage | None]) -> None:
    """Raise ``WriteError`` where one of the storages is damaged: its checksum does not go into the new file, which
    would make the damage look sound.
    """
    for storage in storages:
        if storage is not None and not is_sound(storage):
            raise WriteError(
                f"{checkpoint.path}: {_held_by(checkpoint, storage)} fails its checksum, and the new file would hide "
                "that; fetch the file again, or leave the damaged tensors out with --salvage (without --no-values)"
            )


def _held_by(checkpoint: Checkpoint, storage: Storage) -> str:
    keys = [
        key for key, spec in checkpoint.specs.items() if any(part.storage is storage for part in spec.strided_parts())
    ]
    more = f" and of {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"the storage of {keys[0]}{more}" if keys else "a storage beside the state_dict"
