"""A tensor's figures from those of its parts, which several threads look at side by side.

The parts do not depend on the number of threads and are joined in their order, so neither do the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ckptfix.checkpoint import TensorSpec
from ckptfix.dtypes import DTYPES
from ckptfix.formats.raw.batches import batched, side_by_side
from ckptfix.formats.raw.checksums import is_open
from ckptfix.formats.raw.compiled import MemoryGone, can_sum
from ckptfix.formats.raw.crc32 import crc32
from ckptfix.formats.raw.mapping import WORTH_MAPPING, map_file
from ckptfix.formats.raw.sources import located
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.kernel import KINDS, RANGE_LIMIT, Range, kernel
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.scan import Scanner
from ckptfix.values.tally import Tally
from ckptfix.values.walk import Walk

PART = 1 << 23
"""Bytes of a part, which is mapped at a time: some hundred microseconds of work, of which Python's are few."""

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
    is_summed: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return (self.stop - self.start) * self.walk.spec.itemsize

    def look(self) -> Found:
        """What is to be known of it. Raises ``UnreadableError`` where the bytes are not in the file."""
        if (block := self._mapped()) is not None:
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
        kind, itemsize = KINDS.get(spec.dtype), spec.itemsize
        if kind is None or (self.stop - self.start) * itemsize > RANGE_LIMIT or not self._is_for_the_kernel():
            return None
        place = located(spec.storage.source) if spec.storage is not None else None
        if place is None or spec.extent[1] > place.nbytes:
            return None
        offset = place.offset + (spec.offset + self.start) * itemsize
        return Range(place.file.descriptor, offset, self.stop - self.start, kind, self.is_summed, self.narrowing)

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

    def _mapped(self) -> memoryview | None:
        """The bytes, mapped, where the kernel alone looks at them: whatever else does dies if the file shrinks."""
        storage, compiled = self.walk.spec.storage, kernel()
        if compiled is None or not compiled.takes(self.stored) or self.nbytes < WORTH_MAPPING:
            return None
        if storage is None or not self._is_for_the_kernel():
            return None
        first = self.walk.spec.offset + self.start
        return map_file(storage.source, first * self.walk.spec.itemsize, self.nbytes, self.stored.unit.itemsize)


def parts_of(spec: TensorSpec, narrowing: Narrowing | None) -> list[Part]:
    """The parts of a strided tensor that has elements, and a storage."""
    stored, walk = encoding(spec.dtype), Walk(spec)
    assert stored is not None, f"{spec.dtype} holds no numbers"
    cast = narrowing if DTYPES[spec.dtype].is_float else None
    step = max(PART // spec.itemsize, 1) if walk.is_run else walk.distinct
    edges = range(0, walk.distinct, step)
    # A checksum is that of a whole storage, from front to back.
    whole = spec.storage is not None and is_open(spec.storage) and walk.is_plain
    is_summed = whole and spec.storage is not None and spec.extent == (0, spec.storage.nbytes)
    return [Part(walk, stored, cast, start, min(start + step, walk.distinct), is_summed) for start in edges]


def looks(parts: Sequence[Part]) -> Iterator[Found]:
    """What is found in parts, of one or of many tensors, in their order."""
    batches = list(batched(parts, lambda part: part.nbytes, BATCH))
    return chain.from_iterable(side_by_side(_look_at_all, batches))


def _look_at_all(parts: Sequence[Part]) -> list[Found]:
    """What is found in the parts of one batch. The small ones are looked at in one go."""
    compiled = kernel()
    ranges = {} if compiled is None else {at: where for at, part in enumerate(parts) if (where := part.file_range())}
    if compiled is None or not ranges:
        return [part.look() for part in parts]
    seen = dict(zip(ranges, compiled.look_in_files(list(ranges.values())), strict=True))
    return [_placed(part, found) if (found := seen.get(at)) else part.look() for at, part in enumerate(parts)]


def _placed(part: Part, found: tuple[Tally, int]) -> Found:
    """What the kernel found, with the place of the first bad element among those of the tensor."""
    tally, crc = found
    if tally.first is not None:
        tally.first += part.start
    return Found(tally, crc)
