"""Files that are not checkpoints, and what they are instead.

Torch's messages for these (``invalid load key, 'v'``, ``Unsupported operand 60``) name the first byte and nothing else.
A file is looked up here only after no format could read it, so that nothing that may be a checkpoint is called
something else. Names of files are evidence only if the bytes say nothing."""

from __future__ import annotations

import base64
import binascii
import codecs
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.reading.archives.wrapped import looks_like_checkpoint
from ckptfix.reading.foreign.known import remedy, signatures
from ckptfix.reading.foreign.pages import READ, as_text, name_text

_RIGHT = "is it the right file?"
_HDF5 = "open it with h5py or Keras and save its arrays from there"

_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
"""The end of a table of LevelDB (``table/format.h``), the form of a TensorFlow checkpoint's index."""

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_BASE64 = re.compile(rb"(data:[\w/.+-]*;base64,)?([A-Za-z0-9+/\s]{64,})")
_CHUNKED = re.compile(
    rb"(?:HTTP/.{1,60000}?\r\n\r\n)?[0-9A-Fa-f]{1,15}[ \t]*(?:;[^\r\n]{0,200})?\r\n(.{1,512})", re.DOTALL
)
"""The body of an HTTP answer (RFC 9112, section 7.1): each chunk follows its size."""

_SIGNS = 16
"""Signs of a changed encoding that are no accident."""

_SCANNED = 64 << 20
"""Bytes from which it is believed that all of a file is UTF-8."""

_MANGLED = (b"version: 1\r\n", b"\x80\x02\x8a\r\n")
UNFINISHED = frozenset(".crdownload .part .partial .download .opdownload .incomplete .aria2 .!ut .!qb".split())
"""Suffixes of downloads that go on."""

_ZLIB = (b"x\x01", b"x^", b"x\x9c", b"x\xda")
_ARRAY_OF_JOBLIB = b"joblib.numpy_pickle"
_JOBLIB = "load it with joblib.load, if you trust where it is from, and save its arrays as a state_dict"

_LEAST_TEXT = 8
"""Bytes from which on it is no accident that all of them are letters."""

_ZERO_HEAD = 64
"""Zeros at the start from which on it is no accident."""

_NOISE = 4096
_EVEN = 7.9
"""Bits in a byte from which on bytes look random; weights in float32 have fewer than 7.5."""


def name_foreign_file(content: Content) -> str | None:
    """Return what the file is, with the remedy, where it is a known stranger; None otherwise."""
    for namer in _NAMERS:
        if (said := namer(content)) is not None:
            return f"{content.path}: {said}"
    return None


def name_mangled(content: Content) -> str | None:
    """Return what a transfer as text did to a checkpoint, where it cannot be undone, as a clause; None for any other
    file."""
    if bytes(content.buffer[:16]).startswith(_MANGLED):
        return "every line feed in it became CR LF by a transfer in text mode; transfer it again in binary mode"
    head = bytes(content.buffer[:READ])
    if as_text(head) is None and _replaced(content) >= _SIGNS:
        return (
            "was saved as text: every byte that is not text became the sign U+FFFD, which cannot be undone; fetch it"
            " again in binary mode (not as text of a response, and not through an editor)"
        )
    if _is_utf16(head):
        return (
            "was saved as text in UTF-16, as `>` of PowerShell does: some of its bytes were changed and some are gone,"
            " which cannot be undone; fetch it again into a file (curl -o, Invoke-WebRequest -OutFile)"
        )
    return None


def is_chunked(content: Content) -> bool:
    """Return whether a file is a checkpoint in the chunks of an HTTP answer: their sizes are among its bytes."""
    match = _CHUNKED.match(bytes(content.buffer[:READ]))
    return match is not None and looks_like_checkpoint(match[1])


def _transcoded(content: Content) -> str | None:
    """Name what a checkpoint went through that takes only text, and how to get it back."""
    head = bytes(content.buffer[:READ])
    if (match := _BASE64.match(head)) and looks_like_checkpoint(_decoded(match[2])):
        return "is a checkpoint written as base64 text; decode it first (base64 -d FILE > NEW)"
    if is_chunked(content):
        return "is the answer of a web server with the sizes of its chunks in it; fetch it with curl -o, without them"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
        was = text.encode("cp1252" if any(ord(letter) > 0xFF for letter in text) else "latin-1", "ignore")
    except UnicodeDecodeError:
        return None
    if sum(byte >= 0x80 for byte in was) < _SIGNS or not looks_like_checkpoint(was):
        return None
    return (
        "was saved as text: bytes from 0x80 on became letters of UTF-8; fetch it again in binary mode (not as text of a"
        " response, and not through an editor)"
    )


