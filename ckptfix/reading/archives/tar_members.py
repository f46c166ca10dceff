"""The files in a tar archive.

The headers are walked here and not by ``tarfile``, which has looped without end on archives made for it
(CVE-2019-20907, CVE-2025-8194). Layout: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from functools import partial

from msgspec import Struct, field

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import HostileError
from ckptfix.reading.archives.unpacking import Member, printable

RECORD = 512
# Headers that are looked at; archives of data sets have more, and no user looks for a checkpoint there.
MEMBER_LIMIT = 30_000

_HEAD = 512
_NAME_LIMIT = 1 << 16
_MAGIC = slice(257, 262)


def sniff(content: Content) -> bool:
    """Return whether the content begins with a tar header: its checksum is right, or it has the magic."""
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


class TarFiles(Struct):
    """The files of an archive. After the walk, ``damage`` says what is wrong with it.

    An archive that is cut short still gives its last file, with the size that it ought to have."""

    content: Content
    damage: list[Fact] = field(default_factory=list)

    def walk(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, offset and size of every file. Raises ``HostileError`` if there is no end of them."""
        content, long_name = self.content, None
        for count, (header, start) in enumerate(self._headers()):
            if count >= MEMBER_LIMIT:
                raise HostileError(
                    f"{content.path}: a tar archive of more than {MEMBER_LIMIT} files; unpack it yourself, and name "
                    "the checkpoint in it"
                )
            size = header.size
            if header.type == tarfile.GNUTYPE_LONGNAME:
                long_name = _text(content[start : start + min(size, _NAME_LIMIT)].rstrip(b"\0"))
            elif header.type == tarfile.XHDTYPE:
                long_name = _pax_path(content[start : start + min(size, _NAME_LIMIT)]) or long_name
            elif header.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
                name, long_name = long_name or header.name, None
                if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) and not name.endswith("/"):
                    yield name, start, size

    def _headers(self) -> Iterator[tuple[tarfile.TarInfo, int]]:
        """Yield each header, and where its data begins. Nothing says where the next one is after one that fails its
        checksum."""
        content, position = self.content, 0
        while (record := _record(content, position)).strip(b"\0"):
            if (header := _header(record)) is None:
                is_cut = len(record) < RECORD
                self.damage.append(
                    Fact.of(Kind.TAR_HEADER_CUT, nbytes=len(content))
                    if is_cut
                    else Fact.of(Kind.TAR_HEADER, offset=position)
                )
                return
            end = position + RECORD + header.size
            if end > len(content):
                self.damage.append(Fact.of(Kind.TAR_CUT, printable(header.name), nbytes=len(content), end=end))
            yield header, position + RECORD
            position = end + -end % RECORD


def members(content: Content) -> tuple[list[Member], list[Fact]]:
    """Return every file of an archive, and what is wrong with it."""
    files, found = TarFiles(content), []
    for name, start, size in files.walk():
        head = content[start : start + min(size, _HEAD)]
        found.append(Member(name, head, partial(_blocks, content, start, size)))
    return found, files.damage


def _blocks(content: Content, start: int, size: int, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
    stop = min(start + size, len(content))
    for position in range(start, stop, BLOCK):
        end = min(position + BLOCK, stop)
        yield content[position:end], end - start
    if stop < start + size:
        damage.append(Fact.of(Kind.TAR_MEMBER_CUT, there=max(0, stop - start), size=size))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _pax_path(records: bytes) -> str | None:
    """Return the ``path`` of an extended header: records of the form ``"17 path=a/b.pth\\n"``."""
    for record in records.split(b"\n"):
        _, _, pair = record.partition(b" ")
        if pair.startswith(b"path="):
            return _text(pair.removeprefix(b"path="))
    return None
