"""The zip format of torch.save since 1.6 (a preview since 1.4): a pickle and one uncompressed member per storage.

The members may also be the files of a folder into which the archive was unpacked (``exploded``).

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save"""

import re
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.checksums import is_sound
from ckptfix.bytes.decoders import FAULTS, STORED, why_closed, zip_decoder
from ckptfix.bytes.limits import Bounds, shown
from ckptfix.bytes.sources import Content, DeferredBytes, TornBytes, whole_bytes
from ckptfix.core.facts import Fact, Kind, clauses, first_facts
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import ByteSource, Storage, TensorSpec
from ckptfix.errors import HostileError, UnreadableError, damaged, hostile
from ckptfix.reading.archives.unpacking import Expansion, PackedBytes
from ckptfix.reading.archives.zip_directory import ZipMember, member_name, read_header
from ckptfix.reading.archives.zip_recovery import FoundMembers, ZipIndex, list_members
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.weights.document import Document

NAME = "torch-zip"
NO_DIRECTORY = "the zip archive has no directory at its end (PyTorch says: failed finding central directory)"
# The content that torch accepts in the small members. Versions go up to ten (`kMaxSupportedFileFormatVersion`), and
# are parsed by `stoull`, which ignores text after the number.
_WORDS = {
    "version": re.compile(rb"\s*\+?0*([1-9]|10)(\D.*)?", re.DOTALL),
    ".storage_alignment": re.compile(rb"\s*\+?\d+\s*"),
    ".data/serialization_id": re.compile(rb"[\x00-\x7f]*"),
}

# Members of releases of torch that also write `byteorder`.
_WITH_BYTEORDER = {".format_version", ".storage_alignment"}

SMALL_LIMIT = 64 << 20  # bytes of a member that may always be read into memory, however small the archive is
_PADDING = 64  # zeros after the last member that may be alignment
_LONGEST = 1 << 12  # bytes of a small member
_FOLDER, _FILE = "__MACOSX/", ".DS_Store"  # added by macOS


class TorchArchive:
    """The members of a zip archive or folder, by their names relative to its root (``data.pkl``, ``data/0``).

    ``nbytes`` is the size of all of it, and ``bounds`` are the limits on parsing it."""

    members: Collection[str]
    is_verified = False  # whether storages that fail their checksums are torn

    def __init__(self, path: str, nbytes: int, bounds: Bounds) -> None:
        self.path, self.nbytes, self.bounds = path, nbytes, bounds

    def source(self, name: str) -> ByteSource:
        raise NotImplementedError

    def is_whole(self, name: str) -> bool:
        """Return whether a member is complete, as far as the archive itself shows."""
        return True

    def crc32(self, name: str) -> int | None:
        """Return the checksum of a member; None if the archive has none."""
        return None

    def left_of(self, name: str | None, nbytes: int) -> ByteSource | None:
        """Return what is left of a storage in a damaged archive; None if the storage is complete.

        ``name`` is its member (None if that is lost), and ``nbytes`` its size."""
        return None


def read_member(archive: TorchArchive, name: str, limit: int | None = None) -> bytes:
    """Return the bytes of a member. Raises ``HostileError`` if it is larger than ``limit``, by default 64 MB or four
    times the archive."""
    source = archive.source(name)
    if source.nbytes > (max(SMALL_LIMIT, 4 * archive.nbytes) if limit is None else limit):
        raise hostile(archive.path, f"member {name} declares {source.nbytes} bytes")
    if isinstance(source, PackedBytes):
        archive.bounds.spend(2 * source.nbytes)  # it may be far larger than the archive, and is in memory twice
    found = source.read(0, source.nbytes)
    whole = found.obj
    return whole if isinstance(whole, bytes) and len(whole) == found.nbytes else bytes(found)  # a copy only if needed


