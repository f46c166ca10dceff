"""The members of a zip archive by all that it says of them: its directory, and the header before each member.

Both say the same in a sound archive. If they differ the bytes decide: what matches a checksum is right, and what said
otherwise is damaged. If the directory is damaged as a whole, or gone, the members are found by their local headers from
the front. torch writes a local header before it knows the member's size: size and checksum are zero there and follow
the data in a descriptor (APPNOTE.TXT 4.3.7 and 4.3.9), which is believed if the size that it states is its distance
from the data. A member without one is open: it was being written, or fetched, when the file ended."""

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
from functools import cached_property

from msgspec import Struct, field

from ckptfix.bytes.decoders import DEFLATED, STORED, UNPACKED, zip_decoder
from ckptfix.bytes.files import RangeBuffer
from ckptfix.bytes.sources import Content, TornBytes, filled_end, zero_tail
from ckptfix.core.facts import Fact, Kind, first_facts
from ckptfix.core.spec import ByteSource
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.archives.unpacking import Stream, printable
from ckptfix.reading.archives.zip_directory import (
    DESCRIPTORS,
    HEADER,
    Header,
    Member,
    checksums_left,
    descriptors,
    end_record,
    has_end,
    header_name,
    member_limit,
    plain_members,
    plain_name,
    read_header,
    refusal,
)

_DESCRIPTOR = b"PK\x07\x08"


class FoundMembers(Struct):
    """What is left of an archive: the members in the order of the file, and where the data of open ones begins."""

    content: Content
    infos: list[Member] = field(default_factory=list)
    open_at: dict[str, int] = field(default_factory=dict)
    zeros: int = 0
    end: int = 0  # where the last member that is whole ends

    def left_of(self, name: str, nbytes: int) -> ByteSource:
        """Return what is there of the storage of ``nbytes`` that an open member holds.

        A file that was reserved before it was fetched goes on in zeros after the storage; then the zeros inside of it
        are no data either, and so are those of a sector or more where the file ends inside of the storage: file systems
        end in them after a crash. Any other file that is cut short ends at its last byte. An open member in the middle
        of the file is damaged in a way that is not known, and so is one with something other than its descriptor after
        it: bytes of it were lost, or overwritten."""
        start = self.open_at[name]
        if name != self.infos[-1].filename or self.infos[-1].compress_type != STORED:
            return TornBytes(self.content.path, nbytes)
        behind = bytes(self.content.buffer[start + nbytes : min(start + nbytes + len(_DESCRIPTOR), self.zeros)])
        if not _DESCRIPTOR.startswith(behind):
            return TornBytes(self.content.path, nbytes)
        stop = filled_end(self.content) if start + nbytes >= len(self.content) else self.zeros
        whole = max(0, min(nbytes, stop - start))
        return TornBytes(self.content.path, nbytes, whole, self.content.source(start, whole))


def walk(content: Content) -> FoundMembers:
    """Return the members of an archive without its directory. Raises ``HostileError`` if there is no end of them."""
    found = FoundMembers(content, zeros=zero_tail(content))
    headers = {place: _whole_header(content, place) for place in _signatures(content, b"PK\x03\x04")}
    descriptors = _descriptors(content, {header.start for header in headers.values() if header is not None})
    position = 0
    for place, header in headers.items():
        if place < position or header is None:
            continue  # inside of the member before, or cut itself
        info, start = _member(content, place, header), header.start
        if place != position and (not info.filename.isprintable() or info.compress_type not in UNPACKED):
            continue  # bytes of a tensor that look like a header
        if info.flag_bits & 8:
            if start in descriptors:
                info.CRC, info.compress_size, info.file_size, position = descriptors[start]
                if info.compress_type == STORED:
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
    """Return the names of the members from the front on, as long as each header says where the next one is."""
    names: list[str] = []
    position = 0
    limit = member_limit(content)
    while bytes(content.buffer[position : position + 4]) == b"PK\x03\x04" and len(names) < limit:
        if (header := _whole_header(content, position)) is None:
            break
        info = _member(content, position, header)
        names.append(info.filename)
        if info.flag_bits & 8:
            break  # the size follows the data
        position = header.start + info.compress_size
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


