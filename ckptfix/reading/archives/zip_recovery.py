"""The members of a zip archive, from its directory and the local headers of the members.

In an intact archive, both agree. If they differ, the one that matches a checksum is right, and the other is damaged. If
the whole directory is damaged or lost, members are found by their local headers from the start. torch writes a local
header before it knows the member's size: size and checksum are zero there, and follow the data in a descriptor
(APPNOTE.TXT 4.3.7 and 4.3.9), which is accepted if its size equals its distance from the start of the data. A member
without a descriptor is open: it was being written or downloaded when the file ended."""

import struct
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.decoders import STORED, UNPACKED
from ckptfix.bytes.sources import Content, TornBytes, filled_end, zero_tail
from ckptfix.core.facts import Fact, Kind, first_facts
from ckptfix.core.spec import ByteSource
from ckptfix.errors import UnreadableError, hostile
from ckptfix.reading.archives.zip_directory import (
    DESCRIPTORS,
    HEADER,
    Header,
    ZipMember,
    checksums_left,
    descriptors,
    end_record,
    has_end,
    member_limit,
    member_name,
    read_directory,
    read_header,
    why_refused,
)

_DESCRIPTOR = b"PK\x07\x08"


class FoundMembers(Struct):
    """Members that were found by their local headers, in the order of the file.

    ``open_at`` has the positions of the data of open members, and ``zeros`` the start of the zeros at the end."""

    content: Content
    members: list[ZipMember] = field(default_factory=list)
    open_at: dict[str, int] = field(default_factory=dict)
    zeros: int = 0
    end: int = 0  # end of the last complete member

    def left_of(self, name: str, nbytes: int) -> ByteSource:
        """Return the existing bytes of the storage of ``nbytes`` bytes in an open member.

        If the file continues with zeros after the storage, it was preallocated, and zeros at the end of the storage are
        not data. Neither are a sector or more of zeros at the end of a file that ends inside the storage, which file
        systems leave after a crash. Otherwise the file is truncated after its last byte. If an open member is not the
        last one, or is followed by something other than its descriptor, bytes of it were lost or overwritten at an
        unknown position, and none are returned."""
        start = self.open_at[name]
        if name != self.members[-1].name or self.members[-1].method != STORED:
            return TornBytes(self.content.path, nbytes)
        behind = self.content[start + nbytes : min(start + nbytes + len(_DESCRIPTOR), self.zeros)]
        if not _DESCRIPTOR.startswith(behind):
            return TornBytes(self.content.path, nbytes)
        stop = filled_end(self.content) if start + nbytes >= len(self.content) else self.zeros
        whole = max(0, min(nbytes, stop - start))
        return TornBytes(self.content.path, nbytes, whole, self.content.source(start, whole))


def walk(content: Content) -> FoundMembers:
    """Return the members of an archive without its directory. Raises ``HostileError`` if there are too many."""
    found = FoundMembers(content, zeros=zero_tail(content))
    headers = {place: _whole_header(content, place) for place in _signatures(content, b"PK\x03\x04")}
    descriptors = _descriptors(content, {header.start for header in headers.values() if header is not None})
    position = 0
    for place, header in headers.items():
        if place < position or header is None:
            continue  # inside the member before, or truncated itself
        info, start = _member(content, place, header), header.start
        if place != position and (not info.name.isprintable() or info.method not in UNPACKED):
            continue  # bytes of a tensor that look like a header
        if info.flags & 8:
            if start in descriptors:
                info.crc, info.packed, info.size, position = descriptors[start]
                if info.method == STORED:
                    info.size = info.packed  # the second size may be truncated itself
            else:
                found.open_at[info.name] = start
        elif start + info.packed > len(content) or found.zeros < start + info.packed < len(content):
            found.open_at[info.name] = start
        else:
            position = start + info.packed
        found.members.append(info)
    found.end = position
    return found


def names_in_row(content: Content) -> list[str]:
    """Return the names of the first members, as far as each header gives the position of the next."""
    names: list[str] = []
    position = 0
    limit = member_limit(content)
    while content[position : position + 4] == b"PK\x03\x04" and len(names) < limit:
        if (header := _whole_header(content, position)) is None:
            break
        info = _member(content, position, header)
        names.append(info.name)
        if info.flags & 8:
            break  # the size follows the data
        position = header.start + info.packed
    return names


