"""The members of a zip archive by all that it says of them: its directory, and the header in front of each member.

Both say the same in a sound archive. Where they differ the bytes decide: what matches a checksum is right, and what
said otherwise is damaged. Where the directory is damaged as a whole, or gone, the headers are walked.

Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7 to 4.3.16."""

from __future__ import annotations

import copy
import io
import re
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckptfix.formats.buffers import RangeBuffer
from ckptfix.formats.sources import Content
from ckptfix.formats.wrappers.decoders import zip_decoder
from ckptfix.formats.wrappers.streams import Stream
from ckptfix.formats.wrappers.zip_directory import bounded_directory
from ckptfix.formats.wrappers.zip_headers import DESCRIPTORS, Header, descriptors, header_name, read_header
from ckptfix.formats.wrappers.zip_walk import FoundMembers, walk

NAMED_LIMIT = 3
_LOOK = 1 << 13
"""Bytes that a look at a claim counts as, beside those that are looked at."""

_END = struct.Struct("<4s4H2LH")
_RECORD = re.compile(
    r"(?:.*/)?(?:data\.pkl|constants\.pkl|version|byteorder|\.format_version|\.storage_alignment|model\.json"
    r"|\.data/serialization_id|code/.*|(?:data|tensors|constants)/(?P<number>\d+))"
)
"""The names of a torch file's members; storages are numbered from 0 on."""


@dataclass
class Listing:
    """The members in the order of the archive. ``starts`` has the places of data, by the place of the header, where
    that header is not to be believed, and ``agreed`` those where it is; ``found`` is what a walk found where there is
    no directory to go by. ``damage`` says what is wrong, in clauses that follow the file's name; an archive that merely
    ends early has none here. ``displaced`` are the bytes by which the directory lies further on than it says, as behind
    another file: programs for zip archives see to that, torch refuses it."""

    infos: list[zipfile.ZipInfo]
    starts: dict[int, int] = field(default_factory=dict)
    found: FoundMembers | None = None
    damage: list[str] = field(default_factory=list)
    displaced: int = 0
    agreed: dict[int, int] = field(default_factory=dict)

    def data_start(self, content: Content, info: zipfile.ZipInfo) -> int | None:
        """Where the data of a member begins; None where nothing says so."""
        for known in (self.starts, self.agreed):
            if info.header_offset in known:
                return known[info.header_offset]
        header = read_header(content, info.header_offset)
        return header.start if header is not None and header.is_signed else None


def list_members(content: Content) -> Listing:
    """The members of an archive. Raises ``HostileError`` where there is no end of them."""
    infos, fault, displaced = _directory(content)
    settling = _Settling(content, infos)
    if not fault and settling.is_in_place:
        return replace(settling.settle(), displaced=displaced)
    found = walk(content)
    cause = fault or "it points at places where no members are"
    damage = [f"is damaged: the directory of the zip archive ({cause}); its members were found without it"]
    return Listing(found.infos, {}, found, damage if _has_end(content) else [])


def _directory(content: Content) -> tuple[list[zipfile.ZipInfo], str, int]:
    """The members as the directory at the end lists them, why it cannot be read, and how far it is displaced."""
    buffer = content.buffer
    stream = buffer if isinstance(buffer, RangeBuffer) else io.BytesIO(buffer[:])
    try:
        # zipfile makes an object for whatever the directory lists, wherever it finds one.
        if end := zipfile._EndRecData(stream):  # type: ignore[attr-defined]  # what ZipFile itself goes by
            bounded_directory(content, max(0, end[9] - end[5] - 76), end[9])
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        return [], str(error) or type(error).__name__, 0
    return archive.infolist(), "", archive.start_dir - end[6] if end else 0


def _has_end(content: Content) -> bool:
    """Whether the archive ends as one does, with a record of where its directory begins, be that damaged or not."""
    tail = bytes(content.buffer[-_END.size :])
    if len(tail) < _END.size:
        return False
    *_, size, offset, _ = _END.unpack(tail)
    is_told = size >= 46 and bytes(content.buffer[offset : offset + 4]) == b"PK\x01\x02"
    return tail[:4] == b"PK\x05\x06" or is_told


@dataclass
class _Claim:
    """What somebody says of a member: where its data begins, and what of it."""

    start: int
    method: int
    crc: int
    packed: int
    size: int
    culprit: str
    """What is damaged if this one is right."""


