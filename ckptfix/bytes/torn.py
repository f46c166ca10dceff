"""Storages of which bytes are gone: how a reader goes on past them, and which tensors are whole all the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptfix.bytes.sources import BLOCK, Content, FileBytes, LateBytes, SwappedBytes, WindowBytes
from ckptfix.core.spec import ByteSource, TensorSpec
from ckptfix.core.tree import tensors_in
from ckptfix.errors import UnreadableError

SECTOR = 512
"""Bytes of the shortest run of zeros that may be space without data: disks and file systems lose no less."""

_ZEROS = bytes(BLOCK)


@dataclass(frozen=True, eq=False)
class TornBytes:
    """A storage of ``nbytes`` of which only the first ``whole`` are there, in ``source``."""

    path: str
    nbytes: int
    whole: int = 0
    source: ByteSource | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``. Raises ``UnreadableError`` where they are gone."""
        if stop > self.whole or self.source is None:
            raise UnreadableError(f"{self.path}: the bytes of a storage are gone; leave the tensor out with --salvage")
        return self.source.read(start, stop)


def whole_bytes(source: ByteSource) -> int:
    """How many bytes from the start of a storage on are there."""
    if isinstance(source, TornBytes):
        return source.whole
    if isinstance(source, LateBytes):
        return whole_bytes(source.inner) if source.inner is not None else 0
    if isinstance(source, SwappedBytes):
        return whole_bytes(source.source) // source.width * source.width
    if isinstance(source, WindowBytes):
        return max(0, min(whole_bytes(source.source) - source.offset, source.nbytes))
    return source.nbytes


def is_torn(value: Any) -> bool:
    """Whether a tensor lacks any byte that it views."""
    if not isinstance(value, TensorSpec):
        return False
    for part in value.strided_parts():
        if part.storage is None or type(source := part.storage.source) is FileBytes:
            continue
        if (whole := whole_bytes(source)) < source.nbytes and part.numel and part.extent[1] > whole:
            return True
    return False


def missing_bytes(root: Any) -> int:
    """Return how many bytes the storages of a tree lack."""
    sources = {id(spec.storage): spec.storage.source for spec in tensors_in(root) if spec.storage is not None}
    return sum(source.nbytes - whole_bytes(source) for source in sources.values())


def zero_tail(content: Content) -> int:
    """Where the zeros begin that reach to the end of the content; its size where its last byte is none."""
    end = len(content)
    step = 4096
    while end:
        start = max(0, end - step)
        block = bytes(content.buffer[start:end])
        if block != _ZEROS[: len(block)]:  # ten times as fast as to strip them: a model may end in zeros by right
            return start + len(block.rstrip(b"\0"))
        end, step = start, BLOCK
    return 0


def filled_end(content: Content) -> int:
    """Where the data of a content ends that is known to be cut: in front of its zeros if they are a sector or more."""
    zeros = zero_tail(content)
    return zeros if len(content) - zeros >= SECTOR else len(content)
