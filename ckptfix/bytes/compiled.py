"""The compiled library, where it was built and the processor is able to run it: see ``kernel/kernel.c``.

The library knows nothing of Python, so one build serves every version. Calls run without Python's lock, side by side. A
file that is mapped may be handed to it: where the file shrinks meanwhile, the call ends with ``MemoryGone`` instead of
the process with a signal.
"""

from __future__ import annotations

import ctypes
from functools import cache
from mmap import mmap
from pathlib import Path

LIBRARY = Path(__file__).parent / "kernel" / "_kernel.so"

INTERFACE = 5
"""As in ``kernel.c``. A library of another interface was built from other sources, and is not used."""


SHA256_SIZE = 32
"""Bytes of a digest."""


class MemoryGone(Exception):
    """The mapped file has become shorter, or cannot be read."""


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where none was built, or none that this machine can run."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:  # there is none, or it was built for another machine
        return None
    if found.ckptfix_interface() != INTERFACE or not found.ckptfix_guard():
        return None
    found.ckptfix_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    found.ckptfix_crc32.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint32))
    found.ckptfix_sha256_of_two.argtypes = (
        ctypes.c_void_p * 2,
        ctypes.c_size_t * 2,
        ctypes.c_char * (2 * SHA256_SIZE),
    )
    return found


@cache
def can_sum() -> bool:
    """Whether it can work out checksums here: an older processor lacks the instruction, and other ways are as fast."""
    found = library()
    return found is not None and bool(found.ckptfix_is_summing())


def crc32_of_mapped(block: memoryview, crc: int = 0) -> int:
    """The CRC-32 of zip, gone on with over a mapped range of a file, where ``can_sum()`` holds."""
    found, result = library(), ctypes.c_uint32(crc)
    assert found is not None, "there is no library"
    if found.ckptfix_crc32((ctypes.c_char * block.nbytes).from_buffer(block), block.nbytes, result):
        raise MemoryGone
    return result.value


def copy(goal: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another, past the processor's caches, where ``library()`` is there. They share
    none. Raises ``MemoryGone`` with a part of them copied."""
    found = library()
    assert found is not None, "there is no library"
    if found.ckptfix_copy(goal, source, nbytes):
        raise MemoryGone


@cache
def can_hash() -> bool:
    """Whether it can work out SHA-256 here."""
    found = library()
    return found is not None and bool(found.ckptfix_is_hashing())


def sha256_of_two_mapped(one: mmap, other: mmap) -> tuple[str, str]:
    """The SHA-256 of two mapped files, in hex, where ``can_hash()`` holds: in little more time than one of them takes.

    They are mapped with ``ACCESS_COPY``. Raises ``MemoryGone``."""
    found, digests = library(), (ctypes.c_char * (2 * SHA256_SIZE))()
    assert found is not None, "there is no library"
    views = [ctypes.c_char.from_buffer(each) for each in (one, other)]
    places = (ctypes.c_void_p * 2)(*map(ctypes.addressof, views))
    if found.ckptfix_sha256_of_two(places, (ctypes.c_size_t * 2)(len(one), len(other)), digests):
        raise MemoryGone
    return digests.raw[:SHA256_SIZE].hex(), digests.raw[SHA256_SIZE:].hex()
