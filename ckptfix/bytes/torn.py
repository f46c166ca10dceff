"""Storages of which bytes are gone: how a reader goes on past them, which tensors are whole all the same, and space
that was reserved for a file and never filled.

Downloaders and network file systems make a file in its full size first. Such a file has a whole header, and reads as
zeros from where the transfer stopped. Zeros at the end are common in healthy files too: the ``lora_B`` of a fresh
adapter, a bias, the padded rows of a vocabulary. Those begin where a tensor or one of its rows begins. A transfer stops
anywhere, so what is believed is a run of zeros that begins in the middle of a row of numbers of which hardly one is
zero, and goes on to the end of the file through at least another row or tensor of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptfix.bytes.sources import BLOCK, Content, FileBytes, LateBytes, SwappedBytes, WindowBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import ByteSource, TensorSpec
from ckptfix.core.tree import tensors_in
from ckptfix.errors import Opt, UnreadableError

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
        """Return bytes ``start`` to ``stop``. Raises ``UnreadableError`` if they are gone."""
        if stop > self.whole or self.source is None:
            raise UnreadableError(
                f"{self.path}: the bytes of a storage are gone; leave the tensor out with ", Opt("salvage", True)
            )
        return self.source.read(start, stop)


def whole_bytes(source: ByteSource) -> int:
    """Return how many bytes from the start of a storage on are there."""
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
    """Return whether a tensor lacks any byte that it views."""
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
    """Return where the zeros begin that reach to the end of the content; its size where its last byte is none."""
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
    """Return where the data of a content ends that is known to be cut: before its zeros if they are a sector or
    more."""
    zeros = zero_tail(content)
    return zeros if len(content) - zeros >= SECTOR else len(content)


SAMPLE = 1 << 16
"""Bytes before the zeros that are looked at."""

DENSE = 0.01
"""The largest share of zeros among the numbers in front."""


def unfilled_from(content: Content, placed: Iterable[tuple[int, TensorSpec]]) -> int | None:
    """Return where the zeros begin that were never filled; None if the end of the file may be meant.

    ``placed`` gives contiguous tensors and the byte of the content at which each begins. A file behind a URL is not
    looked at: what was uploaded was complete, and its zeros would all be fetched."""
    if content.is_remote:
        return None
    zeros = zero_tail(content)
    if len(content) - zeros < SECTOR:
        return None
    is_cut, follows = False, False
    for start, spec in placed:
        stop = start + spec.nbytes
        if not _is_float(spec) or stop <= zeros:
            continue
        row = max(spec.nbytes // (spec.shape[0] if len(spec.shape) > 1 else 1), 1)
        if start >= zeros:
            follows = True
        elif _lies_inside(zeros - start, row, spec.itemsize) and _is_dense(content, start, zeros, spec):
            is_cut = True
            follows |= stop - (zeros + row - (zeros - start) % row) >= row
    return zeros if is_cut and follows else None


def _is_float(spec: TensorSpec) -> bool:
    return spec.numel > 0 and (DTYPES[spec.dtype].is_float or DTYPES[spec.dtype].is_complex)


def _lies_inside(offset: int, row: int, itemsize: int) -> bool:
    """Return whether zeros begin inside of a row: inside of a number, or between two and not next to an edge, where the
    last numbers of the row may be zero themselves."""
    return offset % itemsize > 0 or 2 * itemsize <= offset % row <= row - 2 * itemsize


def _is_dense(content: Content, start: int, zeros: int, spec: TensorSpec) -> bool:
    """Return whether hardly a number of the tensor before the zeros is zero itself, or so small that its last byte is.

    A complex number is two."""
    itemsize = spec.itemsize
    lasts = (itemsize // 2, itemsize) if DTYPES[spec.dtype].is_complex else (itemsize,)
    first = start + max(0, (zeros - start - SAMPLE) // itemsize) * itemsize
    data = bytes(content.buffer[first : zeros - (zeros - first) % itemsize])
    count = len(data) // itemsize
    empty = sum(not any(ends) for ends in zip(*(data[last - 1 :: itemsize] for last in lasts), strict=True))
    return count > 0 and empty <= DENSE * count