class Reading(Struct, dict=True):
    """A reader of the members of an archive, with their damage. Incomplete storages are torn."""

    archive: TorchArchive
    faults: list[Fact] = field(default_factory=list)
    torn: list[Fact] = field(default_factory=list)
    unsound: list[Fact] = field(default_factory=list)

    def member(self, name: str, limit: int | None = None) -> bytes:
        """Return the bytes of a member that describes the tensors. A wrong checksum is recorded as damage."""
        data = read_member(self.archive, name, limit)
        crc32 = self.archive.crc32(name)
        if crc32 is not None and zlib.crc32(data) != crc32:
            self.faults.append(Fact(Kind.MEMBER_CHECKSUM, name))
        return data

    @property
    def whole(self) -> list[str]:
        """The names of complete members, in the order of the archive."""
        return [name for name in self.archive.members if self.archive.is_whole(name)]

    def pickle(self, *folders: str, suffix: str = "") -> StoragePickle:
        """Return a reader of pickles whose storages are in one of the folders, named by their key and the suffix."""

        def find(key: str, nbytes: int, device: str) -> Storage:
            members = self.archive.members
            for folder in folders:
                if (name := f"{folder}/{key}{suffix}") in members:
                    return self.storage(key, name, name, nbytes, device)
            return self.storage(key, None, f"{folders[0]}/{key}{suffix}", nbytes, device)

        path, bounds = self.archive.path, self.archive.bounds
        return StoragePickle(path, find, bounds, _read_nested, big_endian=self.is_big_endian)

    @cached_property
    def is_big_endian(self) -> bool:
        """Whether the archive was written on a big-endian machine, which torch records since 2.1.

        If the word is damaged, its length decides, and the values are remarked as doubtful."""
        if "byteorder" not in self.archive.members:
            return False
        try:
            word = self.member("byteorder", 16).strip()
        except UnreadableError:
            self.faults.append(Fact(Kind.BYTEORDER_LOST))
            return False
        if word not in (b"little", b"big") and not self.faults:
            self.faults.append(Fact(Kind.BYTEORDER_ODD))
        return len(word) == len(b"big")

    def storage(self, key: str, name: str | None, called: str, nbytes: int, device: str) -> Storage:
        """Return the storage of ``nbytes`` bytes in the member ``name``, or a torn one if that does not fit or is None;
        ``called`` is the name of a missing member."""
        archive = self.archive
        if (left := archive.left_of(name, nbytes)) is not None:
            return Storage(key, left, device)
        if name is None:
            return self._torn(key, Fact(Kind.STORAGE_LACKING, called), nbytes, device, None)
        source = archive.source(name)
        if source.nbytes != nbytes:
            # torch refuses both ("record size does not match"). If a record is too long, it is unknown which of its
            # bytes are the storage's.
            cause = Fact.of(Kind.STORAGE_SIZE, name, there=source.nbytes, size=nbytes)
            return self._torn(key, cause, nbytes, device, source if source.nbytes < nbytes else None)
        storage = Storage(key, source, device, archive.crc32(name))
        if archive.is_verified and not is_sound(storage):
            self.unsound.append(Fact(Kind.MEMBER_CHECKSUM, name))
            return replace(storage, source=TornBytes(archive.path, nbytes), crc32=None)
        return storage

    def _torn(self, key: str, cause: Fact, nbytes: int, device: str, source: ByteSource | None) -> Storage:
        self.torn.append(cause)
        return Storage(key, TornBytes(self.archive.path, nbytes, source.nbytes if source else 0, source), device)

    @property
    def doubts(self) -> list[Fact]:
        """The remarks for damaged members that describe the tensors: names and places are in doubt."""
        return [Fact.of(Kind.DOUBTFUL_NAMES, cause=fault) for fault in self.faults]

    @property
    def damage(self) -> list[Fact]:
        """The damaged members, the first few of each kind by name."""
        members = [*self.faults, *self.unsound]
        return [*first_facts(members, Kind.MEMBERS_DAMAGED), *first_facts(self.torn, Kind.STORAGES_LACKING)]


def _read_nested(data: bytes, path: str, nesting: int, bounds: Bounds) -> tuple[Any, set[str]]:
    """Read a torch.save file inside the pickle; its reader is imported here because few archives have one."""
    from ckptfix.reading.torch_files.torch_legacy import read_nested

    return read_nested(data, path, nesting, bounds)