def _signatures(content: Content, signature: bytes) -> Iterator[int]:
    limit = member_limit(content)
    count, position = 0, content.find(signature)
    while position >= 0:
        count += 1
        if count > limit:
            raise hostile(content.path, f"more than {limit} members in the archive")
        yield position
        position = content.find(signature, position + 4)


def _whole_header(content: Content, place: int) -> Header | None:
    header = read_header(content, place)
    return header if header is not None and header.start <= len(content) else None


def _descriptors(content: Content, starts: set[int]) -> dict[int, tuple[int, int, int, int]]:
    """Return the data descriptors (checksum, both sizes, end) by the position of the data, one of ``starts``."""
    found: dict[int, tuple[int, int, int, int]] = {}
    for position in _signatures(content, _DESCRIPTOR):
        record = content[position + 4 : position + 24]
        for form in DESCRIPTORS[2:]:
            if len(record) >= form.size:
                crc, packed, size = form.unpack_from(record)
                if position - packed in starts:
                    found.setdefault(position - packed, (crc, packed, size, position + 4 + form.size))
    return found


def _member(content: Content, place: int, header: Header) -> ZipMember:
    packed, size = header.packed, header.size
    extra = content[place + HEADER.size + len(header.name) : header.start]
    if packed == 0xFFFFFFFF and extra[:4] == b"\x01\x00\x10\x00" and len(extra) >= 20:
        size, packed = struct.unpack("<2Q", extra[4:20])
    return ZipMember.of(header.name, header.flags, header.method, header.crc, packed, size, place)


HEADER_RECORD, ENTRY_RECORD = "header", "entry"  # the damaged record of a member
CANDIDATES = 8  # headers with the same name that are considered
NOWHERE = -1  # position of a member without a header


class ZipIndex(Struct):
    """The members in the order of the archive. ``found`` is set if they were found without the directory.

    ``damage`` is what is wrong (not for an archive that is only truncated), and ``doubts`` is the part of it that puts
    names of members in doubt. ``displaced`` is the number of bytes by which the directory is after its declared
    position, as with bytes before the archive, or negative if bytes were lost before it: other zip programs accept
    this, but torch does not. ``refusal`` is why else torch refuses the archive, and ``trailing`` is the number of bytes
    after the archive."""

    members: list[ZipMember]
    found: FoundMembers | None = None
    damage: list[Fact] = field(default_factory=list)
    doubts: list[Fact] = field(default_factory=list)
    displaced: int = 0
    refusal: str = ""
    trailing: int = 0

    def data_start(self, content: Content, member: ZipMember) -> int | None:
        """Return the position of a member's data; None if it has no valid header."""
        if member.ahead:
            return member.place + member.ahead
        header = read_header(content, member.place)
        return header.start if header is not None and header.is_signed else None


