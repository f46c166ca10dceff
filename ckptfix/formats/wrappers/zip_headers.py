"""What stands in front of a member of a zip archive, and behind it.

Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7 and 4.3.9."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.formats.raw.sources import Content

HEADER = struct.Struct("<4s5H3I2H")
"""What stands in front of each member; its name and an extra field follow."""

_USUAL = 128
"""Bytes of a header that are looked at in one go: few names are longer."""

DESCRIPTORS = (struct.Struct("<4s3I"), struct.Struct("<4sI2Q"), struct.Struct("<3I"), struct.Struct("<I2Q"))
"""Checksum and both sizes behind a member, of 4 or (zip64) 8 bytes, with and without a signature."""


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


def header_name(info: zipfile.ZipInfo, header: Header) -> str | None:
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
