"""The zip format of torch.save since 1.6 (a preview since 1.4): a pickle and one uncompressed member for each storage.

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from typing import Any

from msgspec import Struct, field

from ckptfix.bytes.decoders import FAULTS, STORED, why_closed, zip_decoder
from ckptfix.bytes.limits import Bounds, shown
from ckptfix.bytes.sources import Content, SoughtBytes, TornBytes, missing_bytes
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import ByteSource, TensorSpec
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.archives.unpacking import PackedBytes, UnpackedMembers
from ckptfix.reading.archives.zip_directory import Member, header_name, read_header
from ckptfix.reading.archives.zip_recovery import FoundMembers, ZipIndex, list_members
from ckptfix.reading.torch_files.torch_archive import SMALL_LIMIT, read_archive, read_member
from ckptfix.reading.weights.document import Document

NAME = "torch-zip"
NO_DIRECTORY = "the zip archive has no directory at its end (PyTorch says: failed finding central directory)"
# What torch takes the small members for. Its versions end at ten (`kMaxSupportedFileFormatVersion`), and `stoull` reads
# them, which stops after a number.
_WORDS = {
    "version": re.compile(rb"\s*\+?0*([1-9]|10)(\D.*)?", re.DOTALL),
    ".storage_alignment": re.compile(rb"\s*\+?\d+\s*"),
    ".data/serialization_id": re.compile(rb"[\x00-\x7f]*"),
}

# Members that only releases of torch write which say the order of bytes.
_WITH_BYTEORDER = {".format_version", ".storage_alignment"}

_PADDING = 64  # zeros after the last member that are alignment
_LONGEST = 1 << 12  # bytes of a small member
_FOLDER, _FILE = "__MACOSX/", ".DS_Store"  # what macOS puts beside them


class Archive(Struct, dict=True):
    """The members of a torch zip file by their names below the archive's root folder."""

    content: Content
    root: str
    members: dict[str, Member]
    listing: ZipIndex
    # Storages of which neither the header nor the bytes are where the directory says.
    gone: list[str] = field(default_factory=list)
    _unpacked: UnpackedMembers | None = None

    @property
    def found(self) -> FoundMembers | None:
        """Where the directory was gone and the members were found without it."""
        return self.listing.found

    @property
    def path(self) -> str:
        """What messages call the archive."""
        return self.content.path

    @property
    def nbytes(self) -> int:
        """The size of the archive."""
        return len(self.content)

    @property
    def bounds(self) -> Bounds:
        """The account of what is parsed of the archive."""
        return self.content.bounds

    def source(self, name: str) -> ByteSource:
        """Return the bytes of a member; its place is the local header's word, checked against the file."""
        info, content, found = self.members[name], self.content, self.listing.found
        if content.is_remote and info.compress_type == STORED and not why_closed(info.flag_bits, STORED):
            return SoughtBytes(info.compress_size, lambda: self._remote_member(info))
        if found is not None and info.filename in found.open_at:
            raise UnreadableError(f"{content.path}: is cut short in its member {info.filename}; fetch it again")
        start = self.listing.data_start(content, info)
        if start is None:
            raise UnreadableError(
                f"{content.path}: member {info.filename} is not where the archive's directory says; fetch the file "
                "again"
            )
        if start + info.compress_size > content.size:
            raise UnreadableError(
                f"{content.path}: member {info.filename} ends after the end of the file: it is cut short; fetch it "
                "again"
            )
        closed = why_closed(info.flag_bits, info.compress_type)
        if closed:
            raise UnreadableError(f"{content.path}: member {info.filename} {closed}")
        if info.compress_type == STORED:
            return content.source(start, info.compress_size)
        if info.file_size > max(SMALL_LIMIT, 1032 * info.compress_size):
            raise HostileError(
                f"{content.path}: member {info.filename} declares {info.file_size} bytes out of {info.compress_size}; "
                "do not use this file"
            )
        head = bytes(content.buffer[start : start + 9])
        try:
            decoder, skipped = zip_decoder(info.compress_type, info.compress_size, info.file_size, head)
        except FAULTS as error:
            raise UnreadableError(
                f"{content.path}: member {info.filename} is damaged ({error}); fetch it again"
            ) from error
        if self._unpacked is None:
            self._unpacked = UnpackedMembers(content)
        stop = start + info.compress_size
        return PackedBytes(self._unpacked, info.filename, start + skipped, stop, info.file_size, decoder)

    def _remote_member(self, info: Member) -> ByteSource:
        """Return the bytes of a stored member of an archive behind a URL, whose header is looked at only now."""
        content = self.content
        header = read_header(content, info.header_offset)
        is_it = header is not None and header.is_signed and header_name(info, header) == info.orig_filename
        if header is None or not is_it or header.start + info.compress_size > content.size:
            from ckptfix.bytes.remote import download_advice

            raise UnreadableError(
                f"{content.path}: member {info.filename} is not where the archive's directory says; "
                f"{download_advice(content.path)}"
            )
        return content.source(header.start, info.compress_size)

    def left_of(self, name: str | None, nbytes: int) -> ByteSource | None:
        """Return what is left of a storage in a damaged archive; None if the storage is whole."""
        if self.content.is_remote:
            return None
        if self.found is None:
            if name is None or self._is_there(self.members[name]):
                return None
            self.gone.append(self.members[name].filename)
            return TornBytes(self.path, nbytes)
        if name is None:
            return TornBytes(self.path, nbytes)
        info = self.members[name]
        if info.filename in self.found.open_at:
            return self.found.left_of(info.filename, nbytes)
        return TornBytes(self.path, nbytes) if info.file_size < nbytes else None

    def _is_there(self, info: Member) -> bool:
        start = self.listing.data_start(self.content, info)
        return start is not None and start + info.compress_size <= self.content.size

    def is_whole(self, name: str) -> bool:
        """Return whether all of a member is there, as far as the archive itself says."""
        return self.found is None or self.members[name].filename not in self.found.open_at

    @property
    def oddity(self) -> str | None:
        """Why torch does not find its records in a sound archive; None if it does.

        It takes the folder of the first member for that of all, and the preview in torch 1.4 named another one
        (https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc)."""
        if self.listing.refusal:
            return self.listing.refusal
        names = [info.filename for info in self.listing.infos]
        folder, slash, _ = names[0].partition("/")
        if not slash or self.root != f"{folder}/":
            return f"members in {self.root.removesuffix('/') or 'no folder'}"
        if stray := [name for name in names if not name.startswith(self.root)]:
            return f"the member {stray[0]} beside the folder {folder}"
        if any(name.startswith("tensors/") for name in self.members):
            return "storages under tensors/, as in the preview of torch 1.4"
        if not {"version", ".data/version"} & set(self.members):
            return "no member that says the version"
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
        """Return a fact for each reason to doubt that the tensors are those that were saved."""
        doubts = list(self.listing.doubts)
        is_damaged = self.listing.found is not None or self.listing.damage
        if is_damaged and "byteorder" not in self.members and _WITH_BYTEORDER & set(self.members):
            doubts.append(Fact(Kind.BYTEORDER_LOST))
        return [Fact.of(Kind.DOUBTFUL_NAMES, cause=doubt) for doubt in doubts]

    def damage(self, root: Any) -> list[Fact]:
        """Return what is wrong with the archive itself, whose tensors are those in the tree ``root``."""
        told = list(self.listing.damage)
        if self.gone:
            told.append(Fact.of(Kind.MEMBER_GONE, self.gone[0], more=len(self.gone) - 1))
        # A .distcp file is a row of such archives, each with one tensor or object that has no name.
        if self.listing.displaced and not isinstance(root, TensorSpec) and next(tensors_in(root), None) is not None:
            return [Fact.of(Kind.ZIP_DISPLACED, nbytes=self.listing.displaced), *told]
        if told or self.found is None:
            return told
        zeros = self.nbytes - self.found.zeros
        zeros = zeros if zeros > _PADDING else 0
        return [Fact.of(Kind.TORCH_ZIP_CUT, nbytes=self.nbytes, zeros=zeros, missing=missing_bytes(root))]

    def crc32(self, name: str) -> int | None:
        """Return the checksum of a member; None if the archive has none.

        With set_crc32_options(False) torch writes zero for all members. A single zero is a checksum like any other."""
        return self.members[name].CRC if self._has_checksums else None

    @cached_property
    def _has_checksums(self) -> bool:
        return any(info.CRC for info in self.members.values())


