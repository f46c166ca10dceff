"""What stands in front of a member of a zip archive, and behind it.

Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7 and 4.3.9."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ckptfix.bytes.sources import Content

HEADER = struct.Struct("<4s5H3I2H")
"""What stands in front of each member; its name and an extra field follow."""

_USUAL = 128
"""Bytes of a header that are looked at in one go: few names are longer."""

DESCRIPTORS = (struct.Struct("<4s3I"), struct.Struct("<4sI2Q"), struct.Struct("<3I"), struct.Struct("<I2Q"))
"""Checksum and both sizes behind a member, of 4 or (zip64) 8 bytes, with and without a signature."""


@dataclass(slots=True)
class Member:
    """What the directory of an archive says of a member, under the names that ``zipfile.ZipInfo`` gives it.

    ``orig_filename`` is the name as it is written, and ``filename`` ends in front of the first zero in it."""

    filename: str
    orig_filename: str
    flag_bits: int
    compress_type: int
    CRC: int
    compress_size: int
    file_size: int
    header_offset: int
    volume: int = 0
    external_attr: int = 0


class Header(NamedTuple):
    """What stands in front of a member; ``start`` is where its data begins."""

    is_signed: bool
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    name: bytes
    start: int


def read_header(content: Content, place: int) -> Header | None:
    """The header at a place; None where the archive ends before it does."""
    raw = bytes(content.buffer[place : place + _USUAL]) if place >= 0 else b""
    if len(raw) < HEADER.size:
        return None
    signature, _, flags, method, _, _, crc, packed, size, length, extra = HEADER.unpack_from(raw)
    behind = place + HEADER.size
    stop = HEADER.size + length
    name = raw[HEADER.size : stop] if stop <= len(raw) else bytes(content.buffer[behind : behind + length])
    return Header(signature == b"PK\x03\x04", flags, method, crc, packed, size, name, behind + length + extra)


def plain_starts(content: Content, members: Iterable[Member]) -> Iterator[int | None]:
    """Where the data of each member begins; None where its header is to be looked at more closely.

    That is where it does not say just what the directory says, or what stands behind the data does not where torch did
    not know it before. One look takes what is behind a member together with the header of the next."""
    buffer, window, begin = content.buffer, b"", 0
    for member in members:
        place = member.header_offset
        at = place - begin
        if not 0 <= at <= len(window) - _USUAL:
            window, begin, at = buffer[place : place + _USUAL] if place >= 0 else b"", place, 0
        if len(window) - at < HEADER.size:
            yield None
            continue
        signature, _, flags, method, _, _, crc, packed, size, length, extra = HEADER.unpack_from(window, at)
        name = window[at + HEADER.size : at + HEADER.size + length]
        start = place + HEADER.size + length + extra
        said = (member.CRC, member.compress_size, member.file_size)
        is_same = (
            signature == b"PK\x03\x04"
            and method == member.compress_type
            and not (flags ^ member.flag_bits) & 1
            and name.isascii()
            and name.decode("ascii") == member.orig_filename
        )
        if is_same and not crc and not packed and flags & 8:
            begin = start + member.compress_size
            window = buffer[begin : begin + 2 * _USUAL]
            is_same = len(window) >= DESCRIPTORS[0].size and DESCRIPTORS[0].unpack_from(window)[1:] == said
        else:
            is_same = is_same and bool(crc or packed) and (crc, packed, size) == said
        yield start if is_same else None


def header_name(info: Member, header: Header) -> str | None:
    """The name in a header, read as that in the directory; None where it is none."""
    try:
        # ASCII is the same in both, and decoding it as UTF-8 takes no time.
        return plain_name(header.name.decode("utf-8" if info.flag_bits & 0x800 or header.name.isascii() else "cp437"))
    except UnicodeDecodeError:
        return None


def plain_name(name: str) -> str:
    """A member's name with the separator of the format, where a program for Windows wrote its own (APPNOTE 4.4.17)."""
    return name.replace("\\", "/")


def descriptors(content: Content, place: int) -> Iterator[tuple[int, int, int]]:
    """What may be meant by the bytes behind a member, the form of torch first."""
    raw = bytes(content.buffer[place : place + 24])
    return (form.unpack_from(raw)[-3:] for form in DESCRIPTORS if len(raw) >= form.size)
