"""The directory of a zip archive, the headers of its members, and the format that their names show.

Layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7 to 4.3.16."""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

from msgspec import Struct

from ckptfix.bytes.decoders import DEFLATED, METHODS, STORED
from ckptfix.bytes.sources import Content
from ckptfix.errors import HostileError

HEADER = struct.Struct("<4s5H3I2H")  # local header of a member; its name and an extra field follow
_USUAL = 128  # bytes of a header with its name; few are longer

# Data descriptors after a member (checksum and both sizes of 4 or, in zip64, 8 bytes) with and without a signature.
DESCRIPTORS = (struct.Struct("<4s3I"), struct.Struct("<4sI2Q"), struct.Struct("<3I"), struct.Struct("<I2Q"))


class ZipMember(Struct, gc=False):
    """The entry of a member in an archive's directory. ``odd_name`` is the stored name if it is not ``name`` in UTF-8.
    ``ahead`` is the size of the member's local header, 0 if that was not read, and ``entry`` the position of the entry
    in the archive, 0 if the member was found without it."""

    name: str
    odd_name: bytes | None
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    place: int
    volume: int = 0
    attributes: int = 0
    ahead: int = 0
    entry: int = 0

    @classmethod
    def of(cls, raw: bytes, flags: int, *said: int) -> ZipMember:
        """Return the member whose stored name is ``raw``."""
        name = member_name(raw, flags)
        return cls(name, None if name.encode() == raw else raw, flags, *said)

    @property
    def raw(self) -> bytes:
        """The stored name."""
        return self.name.encode() if self.odd_name is None else self.odd_name


class Header(Struct):
    """The local header of a member; ``start`` is the position of its data."""

    is_signed: bool
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    name: bytes
    start: int


def read_header(content: Content, place: int) -> Header | None:
    """Return the local header at ``place``; None if it is truncated."""
    raw = content[place : place + _USUAL] if place >= 0 else b""
    if len(raw) < HEADER.size:
        return None
    signature, _, flags, method, _, _, crc, packed, size, length, extra = HEADER.unpack_from(raw)
    behind = place + HEADER.size
    stop = HEADER.size + length
    name = raw[HEADER.size : stop] if stop <= len(raw) else content[behind : behind + length]
    return Header(signature == b"PK\x03\x04", flags, method, crc, packed, size, name, behind + length + extra)


def member_name(raw: bytes, flags: int) -> str:
    """Decode a stored name like other readers: up to the first zero byte, and with slashes for the backslashes of
    Windows (APPNOTE 4.4.4 and 4.4.17)."""
    name = raw.decode("utf-8" if flags & 0x800 or raw.isascii() else "cp437", "replace")
    return name.partition("\0")[0].replace("\\", "/")


def descriptors(content: Content, place: int) -> Iterator[tuple[int, int, int]]:
    """Return the possible meanings of the data descriptor after a member (checksum, sizes), torch's form first."""
    raw = content[place : place + 24]
    return (form.unpack_from(raw)[-3:] for form in DESCRIPTORS if len(raw) >= form.size)


END = struct.Struct("<4s4H2LH")  # the record at the end of an archive
END64, LOCATOR = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")  # the two zip64 records before it
ENTRY = struct.Struct("<4s6H3L5H2L")  # an entry of the directory; its name, an extra field and a comment follow
CRC = 16  # position of the checksum in an entry
_TAIL = 65535 + END.size + LOCATOR.size  # a comment of at most 65535 bytes follows the end record
_NO_NUMBER, _NO_PLACE = 0xFFFF, 0xFFFFFFFF  # placeholders for numbers that are in zip64 fields
_FEW = 256  # bytes that are read first: few archives have a comment
_PLACE = r"(?:^|(?<=/))(?:data|tensors)/"  # the folder of storages in a torch file
_LARGEST = 64 << 20  # bytes of a damaged directory that are read

# A member of every torch.package archive: the list of modules that it does not contain.
PACKAGE_MARK = ".data/extern_modules"

# A member of every torch.export archive, and the member with the names of its weights, if it has any.
EXPORT_MARK = "archive_format"
_EXPORTED = re.compile(r"[^/]+/data/weights/[^/]*_weights_config\.json")

# The names of a torch file's members.
RECORD = re.compile(
    r"(?:.*/)?(?:data\.pkl|constants\.pkl|version|byteorder|\.format_version|\.storage_alignment|model\.json"
    r"|\.data/.*|code/.*|(?:data|tensors|constants)/\d+)",
    re.DOTALL,  # otherwise a name with many folders and a newline is scanned once for each folder
)


