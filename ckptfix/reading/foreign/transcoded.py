"""Checkpoints that went through something made for text: base64, and a change of encoding.

Where every byte became some letters of its own, that can be undone. Where all bytes that are no text became one and
the same sign, U+FFFD, what they were is gone."""

from __future__ import annotations

import base64
import binascii
import codecs
import re

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.reading.archives.wrapped import looks_like_checkpoint

_HEAD = 512
_EVIDENCE = 16
"""Signs of a changed encoding that are no accident."""

_SEARCHED = 1 << 20
"""Letters in which they are looked for."""

_SCANNED = 64 << 20
"""Bytes from which it is believed that all of a file is UTF-8."""

_UTF8 = codecs.getincrementaldecoder("utf-8")
"""Takes a file that ends in the middle of a letter."""

_BASE64 = re.compile(rb"(data:[\w/.+-]*;base64,)?([A-Za-z0-9+/\s]{64})")
_WINDOWS = {
    ord(letter): code for code in range(0x80, 0xA0) if len(letter := bytes([code]).decode("cp1252", "ignore")) == 1
}
"""The letters that Windows has where Latin-1 has control characters, and the bytes that they were."""


def undo_base64(content: Content) -> bytes | None:
    """The checkpoint that was written as base64; None where the content is none such."""
    match = _BASE64.match(bytes(content.buffer[:256]))
    if match is None or not _is_start(_decoded(bytes(content.buffer[match.start(2) : match.start(2) + _HEAD]))):
        return None
    return _decoded(bytes(content.buffer[match.start(2) :]))


def _decoded(data: bytes) -> bytes | None:
    """The bytes of base64 text, which may be cut short."""
    letters = b"".join(data.split())
    try:
        return base64.b64decode(letters[: len(letters) // 4 * 4], validate=True)
    except binascii.Error:
        return None


def undo_encoding(content: Content) -> bytes | None:
    """The checkpoint whose bytes were taken for Latin-1 or Windows-1252 and saved as UTF-8; None where it is none."""
    if _replaced(content) is None:
        return None
    try:
        text = _UTF8().decode(bytes(content.buffer[:]))
        signs = sum(0x80 <= ord(letter) < 0xA0 or ord(letter) in _WINDOWS for letter in text[:_SEARCHED])
        whole = text.translate(_WINDOWS).encode("latin-1") if signs >= _EVIDENCE else b""
    except UnicodeError:
        return None
    return whole if _is_start(whole[:_HEAD]) else None


def is_beyond_undoing(content: Content) -> bool:
    """Whether bytes of the file became U+FFFD when it was saved as text."""
    return (_replaced(content) or 0) >= _EVIDENCE


def _replaced(content: Content) -> int | None:
    """How often U+FFFD stands in a file that is UTF-8 and not ASCII alone, as far as is looked; None for any other."""
    decoder, signs, is_ascii = _UTF8(), 0, True
    for start in range(0, min(len(content), _SCANNED), BLOCK):
        block = bytes(content.buffer[start : start + BLOCK])
        try:
            signs += decoder.decode(block).count("\ufffd")
        except UnicodeDecodeError:
            return None
        is_ascii = is_ascii and block.isascii()
    return None if is_ascii else signs


def _is_start(head: bytes | None) -> bool:
    return head is not None and looks_like_checkpoint(head)
