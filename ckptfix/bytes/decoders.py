"""What takes packed bytes apart: the decoders of the standard library, each within bounds of memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

# Memory that an xz or lzma stream may ask for; the highest preset needs 65 MB. It is all in use at the end.
DICTIONARY_LIMIT = 128 << 20

# What a decoder says of a stream that asks for more memory than that.
TOO_LARGE = "Memory usage limit exceeded"

# What a decoder raises where its stream is damaged.
FAULTS = (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError)

# Makes a decoder with `decompress(packed, limit)` and `eof`, as `bz2.BZ2Decompressor` is one.
Decoder = Callable[[], Any]

deflate: Decoder = partial(zlib.decompressobj, -zlib.MAX_WBITS)
bzip2: Decoder = bz2.BZ2Decompressor
xz: Decoder = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, DICTIONARY_LIMIT)

# Compression methods of zip members (APPNOTE.TXT 4.4.5): those with a decoder here, and what others are called. The
# names that `zipfile` has would bring shutil and much else to a look at a file that is not an archive.
STORED, DEFLATED, BZIP2, LZMA = UNPACKED = 0, 8, 12, 14
METHODS = {
    1: "Shrink",
    6: "Implode",
    9: "Deflate64",
    BZIP2: "bzip2",
    LZMA: "LZMA",
    20: "zstd",
    93: "zstd",
    94: "MP3",
    95: "xz",
    96: "JPEG",
    97: "WavPack",
    98: "PPMd",
}

_ENCRYPTED, _AES = 1, 99
_LZMA_HEAD = 9


class StoredDecoder:
    """The decoder of bytes that were never packed."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self.eof = nbytes == 0
        self.unused_data = self.unconsumed_tail = b""

    def decompress(self, packed: bytes, limit: int) -> bytes:
        """Return the bytes themselves, up to the limit."""
        block, self.unconsumed_tail = packed[:limit], packed[limit:]
        self._left -= len(block)
        self.eof = self._left <= 0
        return block


def why_closed(flags: int, method: int) -> str:
    """Return why a zip member cannot be read whatever its bytes are, as the end of a sentence; nothing if it can."""
    if flags & _ENCRYPTED or method == _AES:
        return "is encrypted; unpack the archive with its password and name the file"
    if method not in UNPACKED:
        return f"is packed by {METHODS.get(method, f'method {method}')}, which ckptfix cannot unpack; unpack it first"
    return ""


def zip_decoder(method: int, packed: int, size: int, head: bytes) -> tuple[Decoder, int]:
    """Return what makes a decoder for a zip member of ``packed`` bytes that begin with ``head``, and how many it has in
    front.

    The dictionary that an LZMA member claims is memory: never more is taken than its ``size`` can make use of
    (APPNOTE.TXT 5.8.8). Raises ``LZMAError`` if its properties are invalid."""
    if method == STORED:
        return partial(StoredDecoder, packed), 0
    if method != LZMA:
        return deflate if method == DEFLATED else bzip2, 0
    if len(head) < _LZMA_HEAD or int.from_bytes(head[2:4], "little") != 5 or head[4] >= 9 * 5 * 5:
        raise lzma.LZMAError("no LZMA properties")
    dictionary = max(4096, min(int.from_bytes(head[5:9], "little"), size))
    if dictionary > DICTIONARY_LIMIT:
        raise lzma.LZMAError(f"it needs a dictionary of {dictionary} bytes; unpack it yourself")
    rest, lc = divmod(head[4], 9)
    pb, lp = divmod(rest, 5)
    if lc + lp > 4:  # liblzma makes no decoder for more
        raise lzma.LZMAError("no LZMA properties")
    one = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
    return partial(lzma.LZMADecompressor, lzma.FORMAT_RAW, None, [one]), _LZMA_HEAD
