"""How the bytes of each format begin. File names are not reliable: a ``.pth.tar`` is seldom a tar.

Every file is tested, so readers are imported only if the first bytes match."""

import re
from collections.abc import Callable

from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.zip_directory import is_torchscript, member_names

SAFETENSORS_HEADER_LIMIT = 100_000_000  # bytes of the longest header that the safetensors library reads
_SPACES = b" \t\r\n"
# The start of a pickle of protocol 0 or 1 that begins with a string: the string, its memo number, the next opcode.
_STRING = rb"(?s)(V[^\n]*|S'[^\n]*'|S\"[^\n]*\")\n(p\d+\n|q.)?[.0(c]"
_TAR_MAGIC, _TAR_CHECKSUM = slice(257, 262), slice(148, 156)
# The first bytes of compressed files and archives that are named in messages and not unpacked.
PACKERS = {
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"Rar!\x1a\x07": "RAR",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "LZ4",
    b"\x5d\0\0\x80\0": "LZMA without xz (.lzma)",
    b"\x1f\x9d": "compress (.Z)",
}
_PACKED = (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0", *PACKERS)  # gzip, bzip2, xz, and the above


def is_zip(content: Content) -> bool:
    """Return whether the content starts like a zip archive."""
    return content[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def is_torchscript_zip(content: Content) -> bool:
    """Return whether the content is a zip archive with the members of torch.jit.save.

    Without its directory, it is recognised by its pickle, which begins with a class of the archive's code."""
    if content[:4] != b"PK\x03\x04":
        return False
    if names := member_names(content):
        return is_torchscript(names)
    from ckptfix.reading.torch_files.torchscript import names_code

    return names_code(content)


def zip_of(are_its: Callable[[list[str]], bool]) -> Callable[[Content], bool]:
    """Return a test for zip archives whose member names pass ``are_its``."""
    return lambda content: is_zip(content) and are_its(member_names(content))


def is_safetensors(content: Content) -> bool:
    """Return whether the content starts like a safetensors file: the length of the header in 8 bytes, then ``{``.

    White space before ``{`` violates the specification, but the library accepts it."""
    head = content[8:64]
    length = int.from_bytes(content[:8], "little")
    return head[:1] == b"{" or (length <= SAFETENSORS_HEADER_LIMIT and head.lstrip(_SPACES)[:1] == b"{")


def is_torch_tar(content: Content) -> bool:
    """Return whether the content is a tar archive of torch 0.1, or begins with its first two files."""
    if not may_be_tar(content):
        return False
    from ckptfix.reading.torch_files import torch_tar

    return torch_tar.has_parts(content)


def may_be_tar(content: Content) -> bool:
    """Return whether the first record has the magic of a tar archive, or a number in place of its checksum."""
    record = content[:512]
    checksum = record[_TAR_CHECKSUM].strip(b" \0")
    return record[_TAR_MAGIC] == b"ustar" or checksum[:1] in (b"\x80", b"\xff") or checksum.isdigit()


def is_pickle(content: Content) -> bool:
    """Return whether the content starts like a pickle, with a PROTO opcode or an opcode of protocols 0 and 1.

    A text or a Faiss index may begin with the letter of a string or number, so for these more bytes are tested."""
    head = content[:2]
    if head[:1] in (b"V", b"S"):
        return re.match(_STRING, content[:4096]) is not None
    if head[:1] in (b"I", b"L"):
        return re.match(rb"[IL]-?\d+L?\n", content[:4096]) is not None
    return (head[:1] == b"\x80" and head[1:2] <= b"\x05") or head[:1] in (b"(", b"c", b"]", b"}")


def may_be_packed(content: Content) -> bool:
    """Return whether the content starts like a compressed stream or a tar archive."""
    return may_be_tar(content) or content[:256].startswith(_PACKED)


def may_be_json(content: Content) -> bool:
    """Return whether the content starts like a JSON object."""
    return content[:64].lstrip(b"\xef\xbb\xbf" + _SPACES)[:1] == b"{"