def _whole_header(content: Content, place: int) -> Header | None:
    header = read_header(content, place)
    return header if header is not None and header.start <= len(content) else None


def _descriptors(content: Content, starts: set[int]) -> dict[int, tuple[int, int, int, int]]:
    """Checksum, both sizes and the end, by the place where the data begins. Sizes have 4 or (zip64) 8 bytes."""
    found: dict[int, tuple[int, int, int, int]] = {}
    for position in _signatures(content, _DESCRIPTOR):
        record = bytes(content.buffer[position + 4 : position + 24])
        for form in DESCRIPTORS[2:]:
            if len(record) >= form.size:
                crc, packed, size = form.unpack_from(record)
                if position - packed in starts:
                    found.setdefault(position - packed, (crc, packed, size, position + 4 + form.size))
    return found


def _member(content: Content, place: int, header: Header) -> Member:
    name, packed, size = header.name.decode("utf-8", "replace"), header.packed, header.size
    extra = bytes(content.buffer[place + HEADER.size + len(header.name) : header.start])
    if packed == 0xFFFFFFFF and extra[:4] == b"\x01\x00\x10\x00" and len(extra) >= 20:
        size, packed = struct.unpack("<2Q", extra[4:20])
    plain = plain_name(name.partition("\0")[0])
    return Member(plain, name, header.flags, header.method, header.crc, packed, size, place)


_LOOK = 1 << 13  # bytes that a look at a claim counts as, beside those that are looked at


class Claim(Struct, frozen=True):
    """What a record says of a member: where its data begins, and what of it."""

    start: int
    method: int
    crc: int
    packed: int
    size: int
    culprit: str  # what is damaged if this one is right


class Proof:
    """Proves claims about the members of one archive, as long as that does not take too many bytes."""

    def __init__(self, content: Content) -> None:
        self._content = content
        # Bytes, packed and expanded, that may be gone through to tell who is right.
        self._budget = 4 * len(content) + (64 << 20)

    def holds(self, claim: Claim) -> bool:
        """Return whether the bytes have the checksum. A member without one, as torch can write it, is never proved."""
        if not claim.crc or claim.start < 0 or claim.start + claim.packed > len(self._content):
            return False
        if claim.method not in (STORED, DEFLATED):
            return False
        self._budget -= claim.packed + _LOOK
        if self._budget <= 0:
            return False
        decoder, _ = zip_decoder(claim.method, claim.packed, claim.size, b"")
        stream = Stream(self._content, claim.start, claim.start + claim.packed, decoder)
        crc = 0
        for block, _ in stream.blocks(rescue=False):
            crc = zlib.crc32(block, crc)
            self._budget -= len(block)
            if self._budget <= 0 or stream.expanded > claim.size:
                return False
        return stream.ended and crc == claim.crc and stream.expanded == claim.size


HEADER_RECORD, ENTRY_RECORD = "header", "entry"  # which record of a member is damaged
CANDIDATES = 8  # headers of one name that are looked at
NOWHERE = -1  # the place of a member that no header is found for

# The names of a torch file's members; storages are numbered from 0 on, in old files by where they lay in memory.
RECORD = re.compile(
    r"(?:.*/)?(?:data\.pkl|constants\.pkl|version|byteorder|\.format_version|\.storage_alignment|model\.json"
    r"|\.data/.*|code/.*|(?:data|tensors|constants)/(?P<number>\d+))",
    re.DOTALL,  # else a name of many folders and a newline is gone through once for each of them
)

_PLACE_DIGITS = 10  # digits of a number that is such a place


