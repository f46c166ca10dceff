"""The members of a zip archive that has lost its directory, found by their local headers from the front.

torch writes a local header before it knows the member's size: size and checksum are zero there and follow the data in a
descriptor (APPNOTE.TXT 4.3.7 and 4.3.9). A descriptor is believed where the size that it states is its distance from
the data. What has none is an open member: it was being written, or being fetched, when the file ended."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfix.bytes.sources import Content
from ckptfix.bytes.torn import TornBytes, filled_end, zero_tail
from ckptfix.core.spec import ByteSource
from ckptfix.errors import HostileError
from ckptfix.reading.archives.zip_directory import member_limit
from ckptfix.reading.archives.zip_headers import HEADER, Member, plain_name

_DESCRIPTOR = b"PK\x07\x08"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


@dataclass
class FoundMembers:
    """What is left of an archive: the members in the order of the file, and where the data of open ones begins."""

    content: Content
    infos: list[Member] = field(default_factory=list)
    open_at: dict[str, int] = field(default_factory=dict)
    zeros: int = 0
    end: int = 0
    """Where the last member that is whole ends."""

    def left_of(self, name: str, nbytes: int) -> ByteSource:
        """What is there of the storage of ``nbytes`` that an open member holds.

        A file that was reserved before it was fetched goes on in zeros behind the storage; then the zeros inside of it
        are no data either, and so are those of a sector or more where the file ends inside of the storage: file systems
        end in them after a crash. Any other file that is cut short ends at its last byte. An open member in the middle
        of the file is damaged in a way that nobody knows, and so is one with something else than its descriptor behind
        it: bytes of it were lost, or overwritten."""
        start = self.open_at[name]
        if name != self.infos[-1].filename or self.infos[-1].compress_type != zipfile.ZIP_STORED:
            return TornBytes(self.content.path, nbytes)
        behind = bytes(self.content.buffer[start + nbytes : min(start + nbytes + len(_DESCRIPTOR), self.zeros)])
        if not _DESCRIPTOR.startswith(behind):
            return TornBytes(self.content.path, nbytes)
        stop = filled_end(self.content) if start + nbytes >= len(self.content) else self.zeros
        whole = max(0, min(nbytes, stop - start))
        return TornBytes(self.content.path, nbytes, whole, self.content.source(start, whole))


def walk(content: Content) -> FoundMembers:
    """The members of an archive without its directory. Raises ``HostileError`` where there is no end of them."""
    found = FoundMembers(content, zeros=zero_tail(content))
    headers = {position: _data_start(content, position) for position in _signatures(content, b"PK\x03\x04")}
    descriptors = _descriptors(content, set(headers.values()))
    position = 0
    for header, start in headers.items():
        if header < position or start > len(content):
            continue  # inside of the member before, or cut itself
        info = _member(content, header, start)
        if header != position and (not info.filename.isprintable() or info.compress_type not in _METHODS):
            continue  # bytes of a tensor that look like a header
        if info.flag_bits & 8:
            if start in descriptors:
                info.CRC, info.compress_size, info.file_size, position = descriptors[start]
                if info.compress_type == zipfile.ZIP_STORED:
                    info.file_size = info.compress_size  # the second size may be cut off itself
            else:
                found.open_at[info.filename] = start
        elif start + info.compress_size > len(content) or found.zeros < start + info.compress_size < len(content):
            found.open_at[info.filename] = start
        else:
            position = start + info.compress_size
        found.infos.append(info)
    found.end = position
    return found


def first_names(content: Content) -> list[str]:
    """The names of the members from the front on, as long as each header says where the next one is."""
    names: list[str] = []
    position = 0
    limit = member_limit(content)
    while bytes(content.buffer[position : position + 4]) == b"PK\x03\x04" and len(names) < limit:
        start = _data_start(content, position)
        if start > len(content):
            break
        info = _member(content, position, start)
        names.append(info.filename)
        if info.flag_bits & 8:
            break  # the size follows the data
        position = start + info.compress_size
    return names


def _signatures(content: Content, signature: bytes) -> Iterator[int]:
    limit = member_limit(content)
    count, position = 0, content.buffer.find(signature)
    while position >= 0:
        count += 1
        if count > limit:
            raise HostileError(f"{content.path}: more than {limit} members in the archive; do not use this file")
        yield position
        position = content.buffer.find(signature, position + 4)


def _data_start(content: Content, header: int) -> int:
    fields = bytes(content.buffer[header + 26 : header + 30])
    if len(fields) < 4:
        return len(content) + 1
    name, extra = struct.unpack("<2H", fields)
    return int(header + HEADER.size + name + extra)


def _descriptors(content: Content, starts: set[int]) -> dict[int, tuple[int, int, int, int]]:
    """Checksum, both sizes and the end, by the place where the data begins. Sizes have 4 or (zip64) 8 bytes."""
    found: dict[int, tuple[int, int, int, int]] = {}
    for position in _signatures(content, _DESCRIPTOR):
        record = bytes(content.buffer[position + 4 : position + 24])
        for form in (struct.Struct("<3I"), struct.Struct("<I2Q")):
            if len(record) >= form.size:
                crc, packed, size = form.unpack_from(record)
                if position - packed in starts:
                    found.setdefault(position - packed, (crc, packed, size, position + 4 + form.size))
    return found


def _member(content: Content, header: int, start: int) -> Member:
    _, _, flags, method, _, _, crc, packed, size, name_length, _ = HEADER.unpack(
        content.buffer[header : header + HEADER.size]
    )
    names = header + HEADER.size
    name = bytes(content.buffer[names : names + name_length]).decode("utf-8", "replace")
    extra = bytes(content.buffer[names + name_length : start])
    if packed == 0xFFFFFFFF and extra[:4] == b"\x01\x00\x10\x00" and len(extra) >= 20:
        size, packed = struct.unpack("<2Q", extra[4:20])
    return Member(plain_name(name.partition("\0")[0]), name, flags, method, crc, packed, size, header)
