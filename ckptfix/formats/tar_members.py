"""The files in a tar archive.

The headers are walked here and not by ``tarfile``, which has looped without end on archives made for it
(CVE-2019-20907, CVE-2025-8194). Layout: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from functools import partial

from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.sources import BLOCK, Content

RECORD = 512
MEMBER_LIMIT = 100_000
_HEAD = 512
_NAME_LIMIT = 1 << 16


def sniff(content: Content) -> bool:
    """Whether the content begins with the header of a tar archive: its checksum is right."""
    return _header(bytes(content.buffer[:RECORD])) is not None


def _header(record: bytes) -> tarfile.TarInfo | None:
    try:
        header = tarfile.TarInfo.frombuf(record, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    return header if header.size >= 0 else None


def regular_files(content: Content) -> Iterator[tuple[str, int, int]]:
    """The name, offset and size of every file. Raises ``UnreadableError`` where the archive is damaged or cut short."""
    position, count, long_name = 0, 0, None
    while position < len(content):
        record = bytes(content.buffer[position : position + RECORD])
        if not record.strip(b"\0"):
            return
        header = _header(record)
        if header is None:
            raise UnreadableError(
                f"{content.path}: the tar archive is damaged: it has no header at offset {position}; fetch it again"
            )
        start, size = position + RECORD, header.size
        if start + size > len(content):
            raise UnreadableError(
                f"{content.path}: the tar archive is cut short: {header.name!r:.80} ends at {start + size}, the "
                f"file at {len(content)}; fetch it again"
            )
        count += 1
        if count > MEMBER_LIMIT:
            raise HostileError(f"{content.path}: a tar archive of more than {MEMBER_LIMIT} files; unpack it yourself")
        if header.type == tarfile.GNUTYPE_LONGNAME:
            long_name = _text(bytes(content.buffer[start : start + min(size, _NAME_LIMIT)]).rstrip(b"\0"))
        elif header.type == tarfile.XHDTYPE:
            long_name = _pax_path(bytes(content.buffer[start : start + min(size, _NAME_LIMIT)])) or long_name
        elif header.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            name, long_name = long_name or header.name, None
            if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) and not name.endswith("/"):
                yield name, start, size
        position = start + size + -size % RECORD


def members(content: Content) -> Iterator[tuple[str, bytes, Callable[[], Iterator[tuple[bytes, int]]]]]:
    """The name, first bytes and blocks of every file."""
    for name, start, size in regular_files(content):
        head = bytes(content.buffer[start : start + min(size, _HEAD)])
        yield name, head, partial(_blocks, content, start, size)


def _blocks(content: Content, start: int, size: int) -> Iterator[tuple[bytes, int]]:
    for position in range(start, start + size, BLOCK):
        stop = min(position + BLOCK, start + size)
        yield bytes(content.buffer[position:stop]), stop - start


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _pax_path(records: bytes) -> str | None:
    """The ``path`` of an extended header: records of the form ``"17 path=a/b.pth\\n"``."""
    for record in records.split(b"\n"):
        _, _, pair = record.partition(b" ")
        if pair.startswith(b"path="):
            return _text(pair.removeprefix(b"path="))
    return None