class ZipIndex(Struct):
    """The members in the order of the archive. ``starts`` has the places of data, by the place of the header, where
    that header is not to be believed, and ``agreed`` those where it is; ``found`` is what a walk found where there is
    no directory to go by. ``damage`` says what is wrong; an archive that merely
    ends early has none here. ``doubts`` are those of it after which a member may be another than its name says.
    ``displaced`` are the bytes by which the directory is further on than it says, as after another file, and
    negative where bytes before it are gone: programs for zip archives see to that, torch refuses it. ``refusal``
    is what else torch refuses, ``directory`` is where that begins, and ``trailing`` are the bytes after all of it."""

    infos: list[Member]
    starts: dict[int, int] = field(default_factory=dict)
    found: FoundMembers | None = None
    damage: list[Fact] = field(default_factory=list)
    doubts: list[Fact] = field(default_factory=list)
    displaced: int = 0
    refusal: str = ""
    directory: int = 0
    trailing: int = 0
    agreed: dict[int, int] = field(default_factory=dict)

    def data_start(self, content: Content, info: Member) -> int | None:
        """Return where the data of a member begins; None if nothing says so."""
        for known in (self.starts, self.agreed):
            if info.header_offset in known:
                return known[info.header_offset]
        header = read_header(content, info.header_offset)
        return header.start if header is not None and header.is_signed else None