class Directory(Struct, frozen=True, dict=True):
    """The members that a directory lists, with their positions in the content. ``fault`` is why it cannot be read, and
    ``is_exact`` is whether its last entry ends where the directory does."""

    members: Sequence[ZipMember] = ()
    fault: str = ""
    is_exact: bool = False

    @cached_property
    def names(self) -> list[str]:
        """The names of the members; none if the directory is damaged."""
        return [member.name for member in self.members] if self.is_exact else []


# Cached by archive: every test of a file's format reads its names, and there may be a hundred thousand.
_known: WeakKeyDictionary[Content, Directory] = WeakKeyDictionary()


def member_names(content: Content) -> list[str]:
    """Return the names of all members; none if the directory is missing or damaged."""
    return read_directory(content).names


def read_directory(content: Content) -> Directory:
    """Return the directory at the end of an archive. Raises ``HostileError`` if it lists too many members."""
    if (found := _known.get(content)) is None:
        found = _known[content] = _followed(content)
    return found


def _followed(content: Content) -> Directory:
    if (end := end_record(content)) is None:
        return Directory(fault="it has no end record")
    directory, shift = bounded_directory(content, end.begin, end.stop), end.begin - end.start
    members: list[ZipMember] = []
    position = 0
    while position + ENTRY.size <= len(directory):
        signature, _, _, flags, method, _, _, crc, packed, size, *rest = ENTRY.unpack_from(directory, position)
        length, extra, comment, volume, _, attributes, place = rest
        raw = directory[position + ENTRY.size : position + ENTRY.size + length]
        if signature != b"PK\x01\x02" or len(raw) < length:
            break
        entry = end.begin + position
        position += ENTRY.size + length + extra + comment
        if _NO_PLACE in (packed, size, place):
            stop = position - comment
            size, packed, place = _of_zip64(directory[stop - extra : stop], size, packed, place)
        said = (flags, method, crc, packed, size, place + shift, volume, attributes)
        members.append(ZipMember.of(raw, *said, 0, entry))
    if position < len(directory):
        return Directory(fault=f"no entry of it is at byte {end.begin + position}")
    return Directory(members, is_exact=position == len(directory))


def forget_directory(content: Content) -> None:
    """Free the memory of an archive's directory, which is read again if it is needed."""
    _known.pop(content, None)


