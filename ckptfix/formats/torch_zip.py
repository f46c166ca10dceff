"""The zip format of torch.save since 1.6 (a preview since 1.4): a pickle and one uncompressed member for each storage.

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass

from ckptfix.checkpoint import ByteSource
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.sources import Content, DeflatedBytes
from ckptfix.formats.torch_archive import SMALL_LIMIT, read_archive
from ckptfix.formats.torn import TornBytes, missing_bytes
from ckptfix.formats.zip_walk import FoundMembers, walk

NAME = "torch-zip"
NO_DIRECTORY = "the zip archive has no directory at its end (PyTorch says: failed finding central directory)"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_IGNORED = ("__MACOSX/", ".DS_Store")


def sniff(content: Content) -> bool:
    """Whether the content starts as a zip archive does."""
    return bytes(content.buffer[:4]) in (b"PK\x03\x04", b"PK\x05\x06")


@dataclass
class Archive:
    """The members of a torch zip file by their names below the archive's root folder."""

    content: Content
    root: str
    members: dict[str, zipfile.ZipInfo]
    found: FoundMembers | None = None
    """Where the directory was gone and the members were found without it."""

    @property
    def path(self) -> str:
        """What messages call the archive."""
        return self.content.path

    @property
    def nbytes(self) -> int:
        """The size of the archive."""
        return len(self.content)

    def source(self, name: str) -> ByteSource:
        """The bytes of a member; its place is the local header's word, checked against the file."""
        info = self.members[name]
        content = self.content
        if self.found is not None and info.filename in self.found.open_at:
            raise UnreadableError(f"{content.path}: is cut short in its member {info.filename}; fetch it again")
        header = content.buffer[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise UnreadableError(
                f"{content.path}: member {info.filename} is not where the archive's directory says; fetch the file "
                "again"
            )
        *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if start + info.compress_size > len(content):
            raise UnreadableError(
                f"{content.path}: member {info.filename} ends behind the end of the file: it is cut short; fetch it "
                "again"
            )
        if info.compress_type == zipfile.ZIP_STORED:
            return content.source(start, info.compress_size)
        if info.compress_type != zipfile.ZIP_DEFLATED or info.flag_bits & 1:
            raise UnreadableError(
                f"{content.path}: member {info.filename} is encrypted or packed by a method that torch files do not "
                "use; unpack it first"
            )
        if info.file_size > max(SMALL_LIMIT, 1032 * info.compress_size):
            raise HostileError(
                f"{content.path}: member {info.filename} declares {info.file_size} bytes out of {info.compress_size}; "
                "do not use this file"
            )
        return DeflatedBytes(content.source(start, info.compress_size), content.path, info.file_size)

    def left_of(self, name: str | None, nbytes: int) -> ByteSource | None:
        """What is left of a storage in an archive that has lost its directory; None where the storage is whole."""
        if self.found is None:
            return None
        if name is None:
            return TornBytes(self.path, nbytes)
        info = self.members[name]
        if info.filename in self.found.open_at:
            return self.found.left_of(info.filename, nbytes)
        return TornBytes(self.path, nbytes) if info.file_size < nbytes else None

    def crc32(self, name: str) -> int | None:
        """The checksum of a member. Zero is what torch writes with set_crc32_options(False): no checksum, no damage."""
        return self.members[name].CRC or None


def open_archive(content: Content, main: str = "data.pkl") -> Archive:
    """The directory of a torch zip file, whose root is where the member ``main`` is.

    Raises ``UnreadableError`` for other and for truncated archives, ``HostileError`` where two members have one name.
    """
    infos, found = _directory(content), None
    if infos is None:
        found = walk(content)
        infos = found.infos
    infos = [
        info
        for info in infos
        if not info.filename.endswith("/") and not any(part in info.filename for part in _IGNORED)
    ]
    names = Counter(info.filename for info in infos)
    doubled = [name for name, count in names.items() if count > 1]
    if doubled:
        raise HostileError(
            f"{content.path}: the archive has two members {doubled[0]}, and readers differ in which one they take; do "
            "not use this file"
        )
    packed = sum(info.compress_size for info in infos)
    if found is None and packed > len(content):
        raise HostileError(
            f"{content.path}: the members of the archive take {packed} bytes and the file has {len(content)}: they "
            "lie over "
            "each other; do not use this file"
        )
    roots = [name.removesuffix(main) for name in names if f"/{name}".endswith(f"/{main}")]
    if not roots and found is not None:
        raise UnreadableError(
            f"{content.path}: {NO_DIRECTORY}: the file of {len(content)} bytes is cut short before its {main}; fetch it"
            " again"
        )
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
    members = {info.filename.removeprefix(root): info for info in infos if info.filename.startswith(root)}
    return Archive(content, root, members, found)


def _directory(content: Content) -> list[zipfile.ZipInfo] | None:
    """The members as the directory at the end lists them; None where it is gone, or belongs to another archive."""
    stream = io.BytesIO(content.buffer) if isinstance(content.buffer, bytes) else content.buffer
    try:
        infos = zipfile.ZipFile(stream).infolist()  # type: ignore[arg-type]  # a mmap reads, seeks and tells
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return None
    in_place = (content.buffer[info.header_offset : info.header_offset + 4] == b"PK\x03\x04" for info in infos)
    return infos if infos and all(in_place) else None


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a torch zip file; of one without its directory, with what is left of it."""
    archive = open_archive(content)
    document = read_archive(archive, NAME, nesting, archive.left_of)
    if archive.found is not None:
        zeros = len(content) - archive.found.zeros
        document.damage.append(
            f"is cut short: {NO_DIRECTORY}, it has {len(content)} bytes"
            + (f", the last {zeros} of them zeros that were reserved and never filled" if zeros > 64 else "")
            + missing_bytes(document.root)
        )
    return document