class _HeaderComparison:
    """The comparison of a directory with the local headers of its members.

    If they differ, a member is searched by its name and checksum among all headers of the archive. If it is not found
    but has a checksum, it stays where the directory says, and is verified when it is read."""

    def __init__(self, content: Content, index: ZipIndex) -> None:
        self.content, self.index = content, index
        self.names = Counter([member.name for member in index.members])
        self.places = Counter([member.place for member in index.members])
        self.faults: list[Fact] = []
        self.in_place = 0  # number of members that begin where the directory says
        self.odd = [at for at, member in enumerate(index.members) if not self._is_plain(member)]

    def _is_plain(self, member: ZipMember) -> bool:
        """Return whether the header of a member agrees with the directory, also in its name."""
        header = read_header(self.content, member.place)
        if header is None or not header.is_signed:
            return False
        self.in_place += 1
        if header.name != member.raw or not self._agree(member, header):
            return False
        member.ahead = header.start - member.place
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether the directory belongs to these members, and not to another archive."""
        return 2 * self.in_place > len(self.index.members)

    def repair(self) -> ZipIndex:
        """Return the members, corrected if their headers and the directory differ."""
        for at in self.odd:
            self.index.members[at] = self._repaired(self.index.members[at])
        self.index.damage = [*first_facts(self.faults, Kind.ZIP_RECORDS), *self.index.doubts]
        return self.index

    def _repaired(self, member: ZipMember) -> ZipMember:
        if member.name.endswith("/"):
            return member  # a folder, which is not read
        header = read_header(self.content, member.place)
        name = member_name(header.name, member.flags) if header is not None and header.is_signed else ""
        is_anothers = name != member.name and self.names[name] > 0
        is_here = not is_anothers or not (self.places[member.place] > 1 or self._is_proved_elsewhere(member))
        if header is not None and self._agree(member, header) and is_here:
            member.ahead = header.start - member.place
            if not header.is_signed:
                self._blame(member, HEADER_RECORD)
            elif is_anothers and name in self._misfits:
                # Two members have swapped names, and nothing shows whether the headers or the entries are right. If the
                # other member has a header of its own, the name in this one's header is not used by any program.
                doubt = Fact.of(Kind.ZIP_NAMES, member.name[-80:], header=name[-80:])
                self.index.doubts.append(doubt)
            return member
        found = self._found(member)
        if found is None and header is not None and header.is_signed and not is_anothers and member.crc:
            return member
        if found is None:
            self._blame(member, ENTRY_RECORD)
            return replace(member, place=NOWHERE)
        is_stored = found.packed == found.size
        if found.place != member.place or (is_stored and member.packed != member.size):
            self._blame(member, ENTRY_RECORD)
            return found
        # torch reads flags and method from the directory only; the checksum shows whether the method is right.
        method = STORED if is_stored else member.method
        return replace(member, flags=member.flags & found.flags, method=method)

    def _found(self, member: ZipMember) -> ZipMember | None:
        """Return the member with the same name and checksum (or sizes, if it has no checksum) among all headers."""
        named = self._walked.get(member.name, ())
        if member.crc:
            return next((found for found in named if found.crc == member.crc), None)
        said = (0, member.packed, member.size)
        return next((found for found in named if (found.crc, found.packed, found.size) == said), None)

    def _is_proved_elsewhere(self, member: ZipMember) -> bool:
        found = self._found(member) if member.crc else None
        return found is not None and found.place != member.place

    def _blame(self, member: ZipMember, record: str) -> None:
        self.faults.append(Fact.of(Kind.ZIP_RECORD, member.name[-80:], record=record))

    @cached_property
    def _misfits(self) -> set[str]:
        """The names in the directory of members whose headers differ."""
        return {self.index.members[at].name for at in self.odd}

    @cached_property
    def _walked(self) -> dict[str, list[ZipMember]]:
        """The complete members by name, found by their headers because lost or inserted bytes may shift positions."""
        found = walk(self.content)
        walked: dict[str, list[ZipMember]] = {}
        for member in found.members:
            named = walked.setdefault(member.name, [])
            if member.name not in found.open_at and len(named) < CANDIDATES:
                named.append(member)
        return walked

    def _agree(self, member: ZipMember, header: Header) -> bool:
        """Return whether a member's header and descriptor agree with the directory."""
        if header.method != member.method or (header.flags ^ member.flags) & 1:
            return False
        said = (member.crc, member.packed, member.size)
        if header.crc or header.packed:
            is_zip64 = 0xFFFFFFFF in (header.packed, header.size)
            return header.crc == member.crc and (is_zip64 or (header.crc, header.packed, header.size) == said)
        if not header.flags & 8:
            return said == (0, 0, 0)
        return said in descriptors(self.content, header.start + member.packed)


def list_members(content: Content) -> ZipIndex:
    """Return the members of an archive. Raises ``HostileError`` if there are too many."""
    directory, end = read_directory(content), end_record(content)
    if content.is_remote and directory.fault:  # a search for headers would download the whole file
        from ckptfix.bytes.remote import download_advice

        raise UnreadableError(
            f"{content.path}: {directory.fault}; to see what is intact, {download_advice(content.path)}"
        )
    if end is not None and not directory.fault:
        trailing, refused = len(content) - end.end, why_refused(content, end)
        index = ZipIndex([*directory.members], displaced=end.begin - end.start, refusal=refused, trailing=trailing)
        if content.is_remote:
            return index  # reading all headers takes too many requests; each is compared when its member is read
        comparison = _HeaderComparison(content, index)
        if comparison.is_in_place:
            return comparison.repair()
    found = walk(content)
    if not has_end(content):
        return ZipIndex(found.members, found=found)
    left = checksums_left(content, found.end)
    for member in found.members:
        # If bytes are lost, the data of another member may follow a header.
        member.crc = left.get(member.name) or member.crc
    damage = [Fact.of(Kind.ZIP_DIRECTORY, fault=directory.fault)]
    return ZipIndex(found.members, found=found, damage=damage)