class DirectoryRepair:
    """One comparison of a directory with the headers of its members."""

    def __init__(self, content: Content, index: ZipIndex) -> None:
        self.content, self.index = content, index
        infos = index.infos
        self.names = Counter([info.orig_filename for info in infos])
        self.places = Counter([info.header_offset for info in infos])
        self.bounds = sorted(self.places)
        self.faults: list[Fact] = []
        self.proof = Proof(content)
        self.in_place = 0  # how many members begin where the directory says
        self.odd = [place for place, info in enumerate(infos) if not self._is_plain(info)]

    def _is_plain(self, info: Member) -> bool:
        """Return whether the header of a member says what the directory says."""
        header = read_header(self.content, info.header_offset)
        if header is None:
            return False
        self.in_place += header.is_signed
        if not self._agree(info, header) or header_name(info, header) != info.orig_filename:
            return False
        self.index.agreed[info.header_offset] = header.start
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether this is the directory of these members, and not that of another archive."""
        return 2 * self.in_place > len(self.index.infos)

    def repair(self) -> ZipIndex:
        """Return the members, each as it is proved to be where its two descriptions differ."""
        for place in self.odd:
            self.index.infos[place] = self._repaired(self.index.infos[place])
        self.index.damage = [*first_facts(self.faults, Kind.ZIP_RECORDS), *self.index.doubts]
        return self.index

    def _repaired(self, info: Member) -> Member:
        if info.filename.endswith("/"):
            return info  # a folder, of which nothing is read
        header = read_header(self.content, info.header_offset)
        other = header_name(info, header) if header is not None and header.is_signed else None
        other = other if other != info.orig_filename and self.names[other or ""] else None  # that of another member
        if header is not None and other and self._is_misnamed(info, header, other):
            self.index.agreed[info.header_offset] = header.start
            return info
        if (header is None or not header.is_signed or other) and (found := self._elsewhere(info)) is not None:
            return self._misplaced(info, found)
        if header is None or other:
            return self._last_resort(info)
        if self._agree(info, header) and self._is_behind(info, header):
            self.index.agreed[info.header_offset] = header.start
            return self._named(info, header)
        proved = next(filter(self.proof.holds, self._claims(info, header)), None)
        if proved is not None and (proved.culprit or not header.is_signed):
            self._blame(info.filename, proved.culprit or HEADER_RECORD)
            self.index.starts[info.header_offset] = proved.start
            info = copy.copy(info)
            info.compress_type, info.CRC = proved.method, proved.crc
            info.compress_size, info.file_size = proved.packed, proved.size
            info.flag_bits &= ~1
        elif not header.is_signed:
            return self._last_resort(info)
        elif not info.CRC and (start := self._start_by_descriptor(info)) not in (None, header.start):
            self._blame(info.filename, HEADER_RECORD)
            self.index.starts[info.header_offset] = start
        return self._named(info, header)

    def _start_by_descriptor(self, info: Member) -> int | None:
        """Return where the data of a member without a checksum begins, by the descriptor before the next member."""
        stop = self._stop(info)
        for form in DESCRIPTORS[:2]:
            said = bytes(self.content.buffer[max(stop - form.size, 0) : stop])
            if said == form.pack(b"PK\x07\x08", info.CRC, info.compress_size, info.file_size):
                return stop - form.size - info.compress_size
        return None

    def _stop(self, info: Member) -> int:
        """Return where the next member begins, or the directory."""
        after = bisect_right(self.bounds, info.header_offset)
        return min((*self.bounds[after : after + 1], self.index.directory))

    def _is_misnamed(self, info: Member, header: Header, other: str) -> bool:
        """Return whether the header with the name of another member is that of this one all the same.

        Where the other member has a header of its own, this one's has a damaged name, which no program reads. Where the
        two have each other's names, nothing says whether their headers or their entries of the directory are right, if
        no header is found that has the name and the checksum that this one should have."""
        if not self._agree(info, header) or self.places[info.header_offset] > 1:
            return False
        if info.CRC and self._elsewhere(info) is not None:
            return False
        if other in self._misfits:
            self.index.doubts.append(Fact.of(Kind.ZIP_NAMES, printable(info.filename), header=printable(other)))
        return True

    def _is_behind(self, info: Member, header: Header) -> bool:
        """Return whether the data is where the header ends: with another name it may have another length."""
        if len(header.name) == len(info.orig_filename.encode("utf-8", "replace")) or not info.CRC:
            return True
        said = (info.compress_type, info.CRC, info.compress_size, info.file_size)
        return self.proof.holds(Claim(header.start, *said, ""))

    def _elsewhere(self, info: Member) -> Member | None:
        """Return the member that a walk finds elsewhere with this name, and the directory's checksum and sizes."""
        said = (info.CRC, info.compress_size, info.file_size)
        found = (found for found in self._walked.get(info.filename, ()) if found.header_offset != info.header_offset)
        return next((one for one in found if (one.CRC, one.compress_size, one.file_size) == said), None)

    def _last_resort(self, info: Member) -> Member:
        """Return the member at the only header of this name that a walk finds, or one that is nowhere.

        Where bytes are lost, a header may have the data of another member after it: the checksum of the directory
        tells, and if there is none nothing does."""
        found = [found for found in self._walked.get(info.filename, ()) if found.header_offset != info.header_offset]
        moved = copy.copy(info)
        moved.header_offset = found[0].header_offset if len(found) == 1 and info.CRC else NOWHERE
        return self._misplaced(info, moved)

    def _misplaced(self, info: Member, found: Member) -> Member:
        self._blame(info.filename, ENTRY_RECORD)
        return found

    def _blame(self, name: str, record: str, **more: str) -> None:
        self.faults.append(Fact.of(Kind.ZIP_RECORD, printable(name), record=record, **more))

    @cached_property
    def _misfits(self) -> set[str]:
        """The names that the directory gives to members whose headers say otherwise."""
        return {self.index.infos[place].orig_filename for place in self.odd}

    @cached_property
    def _walked(self) -> dict[str, list[Member]]:
        """The members that a walk finds whole, where bytes were lost or gained and all places after them shift."""
        found = walk(self.content)
        walked: dict[str, list[Member]] = {}
        for info in found.infos:
            named = walked.setdefault(info.filename, [])
            if info.filename not in found.open_at and len(named) < CANDIDATES:
                named.append(info)
        return walked

    def _agree(self, info: Member, header: Header) -> bool:
        """Return whether header and descriptor say of a member what the directory says."""
        if not header.is_signed or header.method != info.compress_type or (header.flags ^ info.flag_bits) & 1:
            return False
        said = (info.CRC, info.compress_size, info.file_size)
        if header.crc or header.packed:
            is_zip64 = 0xFFFFFFFF in (header.packed, header.size)
            return header.crc == info.CRC and (is_zip64 or (header.crc, header.packed, header.size) == said)
        if not header.flags & 8:
            return said == (0, 0, 0)
        return said in descriptors(self.content, header.start + info.compress_size)

    def _claims(self, info: Member, header: Header) -> Iterator[Claim]:
        """Yield what a member can be, by its directory, by its header, and by the place of the next member."""
        says = (info.CRC, info.compress_size, info.file_size)
        is_called_locked = info.flag_bits & ~header.flags & 1
        yield Claim(header.start, info.compress_type, *says, ENTRY_RECORD if is_called_locked else "")
        yield Claim(header.start, header.method, *says, ENTRY_RECORD)
        stop = self._stop(info)
        is_misplaced = not header.is_signed and header.name != info.orig_filename.encode("utf-8", "replace")
        culprit = ENTRY_RECORD if is_misplaced else HEADER_RECORD
        for width in (0, *(form.size for form in DESCRIPTORS)):
            yield Claim(stop - width - info.compress_size, info.compress_type, *says, culprit)
        others = [(header.crc, header.packed, header.size)]
        for form in DESCRIPTORS:
            others.extend(descriptors(self.content, stop - form.size))
        for crc, packed, size in others:
            yield Claim(header.start, header.method, crc, packed, size, ENTRY_RECORD)

    def _named(self, info: Member, header: Header) -> Member:
        """Return the member under the name of its header, where only that is one of a torch file.

        A single bit turns a member's name into another, and its tensor would be taken for lost."""
        other = header_name(info, header)
        if other is None or other == info.orig_filename or self.names[other] or not self._is_likely(other):
            return info
        if self._is_likely(info.filename) and self.names[info.orig_filename] == 1:
            return info
        self._blame(other, ENTRY_RECORD, called=printable(info.filename))
        self.names[info.orig_filename] -= 1
        self.names[other] += 1
        info = copy.copy(info)
        info.filename = other
        return info

    def _is_likely(self, name: str) -> bool:
        match = RECORD.fullmatch(name)
        if match is None or match["number"] is None:
            return match is not None
        return len(match["number"]) >= _PLACE_DIGITS or int(match["number"]) < len(self.index.infos)


