"""Damage that can be undone: something before the checkpoint, and a transfer in text mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptfix.bytes.sources import BLOCK, Content, WindowContent
from ckptfix.core.facts import Fact, Kind
from ckptfix.reading.foreign.files import is_chunked

SEARCHED = 1 << 16
"""Bytes at the start of a file in which a checkpoint may begin after something else."""

_ZIP = re.compile(
    rb"PK\x03\x04.{26}[^\0]{0,1024}?(data\.pkl|model\.json|version|constants\.pkl|data/\d|code/)", re.DOTALL
)
_LEGACY = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
_SAFETENSORS = re.compile(rb"(?=(.{6}\0\0)\{\s*\")", re.DOTALL)
_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_MANGLED_LINES = 4
"""Line feeds, all of them after a carriage return, that are no accident."""


@dataclass(frozen=True)
class Undone:
    """The content without the damage, and what the damage is.

    Where it is ``exact``, the undoing is right only if the file is whole then: there is no telling which tensors are.
    """

    content: Content
    cause: Fact
    exact: bool = False


def undo(content: Content) -> Undone | None:
    """Return the content with its damage undone, where it is one of those that can be; None otherwise."""
    if is_chunked(content):
        return None
    if _is_mangled(content):
        whole = bytes(content.buffer[:]).replace(b"\r\n", b"\n")
        return Undone(
            Content(content.path, whole, None, content.member),
            Fact(Kind.CRLF),
            exact=True,
        )
    if bytes(content.buffer[:4]) == _STARTS[0] or bytes(content.buffer[: len(_STARTS[1])]) == _STARTS[1]:
        return None
    if _has_header(content):
        return None  # what begins further on was hung on to a safetensors file
    start = min(_starts(content), default=None)
    if start is None:
        return None
    return Undone(
        WindowContent(content, start, len(content)),
        Fact.of(Kind.PRECEDED, nbytes=start, head=bytes(content.buffer[: min(start, 20)])),
    )


def _has_header(content: Content) -> bool:
    """Return whether the content begins with a header of safetensors that ends where it says."""
    end = 8 + int.from_bytes(content.buffer[:8], "little")
    return bytes(content.buffer[8:9]) == b"{" and end > 9 and bytes(content.buffer[end - 1 : end]) in (b"}", b" ")


def _is_mangled(content: Content) -> bool:
    head = bytes(content.buffer[:SEARCHED])
    if head.count(b"\r\n") < _MANGLED_LINES or _BARE_LINE_FEED.search(head):
        return False
    # Each block begins one byte early, so that it has the carriage return of its first line feed.
    blocks = (bytes(content.buffer[max(0, start - 1) : start + BLOCK]) for start in range(0, len(content), BLOCK))
    return not any(_BARE_LINE_FEED.search(block, 1) for block in blocks)


def _starts(content: Content) -> Iterator[int]:
    """Yield where a checkpoint of any format seems to begin, not at the start itself."""
    head = bytes(content.buffer[: SEARCHED + 64])
    for pattern in (_ZIP, _LEGACY):
        yield from (match.start() for match in pattern.finditer(head) if match.start())
    for match in _SAFETENSORS.finditer(head):
        length = int.from_bytes(match[1], "little")
        end = match.start() + 8 + length
        if match.start() and length >= 2 and bytes(content.buffer[max(end - 1, 0) : end]) in (b"}", b" "):
            yield match.start()
