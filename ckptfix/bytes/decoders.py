"""Decoders of compressed bytes from the standard library, each with a limit on its memory."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

# Bytes of memory that an xz or LZMA stream may ask for; the highest preset needs 65 MB.
DICTIONARY_LIMIT = 128 << 20

# The message of liblzma for a stream that asks for more memory than that.
TOO_LARGE = "Memory usage limit exceeded"

# The errors that decoders raise for a damaged stream.
FAULTS = (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError)

# Creates a decoder with `decompress(packed, limit)` and `eof`, like `bz2.BZ2Decompressor`.
Decoder = Callable[[], Any]

deflate: Decoder = partial(zlib.decompressobj, -zlib.MAX_WBITS)
bzip2: Decoder = bz2.BZ2Decompressor
xz: Decoder = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, DICTIONARY_LIMIT)

# Compression methods of zip members (APPNOTE.TXT 4.4.5): those with a decoder here, and the names of others. Importing
# the constants of `zipfile` would load shutil and more even for files that are not archives.
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
    """A decoder of bytes that are stored uncompressed."""

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
    """Return why a zip member with these flags and method cannot be read, as the end of a sentence; empty if it can."""
    if flags & _ENCRYPTED or method == _AES:
        return "is encrypted; unpack the archive with its password and name the file"
    if method not in UNPACKED:
        return f"is packed by {METHODS.get(method, f'method {method}')}, which ckptfix cannot unpack; unpack it first"
    return ""


def zip_decoder(method: int, packed: int, size: int, head: bytes) -> tuple[Decoder, int]:
    """Return the decoder of a zip member of ``packed`` bytes that begins with ``head``, and the size of its own header.

    An LZMA member claims memory for its dictionary: never more is allocated than its unpacked ``size`` can use
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
    if lc + lp > 4:  # liblzma supports no more
        raise lzma.LZMAError("no LZMA properties")
    one = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
    return partial(lzma.LZMADecompressor, lzma.FORMAT_RAW, None, [one]), _LZMA_HEAD