def list_members(content: Content) -> ZipIndex:
    """Return the members of an archive. Raises ``HostileError`` if there is no end of them."""
    index, fault = _directory(content)
    if content.is_remote:
        if fault:  # to go by the headers, all of the file would have to be fetched
            from ckptfix.bytes.remote import download_advice

            raise UnreadableError(
                f"{content.path}: {fault}; to see what of it is whole, {download_advice(content.path)}"
            )
        return index  # a request for each header is too much: it is compared when its member is read
    repair = DirectoryRepair(content, index)
    if not fault and repair.is_in_place:
        return repair.repair()
    found = walk(content)
    if not has_end(content):
        return ZipIndex(found.infos, found=found)
    left = checksums_left(content, found.end)
    for info in found.infos:
        # Where bytes are lost, a header may have the data of another member after it.
        info.CRC = left.get(info.filename) or info.CRC
    damage = [Fact.of(Kind.ZIP_DIRECTORY, fault=fault)]
    return ZipIndex(found.infos, found=found, damage=damage)


def _directory(content: Content) -> tuple[ZipIndex, str]:
    """Return the members as the directory at the end lists them, and why it cannot be read."""
    end, buffer = end_record(content), content.buffer
    try:
        if end is not None and (plain := plain_members(content, end.begin - end.start)):
            index = ZipIndex(plain, directory=end.begin)
        else:
            archive = zipfile.ZipFile(buffer if isinstance(buffer, RangeBuffer) else io.BytesIO(buffer[:]))
            # The fields have the names that ZipInfo gives them.
            fields = Member.__struct_fields__
            infos = [Member(*(getattr(info, name) for name in fields)) for info in archive.infolist()]
            index = ZipIndex(infos, directory=archive.start_dir)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        return ZipIndex([]), str(error) or type(error).__name__
    if end is not None:
        index.displaced = index.directory - end.start
        index.refusal = refusal(content, end, index.infos)
        index.trailing = len(content) - end.end
    for info in index.infos:
        if "\\" in info.orig_filename:
            info.filename, info.orig_filename = plain_name(info.filename), plain_name(info.orig_filename)
    return index, ""
