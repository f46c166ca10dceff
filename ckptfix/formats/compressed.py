"""Compressed streams: gzip, bzip2 and xz."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ckptfix.errors import UnreadableError
from ckptfix.formats.sources import Content

_PACKED, _EXPANDED = 64 << 10, 1 << 20
_DICTIONARY = 512 << 20
"""Memory that an xz stream may ask for; the highest preset needs 65 MB."""


@dataclass(frozen=True)
class Compression:
    """A kind of stream: its name, how it begins, the suffixes that name it, and what makes a decoder for it."""

    name: str
    magic: bytes
    suffixes: tuple[str, ...]
    decoder: Callable[[], Any]

    def name_inside(self, name: str) -> str:
        """What the file was called before it was compressed; it is the same name where the suffix says nothing."""
        path = PurePath(name)
        if path.suffix.lower() in (".tgz", ".tbz2", ".txz"):
            return f"{path.stem}.tar"
        return path.stem if path.suffix.lower() in self.suffixes else path.name

    def blocks(self, content: Content, salvage: bool) -> Iterator[tuple[bytes, int]]:
        """The expanded bytes in blocks, each with the count of compressed bytes taken so far.

        Several streams behind each other are one file, and what is behind them is padding, as for gzip(1). Raises
        ``UnreadableError`` where a stream is damaged or ends early, unless its head is to be salvaged."""
        decoder, position, expanded = self.decoder(), 0, 0
        while True:
            packed = bytes(content.buffer[position : position + _PACKED])
            if not packed:
                if salvage and expanded:
                    return
                raise UnreadableError(
                    f"{content.path}: the {self.name} stream is cut short after {len(content)} bytes ({expanded} "
                    "expanded); fetch it again"
                )
            position += len(packed)
            try:
                for block in _decode(decoder, packed):
                    expanded += len(block)
                    yield block, position
            except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
                if salvage and expanded:
                    return
                raise UnreadableError(
                    f"{content.path}: the {self.name} stream is damaged ({error}); fetch it again"
                ) from error
            if decoder.eof:
                position -= len(decoder.unused_data)
                if bytes(content.buffer[position : position + len(self.magic)]) != self.magic:
                    return
                decoder = self.decoder()


def _decode(decoder: Any, packed: bytes) -> Iterator[bytes]:
    """What a decoder makes of some bytes, in blocks of bounded size."""
    while not decoder.eof:
        block = decoder.decompress(packed, _EXPANDED)
        if block:
            yield block
        # zlib hands the rest of its input back; the others keep it, and say when they want more.
        packed = getattr(decoder, "unconsumed_tail", b"")
        if not packed and (not block or getattr(decoder, "needs_input", len(block) < _EXPANDED)):
            return


COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b\x08", (".gz", ".gzip"), lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)),
    Compression("bzip2", b"BZh", (".bz2",), bz2.BZ2Decompressor),
    Compression("xz", b"\xfd7zXZ\0", (".xz",), lambda: lzma.LZMADecompressor(memlimit=_DICTIONARY)),
)


def sniff(content: Content) -> Compression | None:
    """The compression of the content by its first bytes, None where it has none."""
    head = bytes(content.buffer[:10])
    for compression in COMPRESSIONS:
        if head.startswith(compression.magic):
            return compression
    return None