def read_archive(archive: TorchArchive, form: str) -> Document:
    """Return the document of a torch.save archive; ``form`` is the name of its format."""
    reading = Reading(archive)
    # The preview of the format in torch 1.4 and 1.5 has `tensors/` instead of `data/`.
    pickles = reading.pickle("data", "tensors")
    data = reading.member("data.pkl")
    root, end = _run(reading, pickles, data)
    remarks = payload_remarks(pickles.names)
    remarks += pickles.table.remarks()
    remarks += [
        Fact(Kind.HIDDEN_PICKLE, name)
        for name in archive.members
        if name.lower().endswith((".pkl", ".pickle", ".pt", ".pth", ".bin")) and name != "data.pkl"
    ]
    if data[end:].strip(b"\0"):
        remarks.append(Fact(Kind.HIDDEN_PICKLE, "the bytes after the end of data.pkl"))
    remarks += pickles.protocol_remarks("data.pkl")
    remarks += reading.doubts
    producer = _producer(archive.members)
    return Document(archive.path, form, root, None, pickles.names, remarks, reading.damage, producer=producer)


def _run(reading: Reading, pickles: StoragePickle, data: bytes) -> tuple[Any, int]:
    """Return the value of ``data.pkl`` and the position of its end. Errors mention a wrong checksum first."""
    try:
        run = pickles.run(data)
    except UnreadableError as error:
        if not reading.faults:
            raise
        path = reading.archive.path
        cause = error.without(f"{path}: ")
        raise UnreadableError(f"{path}: {clauses(reading.faults)}, and cannot be read: ", *cause) from error
    pickles.refuse_torn()
    return run


def _producer(members: Collection[str]) -> str:
    """Return which releases of torch write these members: pytorch#118719 added ``byteorder``, pytorch#147788
    ``.format_version``."""
    if ".format_version" in members:
        return "torch 2.7 or later, or ckptfix"
    if "byteorder" in members:
        return "torch 2.1 to 2.6"
    return "torch 1.4 or 1.5" if any(name.startswith("tensors/") for name in members) else "torch 1.6 to 2.0"


