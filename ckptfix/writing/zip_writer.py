"""Writes the zip container of torch.save: members one after another, uncompressed, their data aligned.

A local header has to carry the member's CRC-32, which may be known only later: then its four bytes are left empty, and
filled in at the end. Sizes and offsets past 4 GiB use zip64 records (APPNOTE.TXT 4.3.14, 4.3.15
and 4.5.3)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from ckptfix.bytes.copying import LARGE, PAGE, Copier

ALIGNMENT = 64
"""torch aligns the data of each member so that a mapped file gives aligned tensors."""

_LIMIT = 0xFFFFFFFF
_CRC_AT = 14  # in a local header
_EPOCH = (0, 33)  # 1980-01-01 00:00, the first moment that the format knows: files of equal content are equal

# What all headers begin with. The first number is the version that is needed to read the member.
_LOCAL, _LOCAL_ZIP64 = (struct.pack("<4s5H", b"PK\x03\x04", needed, 0, 0, *_EPOCH) for needed in (20, 45))
_DIRECTORY, _DIRECTORY_ZIP64 = (struct.pack("<4s6H", b"PK\x01\x02", 45, needed, 0, 0, *_EPOCH) for needed in (20, 45))
_SIZES = struct.Struct("<3I2H")
"""The checksum, both sizes, and those of the path and of the extra fields."""

_PLACE, _PADDING = struct.Struct("<3H2I"), struct.Struct("<2sH")


Checksum = Callable[[], int]
"""What gives the CRC-32 of a member, asked for when the archive is closed."""


class _Member(NamedTuple):
    name: bytes
    crc: int | Checksum
    size: int
    offset: int


class ZipWriter:
    """Appends members to a seekable file; ``close`` writes the directory."""

    def __init__(self, file: BinaryIO | Copier, root: str = "archive") -> None:
        self._file, self._root = file, root
        self._members: list[_Member] = []
        self._end = file.tell()

    def write(self, name: str, data: bytes) -> None:
        """Append a member from memory."""
        self.member(name, len(data), zlib.crc32(data))
        self._file.write(data)

    def member(self, name: str, size: int, crc: int | Checksum, place: int | None = None) -> None:
        """Append a member of ``size`` bytes, which the caller writes to the file next. No other look is taken at them.

        ``place`` is where they lie in another file: large ones keep their place in a page, if that is an aligned one.
        """
        offset = self._end_of_members()
        path = f"{self._root}/{name}".encode()
        is_aligned = place is not None and place % ALIGNMENT == 0 and size >= LARGE
        header = _local_header(path, crc if isinstance(crc, int) else 0, size, offset, place if is_aligned else None)
        self._file.write(header)
        self._members.append(_Member(path, crc, size, offset))
        self._end = offset + len(header) + size

    def _end_of_members(self) -> int:
        """Where the file ends, and the last member with it."""
        end = self._file.tell()
        if end != self._end:
            last = self._members[-1]
            declared = f"member {last.name.decode()} was declared with {last.size} bytes"
            raise ValueError(f"{declared} and got {end - self._end + last.size}")
        return end

    def close(self) -> None:
        """Fill in the checksums that were not known, and write the directory at the end."""
        start, records = self._end_of_members(), []
        for path, crc, size, offset in self._members:
            if isinstance(crc, int):
                known = crc
            else:
                known = crc()
                self._file.seek(offset + _CRC_AT)
                self._file.write(known.to_bytes(4, "little"))
            records.append(_directory_record(path, known, size, offset))
        if self._file.tell() != start:
            self._file.seek(start)
        directory, count = b"".join(records), len(records)
        self._file.write(directory)
        size = len(directory)
        if start >= _LIMIT or count >= 0xFFFF or size >= _LIMIT:
            self._file.write(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start))
            self._file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1))
        count, size, start = min(count, 0xFFFF), min(size, _LIMIT), min(start, _LIMIT)
        self._file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, start, 0))


def _local_header(path: bytes, crc: int, size: int, offset: int, place: int | None) -> bytes:
    zip64 = struct.pack("<2H2Q", 1, 16, size, size) if size >= _LIMIT else b""
    size, start = min(size, _LIMIT), offset + 30 + len(path) + len(zip64)
    # The padding is an extra field of its own, with the id FB that torch's writer uses: 4 bytes and as many more as are
    # needed.
    padding = (-start - 4) % ALIGNMENT if place is None else (place - start - 4) % PAGE
    sizes = _SIZES.pack(crc, size, size, len(path), len(zip64) + 4 + padding)
    begin = _LOCAL_ZIP64 if zip64 else _LOCAL
    return b"".join((begin, sizes, path, zip64, _PADDING.pack(b"FB", padding), b"Z" * padding))


def _directory_record(path: bytes, crc: int, size: int, offset: int) -> bytes:
    if size < _LIMIT and offset < _LIMIT:
        return _DIRECTORY + _SIZES.pack(crc, size, size, len(path), 0) + _PLACE.pack(0, 0, 0, 0, offset) + path
    large = [value for value in (size, size, offset) if value >= _LIMIT]
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large)
    size, offset = min(size, _LIMIT), min(offset, _LIMIT)
    sizes = _SIZES.pack(crc, size, size, len(path), len(extra))
    return b"".join((_DIRECTORY_ZIP64, sizes, _PLACE.pack(0, 0, 0, 0, offset), path, extra))
