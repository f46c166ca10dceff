"""Copies the bytes of storages into a new file by the shortest way that there is.

A range of a file is copied by the kernel, which moves it from page to page, or shares the blocks where the file system
can. What it refuses (another file system, an old kernel, a system without such calls) goes through one buffer, and so
do bytes that have to be made first: expanded, cast, put in order. The buffer is tried after every failure of the
kernel, so that a full disk and a source that cannot be read are told apart by whoever reads or writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from ckptfix.checkpoint import ByteSource
from ckptfix.formats.sources import BLOCK, FileBytes, located, stream
from ckptfix.progress import Task, tell_slower

if TYPE_CHECKING:
    from concurrent.futures import Executor

CHUNK = 64 << 20
"""Bytes that the kernel is asked for in one go: between two of them progress is told, and a signal heard."""

SMALL = 64 << 10
"""Below so many bytes, a turn through the buffer of the file is cheaper than a call of the kernel for each storage."""


def copy_bytes(source: ByteSource, start: int, stop: int, file: BinaryIO, task: Task) -> None:
    """Write bytes ``start`` to ``stop`` of a source at the end of the file."""
    place = located(source)
    if place is None:
        tell_slower(reason_of(source), stop - start)
    elif stop - start > SMALL and _has_descriptor(file):
        start += _copy_range(place, start, stop, file, task)
    for block in stream(source, start, stop):
        file.write(block)
        task.advance(block.nbytes)


def reason_of(source: ByteSource) -> str:
    """Why the bytes of a source are not a range of a file that can be copied as it is."""
    return _REASONS.get(type(source).__name__, "made while they are read")


_REASONS = {
    "DeflatedBytes": "compressed in the source",
    "SwappedBytes": "turned round from big-endian order",
    "CastBytes": "cast to another dtype",
    "ChunkedBytes": "put together from chunks",
    "RowMajorBytes": "put in row-major order",
    "MemoryBytes": "from memory",
    "LiveBytes": "from memory",
    "TornBytes": "from a damaged storage",
}


def _has_descriptor(file: BinaryIO) -> bool:
    try:
        file.fileno()
    except OSError:  # io.UnsupportedOperation: a file in memory
        return False
    return True


def _copy_range(place: FileBytes, start: int, stop: int, file: BinaryIO, task: Task) -> int:
    """How many bytes the kernel copied; the file stands behind them."""
    file.flush()
    target, done, count = file.tell(), 0, stop - start
    for way in (_share_or_copy, _send):
        try:
            while done < count:
                asked = min(CHUNK, count - done)
                moved = way(place.file.descriptor, file.fileno(), asked, place.offset + start + done)
                if not moved:
                    break  # the file ends here, as the reader of the next byte will say
                done += moved
                task.advance(moved)
            break
        except (OSError, AttributeError) as error:  # a system without the call has no such attribute
            reason = error.strerror if isinstance(error, OSError) else f"{sys.platform} has no copy_file_range"
            tell_slower(f"not copied from page to page ({reason})", count - done)
    file.seek(target + done)
    return done


def _share_or_copy(source: int, goal: int, count: int, offset: int) -> int:
    return os.copy_file_range(source, goal, count, offset)


def _send(source: int, goal: int, count: int, offset: int) -> int:
    return os.sendfile(goal, source, offset, count)


@contextmanager
def background(threads: int = 1) -> Iterator[Executor]:
    """Threads beside this one, for passes whose results are wanted at the end; what they have not begun then is left.

    Reads, checksums, memcmp and flushes run without Python's lock."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Bytes in memory, in the same blocks as ``stream``."""
    for start in range(0, data.nbytes, BLOCK):
        yield data[start : start + BLOCK]
