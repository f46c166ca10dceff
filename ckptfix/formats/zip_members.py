"""The files in an ordinary zip archive, one that torch did not write."""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.sources import Content
from ckptfix.formats.zip_directory import is_torch_save, is_torchscript, member_names

MEMBER_LIMIT = 100_000
_BLOCK = 1 << 20
_HEAD = 512
_DAMAGE = (zipfile.BadZipFile, OSError, EOFError, ValueError, struct.error, zlib.error, lzma.LZMAError)


def sniff(content: Content) -> bool:
    """Whether the content is a zip archive with a directory, and not itself a file of torch."""
    if bytes(content.buffer[:4]) not in (b"PK\x03\x04", b"PK\x05\x06"):
        return False
    names = member_names(content)
    return bool(names) and not is_torch_save(names) and not is_torchscript(names)


class _Stream(io.RawIOBase):
    """A content as a file: ``zipfile`` wants to seek, and a mmap cannot say that it can before Python 3.13."""

    def __init__(self, content: Content) -> None:
        self.content, self.position = content, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self.position, len(self.content))[whence]
        if base + offset < 0:
            raise ValueError("a negative position")
        self.position = base + offset
        return self.position

    def readinto(self, target: Any) -> int:
        data = self.content.buffer[self.position : self.position + len(target)]
        target[: len(data)] = data
        self.position += len(data)
        return len(data)


def members(content: Content) -> Iterator[tuple[str, bytes, Callable[[], Iterator[tuple[bytes, int]]]]]:
    """The name, first bytes and blocks of every file. Raises ``UnreadableError`` where one is encrypted or damaged."""
    if len(member_names(content)) > MEMBER_LIMIT:
        raise HostileError(f"{content.path}: a zip archive of more than {MEMBER_LIMIT} files; unpack it yourself")
    try:
        archive = zipfile.ZipFile(_Stream(content))
    except (*_DAMAGE, NotImplementedError) as error:
        raise UnreadableError(f"{content.path}: the zip archive is damaged ({error}); fetch it again") from error
    for info in archive.infolist():
        if info.filename.endswith("/"):
            continue
        blocks = partial(_blocks, content.path, archive, info)
        head = next(blocks(_HEAD), (b"", 0))[0] if info.file_size else b""
        yield info.filename, head, blocks


def _blocks(
    path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int = _BLOCK
) -> Iterator[tuple[bytes, int]]:
    if info.flag_bits & 1:
        raise UnreadableError(
            f"{path}: {info.filename!r:.80} is encrypted; unpack the archive with its password and name the file"
        )
    try:
        with archive.open(info) as file:
            while block := file.read(size):
                yield block, info.compress_size
    except NotImplementedError as error:
        raise UnreadableError(
            f"{path}: {info.filename!r:.80} is packed by a method that Python does not know ({error}); unpack it first"
        ) from error
    except _DAMAGE as error:
        raise UnreadableError(f"{path}: {info.filename!r:.80} is damaged ({error}); fetch the archive again") from error