class StoredMembers(Mapping[str, ZipMember]):
    """Members of an archive that are not packed, by name, with their places and checksums as numbers in a row: 10,000
    take 1.5 MB instead of 4 MB."""

    def __init__(self, members: Mapping[str, ZipMember]) -> None:
        self._index = {name: at for at, name in enumerate(members)}
        self._numbers = array("Q")
        for each in members.values():
            self._numbers.extend((each.flags, each.crc, each.packed, each.size, each.place, each.ahead, each.entry))

    def __getitem__(self, name: str) -> ZipMember:
        at = self._index[name] * _NUMBERS
        flags, crc, packed, size, place, ahead, entry = self._numbers[at : at + _NUMBERS]
        return ZipMember(name, None, flags, STORED, crc, packed, size, place, 0, 0, ahead, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


_NUMBERS = 7  # of a member


def _of_zip64(extra: bytes, *numbers: int) -> list[int]:
    """Return numbers of an entry, with placeholders replaced from its zip64 extra field (APPNOTE 4.5.3)."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = (int.from_bytes(extra[at : at + 8], "little") for at in range(4, length - 3, 8))
            return [next(wide, number) if number == _NO_PLACE else number for number in numbers]
        extra = extra[4 + length :]
    return [*numbers]


class ChecksumPlaces(Struct, frozen=True):
    """The end of an archive, from its directory on, with the places of the checksums in it.

    Archives of one size whose ends differ only in checksums and in the folder of all members have the same members in
    the same places."""

    size: int  # of the whole archive
    begin: int
    width: int  # bytes of the folder's name, with its slash
    folders: list[range]  # the places of the folder's name, as entries of one length in a row are as far apart
    rest: bytes  # with zeros in place of checksums and folders

    @classmethod
    def of(cls, content: Content) -> ChecksumPlaces | None:
        """Return the places in an archive; None if its directory is missing or damaged, or its members are not all in
        one folder."""
        directory, end = read_directory(content), end_record(content)
        if end is None or not directory.names:
            return None
        folder, slash, _ = directory.names[0].partition("/")
        if not folder.isascii() or not all(name.startswith(folder + slash) for name in directory.names):
            return None
        width = len(folder + slash)
        folders = _runs(member.entry - end.begin + ENTRY.size for member in directory.members)
        return cls(len(content), end.begin, width, folders, bytes(_without_sums(content[end.begin :], folders, width)))

    def folder(self, other: Content) -> str | None:
        """Return the folder of another archive, with its slash; None if its members differ in anything except this and
        their checksums."""
        if len(other) != self.size:
            return None
        tail = other[self.begin :]
        folder = tail[self.folders[0].start :][: self.width]
        is_one = folder.isascii() and all(
            tail[_moved(run, at)] == folder[at : at + 1] * len(run) for run in self.folders for at in range(self.width)
        )
        return folder.decode() if is_one and _without_sums(tail, self.folders, self.width) == self.rest else None


def _runs(places: Iterable[int]) -> list[range]:
    """Return increasing numbers as ranges."""
    found: list[range] = []
    for place in places:
        last = found[-1] if found else range(0)
        if last and (len(last) == 1 or place - last[-1] == last.step):
            found[-1] = range(last.start, place + 1, place - last[-1])
        else:
            found.append(range(place, place + 1))
    return found


def _moved(places: range, distance: int) -> slice:
    return slice(places.start + distance, places.stop + distance, places.step)


def _without_sums(tail: bytes, folders: Iterable[range], width: int) -> bytearray:
    """Return the end of an archive with zeros in place of the checksums and the folder's name in each entry.

    Byte by byte of all entries of one length, which takes a tenth of the time of entry by entry."""
    made, checksum = bytearray(tail), CRC - ENTRY.size
    for run in folders:
        for at in (*range(width), *range(checksum, checksum + 4)):
            made[_moved(run, at)] = bytes(len(run))
    return made


class EndRecord(NamedTuple):
    """The end record of an archive, or its zip64 form if it has one.

    ``start`` is the declared position of the directory, and ``stop`` its actual end; ``at`` is the position of the last
    record, and ``end`` that after its comment."""

    disk: int
    first_disk: int
    here: int
    listed: int
    size: int
    start: int
    stop: int
    at: int
    end: int

    @property
    def begin(self) -> int:
        """The start of the directory by its size; bytes before the archive move it from its declared position."""
        return max(self.stop - self.size, 0)


def end_record(content: Content) -> EndRecord | None:
    """Return the end record of an archive; None if there is none.

    The zip64 record is read right before its locator, and not at the position in the locator, which is wrong if there
    are bytes before the archive."""
    at = -1
    for size in (_FEW, _TAIL):
        first = max(len(content) - size, 0)
        tail = content[first:]
        at = tail.rfind(b"PK\x05\x06")
        if at >= LOCATOR.size:
            break
    if at < 0 or at + END.size > len(tail):
        return None
    _, *numbers, comment = END.unpack_from(tail, at)
    stop, place, end = first + at, first + at, min(first + at + END.size + comment, len(content))
    if at >= LOCATOR.size and tail[at - LOCATOR.size : at - LOCATOR.size + 4] == b"PK\x06\x07":
        stop = max(place - LOCATOR.size - END64.size, 0)
        record = content[stop : stop + END64.size]
        if len(record) == END64.size and record[:4] == b"PK\x06\x06":
            _, _, _, _, *numbers = END64.unpack(record)
    disk, first_disk, here, listed, size, start = numbers
    return EndRecord(disk, first_disk, here, listed, size, start, stop, place, end)


def member_limit(content: Content) -> int:
    """Return how many members an archive may list, each of which takes a thousand bytes of memory.

    A torch file has at least 300 bytes per tensor. A crafted directory can list one position a million times."""
    return max(1 << 16, len(content) // 200)


def bounded_directory(content: Content, start: int, stop: int) -> bytes:
    """Return the bytes of a directory. Raises ``HostileError`` if it lists too many members."""
    directory = content[start:stop]
    count = directory.count(b"PK\x01\x02")
    if count > member_limit(content):
        raise HostileError(
            f"{content.path}: the zip archive lists {count} members, far more than a checkpoint of its size has; "
            "unpack it yourself if you trust it"
        )
    return directory


def has_end(content: Content) -> bool:
    """Return whether the archive ends with an end record, possibly a damaged one that still points at a directory."""
    tail = content[-END.size :]
    if len(tail) < END.size:
        return False
    *_, size, offset, _ = END.unpack(tail)
    is_entry = size >= ENTRY.size and content[offset : offset + 4] == b"PK\x01\x02"
    return tail[:4] == b"PK\x05\x06" or is_entry


def checksums_left(content: Content, start: int) -> dict[str, int]:
    """Return the checksums by name in the readable entries of a damaged directory, which comes after ``start``."""
    found: dict[str, int] = {}
    at = content.find(b"PK\x01\x02", start)
    directory = bounded_directory(content, at, min(len(content), at + _LARGEST)) if at >= 0 else b""
    at = 0
    while 0 <= at <= len(directory) - ENTRY.size:
        _, *fields = ENTRY.unpack_from(directory, at)
        start, stop = at + ENTRY.size, at + ENTRY.size + fields[9]
        at = directory.find(b"PK\x01\x02", at + 4)
        if at >= 0 and stop > at:
            continue  # the name of a damaged entry overlaps the next entry
        name = directory[start:stop]
        if name.isascii() and fields[6]:
            found[member_name(name, 0)] = fields[6]
    return found


def is_torch_save(names: list[str]) -> bool:
    """Return whether the members are those of torch.save or, since 1.3, torch.jit.save."""
    present, roots = set(names), set(_roots(names, "data.pkl"))
    if any(f"{root}version" in present for root in roots):
        return True
    return any(name[: place.start()] in roots for name in names for place in re.finditer(_PLACE, name))


def is_torchscript(names: list[str]) -> bool:
    """Return whether the members are those of torch.jit.save, from torch 1.0 to 1.2 (``model.json``) or later."""
    present = set(names)
    old = any(f"{root}version" in present for root in _roots(names, "model.json"))
    return old or any(f"{root}constants.pkl" in present for root in _roots(names, "data.pkl"))


def is_torch_package(names: list[str]) -> bool:
    """Return whether the members are those of a torch.package archive."""
    return bool(names) and f"{names[0].partition('/')[0]}/{PACKAGE_MARK}" in names


def is_torch_export(names: list[str]) -> bool:
    """Return whether the members are those of a torch.export archive with weights."""
    is_one = bool(names) and f"{names[0].partition('/')[0]}/{EXPORT_MARK}" in names
    return is_one and any(map(_EXPORTED.fullmatch, names))


def _roots(names: list[str], main: str) -> list[str]:
    inner = f"/{main}"
    return [name.removesuffix(main) for name in names if name.endswith(inner) or name == main]


_LOCKED, _PATCHED, _MASKED = 1 | 1 << 6, 1 << 5, 1 << 13
_FOLDER = 0x10


def why_refused(content: Content, end: EndRecord) -> str:
    """Return why torch refuses an archive, as a noun phrase; empty if it does not."""
    disk, first_disk, here, count, size, place, _, at, _ = end
    directory = read_directory(content)
    listed = len(directory.members)
    if (disk, first_disk) not in ((0, 0), (1, 1)):
        return f"a zip directory on disk {disk or first_disk}"
    if here != count or count != listed:
        return f"a zip directory that counts {here if here != listed else count} members and lists {listed}"
    if size < count * ENTRY.size or place + size > len(content):
        return f"a zip directory that claims {size} bytes from byte {place} on"
    if not directory.is_exact:
        return "a zip directory whose entries do not end where it ends"
    found = ((member, what) for member in directory.members if (what := _what_is_wrong(content, disk, member)))
    return _refusal64(content, at) or next((f"the member {member.name[-80:]} {what}" for member, what in found), "")


def _refusal64(content: Content, end: int) -> str:
    """Return why torch refuses the two zip64 records before the end record; empty if it does not."""
    raw = content[max(end - LOCATOR.size, 0) : end]
    if len(raw) < LOCATOR.size or raw[:4] != b"PK\x06\x07":
        return ""
    _, _, place, disks = LOCATOR.unpack(raw)
    record = content[place : place + END64.size] if place <= len(content) else b""
    is_found = record[:4] == b"PK\x06\x06"
    *_, count, size, start, _ = END.unpack(content[end : end + END.size])
    if len(record) < END64.size or (not is_found and (count == _NO_NUMBER or _NO_PLACE in (size, start))):
        return "a zip64 directory whose end record is not where it claims to be"
    if not is_found:
        return ""  # torch then uses the plain end record
    if disks != 1:
        return f"a zip directory on {disks} disks"
    length = END64.unpack(record)[1]
    return f"a zip64 end record of {length} bytes" if length < END64.size - 12 else ""


def _what_is_wrong(content: Content, disk: int, member: ZipMember) -> str:
    packed, size, method = member.packed, member.size, member.method
    if b"\\" in member.raw:
        return "with backslashes in its name"
    if member.odd_name is not None and not _is_utf8(member.odd_name):
        return "with a name that is not UTF-8"
    if member.volume == _NO_NUMBER or member.volume not in (disk, 1):
        return f"on disk {member.volume}"
    if member.flags & _MASKED:
        return "with a masked header"
    if member.place + HEADER.size + packed > len(content):
        return "that claims to end after the file"
    if member.name.endswith("/"):
        return ""
    if member.flags & (_LOCKED | _PATCHED):
        return f"that is marked as {'encrypted' if member.flags & _LOCKED else 'a patch'}"
    if member.attributes & _FOLDER and size:
        return "that is marked as a folder"
    if method not in (STORED, DEFLATED):
        return f"packed by {METHODS.get(method, f'method {method}')}"
    if (method == STORED and packed != size) or (size and not packed):
        return f"of {packed} bytes that claim to be {size}"
    # torch unpacks what the directory calls packed, whatever comes of it.
    header = read_header(content, member.place) if method == DEFLATED and packed == size else None
    return "packed by two different methods" if header is not None and header.method == STORED else ""


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True
