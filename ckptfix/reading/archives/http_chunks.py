"""The body of an HTTP answer as it was sent: in chunks, the size of each in front of it (RFC 9112, section 7.1).

Whoever writes a socket to a file without a client of HTTP, or stores what a proxy recorded, has the sizes in the file,
and perhaps the headers of the answer too. Without them it is what was to be sent."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.core.facts import Fact, Kind

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]{0,200})?\r\n")
_LINE, _HEADERS = 256, 1 << 16
_ANSWER = b"HTTP/"


def may_be_chunked(head: bytes) -> bool:
    """Whether a file that begins so may be an answer in chunks."""
    return head.startswith(_ANSWER) or _SIZE.match(head) is not None


def first_chunk(content: Content) -> tuple[int, int] | None:
    """Where the first chunk begins and what its size is; None where the content is no answer in chunks.

    What is in the chunk is for the caller to judge: four letters in front of a line's end may be an accident."""
    start = 0
    if bytes(content.buffer[: len(_ANSWER)]) == _ANSWER:
        start = content.buffer.find(b"\r\n\r\n", 0, _HEADERS) + 4
        if start < 4:
            return None
    return _chunk(content, start)


def _chunk(content: Content, start: int) -> tuple[int, int] | None:
    """Where the bytes of the chunk begin whose size stands at ``start``, and their count."""
    line = _SIZE.match(bytes(content.buffer[start : start + _LINE]))
    return (start + line.end(), int(line[1], 16)) if line else None


def blocks(content: Content, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
    """What is in the chunks, in blocks, each with the count of bytes taken so far."""
    damage.append(Fact(Kind.HTTP_CHUNKS))
    chunk, total, end = first_chunk(content), 0, len(content)
    while chunk is not None and chunk[1]:
        start, size = chunk
        for at in range(start, min(start + size, end), BLOCK):
            block = bytes(content.buffer[at : min(at + BLOCK, start + size, end)])
            total += len(block)
            yield block, at + len(block)
        stop = start + size
        is_closed = bytes(content.buffer[stop : stop + 2]) == b"\r\n"
        chunk = _chunk(content, stop + 2) if is_closed else None
    if chunk is None:
        damage.append(Fact.of(Kind.HTTP_CUT, there=total))
