"""What torch's own reader of zip archives refuses, although programs for zip archives find every byte.

It reads the directory with miniz, which compares fields that others pass by
(https://github.com/richgel999/miniz/blob/master/miniz_zip.c, ``mz_zip_reader_read_central_dir``)."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import Any

from ckptfix.bytes.decoders import METHODS
from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.zip_directory import END, END64, ENTRY, HEADER, LOCATOR, Member, member_names

_NO_NUMBER, _NO_PLACE = 0xFFFF, 0xFFFFFFFF
_LOCKED, _PATCHED, _MASKED = 1 | 1 << 6, 1 << 5, 1 << 13
_UNUSUAL = _LOCKED | _PATCHED | _MASKED
_FOLDER = 0x10
_NAMES = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "LZMA", **METHODS}


def refusal(content: Content, end: Sequence[Any], infos: Sequence[Member]) -> str:
    """Return why torch refuses an archive, as a noun with what follows it; nothing where it does not.

    ``end`` is the record at the end as ``zipfile`` reads it, with the numbers of zip64 in their places."""
    _, disk, first_disk, here, count, size, place, _, _, at = end[:10]
    if (disk, first_disk) not in ((0, 0), (1, 1)):
        return f"a zip directory on disk {disk or first_disk}"
    if here != count or count != len(infos):
        wrong = here if here != len(infos) else count
        return f"a zip directory that counts {wrong} members and lists {len(infos)}"
    if size < count * ENTRY.size or place + size > len(content):
        return f"a zip directory that is said to take {size} bytes from byte {place} on"
    if infos and not member_names(content):
        return "a zip directory whose entries do not end where it ends"
    odd = (info for info in infos if disk or not _is_plain(content, info))
    return _refusal64(content, at) or next(filter(None, (_member_refusal(content, disk, info) for info in odd)), "")


def _refusal64(content: Content, end: int) -> str:
    """Return the same of the two records that zip64 has before the end."""
    raw = bytes(content.buffer[max(end - LOCATOR.size, 0) : end])
    if len(raw) < LOCATOR.size or raw[:4] != b"PK\x06\x07":
        return ""
    _, _, place, disks = LOCATOR.unpack(raw)
    record = bytes(content.buffer[place : place + END64.size]) if place <= len(content) else b""
    is_found = record[:4] == b"PK\x06\x06"
    *_, count, size, start, _ = END.unpack(content.buffer[end : end + END.size])
    if len(record) < END64.size or (not is_found and (count == _NO_NUMBER or _NO_PLACE in (size, start))):
        return "a zip64 directory whose end record is not where it is said to be"
    if not is_found:
        return ""  # then torch goes by the plain end record
    if disks != 1:
        return f"a zip directory on {disks} disks"
    length = END64.unpack(record)[1]
    return f"a zip64 end record of {length} bytes" if length < END64.size - 12 else ""


def _is_plain(content: Content, info: Member) -> bool:
    """Return whether a member is like nearly all, for there may be a hundred thousand."""
    packed = info.compress_size
    return (
        not (info.compress_type or info.volume or info.flag_bits & _UNUSUAL or info.external_attr & _FOLDER)
        and packed == info.file_size
        and info.header_offset + HEADER.size + packed <= content.size
        and "\\" not in info.orig_filename
    )


def _member_refusal(content: Content, disk: int, info: Member) -> str:
    what = _what_is_wrong(content, disk, info)
    return what and f"the member {info.filename[-80:]} {what}"


def _what_is_wrong(content: Content, disk: int, info: Member) -> str:
    packed, size, method = info.compress_size, info.file_size, info.compress_type
    if "\\" in info.orig_filename:
        return "with backslashes in its name"
    if info.volume == _NO_NUMBER or info.volume not in (disk, 1):
        return f"on disk {info.volume}"
    if info.flag_bits & _MASKED:
        return "with a masked header"
    if info.header_offset + HEADER.size + packed > len(content):
        return "that is said to end after the file"
    if info.filename.endswith("/"):
        return ""
    if info.flag_bits & (_LOCKED | _PATCHED):
        return f"that is marked as {'encrypted' if info.flag_bits & _LOCKED else 'a patch'}"
    if info.external_attr & _FOLDER and size:
        return "that is marked as a folder"
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"packed by {_NAMES.get(method, f'method {method}')}"
    if (method == zipfile.ZIP_STORED and packed != size) or (size and not packed):
        return f"of {packed} bytes that are said to be {size}"
    return ""
