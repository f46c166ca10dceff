"""Compressed files: gzip, bzip2 and xz.

A stream that ends early or fails its checksum still gives what came out of it. What is wrong is said, and the format
inside decides by its own sizes and checksums what of that is whole."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ckptfix.bytes import decoders
from ckptfix.bytes.sources import Content
from ckptfix.bytes.torn import filled_end
from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.archives.streams import Stream

_HEADER, _HEADER_LIMIT = 1 << 9, 1 << 17
"""Bytes in which a gzip header ends in most files, and in all: it may name the file, and have a comment."""

_STREAMS, _STREAM = 10_000, 512
"""Streams that may lie behind each other; more of them have to expand to so many bytes each. bgzip has 64 KB in one."""

_GZIP_HEADER = re.compile(rb"\x1f\x8b\x08([\0-\x1f]).{6}", re.DOTALL)


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

    def blocks(self, content: Content, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
        """The expanded bytes in blocks, each with the count of compressed bytes taken so far.

        Several streams behind each other are one file, and what is behind them is padding, as for gzip(1). Where a
        stream is damaged or ends early, ``damage`` is told. Zeros at the end
        of the content are padding, or space that was never filled: a decoder would make something of them."""
        position, before, streams = 0, 0, 0
        end = filled_end(content)
        while True:
            streams += 1
            if streams > max(_STREAMS, before // _STREAM):
                raise HostileError(
                    f"{content.path}: {streams} {self.name} streams of next to nothing lie behind each other; do not "
                    "use this file"
                )
            start = _behind_gzip_header(content, position) if self is GZIP else position
            stream = Stream(content, start, end, self.decoder)
            crc = 0
            for block, _ in stream.blocks():
                crc = zlib.crc32(block, crc) if self is GZIP else 0
                yield block, stream.position
            if decoders.is_too_large(stream.fault):
                raise UnreadableError(
                    f"{content.path}: to unpack it takes more than {decoders.DICTIONARY_LIMIT >> 20} MB of memory; if "
                    f"you trust it, unpack it yourself ({self.name} -d)"
                )
            position, expanded = stream.position, before + stream.expanded
            fault = stream.fault
            is_whole = stream.ended
            if is_whole and self is GZIP:
                trailer = bytes(content.buffer[position : position + 8])
                fault, is_whole = _trailer_fault(trailer, crc, stream.expanded), len(trailer) == 8
                position += 8
            if fault:
                damage.append(Fact.of(Kind.STREAM_DAMAGED, self.name, there=expanded, fault=fault))
            elif not is_whole:
                damage.append(Fact.of(Kind.STREAM_CUT, self.name, there=expanded))
            if fault or not is_whole:
                return
            before = expanded
            if bytes(content.buffer[position : position + len(self.magic)]) != self.magic:
                return


def _behind_gzip_header(content: Content, start: int) -> int:
    """Where the deflated bytes begin; the end of the content where the header has none (RFC 1952, section 2.3)."""
    head = bytes(content.buffer[start : start + _HEADER])
    fixed = _GZIP_HEADER.match(head)
    if fixed is not None and fixed[1][0]:
        head = bytes(content.buffer[start : start + _HEADER_LIMIT])
    if fixed is None:
        return len(content)
    flags, position = fixed[1][0], fixed.end()
    if flags & 4:
        position += 2 + int.from_bytes(head[position : position + 2], "little")
    for _ in range(bool(flags & 8) + bool(flags & 16)):  # the name and the comment, each with a zero behind it
        end = head.find(b"\0", position)
        position = end + 1 if end >= 0 else len(head)
    return min(start + position + (2 if flags & 2 else 0), len(content))


def _trailer_fault(trailer: bytes, crc: int, expanded: int) -> str:
    """What is wrong with the checksum and length behind a gzip stream; nothing where they are right or cut off."""
    if len(trailer) < 8:
        return ""
    if int.from_bytes(trailer[:4], "little") != crc:
        return "wrong checksum"
    return "" if int.from_bytes(trailer[4:], "little") == expanded & 0xFFFFFFFF else "wrong length"


GZIP = Compression("gzip", b"\x1f\x8b\x08", (".gz", ".gzip"), decoders.deflate)
COMPRESSIONS = (
    GZIP,
    Compression("bzip2", b"BZh", (".bz2",), decoders.bzip2),
    Compression("xz", b"\xfd7zXZ\0", (".xz",), decoders.xz),
)


def sniff(content: Content) -> Compression | None:
    """The compression of the content by its first bytes, None where it has none."""
    head = bytes(content.buffer[:10])
    for compression in COMPRESSIONS:
        if head.startswith(compression.magic):
            return compression
    return None
