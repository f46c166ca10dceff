"""The members of a zip archive by all that it says of them: its directory, and the header in front of each member.

Where the directory is damaged as a whole, or gone, the headers are walked."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

from ckptfix.bytes.buffers import RangeBuffer
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.reading.archives.zip_directory import (
    END,
    END64,
    LOCATOR,
    bounded_directory,
    checksums_left,
    has_end,
    plain_members,
)
from ckptfix.reading.archives.zip_headers import Member, plain_name
from ckptfix.reading.archives.zip_settling import Listing, Settling
from ckptfix.reading.archives.zip_strictness import refusal
from ckptfix.reading.archives.zip_walk import walk

_RECORDS64 = END64.size + LOCATOR.size
"""Bytes of what zip64 has in front of the end record."""


def list_members(content: Content) -> Listing:
    """The members of an archive. Raises ``HostileError`` where there is no end of them."""
    listing, fault = _directory(content)
    settling = Settling(content, listing)
    if not fault and settling.is_in_place:
        return settling.settle()
    found = walk(content)
    if not has_end(content):
        return Listing(found.infos, found=found)
    left = checksums_left(content, found.end)
    for info in found.infos:
        # Where bytes are lost, a header may have the data of another member behind it.
        info.CRC = left.get(info.filename) or info.CRC
    damage = [Fact.of(Kind.ZIP_DIRECTORY, fault=fault)]
    return Listing(found.infos, found=found, damage=damage)


def _directory(content: Content) -> tuple[Listing, str]:
    """The members as the directory at the end lists them, and why it cannot be read."""
    buffer = content.buffer
    stream = buffer if isinstance(buffer, RangeBuffer) else io.BytesIO(buffer[:])
    try:
        # zipfile makes an object for whatever the directory lists, wherever it finds one.
        if end := zipfile._EndRecData(stream):  # type: ignore[attr-defined]  # what ZipFile itself goes by
            bounded_directory(content, max(0, end[9] - end[5] - _RECORDS64), end[9])
        infos, start = _members(content, stream, end)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        return Listing([]), str(error) or type(error).__name__
    listing = Listing(infos, directory=start)
    if end:
        listing.displaced = start - end[6]
        listing.refusal = refusal(content, end, listing.infos)
        listing.trailing = max(0, len(content) - end[9] - END.size - len(end[8]))
    for info in listing.infos:
        if "\\" in info.orig_filename:
            info.filename, info.orig_filename = plain_name(info.filename), plain_name(info.orig_filename)
    return listing, ""


def _members(content: Content, stream: Any, end: Sequence[Any] | None) -> tuple[list[Member], int]:
    """The members, and where the directory of them begins."""
    if end:
        _, _, _, _, _, size, start, _, _, place, *_ = end
        stop = place - (_RECORDS64 if end[0] == b"PK\x06\x06" else 0)
        if start + size == stop and (plain := plain_members(content, start, stop)) is not None:
            return plain, start
    archive = zipfile.ZipFile(stream)
    members = [
        Member(
            info.filename,
            info.orig_filename,
            info.flag_bits,
            info.compress_type,
            info.CRC,
            info.compress_size,
            info.file_size,
            info.header_offset,
            info.volume,
            info.external_attr,
        )
        for info in archive.infolist()
    ]
    return members, archive.start_dir