def _decoded(letters: bytes) -> bytes:
    """Return the first bytes of base64 text; nothing if it is not base64."""
    letters = b"".join(letters.split())[:1024]
    try:
        return base64.b64decode(letters[: len(letters) // 4 * 4], validate=True)
    except binascii.Error:
        return b""


def _replaced(content: Content) -> int:
    """Return how often U+FFFD is in a file that is UTF-8; 0 for any other file."""
    decoder, signs = codecs.getincrementaldecoder("utf-8")(), 0
    for start in range(0, min(len(content), _SCANNED), BLOCK):
        try:
            signs += decoder.decode(bytes(content.buffer[start : start + BLOCK])).count("\ufffd")
        except UnicodeDecodeError:
            return 0
    return signs


def _is_utf16(head: bytes) -> bool:
    """Return whether bytes are UTF-16 in which no text is: each byte of a code page became one of a few hundred
    letters."""
    upper = head[3::2] if head.startswith(codecs.BOM_UTF16_LE) else head[2::2]
    is_marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and len(upper) >= _LEAST_TEXT
    return is_marked and all(byte < 0x30 or byte == 0xFF for byte in upper) and as_text(head) is None


def _signed(content: Content) -> str | None:
    head = bytes(content.buffer[:32])
    if any(bytes(content.buffer[at : at + 8]) == _HDF5_MAGIC for at in (0, 512, 1024, 2048)):
        kind = "a Keras model in HDF5" if b"keras" in bytes(content.buffer[:READ]) else "an HDF5 file (Keras, h5py)"
        return f"{kind}, not a PyTorch checkpoint; {_HDF5}"
    head = bytes(content.buffer[:READ])
    for known in signatures():
        if known.begins.match(head, known.at):
            return f"{known.what}, not a PyTorch checkpoint; {known.remedy}"
    if bytes(content.buffer[-8:]) == _TABLE_MAGIC:
        return f"the index of a TensorFlow checkpoint, whose weights are in its .data files; {remedy('tensorflow')}"
    if head[:2] == b"BM" and int.from_bytes(head[2:6], "little") == len(content):
        return f"a bitmap image, not a PyTorch checkpoint; {_RIGHT}"
    at = int.from_bytes(bytes(content.buffer[60:64]), "little")
    if head[:2] == b"MZ" and bytes(content.buffer[at : at + 4]) == b"PE\0\0":
        return f"a program or library of Windows, not a PyTorch checkpoint; {_RIGHT}"
    return None


def _joblib(content: Content) -> str | None:
    """Return a file of joblib.dump: a pickle with the bytes of arrays between its opcodes, often compressed by zlib."""
    head = bytes(content.buffer[:READ])
    if head.startswith(b"\x80") and _ARRAY_OF_JOBLIB in head:
        return f"a file of joblib with NumPy arrays, not a PyTorch checkpoint; {_JOBLIB}"
    if head.startswith(_ZLIB):
        try:
            inside = zlib.decompressobj().decompress(head, 64)
        except zlib.error:
            return None
        if looks_like_checkpoint(inside):
            return f"a stream of zlib, as joblib.dump(…, compress=…) writes it; {_JOBLIB}, or expand it with zlib"
    return None


def _text(content: Content) -> str | None:
    head = bytes(content.buffer[:READ])
    text = as_text(head)
    if text is None or len(head) < _LEAST_TEXT or looks_like_checkpoint(head):
        return None
    return name_text(text, len(content))


def _zeros(content: Content) -> str | None:
    if bytes(content.buffer[:1024]).strip(b"\0") or bytes(content.buffer[-1024:]).strip(b"\0"):
        return None
    return (
        f"nothing but zeros at its start and end ({len(content)} bytes): the space was reserved and the download"
        " never arrived; fetch it again"
    )


def _zero_head(content: Content) -> str | None:
    head = bytes(content.buffer[:READ])
    zeros = len(head) - len(head.lstrip(b"\0"))
    if zeros < _ZERO_HEAD:
        return None
    least = "at least " if zeros == len(head) else ""
    return (
        f"begins with {least}{zeros} zeros, where every checkpoint says what it is: that part never arrived, or was"
        " wiped; fetch it again"
    )


def _by_name(content: Content) -> str | None:
    """Return what the name and the neighbours say of bytes that say nothing themselves."""
    path = Path(content.member or content.path)
    suffix = path.suffix.lower()
    if suffix == ".aria2":
        return "the notes of aria2 on a download, not the file itself; resume it with `aria2c -c`, then name the file"
    if suffix in UNFINISHED:
        return f"a download that is not finished (its name ends in {path.suffix}); resume it, or fetch the file again"
    if re.search(r"\.data-\d{5}-of-\d{5}$", path.name):
        return f"by its name the data of a TensorFlow checkpoint; {remedy('tensorflow')}"
    if path.parent.name == "data" and path.name.isdigit():
        return "by its place a storage of a torch file that was unpacked; name the folder that holds data.pkl"
    return None


def _noise(content: Content) -> str | None:
    head = bytes(content.buffer[:READ])
    if len(head) < _NOISE:
        return None
    entropy = -sum(count / len(head) * math.log2(count / len(head)) for count in Counter(head).values())
    if entropy < _EVEN:
        return None
    return (
        f"neither a torch file nor safetensors (it starts with {head[:8]!r}), and its bytes look random, as those of"
        " encrypted or packed files do; decrypt or unpack it first, or fetch it again"
    )


def describe_unknown(content: Content) -> str:
    """Return what can be said of a file that no format knows: by its name, by how even its bytes are, or by the first
    few."""
    head = bytes(content.buffer[:8])
    plain = f"neither a torch file nor safetensors (it starts with {head!r}); is it the right file, and is it complete?"
    return _by_name(content) or _zero_head(content) or _noise(content) or plain


_NAMERS: tuple[Callable[[Content], str | None], ...] = (_zeros, name_mangled, _transcoded, _joblib, _signed, _text)
"""In the order in which they are asked."""
