"""Unpacks compressed files (gzip, bzip2 and xz) and members of zip archives.

A stream that ends early or fails its checksum still gives the bytes decoded so far. The damage is recorded, and the
reader of the content decides by its own sizes and checksums what is complete. Declared sizes are not trusted: bytes are
counted while they are unpacked, into memory at first and then into a temporary file without a name."""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from threading import Lock
from typing import Any, BinaryIO

from msgspec import Struct

from ckptfix.bytes import decoders
from ckptfix.bytes.decoders import FAULTS
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import Content, filled_end
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.errors import HostileError, UnreadableError, damaged

# Unpacked bytes kept in memory. Nested archives are in memory together, each twice while it is passed on.
MEMORY_LIMIT = 8 << 20

# Largest ratio of unpacked to packed bytes, and the unpacked bytes from which it applies.
RATIO_LIMIT, RATIO_FLOOR = 50, 64 << 20
DISK_RESERVE = 1 << 30  # bytes of the temporary folder's disk that are left free


class Expansion:
    """The unpacked bytes of a file. ``path`` is its name in messages."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = 0
        self.lock = Lock()  # threads of the value scan read at the same time
        self._memory = bytearray()
        self._file: BinaryIO | None = None

    def write(self, block: bytes, packed: int) -> None:
        """Append a block; ``packed`` is the number of packed bytes read so far.

        Raises ``HostileError`` for the ratio of a bomb, ``UnreadableError`` if the disk has too little space."""
        self.nbytes += len(block)
        if self.nbytes <= MEMORY_LIMIT:
            self._memory += block
            return
        if self.nbytes > max(RATIO_FLOOR, RATIO_LIMIT * packed):
            raise HostileError(
                f"{self.path}: expands more than {RATIO_LIMIT} times ({packed} bytes to {self.nbytes} or more), which "
                "weights never do; do not use this file, or unpack it yourself if you trust it"
            )
        import shutil  # few files need these, and importing them takes longer than reading a small file
        import tempfile

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
                "bytes); free some space, or set TMPDIR to a larger disk"
            ) from error

    def _write(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def read(self, start: int, stop: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[start:stop])
        return os.pread(self._file.fileno(), stop - start, start)

    def content(self, member: str) -> Content:
        """Return the unpacked bytes as the file ``member``. Raises ``UnreadableError`` if there are none."""
        if not self.nbytes:
            raise damaged(self.path, "its content is empty (0 bytes)")
        if self._file is None:
            return Content(self.path, bytes(self._memory), member=member)
        descriptor = os.dup(self._file.fileno())
        self._file.close()
        return Content.of_open_file(OpenFile(self.path, descriptor), member)


# Yields the unpacked bytes of a file in blocks, each with the number of packed bytes read so far. Damage is appended to
# the list, and ends the blocks early.
MakeBlocks = Callable[[list[Fact]], Iterator[tuple[bytes, int]]]


class Member(Struct, frozen=True):
    """A file in an archive: its name, its first bytes, a function that unpacks it, and why it cannot be unpacked, if
    so."""

    name: str
    head: bytes
    blocks: MakeBlocks
    closed: str = ""


def expand(path: str, member: str, blocks: MakeBlocks) -> Content:
    """Return the content of a packed file, with its damage. Raises ``UnreadableError`` if none of it is readable."""
    expansion = Expansion(path)
    damage: list[Fact] = []
    for block, packed in blocks(damage):
        expansion.write(block, packed)
    if damage and not expansion.nbytes:
        raise damaged(path, f"{clauses(damage)}: nothing in it is readable")
    content = expansion.content(member)
    content.damage = damage
    return content


# Packed bytes that are read at a time (first, most), and unpacked bytes of a block. The block in which a stream fails
# is lost, so blocks are small, although with gzip these take a quarter more time than blocks of 1 MB.
_FIRST, _PACKED, _EXPANDED = 1 << 10, 64 << 10, 16 << 10


class Stream(Struct):
    """A compressed stream in bytes ``position`` to ``stop`` of a content.

    After ``blocks``, either the stream ``ended`` properly and ``position`` is after it, or decoding failed with a
    ``fault``, or (if that is empty) the bytes ended before the stream."""

    content: Content
    position: int
    stop: int
    make_decoder: Callable[[], Any]
    expanded: int = 0
    ended: bool = False
    fault: str = ""

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the unpacked bytes in blocks, each with the number of packed bytes read so far."""
        decoder, start = self.make_decoder(), self.position
        size = _FIRST  # a file may have many small streams
        try:
            while not decoder.eof:
                packed = self.content[self.position : min(self.position + size, self.stop)]
                size = min(2 * size, _PACKED)
                if not packed:
                    return
                self.position += len(packed)
                for block in _decode(decoder, packed):
                    self.expanded += len(block)
                    yield block, self.position - start
        except FAULTS as error:
            self.fault = str(error)
            return
        self.ended = True
        self.position -= len(decoder.unused_data)


def _decode(decoder: Any, packed: bytes) -> Iterator[bytes]:
    """Yield the decoded bytes in blocks of bounded size."""
    while not decoder.eof:
        block = decoder.decompress(packed, _EXPANDED)
        if block:
            yield block
        # zlib returns the rest of its input; the others keep it, and report when they need more.
        packed = getattr(decoder, "unconsumed_tail", b"")
        if not packed and (not block or getattr(decoder, "needs_input", len(block) < _EXPANDED)):
            return