def open_archive(content: Content, main: str = "data.pkl") -> Archive:
    """Return the directory of a torch zip file, whose root is where the member ``main`` is.

    Raises ``UnreadableError`` for other and for truncated archives, ``HostileError`` where two members have one name.
    """
    listing = list_members(content)
    found = listing.found
    infos = [
        info
        for info in listing.infos
        if not info.filename.endswith("/") and _FOLDER not in info.filename and _FILE not in info.filename
    ]
    names = Counter([info.filename for info in infos])
    # A directory that is read at the wrong place, as after a transfer as text, has entries without a name.
    doubled = [name for name, count in names.items() if count > 1 and name]
    if doubled:
        raise HostileError(
            f"{content.path}: the archive has two members {doubled[0]}, and readers differ in which one they take; do "
            "not use this file"
        )
    packed = sum([info.compress_size for info in infos])
    # Where bytes were lost before the directory, the members are larger than what is left.
    lacking = min(max(0, -listing.displaced), len(content))
    if found is None and packed > len(content) + lacking:
        raise HostileError(
            f"{content.path}: the members of the archive take {packed} bytes and the file has {len(content)}: they "
            "lie over each other; do not use this file"
        )
    roots = [name.removesuffix(main) for name in names if name.endswith(f"/{main}") or name == main]
    if not roots and found is not None:
        raise UnreadableError(f"{content.path}: {NO_DIRECTORY}: {_nameless(content, found, None)}; fetch it again")
    if not roots:
        some = ", ".join(sorted(names)[:3]) or "nothing"
        raise UnreadableError(
            f"{content.path}: a zip archive, but not of torch.save: it has no {main} but {some}; unpack it first"
        )
    root = min(roots, key=len)
    if others := [other for other in roots if not other.startswith(root)]:
        raise UnreadableError(
            f"{content.path}: it holds two unpacked torch files, {root} and {others[0]}; unpack it and name one of the "
            "folders"
        )
    if found is not None and root + main in found.open_at:
        raise UnreadableError(f"{content.path}: {NO_DIRECTORY}: {_nameless(content, found, main)}; fetch it again")
    members = {info.filename.removeprefix(root): info for info in infos if info.filename.startswith(root)}
    return Archive(content, root, members, listing)


