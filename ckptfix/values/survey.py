"""A tensor's figures from those of its parts, which several threads look at side by side.

The parts do not depend on the number of threads and are joined in their order, so neither do the figures.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ckptfix.bytes.batches import batched, side_by_side
from ckptfix.bytes.checksums import is_open
from ckptfix.bytes.compiled import MemoryGone, can_sum
from ckptfix.bytes.crc32 import crc32
from ckptfix.bytes.mapping import WORTH_MAPPING, Mapping
from ckptfix.bytes.sources import located
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import TensorSpec
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.kernel import KINDS, RANGE_LIMIT, Range, kernel
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.scan import Scanner
from ckptfix.values.tally import Tally
from ckptfix.values.walk import Walk

PART = 1 << 23
"""Bytes of a part, which is looked at in one call: some hundred microseconds of work, of which Python's are few."""

BATCH = 1 << 25
"""Bytes that a thread looks at in one go: a signal waits for as many, and handing over fewer would take longer."""


class Found(NamedTuple):
    """The figures of a part, and the CRC-32 of its bytes where that was asked for."""

    tally: Tally
    crc32: int = 0


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of a walk. With ``is_summed``, the checksum of their storage is worked out too."""

    walk: Walk
    stored: Encoding
    narrowing: Narrowing | None
    start: int
    stop: int
    nbytes: int
    is_summed: bool = False

    def look(self, mapping: Mapping) -> Found:
        """What is to be known of it. Raises ``UnreadableError`` where the bytes are not in the file."""
        if (block := self._mapped(mapping)) is not None:
            try:
                return self._look_at(block)
            except MemoryGone:  # reading the file in the plain way tells what is wrong with it
                pass
        order = None if self.walk.is_row_major else self.walk.logical_order
        scanner, crc = Scanner(self.stored, order, self.narrowing, self.start), 0
        for block in self.walk.blocks(self.start, self.stop):
            scanner.feed(block)
            crc = crc32(block, crc) if self.is_summed else 0
        return Found(scanner.tally, crc)

    def file_range(self) -> Range | None:
        """Where it lies in a file, if it is so small that the kernel had better read it itself; None where it is not,
        or where the kernel does not know its numbers.
        """
        spec = self.walk.spec
        kind, storage = KINDS.get(spec.dtype), spec.storage
        if kind is None or self.nbytes > RANGE_LIMIT or storage is None or not self._is_for_the_kernel():
            return None
        place, first = located(storage.source), (spec.offset + self.start) * self.stored.unit.itemsize
        if place is None or first + self.nbytes > place.nbytes:
            return None
        length, offset = self.stop - self.start, place.offset + first
        return Range(place.file.descriptor, offset, length, kind, self.is_summed, self.narrowing)

    def _look_at(self, block: memoryview) -> Found:
        """What the kernel finds in all the bytes: they pass through the processor's cache once."""
        import numpy as np

        compiled = kernel()
        assert compiled is not None, "nothing is mapped without it"
        units = np.frombuffer(block, dtype=self.stored.unit)
        tally, crc = compiled.look(units, self.stored, self.narrowing, self.is_summed)
        if tally.first is not None:
            tally.first = self.start + tally.first // self.stored.units
        return Found(tally, crc)

    def _is_for_the_kernel(self) -> bool:
        """Whether it can look at all the bytes alone, in one go."""
        return (can_sum() or not self.is_summed) and self.walk.is_run and self.walk.is_row_major

    def _mapped(self, mapping: Mapping) -> memoryview | None:
        """The bytes, mapped, where the kernel alone looks at them: whatever else does dies if the file shrinks."""
        storage, compiled = self.walk.spec.storage, kernel()
        if compiled is None or not compiled.takes(self.stored) or self.nbytes < WORTH_MAPPING:
            return None
        if storage is None or not self._is_for_the_kernel():
            return None
        first = self.walk.spec.offset + self.start
        return mapping.block(storage.source, first * self.walk.spec.itemsize, self.nbytes, self.stored.unit.itemsize)


def parts_of(spec: TensorSpec, narrowing: Narrowing | None) -> list[Part]:
    """The parts of a strided tensor that has elements, and a storage."""
    dtype, stored, walk, storage = DTYPES[spec.dtype], encoding(spec.dtype), Walk(spec), spec.storage
    assert stored is not None, f"{spec.dtype} holds no numbers"
    cast = narrowing if dtype.is_float else None
    size, distinct = dtype.itemsize, walk.distinct
    nbytes = distinct * size
    # A checksum is that of a whole storage, from front to back.
    is_whole = storage is not None and not spec.offset and nbytes == storage.nbytes and walk.is_plain
    is_summed = is_whole and storage is not None and is_open(storage)
    if nbytes <= PART:  # as most have
        return [Part(walk, stored, cast, 0, distinct, nbytes, is_summed)]
    step = max(PART // size, 1) if walk.is_run else distinct
    edges = [(start, min(start + step, distinct)) for start in range(0, distinct, step)]
    return [Part(walk, stored, cast, start, stop, (stop - start) * size, is_summed) for start, stop in edges]


def looks(parts: Sequence[Part]) -> Iterator[Found]:
    """What is found in parts, of one or of many tensors, in their order."""
    batches = list(batched(parts, lambda part: part.nbytes, BATCH))
    return chain.from_iterable(side_by_side(_look_at_all, batches))


def _look_at_all(parts: Sequence[Part]) -> list[Found]:
    """What is found in the parts of one batch. The small ones are looked at in one go."""
    compiled, mapping = kernel(), Mapping(mmap.ACCESS_READ)
    ranges = {} if compiled is None else {at: where for at, part in enumerate(parts) if (where := part.file_range())}
    if compiled is None or not ranges:
        return [part.look(mapping) for part in parts]
    seen = dict(zip(ranges, compiled.look_in_files(list(ranges.values())), strict=True))
    return [_placed(part, found) if (found := seen.get(at)) else part.look(mapping) for at, part in enumerate(parts)]


def _placed(part: Part, found: tuple[Tally, int]) -> Found:
    """What the kernel found, with the place of the first bad element among those of the tensor."""
    tally, crc = found
    if tally.first is not None:
        tally.first += part.start
    return Found(tally, crc)
