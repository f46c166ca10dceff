"""Ranges of files as memory, without a copy: for the compiled passes, and for torch.

A file is mapped privately: its bytes are those of the page cache and are read when they are looked at, and what is
written goes to a page of the process's own and never into the file. The mapping holds on to the file, so that its
removal, or a new file under its name, changes nothing. Nobody can guard against a file that is written in place while
a tensor of it lives: values change with it, and a look behind its new end kills the process (SIGBUS). So it is after
``torch.load(mmap=True)`` too, and so nothing is mapped for longer than a load takes unless it was asked for."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import located
from ckptfix.core.regions import Region
from ckptfix.core.spec import ByteSource

if TYPE_CHECKING:
    import torch

HUGE_PAGE = 1 << 21
"""A mapping from one multiple to another can have pages of this size where the cache has: they appear all at once."""

WORTH_MAPPING = 1 << 18
"""Bytes from which on a mapping takes less time than a copy."""

WORTH_A_THREAD = 1 << 26
"""Bytes of a mapping from which on it takes longer to let go of its pages than to have a thread do it."""

_KEPT: WeakKeyDictionary[OpenFile, mmap.mmap | None] = WeakKeyDictionary()
_keepers = 0
_lock = Lock()


@contextmanager
def kept_mapped(stays: bool = False) -> Iterator[None]:
    """Files that are mapped in the body are mapped as a whole, and stay so to its end.

    For bytes that are looked at more than once: the first look at each page of a mapping costs as much as its reading.
    Behind the body nothing may be left of what was written to a mapping, unless it ``stays`` in use.
    """
    global _keepers  # threads that look at parts of a file ask for it too, so no variable of a context will do
    with _lock:
        _keepers += 1
    try:
        yield
    finally:
        with _lock:
            _keepers -= 1
            gone = list(filter(None, _KEPT.values())) if not _keepers else []
            if not _keepers:
                _KEPT.clear()
        if not stays and (large := [whole for whole in gone if len(whole) >= WORTH_A_THREAD]):
            Thread(target=_empty, args=(large,), name="ckptfix-unmapping").start()


def _empty(mappings: Sequence[mmap.mmap]) -> None:
    """Take away the pages of mapped files, which of a gigabyte takes ten milliseconds. To let go of the mappings would
    do it too, and would keep Python's lock for as long; and a program waits for neither."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and sys.platform == "linux":  # elsewhere the advice means something else
        for whole in mappings:
            place = ctypes.c_char.from_buffer(whole)
            madvise(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(whole)), mmap.MADV_DONTNEED)


def _whole(file: OpenFile, access: int) -> mmap.mmap | None:
    """All of a file; None where a file system or a limit of the system is against it. Kept where that was asked for."""
    with _lock:
        if file in _KEPT:
            return _KEPT[file]
        try:
            found = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_COPY if _keepers else access)
        except (OSError, ValueError):
            found = None
        if _keepers:
            _KEPT[file] = found
        return found


def map_file(source: ByteSource, start: int, nbytes: int, alignment: int) -> memoryview | None:
    """Bytes of a source, mapped until the last view of them is gone; None where they lie in no file, or not aligned.

    Whoever looks at them dies if the file shrinks, all but the compiled library."""
    place = located(source)
    if place is None or start + nbytes > place.nbytes or (place.offset + start) % alignment:
        return None
    first = place.offset + start
    if _keepers:
        whole = _whole(place.file, mmap.ACCESS_COPY)
        block = memoryview(whole or b"")[first : first + nbytes]
        return block if block.nbytes == nbytes else None
    begin = first - first % HUGE_PAGE
    end = min(-(-(first + nbytes) // HUGE_PAGE) * HUGE_PAGE, place.file.size)
    if end < first + nbytes:
        return None  # the file has shrunk: whoever reads it says so
    try:
        mapping = mmap.mmap(place.file.descriptor, end - begin, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError):  # no file system that maps, or the file has become too short
        return None
    block = memoryview(mapping)[first - begin : first - begin + nbytes]
    return block if block.nbytes == nbytes else None


class Mapping:
    """The files that a set of tensors lies in, each mapped as a whole when the first of them is asked for.

    With ``mmap.ACCESS_READ``, for ``block`` alone, no system refuses a file for being larger than its memory."""

    def __init__(self, access: int = mmap.ACCESS_COPY) -> None:
        self._access = access
        self._maps: dict[OpenFile, mmap.mmap | None] = {}
        self._addresses: dict[mmap.mmap, int] = {}

    def storage(self, region: Region) -> torch.UntypedStorage | None:
        """The bytes of a region; None where they are no range of a file, or lie where their elements cannot be."""
        import torch

        found = self._place(region.storage.source, region.start, region.nbytes)
        if found is None or found[1] % region.align:
            return None
        whole, start = found
        return torch.frombuffer(whole, dtype=torch.uint8, count=region.nbytes, offset=start).untyped_storage()

    def block(self, source: ByteSource, start: int, nbytes: int, alignment: int) -> memoryview | None:
        """The same as ``map_file``: of many ranges that are not large, mapping each takes longer than a look at it."""
        found = self._place(source, start, nbytes)
        if found is None or found[1] % alignment:
            return None
        whole, place = found
        return memoryview(whole)[place : place + nbytes]

    def address(self, source: ByteSource, start: int, nbytes: int) -> int | None:
        """Where bytes of a source are in memory, as long as the mapping is there; None where they lie in no file.

        The compiled library alone may look at them."""
        found = self._place(source, start, nbytes)
        if found is None:
            return None
        whole, place = found
        if whole not in self._addresses:
            self._addresses[whole] = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        return self._addresses[whole] + place

    def _place(self, source: ByteSource, start: int, nbytes: int) -> tuple[mmap.mmap, int] | None:
        """The mapped file that some bytes of a source lie in, and where in it."""
        place = located(source)
        if place is None or not nbytes or start + nbytes > place.nbytes:
            return None
        if place.file not in self._maps:
            self._maps[place.file] = _whole(place.file, self._access)
        whole, begin = self._maps[place.file], place.offset + start
        # Of a file that ends too early, the reader says so.
        return None if whole is None or begin + nbytes > len(whole) else (whole, begin)
