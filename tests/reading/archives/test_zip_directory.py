"""What is left of a damaged directory."""

from __future__ import annotations

import struct

from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.zip_directory import checksums_left


def entry(name: bytes, crc: int, length: int | None = None) -> bytes:
    fields = (20, 20, 0, 0, 0, 0, crc, 1, 1, len(name) if length is None else length, 0, 0, 0, 0, 0, 0)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name


def test_the_entries_that_are_whole_tell_their_checksums() -> None:
    directory = entry(b"m/data/0", 5) + b"PK\x01" + entry(b"m\\data\\1", 6) + entry(b"m/none", 0) + entry(b"m/z", 7)
    assert checksums_left(Content("m.pth", b"data" + directory), 4) == {"m/data/0": 5, "m/data/1": 6, "m/z": 7}


def test_a_name_that_reaches_into_the_next_entry_is_none() -> None:
    directory = entry(b"m/data/0", 5, length=60) + entry(b"m/data/1", 6)
    assert checksums_left(Content("m.pth", directory), 0) == {"m/data/1": 6}