# Bytes of a gzip header in most files, and at most: it may have a file name and a comment.
_HEADER, _HEADER_LIMIT = 1 << 9, 1 << 17

# Streams allowed in a file; more are allowed if they unpack to this many bytes each. bgzip has 64 KB per stream.
_STREAMS, _STREAM = 10_000, 512

_GZIP_HEADER = re.compile(rb"\x1f\x8b\x08([\0-\x1f]).{6}", re.DOTALL)


class Compression(Struct, frozen=True):
    """A kind of compression: its name, magic bytes, file suffixes, and decoder."""

    name: str
    magic: bytes
    suffixes: tuple[str, ...]
    decoder: Callable[[], Any]

    def name_inside(self, name: str) -> str:
        """Return the name of the file before it was compressed; the same name if the suffix is unknown."""
        path = PurePath(name)
        if path.suffix.lower() in (".tgz", ".tbz2", ".txz"):
            return f"{path.stem}.tar"
        return path.stem if path.suffix.lower() in self.suffixes else path.name

    def blocks(self, content: Content, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
        """Yield the unpacked bytes in blocks, each with the number of packed bytes read so far.

        Consecutive streams are one file, and bytes after them are padding, as for gzip(1). A stream that is damaged or
        ends early is recorded in ``damage``. Zeros at the end of the content are padding or were never filled, and are
        not decoded."""
        position, before, streams = 0, 0, 0
        end = filled_end(content)
        while True:
            streams += 1
            if streams > max(_STREAMS, before // _STREAM):
                raise HostileError(
                    f"{content.path}: {streams} {self.name} tiny streams follow each other; do not use this file"
                )
            start = _behind_gzip_header(content, position) if self is GZIP else position
            stream = Stream(content, start, end, self.decoder)
            crc = 0
            for block, _ in stream.blocks():
                crc = zlib.crc32(block, crc) if self is GZIP else 0
                yield block, stream.position
            if stream.fault == decoders.TOO_LARGE:
                raise UnreadableError(
                    f"{content.path}: unpacking it takes more than {decoders.DICTIONARY_LIMIT >> 20} MB of memory; if "
                    f"you trust it, unpack it yourself ({self.name} -d)"
                )
            position, expanded = stream.position, before + stream.expanded
            fault = stream.fault
            is_whole = stream.ended
            if is_whole and self is GZIP:
                trailer = content[position : position + 8]
                fault, is_whole = _trailer_fault(trailer, crc, stream.expanded), len(trailer) == 8
                position += 8
            if fault:
                damage.append(Fact.of(Kind.STREAM_DAMAGED, self.name, there=expanded, fault=fault))
            elif not is_whole:
                damage.append(Fact.of(Kind.STREAM_CUT, self.name, there=expanded))
            if fault or not is_whole:
                return
            before = expanded
            if content[position : position + len(self.magic)] != self.magic:
                return


def _behind_gzip_header(content: Content, start: int) -> int:
    """Return the position after a gzip header (RFC 1952, section 2.3), or the end of the content."""
    head = content[start : start + _HEADER]
    fixed = _GZIP_HEADER.match(head)
    if fixed is not None and fixed[1][0]:
        head = content[start : start + _HEADER_LIMIT]
    if fixed is None:
        return len(content)
    flags, position = fixed[1][0], fixed.end()
    if flags & 4:
        position += 2 + int.from_bytes(head[position : position + 2], "little")
    for _ in range(bool(flags & 8) + bool(flags & 16)):  # the name and the comment, each ends with a zero
        end = head.find(b"\0", position)
        position = end + 1 if end >= 0 else len(head)
    return min(start + position + (2 if flags & 2 else 0), len(content))


def _trailer_fault(trailer: bytes, crc: int, expanded: int) -> str:
    """Return what is wrong with the checksum and length after a gzip stream; empty if they are right or truncated."""
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
    """Return the compression of the content by its first bytes; None if it is not compressed."""
    head = content[:10]
    return next((compression for compression in COMPRESSIONS if head.startswith(compression.magic)), None)


class PackedBytes(Struct, eq=False):
    """A packed member of an archive, in bytes ``start`` to ``stop`` of its content. It is unpacked on first use.

    ``expansion`` has all members of the archive that were unpacked. They are kept as long as the checkpoint, because
    many tensors may be views of one storage."""

    content: Content
    expansion: Expansion
    name: str
    start: int
    stop: int
    nbytes: int
    make_decoder: decoders.Decoder
    place: int | None = None
    fault: str = ""

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the unpacked member. Raises ``UnreadableError`` if it is damaged."""
        with self.expansion.lock:
            if self.place is None and not self.fault:
                self.unpack()
            if self.place is None:
                raise damaged(self.content.path, self.fault)
            return memoryview(self.expansion.read(self.place + start, self.place + stop))

    def unpack(self) -> None:
        """Append the unpacked bytes to those of the other members, or set ``fault``."""
        begin = self.expansion.nbytes
        stream = Stream(self.content, self.start, self.stop, self.make_decoder)
        for block, _ in stream.blocks():
            if stream.expanded > self.nbytes:
                break
            # The size of all unpacked members is compared with that of the archive: a single one may be all zeros.
            self.expansion.write(block, len(self.content))
        if stream.fault:
            self.fault = f"member {self.name} is damaged ({stream.fault})"
        elif stream.expanded != self.nbytes:
            self.fault = f"member {self.name} does not unpack to its declared {self.nbytes} bytes"
        else:
            self.place = begin
