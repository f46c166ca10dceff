"""A tensor's figures from those of its parts, which several threads look at side by side.

The parts do not depend on the number of threads and are joined in their order, so neither do the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ckptfix.checkpoint import TensorSpec
from ckptfix.dtypes import DTYPES
from ckptfix.formats.batches import batched, side_by_side
from ckptfix.formats.checksums import is_open
from ckptfix.formats.compiled import MemoryGone, can_sum
from ckptfix.formats.crc32 import crc32
from ckptfix.formats.mapping import WORTH_MAPPING, map_file
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.kernel import kernel
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.scan import Scanner
from ckptfix.values.tally import Tally
from ckptfix.values.walk import Walk

PART = 1 << 23
"""Bytes of a part, which is mapped at a time: some hundred microseconds of work, of which Python's are few."""

BATCH = 1 << 25
"""Bytes that a thread looks at in one go: a signal waits for as many, and handing over fewer would take longer."""

WORTH_A_THREAD = 1 << 16
"""Bytes of the average part from which on threads help: smaller ones are work for Python, which does one thing at a
time."""


class Found(NamedTuple):
    """The figures of a part, and the CRC-32 of its bytes where that was asked for."""

    tally: Tally
    crc32: int = 0


@dataclass(frozen=True)
class Part:
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

    def _mapped(self) -> memoryview | None:
        """The bytes, mapped, where the kernel alone looks at them: whatever else does dies if the file shrinks."""
        storage, compiled = self.walk.spec.storage, kernel()
        if compiled is None or not compiled.takes(self.stored) or self.nbytes < WORTH_MAPPING:
            return None
        if self.is_summed and not can_sum():
            return None
        if storage is None or not self.walk.is_run or not self.walk.is_row_major:
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
    if sum(part.nbytes for part in parts) < WORTH_A_THREAD * len(parts):
        return map(Part.look, parts)
    batches = list(batched(parts, lambda part: part.nbytes, BATCH))
    return chain.from_iterable(side_by_side(_look_at_all, batches))


def _look_at_all(parts: Sequence[Part]) -> list[Found]:
    return [part.look() for part in parts]
