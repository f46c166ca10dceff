"""The files in an ordinary zip archive, one that torch did not write."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial

from ckptfix.bytes.decoders import FAULTS, why_closed, zip_decoder
from ckptfix.bytes.sources import Content
from ckptfix.bytes.torn import filled_end
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.wording import clause
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.archives.unpacking import Blocks, Stream
from ckptfix.reading.archives.zip_directory import Member, is_torch_package, is_torch_save, is_torchscript, member_names
from ckptfix.reading.archives.zip_recovery import ZipIndex, first_names, list_members

OVERLAP_LIMIT = 4
"""How many times the archive its files may take: a damaged entry or two may claim any size."""

COSTLY_LIMIT = 100
"""Members packed by bzip2 whose first bytes are looked at: each has a whole block of 900 KB to be expanded."""

_HEAD = 512
_OF_TORCH = re.compile(
    r"(?:.*/)?(?:data\.pkl|constants\.pkl|model\.json|version|byteorder|\.format_version|\.storage_alignment"
    r"|\.data/.*|code/.*|(?:data|tensors|constants)/\d+)"
)


def sniff(content: Content) -> bool:
    """Return whether the content is a zip archive, and not itself a file of torch.

    One without a directory is recognised by the names before its members, as far as they can be followed."""
    if bytes(content.buffer[:4]) not in (b"PK\x03\x04", b"PK\x05\x06"):
        return False
    # A header that bytes were put into (CR before LF) seems to have a name of none.
    names, first = member_names(content), [name for name in first_names(content) if name and not name.endswith("/")]
    if names:
        # A single bit of the directory may have changed the one name that tells whose file it is.
        is_of_torch = is_torchscript(names) or is_torch_package(names)
        return not is_of_torch and not any(map(is_torch_save, (names, [*names, *first])))
    return bool(first) and not any(map(_OF_TORCH.fullmatch, first))


def members(content: Content) -> tuple[list[tuple[str, bytes, Blocks, str]], list[Fact]]:
    """Return the name, first bytes and blocks of every file, with the reason where it is closed; and what is wrong with
    the archive."""
    listing = list_members(content)
    packed = sum(min(info.compress_size, len(content)) for info in listing.infos)
    if packed > OVERLAP_LIMIT * len(content):
        raise HostileError(
            f"{content.path}: the files in the zip archive take {packed} bytes and it has {len(content)}: they "
            "overlap, to fill a disk; do not use this file"
        )
    damage = list(listing.damage)
    if listing.found is not None and not damage:
        damage = [Fact.of(Kind.ZIP_CUT, nbytes=len(content))]
    found: list[tuple[str, bytes, Blocks, str]] = []
    costly = 0
    for info in listing.infos:
        if not info.filename.endswith("/"):
            costly += info.compress_type == zipfile.ZIP_BZIP2
            blocks = partial(_blocks, content, listing, info)
            closed = why_closed(info.flag_bits, info.compress_type)
            head = b""
            if not closed and costly <= COSTLY_LIMIT:
                head, closed = _head(content, listing, info)
            found.append((info.filename, head, blocks, closed))
        if listing.found is not None and info.filename in listing.found.open_at:
            break  # what seems to follow is inside of it
    return found, damage


def _stream(content: Content, listing: ZipIndex, info: Member) -> Stream | Fact:
    """Return the packed bytes of a member, as far as they are there; where there are none, why."""
    start = listing.data_start(content, info)
    if start is None:
        return Fact(Kind.MEMBER_LOST)
    is_open = listing.found is not None and info.filename in listing.found.open_at
    packed = max(info.compress_size, len(content) - start) if is_open else info.compress_size
    # A decoder makes something of zeros that were never filled; what is stored tells for itself.
    end = filled_end(content) if is_open and info.compress_type != zipfile.ZIP_STORED else len(content)
    stop = min(start + packed, end)
    try:
        head = bytes(content.buffer[start : min(start + 9, stop)])
        decoder, skipped = zip_decoder(info.compress_type, packed, max(info.file_size, packed), head)
    except FAULTS as error:
        return Fact.of(Kind.MEMBER_DAMAGED, fault=str(error))
    return Stream(content, start + skipped, stop, decoder)


def _head(content: Content, listing: ZipIndex, info: Member) -> tuple[bytes, str]:
    """Return the first bytes of a member; where there are none that should be, why, as the end of a sentence."""
    stream = _stream(content, listing, info)
    if isinstance(stream, Fact):
        return b"", f"{clause(stream)}; fetch the archive again"
    head = b""
    for block, _ in stream.blocks(_HEAD):
        head += block
        if len(head) >= _HEAD:
            break
    why = f"is damaged from its first bytes on ({stream.fault}); fetch the archive again" if stream.fault else ""
    return head, "" if head else why


def _blocks(content: Content, listing: ZipIndex, info: Member, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
    closed = why_closed(info.flag_bits, info.compress_type)
    if closed:
        raise UnreadableError(f"{content.path}: {info.filename!r:.80} {closed}")
    stream = _stream(content, listing, info)
    if isinstance(stream, Fact):
        damage.append(stream)
        return
    crc = 0
    for block, packed in stream.blocks():
        crc = zlib.crc32(block, crc)
        yield block, packed
    is_known = listing.found is None or info.filename not in listing.found.open_at
    if stream.fault:
        damage.append(Fact.of(Kind.PACKED_BYTES, there=stream.expanded, fault=stream.fault))
    elif not is_known or not _is_whole(stream, info):
        damage.append(Fact.of(Kind.MEMBER_CUT, there=stream.expanded, size=info.file_size))
    elif crc != info.CRC:
        damage.append(Fact(Kind.ZIP_CHECKSUM))


def _is_whole(stream: Stream, info: Member) -> bool:
    # The end of an LZMA stream is its size; a marker after it is an option.
    return stream.ended or (info.compress_type == zipfile.ZIP_LZMA and stream.expanded == info.file_size)