def _nameless(content: Content, found: FoundMembers, partly: str | None) -> str:
    """Return what is said of an archive that is cut short before its list of tensors, or inside of it (``partly``).

    TorchScript writes its storages first."""
    names = [info.filename for info in found.infos]
    # Torch 1.0 to 1.2 wrote the sources of TorchScript first, and later releases write them last.
    place = f"before its {'model.json' if any('/code/' in name for name in names) else 'data.pkl'}"
    storages = [name for name in names if {"data", "tensors"} & set(name.split("/")[:-1]) and name not in found.open_at]
    whole = f": {counted(len(storages), 'storage')} before it can be read, but nothing says which tensors they are"
    return (
        f"the file of {len(content)} bytes is cut short {f'inside of its {partly}' if partly else place}"
        f"{whole if storages else ''}"
    )


def read(content: Content, nesting: int = 0) -> Document:
    """Return the document of a torch zip file; of one without its directory, with what is left of it."""
    archive = open_archive(content)
    document = read_archive(archive, NAME, nesting, archive.left_of)
    document.damage += archive.damage(document.root)
    document.remarks += archive.doubts
    if packed := sum(info.compress_type != STORED for info in archive.members.values()):
        document.remarks.append(Fact.of(Kind.PACKED_MEMBERS, members=packed))
    if archive.listing.trailing:
        document.remarks.append(Fact.of(Kind.TRAILING_BYTES, nbytes=archive.listing.trailing))
    if not document.damage and (oddity := archive.oddity):
        document.remarks.append(Fact.of(Kind.ODD_LAYOUT, oddity=oddity))
    return document
