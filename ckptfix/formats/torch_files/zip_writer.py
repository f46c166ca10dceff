"""Writes the zip container of torch.save: members one after another, uncompressed, their data aligned.

A local header has to carry the member's CRC-32, which may be known only later: then its four bytes are left empty, and
filled in at the end. Sizes and offsets past 4 GiB use zip64 records (APPNOTE.TXT 4.3.14, 4.3.15
and 4.5.3)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from ckptfix.formats.raw.copying import LARGE, PAGE

ALIGNMENT = 64
"""torch aligns the data of each member so that a mapped file gives aligned tensors."""

_LIMIT = 0xFFFFFFFF
_CRC_AT = 14  # in a local header
_EPOCH = (0, 33)  # 1980-01-01 00:00, the first moment that the format knows: files of equal content are equal


Checksum = Callable[[], int]
"""What gives the CRC-32 of a member, asked for when the archive is closed."""


@dataclass
class _Member:
    name: bytes
    crc: int
    size: int
    offset: int


class _Body:
    """The context in which the bytes of a member are written, as many as were declared."""

    def __init__(self, file: BinaryIO, member: _Member, start: int) -> None:
        self._file, self._member, self._start = file, member, start

    def __enter__(self) -> None:
        pass

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        written = self._file.tell() - self._start
        if raised is None and written != self._member.size:
            declared = f"member {self._member.name.decode()} was declared with {self._member.size} bytes"
            raise ValueError(f"{declared} and got {written}")


class ZipWriter:
    """Appends members to a seekable file; ``close`` writes the directory."""

    def __init__(self, file: BinaryIO, root: str = "archive") -> None:
        self._file, self._root = file, root
        self._members: list[_Member] = []
        self._pending: list[tuple[_Member, Checksum]] = []

    def write(self, name: str, data: bytes) -> None:
        """Append a member from memory."""
        with self.member(name, len(data), zlib.crc32(data)):
            self._file.write(data)

    def member(self, name: str, size: int, crc: int | Checksum, place: int | None = None) -> _Body:
        """Append a member of ``size`` bytes, which the body of the context writes to the file. No other look is taken
        at them.

        ``place`` is where they lie in another file: large ones keep their place in a page, if that is an aligned one.
        """
        path, offset = f"{self._root}/{name}".encode(), self._file.tell()
        member = _Member(path, crc if isinstance(crc, int) else 0, size, offset)
        is_aligned = place is not None and place % ALIGNMENT == 0 and size >= LARGE
        header = _local_header(member, place if is_aligned else None)
        self._file.write(header)
        self._members.append(member)
        if not isinstance(crc, int):
            self._pending.append((member, crc))
        return _Body(self._file, member, offset + len(header))

    def close(self) -> None:
        """Fill in the checksums that were not known, and write the directory at the end."""
        start = self._file.tell()
        for member, checksum in self._pending:
            member.crc = checksum()
            self._file.seek(member.offset + _CRC_AT)
            self._file.write(member.crc.to_bytes(4, "little"))
        self._file.seek(start)
        for member in self._members:
            self._file.write(_directory_record(member))
        size, count = self._file.tell() - start, len(self._members)
        if start >= _LIMIT or count >= 0xFFFF or size >= _LIMIT:
            end = self._file.tell()
            self._file.write(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start))
            self._file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        count, size, start = min(count, 0xFFFF), min(size, _LIMIT), min(start, _LIMIT)
        self._file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, start, 0))


def _local_header(member: _Member, place: int | None) -> bytes:
    path, size = member.name, member.size
    zip64 = struct.pack("<2H2Q", 1, 16, size, size) if size >= _LIMIT else b""
    start = member.offset + 30 + len(path) + len(zip64)
    # The padding is an extra field of its own, with the id FB that torch's writer uses: 4 bytes and as many more as are
    # needed.
    padding = 4 + ((-start - 4) % ALIGNMENT if place is None else (place - start - 4) % PAGE)
    extra = zip64 + struct.pack("<2s H", b"FB", padding - 4) + b"Z" * (padding - 4)
    shown = _LIMIT if zip64 else size
    return (
        struct.pack(
            "<4s5H3I2H",
            b"PK\x03\x04",
            45 if zip64 else 20,
            0,
            0,
            *_EPOCH,
            member.crc,
            shown,
            shown,
            len(path),
            len(extra),
        )
        + path
        + extra
    )


def _directory_record(member: _Member) -> bytes:
    large = [value for value in (member.size, member.size) if value >= _LIMIT] + [member.offset] * (
        member.offset >= _LIMIT
    )
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    size, offset = min(member.size, _LIMIT), min(member.offset, _LIMIT)
    fixed = struct.pack(
        "<4s6H3I5H2I",
        b"PK\x01\x02",
        45,
        45 if large else 20,
        0,
        0,
        *_EPOCH,
        member.crc,
        size,
        size,
        len(member.name),
        len(extra),
        0,
        0,
        0,
        0,
        offset,
    )
    return fixed + member.name + extra
