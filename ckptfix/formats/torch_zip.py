"""The zip format of torch.save since 1.6 (a preview since 1.4): a pickle and one uncompressed member for each storage.

Layout: https://pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass

from ckptfix.checkpoint import ByteSource, Remark, Storage
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.payload import payload_remarks
from ckptfix.formats.sources import Content, DeflatedBytes
from ckptfix.formats.torch_pickle import StoragePickle

NAME = "torch-zip"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_INFLATED_LIMIT = 64 << 20
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

    def source(self, name: str) -> ByteSource:
        """The bytes of a member; its place is the local header's word, checked against the file."""
        info = self.members[name]
        content = self.content
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
        if info.file_size > max(_INFLATED_LIMIT, 1032 * info.compress_size):
            raise HostileError(
                f"{content.path}: member {info.filename} declares {info.file_size} bytes out of {info.compress_size}; "
                "do not use this file"
            )
        if content.file is None:
            raise UnreadableError(f"{content.path}: a compressed archive inside a pickle is not read")
        return DeflatedBytes(content.file, start, info.compress_size, info.file_size)

    def read(self, name: str, limit: int = 1 << 62) -> bytes:
        """The whole of a member, at most ``limit`` bytes."""
        source = self.source(name)
        if source.nbytes > limit:
            raise HostileError(
                f"{self.content.path}: member {name} declares {source.nbytes} bytes; do not use this file"
            )
        return bytes(source.read(0, source.nbytes))


def open_archive(content: Content) -> Archive:
    """The directory of a torch zip file. Raises ``UnreadableError`` for other and for truncated archives."""
    stream = io.BytesIO(content.buffer) if isinstance(content.buffer, bytes) else content.buffer
    try:
        infos = zipfile.ZipFile(stream).infolist()  # type: ignore[arg-type]  # a mmap reads, seeks and tells
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise UnreadableError(
            f"{content.path}: the zip archive has no directory at its end (PyTorch says: failed finding central "
            "directory):"
            f" the file of {len(content)} bytes is cut short; fetch it again"
        ) from error
    infos = [info for info in infos if not info.is_dir() and not any(part in info.filename for part in _IGNORED)]
    names = Counter(info.filename for info in infos)
    doubled = [name for name, count in names.items() if count > 1]
    if doubled:
        raise HostileError(
            f"{content.path}: the archive has two members {doubled[0]}, and readers differ in which one they take; do "
            "not use this file"
        )
    roots = [name.removesuffix("data.pkl") for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
    if not roots:
        some = ", ".join(sorted(names)[:3]) or "nothing"
        raise UnreadableError(
            f"{content.path}: a zip archive, but not of torch.save: it has no data.pkl but {some}; unpack it first"
        )
    root = min(roots, key=len)
    members = {info.filename.removeprefix(root): info for info in infos if info.filename.startswith(root)}
    if "constants.pkl" in members:
        raise UnreadableError(
            f"{content.path}: a TorchScript archive, which ckptfix does not read yet; "
            "torch.jit.load(...).state_dict() gives its weights"
        )
    return Archive(content, root, members)


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a torch zip file."""
    archive = open_archive(content)
    if "byteorder" in archive.members and archive.read("byteorder", 16).strip() == b"big":
        raise UnreadableError(
            f"{content.path}: the file was written on a big-endian machine, which ckptfix does not read yet"
        )

    def find_storage(key: str, nbytes: int, device: str) -> Storage:
        name = f"data/{key}" if f"data/{key}" in archive.members else f"tensors/{key}"
        if name not in archive.members:
            raise UnreadableError(
                f"{content.path}: storage {key} is used but not in the archive; it is damaged: fetch it again"
            )
        source = archive.source(name)
        if source.nbytes < nbytes:
            raise HostileError(
                f"{content.path}: storage {key} declares {nbytes} bytes and its member has {source.nbytes}: damaged "
                "or hostile; fetch it again"
            )
        # A CRC of 0 is what torch writes with set_crc32_options(False): no checksum, and no damage.
        return Storage(key, source, device, archive.members[name].CRC or None)

    pickles = StoragePickle(content.path, find_storage, nesting)
    root, _ = pickles.run(archive.read("data.pkl", limit=max(_INFLATED_LIMIT, 4 * len(content))))
    remarks = payload_remarks(pickles.names)
    remarks += [Remark("tensor-subclass", "state_dict", name) for name in pickles.table.foreign]
    remarks += [
        Remark("hidden-pickle", name, "a pickle that torch.load never reads")
        for name in archive.members
        if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin")) and name != "data.pkl"
    ]
    if pickles.protocol != 2:
        remarks.append(Remark("protocol", "data.pkl", str(pickles.protocol)))
    return Document(content.path, NAME, root, None, pickles.names, remarks)
