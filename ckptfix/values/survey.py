"""A tensor's figures from those of its parts, which several threads look at side by side.

The parts do not depend on the number of threads and are joined in their order, so neither do the figures.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ckptfix.checkpoint import ByteSource, TensorSpec
from ckptfix.dtypes import DTYPES
from ckptfix.formats.copying import background
from ckptfix.formats.sources import located
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.kernel import MemoryGone, kernel
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.scan import Scanner
from ckptfix.values.tally import Tally
from ckptfix.values.walk import Walk

PART = 1 << 23
"""Bytes of a part: some hundred microseconds of work, beside which handing it to a thread is nothing."""

HUGE_PAGE = 1 << 21
"""A mapping from one multiple to another can have pages of this size where the cache has: they appear all at once."""

WORTH_MAPPING = 1 << 18
"""Bytes from which on a mapping takes less time than a copy."""

WORTH_A_THREAD = 1 << 16
"""Bytes of the average part from which on threads help: smaller ones are work for Python, which does one thing at a
time."""

THREADS = 2
"""Two read nearly as fast as a machine with few cores can; the batch migration runs jobs of its own beside them."""


@dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``stop`` of a walk."""

    walk: Walk
    stored: Encoding
    narrowing: Narrowing | None
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return (self.stop - self.start) * self.walk.spec.itemsize

    def tally(self) -> Tally:
        """The figures. Raises ``UnreadableError`` where the bytes are not in the file."""
        if (block := self._mapped()) is not None:
            scanner = self._scanner()
            try:
                scanner.feed(block)
            except MemoryGone:  # reading the file in the plain way tells what is wrong with it
                pass
            else:
                return scanner.tally
        scanner = self._scanner()
        for block in self.walk.blocks(self.start, self.stop):
            scanner.feed(block)
        return scanner.tally

    def _scanner(self) -> Scanner:
        order = None if self.walk.is_row_major else self.walk.logical_order
        return Scanner(self.stored, order, self.narrowing, self.start)

    def _mapped(self) -> memoryview | None:
        """The bytes, mapped, where the kernel alone looks at them: whatever else does dies if the file shrinks."""
        storage, compiled = self.walk.spec.storage, kernel()
        if compiled is None or not compiled.takes(self.stored) or self.nbytes < WORTH_MAPPING:
            return None
        if storage is None or not self.walk.is_run or not self.walk.is_row_major:
            return None
        first = self.walk.spec.offset + self.start
        return map_file(storage.source, first * self.walk.spec.itemsize, self.nbytes, self.stored.unit.itemsize)


def map_file(source: ByteSource, start: int, nbytes: int, alignment: int) -> memoryview | None:
    """Bytes of a source, mapped until the last view of them is gone; None where they lie in no file, or not aligned."""
    place = located(source)
    if place is None or start + nbytes > place.nbytes or (place.offset + start) % alignment:
        return None
    first = place.offset + start
    begin = first - first % HUGE_PAGE
    end = min(-(-(first + nbytes) // HUGE_PAGE) * HUGE_PAGE, place.file.size)
    try:
        mapping = mmap.mmap(place.file.descriptor, end - begin, access=mmap.ACCESS_READ, offset=begin)
    except (OSError, ValueError):  # no file system that maps, or the file has become too short
        return None
    block = memoryview(mapping)[first - begin : first - begin + nbytes]
    return block if block.nbytes == nbytes else None


def parts_of(spec: TensorSpec, narrowing: Narrowing | None) -> list[Part]:
    """The parts of a strided tensor that has elements, and a storage."""
    stored, walk = encoding(spec.dtype), Walk(spec)
    assert stored is not None, f"{spec.dtype} holds no numbers"
    cast = narrowing if DTYPES[spec.dtype].is_float else None
    step = max(PART // spec.itemsize, 1) if walk.is_run else walk.distinct
    edges = range(0, walk.distinct, step)
    return [Part(walk, stored, cast, start, min(start + step, walk.distinct)) for start in edges]


def tallies(parts: Sequence[Part]) -> Iterator[Tally]:
    """The figures of parts, of one or of many tensors, in their order."""
    batches = list(_batches(parts))
    if len(batches) < 2 or sum(part.nbytes for part in parts) < WORTH_A_THREAD * len(parts):
        yield from map(Part.tally, parts)
        return
    with background(THREADS) as pool:
        yield from chain.from_iterable(pool.map(_tally_all, batches))


def _tally_all(parts: Sequence[Part]) -> list[Tally]:
    return [part.tally() for part in parts]


def _batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbours together until they are as large as the largest part: handing over each small one would take longer
    than looking at it."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        if batch and size + part.nbytes > PART:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.nbytes
    if batch:
        yield batch