class Archive(TorchArchive):
    """The members of a torch zip file. ``found`` is set if the directory was lost and they were found without it.
    ``gone`` lists storages whose header and bytes are not where the directory says."""

    members: Mapping[str, ZipMember]

    def __init__(self, content: Content, root: str, members: Mapping[str, ZipMember], index: ZipIndex) -> None:
        super().__init__(content.path, len(content), content.bounds)
        self.content, self.root, self.members, self.index = content, root, members, index
        self.found = index.found
        self.gone: list[str] = []
        self._unpacked = Expansion(content.path)
        self._has_checksums = any(info.crc for info in members.values())
        self.is_verified = content.is_verified

    def source(self, name: str) -> ByteSource:
        """Return the bytes of a member, whose position is given by its local header and checked against the file."""
        info, content = self.members[name], self.content
        if content.is_remote and info.method == STORED and not why_closed(info.flags, STORED):
            return DeferredBytes(info.packed, lambda: self._remote_member(info))
        if not self.is_whole(name):
            raise damaged(content.path, f"is cut short in its member {info.name}")
        start = self.index.data_start(content, info)
        if start is None:
            raise damaged(content.path, f"member {info.name} is not where the archive's directory says")
        if start + info.packed > content.size:
            raise damaged(content.path, f"member {info.name} ends after the end of the file: it is cut short")
        closed = why_closed(info.flags, info.method)
        if closed:
            raise UnreadableError(f"{content.path}: member {info.name} {closed}")
        if info.method == STORED:
            return content.source(start, info.packed)
        if info.size > max(SMALL_LIMIT, 1032 * info.packed):
            raise hostile(content.path, f"member {info.name} declares {info.size} bytes out of {info.packed}")
        head = content[start : start + 9]
        try:
            decoder, skipped = zip_decoder(info.method, info.packed, info.size, head)
        except FAULTS as error:
            raise damaged(content.path, f"member {info.name} is damaged ({error})") from error
        stop = start + info.packed
        return PackedBytes(content, self._unpacked, info.name, start + skipped, stop, info.size, decoder)

    def _remote_member(self, info: ZipMember) -> ByteSource:
        """Return the bytes of a stored member of an archive at a URL, whose header is only read now."""
        content = self.content
        header = read_header(content, info.place)
        is_it = header is not None and header.is_signed and member_name(header.name, info.flags) == info.name
        if header is None or not is_it or header.start + info.packed > content.size:
            from ckptfix.bytes.remote import download_advice

            raise UnreadableError(
                f"{content.path}: member {info.name} is not where the archive's directory says; "
                f"{download_advice(content.path)}"
            )
        return content.source(header.start, info.packed)

    def left_of(self, name: str | None, nbytes: int) -> ByteSource | None:
        if self.content.is_remote:
            return None
        info = self.members[name] if name is not None else None
        if self.found is None:
            start = self.index.data_start(self.content, info) if info is not None else None
            if info is None or (start is not None and start + info.packed <= self.content.size):
                return None
            self.gone.append(info.name)
        elif info is not None and info.name in self.found.open_at:
            return self.found.left_of(info.name, nbytes)
        elif info is not None and info.size >= nbytes:
            return None
        return TornBytes(self.path, nbytes)

    def is_whole(self, name: str) -> bool:
        return self.found is None or self.members[name].name not in self.found.open_at

    @property
    def oddity(self) -> str | None:
        """Why torch does not find its records in an undamaged archive; None if it does.

        torch uses the folder of the first member for all members
        (https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc)."""
        if self.index.refusal:
            return self.index.refusal
        names = [info.name for info in self.index.members]
        folder, slash, _ = names[0].partition("/")
        if not slash or self.root != f"{folder}/":
            return f"members in {self.root.removesuffix('/') or 'no folder'}"
        if stray := [name for name in names if not name.startswith(self.root)]:
            return f"the member {stray[0]} outside the folder {folder}"
        if any(name.startswith("tensors/") for name in self.members):
            return "storages under tensors/, as in the preview of torch 1.4"
        if not {"version", ".data/version"} & set(self.members):
            return "no member with the version"
        return next(filter(None, map(self._odd_word, _WORDS)), None)

    def _odd_word(self, name: str) -> str:
        if name not in self.members:
            return ""
        try:
            word = read_member(self, name, _LONGEST)
        except (UnreadableError, HostileError):
            return f"the member {name}, which cannot be read"
        return "" if _WORDS[name].fullmatch(word) else f"the {name} {shown(word)}"

    @property
    def doubts(self) -> list[Fact]:
        """The remarks for reasons to doubt that the tensors are those that were saved."""
        doubts = list(self.index.doubts)
        is_damaged = self.index.found is not None or self.index.damage
        if is_damaged and "byteorder" not in self.members and _WITH_BYTEORDER & set(self.members):
            doubts.append(Fact(Kind.BYTEORDER_LOST))
        return [Fact.of(Kind.DOUBTFUL_NAMES, cause=doubt) for doubt in doubts]

    def damage(self, root: Any) -> list[Fact]:
        """Return the damage of the archive itself; ``root`` is the object tree with its tensors."""
        damage = list(self.index.damage)
        if self.gone:
            damage.append(Fact.of(Kind.MEMBER_GONE, self.gone[0], more=len(self.gone) - 1))
        # A .distcp file is a sequence of such archives, each with one tensor or object without a name.
        if self.index.displaced and not isinstance(root, TensorSpec) and next(tensors_in(root), None) is not None:
            return [Fact.of(Kind.ZIP_DISPLACED, nbytes=self.index.displaced), *damage]
        if damage or self.found is None:
            return damage
        zeros = self.nbytes - self.found.zeros
        zeros = zeros if zeros > _PADDING else 0
        sources = {id(spec.storage): spec.storage.source for spec in tensors_in(root) if spec.storage is not None}
        missing = sum(source.nbytes - whole_bytes(source) for source in sources.values())
        return [Fact.of(Kind.TORCH_ZIP_CUT, nbytes=self.nbytes, zeros=zeros, missing=missing)]

    def crc32(self, name: str) -> int | None:
        """Return the checksum of a member; None if the archive has none.

        With ``set_crc32_options(False)``, torch writes zero for all members. A single zero is a valid checksum."""
        return self.members[name].crc if self._has_checksums else None


