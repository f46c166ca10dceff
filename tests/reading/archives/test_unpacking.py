"""Compressed streams that end early or fail: every byte that a decoder can produce is returned."""

import bz2
import lzma
import random
import zlib
from collections.abc import Callable

import pytest

from ckptfix.bytes import decoders
from ckptfix.bytes.sources import Content
from ckptfix.reading.archives import unpacking
from ckptfix.reading.archives.unpacking import Stream

RAW = random.Random(1).randbytes(3000) + bytes(500) + random.Random(2).randbytes(3000)


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, tuple[Callable[[bytes], bytes], decoders.Decoder]] = {
    "deflate": (deflated, decoders.deflate),
    "bzip2": (bz2.compress, decoders.bzip2),
    "xz": (lzma.compress, decoders.xz),
}


def expanded(packed: bytes, make: decoders.Decoder) -> tuple[Stream, bytes]:
    stream = Stream(Content("f", packed), 0, len(packed), make)
    return stream, b"".join(block for block, _ in stream.blocks())


@pytest.mark.parametrize("name", PACKERS)
def test_noop_a_whole_stream(name: str) -> None:
    pack, make = PACKERS[name]
    stream, out = expanded(pack(RAW) + b"what follows", make)
    assert (stream.ended, stream.fault, out) == (True, "", RAW)
    assert stream.position == len(pack(RAW))


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("chunk", [64 << 10, 100])
def test_a_cut_stream_gives_its_beginning(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_PACKED", chunk)
    pack, make = PACKERS[name]
    packed = pack(RAW)
    for cut in range(0, len(packed), 501):
        stream, out = expanded(packed[:cut], make)
        assert (stream.ended, stream.fault) == (False, "")
        assert RAW.startswith(out)
        assert len(out) > cut - 800 or name == "bzip2", "bzip2 gives whole blocks"


@pytest.mark.parametrize(("name", "place"), [("xz", -30), ("bzip2", -3)])
def test_a_wrong_checksum_after_the_bytes_costs_the_last_block(name: str, place: int) -> None:
    """A failing decoder returns nothing from that call."""
    pack, make = PACKERS[name]
    packed = bytearray(pack(RAW))
    packed[place] ^= 1
    stream, out = expanded(bytes(packed), make)
    assert stream.fault
    assert RAW.startswith(out)
    assert len(RAW) - len(out) <= unpacking._EXPANDED


@pytest.mark.parametrize("name", PACKERS)
def test_a_fault_in_the_middle_gives_the_bytes_before_it(name: str) -> None:
    pack, make = PACKERS[name]
    packed = pack(RAW)
    stream, out = expanded(packed[: len(packed) // 2] + bytes(100) + b"\xff" * 100, make)
    assert not stream.ended
    assert out[:1000] == RAW[:1000] if name != "bzip2" else not out


def test_blocks_are_of_bounded_size() -> None:
    stream = Stream(Content("f", lzma.compress(bytes(1 << 20))), 0, 1 << 20, decoders.xz)
    assert max(len(block) for block, _ in stream.blocks()) == unpacking._EXPANDED