class _Settling:
    """One comparison of a directory with the headers of its members."""

    def __init__(self, content: Content, infos: list[zipfile.ZipInfo]) -> None:
        self.content, self.listing = content, Listing(infos)
        self.names = Counter(info.orig_filename for info in infos)
        self.bounds = sorted(info.header_offset for info in infos)
        self.faults: list[str] = []
        self.budget = 4 * len(content) + (64 << 20)
        """Bytes, packed and expanded, that may be gone through to tell who is right."""

        self.in_place = 0
        """How many members begin where the directory says."""
        self.odd = [place for place, info in enumerate(infos) if not self._is_plain(info)]

    def _is_plain(self, info: zipfile.ZipInfo) -> bool:
        """Whether the header of a member says what the directory says, as of nearly all."""
        header = read_header(self.content, info.header_offset)
        if header is None:
            return False
        self.in_place += header.is_signed
        if not self._agree(info, header) or header_name(info, header) != info.orig_filename:
            return False
        self.listing.agreed[info.header_offset] = header.start
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether this is the directory of these members, and not that of another archive."""
        return 2 * self.in_place > len(self.listing.infos)

    def settle(self) -> Listing:
        """The members, each as it is proved to be where its two descriptions differ."""
        for place in self.odd:
            self.listing.infos[place] = self._settled(self.listing.infos[place])
        more = len(self.faults) - NAMED_LIMIT
        self.listing.damage = [f"is damaged: {fault}" for fault in self.faults[:NAMED_LIMIT]]
        self.listing.damage += [f"has {more} more damaged members"] if more > 0 else []
        return self.listing

    def _settled(self, info: zipfile.ZipInfo) -> zipfile.ZipInfo:
        header = read_header(self.content, info.header_offset)
        if header is None:
            return self._walked.get(info.filename, info)
        if not self._agree(info, header):
            proved = next(filter(self._is_proved, self._claims(info, header)), None)
            if proved is not None and (proved.culprit or not header.is_signed):
                culprit = proved.culprit or "the header of"
                self.faults.append(f"{culprit} member {_shown(info.filename)}")
                self.listing.starts[info.header_offset] = proved.start
                info = copy.copy(info)
                info.compress_type, info.CRC = proved.method, proved.crc
                info.compress_size, info.file_size = proved.packed, proved.size
                info.flag_bits &= ~1
            elif not header.is_signed:
                found = self._walked.get(info.filename)
                if found is None:
                    return info
                self.faults.append(f"the directory's entry of member {_shown(info.filename)}")
                return found
        else:
            self.listing.agreed[info.header_offset] = header.start
        return self._named(info, header)

    @cached_property
    def _walked(self) -> dict[str, zipfile.ZipInfo]:
        """The members that a walk finds whole, where bytes were lost or gained and all places behind them shift."""
        found = walk(self.content)
        return {info.filename: info for info in found.infos if info.filename not in found.open_at}

    @cached_property
    def _directory(self) -> int:
        return self.content.buffer.find(b"PK\x01\x02", self.bounds[-1])

    def _agree(self, info: zipfile.ZipInfo, header: Header) -> bool:
        """Whether header and descriptor say of a member what the directory says."""
        if not header.is_signed or header.method != info.compress_type or (header.flags ^ info.flag_bits) & 1:
            return False
        said = (info.CRC, info.compress_size, info.file_size)
        if header.crc or header.packed:
            is_zip64 = 0xFFFFFFFF in (header.packed, header.size)
            return header.crc == info.CRC and (is_zip64 or (header.crc, header.packed, header.size) == said)
        if not header.flags & 8:
            return said == (0, 0, 0)
        return said in descriptors(self.content, header.start + info.compress_size)

    def _claims(self, info: zipfile.ZipInfo, header: Header) -> Iterator[_Claim]:
        """What a member can be, by its directory, by its header, and by the place of the next member."""
        says = (info.CRC, info.compress_size, info.file_size)
        is_called_locked = info.flag_bits & ~header.flags & 1
        yield _Claim(header.start, info.compress_type, *says, "the directory's entry of" if is_called_locked else "")
        yield _Claim(header.start, header.method, *says, "the directory's entry of")
        after = bisect_right(self.bounds, info.header_offset)
        stop = self.bounds[after] if after < len(self.bounds) else self._directory
        is_misplaced = not header.is_signed and header.name != info.orig_filename.encode("utf-8", "replace")
        culprit = "the directory's entry of" if is_misplaced else "the header of"
        for width in (0, *(form.size for form in DESCRIPTORS)):
            yield _Claim(stop - width - info.compress_size, info.compress_type, *says, culprit)
        others = [(header.crc, header.packed, header.size)]
        for form in DESCRIPTORS:
            others.extend(descriptors(self.content, stop - form.size))
        for crc, packed, size in others:
            yield _Claim(header.start, header.method, crc, packed, size, "the directory's entry of")

    def _is_proved(self, claim: _Claim) -> bool:
        """Whether the bytes have the checksum. A member without one, as torch can write it, is never proved."""
        if not claim.crc or claim.start < 0 or claim.start + claim.packed > len(self.content):
            return False
        if claim.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return False
        self.budget -= claim.packed + _LOOK
        if self.budget <= 0:
            return False
        decoder, _ = zip_decoder(claim.method, claim.packed, claim.size, b"")
        stream = Stream(self.content, claim.start, claim.start + claim.packed, decoder)
        crc = 0
        for block, _ in stream.blocks(rescue=False):
            crc = zlib.crc32(block, crc)
            self.budget -= len(block)
            if self.budget <= 0 or stream.expanded > claim.size:
                return False
        return stream.ended and crc == claim.crc and stream.expanded == claim.size

    def _named(self, info: zipfile.ZipInfo, header: Header) -> zipfile.ZipInfo:
        """The member under the name of its header, where only that is one of a torch file.

        A single bit turns a member's name into another, and its tensor would be taken for lost."""
        other = header_name(info, header)
        if other is None or other == info.orig_filename or self.names[other] or not self._is_likely(other):
            return info
        if self._is_likely(info.filename) and self.names[info.orig_filename] == 1:
            return info
        self.faults.append(f"the directory's entry of member {_shown(other)}, which it calls {_shown(info.filename)}")
        self.names[info.orig_filename] -= 1
        self.names[other] += 1
        info = copy.copy(info)
        info.filename = other
        return info

    def _is_likely(self, name: str) -> bool:
        match = _RECORD.fullmatch(name)
        return match is not None and (match["number"] is None or int(match["number"][:9]) < self.names.total())


def _shown(name: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in name[-80:])
