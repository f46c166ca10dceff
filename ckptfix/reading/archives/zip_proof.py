"""Which of several claims about a member of a damaged zip archive is true: the one whose checksum the bytes have."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass

from ckptfix.bytes.decoders import zip_decoder
from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.streams import Stream

_LOOK = 1 << 13
"""Bytes that a look at a claim counts as, beside those that are looked at."""


@dataclass(frozen=True)
class Claim:
    """What somebody says of a member: where its data begins, and what of it."""

    start: int
    method: int
    crc: int
    packed: int
    size: int
    culprit: str
    """What is damaged if this one is right."""


class Proof:
    """Proves claims about the members of one archive, as long as that does not take too many bytes."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._budget = 4 * len(content) + (64 << 20)
        """Bytes, packed and expanded, that may be gone through to tell who is right."""

    def holds(self, claim: Claim) -> bool:
        """Whether the bytes have the checksum. A member without one, as torch can write it, is never proved."""
        if not claim.crc or claim.start < 0 or claim.start + claim.packed > len(self._content):
            return False
        if claim.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return False
        self._budget -= claim.packed + _LOOK
        if self._budget <= 0:
            return False
        decoder, _ = zip_decoder(claim.method, claim.packed, claim.size, b"")
        stream = Stream(self._content, claim.start, claim.start + claim.packed, decoder)
        crc = 0
        for block, _ in stream.blocks(rescue=False):
            crc = zlib.crc32(block, crc)
            self._budget -= len(block)
            if self._budget <= 0 or stream.expanded > claim.size:
                return False
        return stream.ended and crc == claim.crc and stream.expanded == claim.size