def open_archive(content: Content, main: str = "data.pkl") -> Archive:
    """Return the members of a torch zip file, whose root is the folder of the member ``main``.

    Raises ``UnreadableError`` for other archives and truncated ones, ``HostileError`` if two members have one name."""
    index = list_members(content)
    found = index.found
    infos = [
        info
        for info in index.members
        if not info.name.endswith("/") and _FOLDER not in info.name and _FILE not in info.name
    ]
    names = Counter([info.name for info in infos])
    # A directory that was read at the wrong position, as after a transfer as text, has entries without names.
    doubled = [name for name, count in names.items() if count > 1 and name]
    if doubled:
        raise HostileError(
            f"{content.path}: the archive has two members {doubled[0]}, and readers differ in which one they use; do "
            "not use this file"
        )
    packed = sum([info.packed for info in infos])
    # If bytes were lost before the directory, the members are larger than the file.
    lacking = min(max(0, -index.displaced), len(content))
    if found is None and packed > len(content) + lacking:
        raise hostile(
            content.path,
            f"the members of the archive take {packed} bytes and the file has {len(content)}: they overlap",
        )
    roots = [name.removesuffix(main) for name in names if name.endswith(f"/{main}") or name == main]
    if not roots and found is not None:
        raise damaged(content.path, f"{NO_DIRECTORY}: {_nameless(content, found, None)}")
    if not roots:
        some = ", ".join(sorted(names)[:3]) or "nothing"
        raise UnreadableError(
            f"{content.path}: a zip archive, but not from torch.save: it has no {main} but {some}; unpack it first"
        )
    root = min(roots, key=len)
    if others := [other for other in roots if not other.startswith(root)]:
        raise UnreadableError(
            f"{content.path}: it holds two unpacked torch files, {root} and {others[0]}; unpack it and name one of the "
            "folders"
        )
    if found is not None and root + main in found.open_at:
        raise damaged(content.path, f"{NO_DIRECTORY}: {_nameless(content, found, main)}")
    members = {info.name.removeprefix(root): info for info in infos if info.name.startswith(root)}
    return Archive(content, root, members, index)


def _nameless(content: Content, found: FoundMembers, partly: str | None) -> str:
    """Return the message for an archive that is cut short before its list of tensors, or inside it (``partly``)."""
    names = [info.name for info in found.members]
    # torch 1.0 to 1.2 wrote the sources of TorchScript first; later releases write them last.
    place = f"before its {'model.json' if any('/code/' in name for name in names) else 'data.pkl'}"
    storages = [name for name in names if {"data", "tensors"} & set(name.split("/")[:-1]) and name not in found.open_at]
    whole = f": {counted(len(storages), 'storage')} before it can be read, but nothing says which tensors they are"
    return (
        f"the file of {len(content)} bytes is cut short {f'inside its {partly}' if partly else place}"
        f"{whole if storages else ''}"
    )


def read(content: Content) -> Document:
    """Return the document of a torch zip file; without its directory, of the members that are left."""
    archive = open_archive(content)
    document = read_archive(archive, NAME)
    document.damage += archive.damage(document.root)
    document.remarks += archive.doubts
    if packed := sum(info.method != STORED for info in archive.members.values()):
        document.remarks.append(Fact.of(Kind.PACKED_MEMBERS, members=packed))
    if archive.index.trailing:
        document.remarks.append(Fact.of(Kind.TRAILING_BYTES, nbytes=archive.index.trailing))
    if not document.damage and (oddity := archive.oddity):
        document.remarks.append(Fact.of(Kind.ODD_LAYOUT, oddity=oddity))
    return document
