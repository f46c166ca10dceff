"""Where expanded bytes go: memory while they are few, a temporary file without a name when they are many.

What a compressed file expands to is a claim like any other. Weights hardly compress, so a file that expands fiftyfold
is taken for an attack, and the disk is never filled."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact
from ckptfix.core.progress import tell_slower
from ckptfix.core.wording import clauses
from ckptfix.errors import HostileError, UnreadableError

MEMORY_LIMIT = 8 << 20
"""Bytes that are kept in memory. What an archive inside of an archive expands to is there beside it, and twice while it
is handed on."""

RATIO_LIMIT, RATIO_FLOOR = 50, 64 << 20
"""How much larger than its compressed form a file may be, once it has so many bytes."""

DISK_RESERVE = 1 << 30
"""Bytes of the temporary folder's disk that are left free."""


class Expansion:
    """Gathers the expanded bytes of one file. ``path`` is what messages call it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = 0
        self._memory = bytearray()
        self._file: BinaryIO | None = None

    def write(self, block: bytes, packed: int) -> None:
        """Add a block; ``packed`` is how many compressed bytes have been read for all of them so far.

        Raises ``HostileError`` where the ratio is that of a bomb, ``UnreadableError`` where the disk has no room."""
        self.nbytes += len(block)
        if self.nbytes <= MEMORY_LIMIT:
            self._memory += block
            return
        if self.nbytes > max(RATIO_FLOOR, RATIO_LIMIT * packed):
            raise HostileError(
                f"{self.path}: expands more than {RATIO_LIMIT} times ({packed} bytes to {self.nbytes} and on), which "
                "weights do not; do not use this file, or unpack it yourself if you trust it"
            )
        try:
            if shutil.disk_usage(tempfile.gettempdir()).free < DISK_RESERVE + len(block):
                raise OSError(None, "less than 1 GiB is free")
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in content()
                self._write(self._memory)
                self._memory = bytearray()
            self._write(block)
        except OSError as error:
            raise UnreadableError(
                f"{self.path}: no room in {tempfile.gettempdir()} to expand it ({error.strerror} after {self.nbytes} "
                "bytes); free some, or set TMPDIR to a larger disk"
            ) from error

    def _write(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def content(self, member: str) -> Content:
        """What was gathered, as the file ``member``. Raises ``UnreadableError`` where it is empty."""
        if not self.nbytes:
            raise UnreadableError(f"{self.path}: what is packed in it is empty (0 bytes); fetch it again")
        if self._file is None:
            return Content(self.path, bytes(self._memory), member=member)
        descriptor = os.dup(self._file.fileno())
        self._file.close()
        return Content.of_open_file(OpenFile(self.path, descriptor), member)


Blocks = Callable[[list[Fact]], Iterator[tuple[bytes, int]]]
"""Gives the bytes of a packed file in blocks, each with the count of compressed bytes that were read so far.

What is wrong with the file is added to the list; the blocks then end early."""


def expand(path: str, member: str, blocks: Blocks) -> Content:
    """The content of a packed file, and its damage. Raises ``UnreadableError`` where the damage left nothing."""
    expansion = Expansion(path)
    damage: list[Fact] = []
    for block, packed in blocks(damage):
        expansion.write(block, packed)
    if damage and not expansion.nbytes:
        raise UnreadableError(f"{path}: {clauses(damage)}: nothing of it is left; fetch it again")
    tell_slower("unpacked first", expansion.nbytes)
    content = expansion.content(member)
    content.damage = damage
    return content
