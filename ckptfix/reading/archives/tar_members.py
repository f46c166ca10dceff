"""The files in a tar archive.

The headers are followed here and not by ``tarfile``, which crafted archives have put into endless loops
(CVE-2019-20907, CVE-2025-8194). Layout: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html"""

import tarfile
from collections.abc import Iterator
from functools import partial

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import HostileError
from ckptfix.reading.archives.unpacking import Member

RECORD = 512
# Headers that are read; archives of data sets have more, and no user looks for a checkpoint in them.
MEMBER_LIMIT = 30_000

_HEAD = 512
_NAME_LIMIT = 1 << 16
_MAGIC = slice(257, 262)


def sniff(content: Content) -> bool:
    """Return whether the content begins with a tar header, by its checksum or its magic."""
    record = _record(content, 0)
    return _header(record) is not None or record[_MAGIC] == b"ustar"


def _record(content: Content, position: int) -> bytes:
    return content[position : position + RECORD]


def _header(record: bytes) -> tarfile.TarInfo | None:
    try:
        header = tarfile.TarInfo.frombuf(record, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    return header if header.size >= 0 else None


def files(content: Content, damage: list[Fact]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, offset and declared size of every file, and append damage of the archive to ``damage``.

    The last file of a truncated archive is yielded too. Reading ends at a header that fails its checksum, because the
    position of the next one is unknown. Raises ``HostileError`` if there are too many files."""
    position, count = 0, 0
    special: dict[str, str] = {}  # fields from extended headers, which come before the file's own header
    while (record := _record(content, position)).strip(b"\0"):
        if (header := _header(record)) is None:
            is_cut, nbytes = len(record) < RECORD, len(content)
            damage.append(
                Fact.of(Kind.TAR_HEADER_CUT, nbytes=nbytes) if is_cut else Fact.of(Kind.TAR_HEADER, offset=position)
            )
            return
        if (count := count + 1) > MEMBER_LIMIT:
            raise HostileError(
                f"{content.path}: a tar archive of more than {MEMBER_LIMIT} files; unpack it yourself, and name the "
                "checkpoint in it"
            )
        is_file = header.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
        start, size = position + RECORD, int(special.get("size", header.size)) if is_file else header.size
        if start + size > len(content):
            damage.append(Fact.of(Kind.TAR_CUT, header.name[-80:], nbytes=len(content), end=start + size))
        if header.type == tarfile.GNUTYPE_LONGNAME:
            special["path"] = _text(content[start : start + min(size, _NAME_LIMIT)].rstrip(b"\0"))
        elif header.type == tarfile.XHDTYPE:
            special |= _extended(content[start : start + min(size, _NAME_LIMIT)])
        elif header.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            name, special = special.get("path") or header.name, {}
            if is_file and not name.endswith("/"):
                yield name, start, size
        position = start + size + -size % RECORD


def members(content: Content) -> tuple[list[Member], list[Fact]]:
    damage: list[Fact] = []
    found = [
        Member(name, content[start : start + min(size, _HEAD)], partial(_blocks, content, start, size))
        for name, start, size in files(content, damage)
    ]
    return found, damage


def _blocks(content: Content, start: int, size: int, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
    stop = min(start + size, len(content))
    for position in range(start, stop, BLOCK):
        end = min(position + BLOCK, stop)
        yield content[position:end], end - start
    if stop < start + size:
        damage.append(Fact.of(Kind.TAR_MEMBER_CUT, there=max(0, stop - start), size=size))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _extended(records: bytes) -> dict[str, str]:
    """Return the path and size in an extended header, whose records have the form ``"17 path=a/b.pth\\n"``."""
    found: dict[str, str] = {}
    for record in records.split(b"\n"):
        key, _, value = record.partition(b" ")[2].partition(b"=")
        if key == b"path" or (key == b"size" and value.isdigit() and len(value) < 20):
            found[key.decode()] = _text(value)
    return found
