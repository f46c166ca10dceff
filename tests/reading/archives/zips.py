"""Zip archives whose fields tests can change by name."""

import io
import zipfile
from typing import Any

import torch

LOCAL = {"signature": (0, 4), "checksum": (14, 4), "name length": (26, 2), "extra length": (28, 2), "name": (30, 1)}
CENTRAL = {
    "flags": (8, 2),
    "method": (10, 2),
    "checksum": (16, 4),
    "packed size": (20, 4),
    "size": (24, 4),
    "name length": (28, 2),
    "disk": (34, 2),
    "attributes": (38, 4),
    "place": (42, 4),
    "name": (46, 1),
}
END = {"disk": (4, 2), "first disk": (6, 2), "here": (8, 2), "count": (10, 2), "size": (12, 4), "place": (16, 4)}


def saved(weights: dict[str, Any], checksums: bool = True) -> bytes:
    """Return what torch.save writes, with or without checksums."""
    buffer, before = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(weights, buffer)
    finally:
        torch.serialization.set_crc32_options(before)
    return buffer.getvalue()


class Zip:
    """The bytes of an archive and the positions of its records."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos, self.directory = archive.infolist(), archive.start_dir
        self.names = [info.filename for info in infos]
        self.sizes = {info.filename: info.compress_size for info in infos}
        self.headers = {info.filename: info.header_offset for info in infos}
        self.starts = {name: at + 30 + self._lengths(at) for name, at in self.headers.items()}
        self.entries: dict[str, int] = {}
        at = self.directory
        for name in self.names:
            self.entries[name] = at
            at += 46 + sum(int.from_bytes(data[at + field : at + field + 2], "little") for field in (28, 30, 32))
        self.end = data.rindex(b"PK\x05\x06")

    def _lengths(self, at: int) -> int:
        return sum(int.from_bytes(self.data[at + field : at + field + 2], "little") for field in (26, 28))

    def get(self, base: int, field: tuple[int, int]) -> int:
        """Return the number in a field of the record at ``base``."""
        at, width = base + field[0], field[1]
        return int.from_bytes(self.data[at : at + width], "little")

    def put(self, base: int, field: tuple[int, int], value: int) -> None:
        """Write a number into a field of the record at ``base``."""
        at, width = base + field[0], field[1]
        self.data[at : at + width] = value.to_bytes(width, "little")

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the bytes at two positions."""
        here, there = self.data[first : first + length], self.data[second : second + length]
        self.data[first : first + length], self.data[second : second + length] = there, here
