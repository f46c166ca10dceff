"""Packed streams, expanded block by block up to their first fault.

A decoder that meets a fault keeps what it had made in that call to itself. So the stream is expanded once more up to
there, by another decoder that is fed byte by byte and asked for little at a time: nothing that was there is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptfix.bytes.decoders import FAULTS
from ckptfix.bytes.sources import Content

_FIRST, _PACKED, _EXPANDED = 1 << 10, 64 << 10, 1 << 20
"""Packed bytes that are taken at first, and at most, at a time; expanded bytes of a block."""


@dataclass
class Stream:
    """The packed bytes from ``position`` to ``stop`` of a content, and what makes a decoder for them.

    Once its blocks are out, ``position`` is behind the stream where it ``ended`` as it should. Else it stopped at a
    ``fault``, or, where that is empty, its bytes came to an end before it did."""

    content: Content
    position: int
    stop: int
    make_decoder: Callable[[], Any]
    expanded: int = 0
    ended: bool = False
    fault: str = ""

    def blocks(self, most: int = _EXPANDED, rescue: bool = True) -> Iterator[tuple[bytes, int]]:
        """The expanded bytes in blocks, each with the count of packed bytes that were taken so far.

        Without ``rescue`` the last of them before a fault are left: to get at them takes long."""
        decoder, start = self.make_decoder(), self.position
        size = _FIRST  # a file may have many small streams
        while not decoder.eof:
            packed = self._packed(self.position, size)
            size = min(2 * size, _PACKED)
            if not packed:
                return
            self.position += len(packed)
            try:
                for block in _decode(decoder, packed, lambda: most):
                    self.expanded += len(block)
                    yield block, self.position - start
            except FAULTS as error:
                self.fault = str(error)
                for step in (4096, 1) if rescue else ():
                    for block in self._rescued(start, self.position - len(packed), step):
                        self.expanded += len(block)
                        yield block, self.position - start
                return
        self.ended = True
        self.position -= len(decoder.unused_data)

    def _packed(self, start: int, size: int) -> bytes:
        return bytes(self.content.buffer[start : min(start + size, self.stop)])

    def _rescued(self, start: int, faulty: int, step: int) -> Iterator[bytes]:
        """What lies between the blocks that came out and the fault, which is in the packed bytes from ``faulty`` on."""
        decoder, skip, position = self.make_decoder(), self.expanded, start

        def limit() -> int:
            return min(_EXPANDED, skip) or step

        with suppress(*FAULTS):
            while position < self.position and not decoder.eof:
                packed = self._packed(position, max(1, min(_PACKED, faulty - position)))
                position += len(packed)
                for block in _decode(decoder, packed, limit):
                    fresh = block[skip:]
                    skip -= min(skip, len(block))
                    if fresh:
                        yield fresh


def _decode(decoder: Any, packed: bytes, limit: Callable[[], int]) -> Iterator[bytes]:
    """What a decoder makes of some bytes, in blocks of bounded size."""
    while not decoder.eof:
        most = limit()
        block = decoder.decompress(packed, most)
        if block:
            yield block
        # zlib hands the rest of its input back; the others keep it, and say when they want more.
        packed = getattr(decoder, "unconsumed_tail", b"")
        if not packed and (not block or getattr(decoder, "needs_input", len(block) < most)):
            return
