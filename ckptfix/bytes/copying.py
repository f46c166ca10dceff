"""Copies the bytes of storages into a new file by the shortest way that there is.

A range of a file that lies in its pages as it will lie in the new file's is copied by the kernel, which moves it from
page to page, or shares the blocks where the file system can. All else goes through one window of the new file, which
holds many small storages and what lies between them: ranges that lie differently, which the kernel would split at every
page, what it refuses (another file system, an old kernel), and bytes that have to be made first: expanded, cast, put in
order. The window is tried after every failure of the kernel, so that a full disk and a source that cannot be read are
told apart by whoever reads or writes.

What was copied is read back at once, while it is in the processor's cache, which costs less than later; and the disk
begins to take up the new file while it grows, so that the flush at the end waits for little."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from ckptfix.bytes.appending import Appender, Copied
from ckptfix.bytes.crc32 import crc32
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import BLOCK, FileBytes, located, stream
from ckptfix.core.progress import Task, tell_slower
from ckptfix.core.spec import ByteSource

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

PAGE = 4096
"""Bytes of a page: what begins at the same place in a page on both sides is copied without splitting any."""

LARGE = 1 << 20
"""Bytes from which a range is worth up to a page of padding, that it may lie in its pages as before."""

T = TypeVar("T")

CHUNK = 64 << 20
"""Bytes of a file that the kernel may be asked for in one go: between two of them progress is told, a signal heard."""

FLUSHED = 64 << 20
"""Bytes after which the disk is to take up the file: fewer are as fast in one go at the end."""

SMALL = 64 << 10
"""Up to so many bytes, a part of a window is cheaper than calls of the kernel for the storage alone."""

_FLUSH = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


def _flush(descriptor: int) -> None:
    try:
        _FLUSH(descriptor)
    finally:
        os.close(descriptor)


class Copier(Appender):
    """Appends storages to a file, and what is around them. What the disk takes up meanwhile, and its errors, ``wait``
    waits for.
    """

    def __init__(self, file: BinaryIO, task: Task) -> None:
        super().__init__(file)
        self._task = task
        self._flusher: Executor | None = None
        self._flush: Future[None] | None = None
        self._unflushed = 0

    def __exit__(self, raised: type[BaseException] | None, *more: object) -> None:
        try:
            super().__exit__(raised, *more)
        finally:
            if self._flusher is not None:
                self._flusher.shutdown(wait=raised is not None)

    def wait(self) -> None:
        """Wait until the disk has what it began to take up; the file may be closed. Raises ``OSError`` of the disk."""
        if self._flush is not None:
            self._flush.result()

    def copy(self, source: ByteSource, start: int, stop: int, is_summed: bool = False) -> int:
        """Write bytes ``start`` to ``stop`` of a source. Gives their CRC-32 if it is asked for: they are at hand here,
        and need not be read once more.
        """
        place = located(source)
        if place is not None:
            return self._copy_range(place.file, place.offset + start, stop - start, is_summed)
        tell_slower(reason_of(source), stop - start)
        crc = 0
        for block in stream(source, start, stop):
            self.write_block(block)
            crc = crc32(block, crc) if is_summed else crc
        return crc

    def write_block(self, block: memoryview) -> None:
        """Write bytes of a storage that were made."""
        self.write(block.cast("B"))
        self._advance(block.nbytes)

    def _copy_range(self, file: OpenFile, offset: int, nbytes: int, is_summed: bool) -> int:
        begin, done, crc = self.tell(), 0, 0
        goal = None  # the file for the kernel, as long as it copies
        if nbytes > SMALL and (begin - offset) % PAGE == 0:
            self._end_window()
            goal = self._descriptor
        elif nbytes >= LARGE:  # of fewer bytes, a padding would cost more than it gains
            tell_slower("moved within their pages", nbytes)
        if self._is_readable:
            self._ranges.append(Copied(file, offset, nbytes, begin))
        while done < nbytes:
            count = min(self._room, nbytes - done)
            if goal is not None:
                moved = _by_kernel(goal, FileBytes(file, offset + done, nbytes - done), count)
                goal, count = (goal, moved) if moved else (None, count)
            if goal is None or self._is_readable or is_summed:
                block = self._space(count)
                file.fill(block, offset + done)
                crc = crc32(block, crc) if is_summed else crc
            self._add(count, is_in_file=goal is not None)
            self._advance(count)
            done += count
        return crc

    def _advance(self, nbytes: int) -> None:
        self._task.advance(nbytes)
        self._unflushed += nbytes
        if self._unflushed >= FLUSHED and self._descriptor is not None:
            self._flush_early(self._descriptor)

    def _flush_early(self, descriptor: int) -> None:
        """Let the disk take up what is written, unless it still does."""
        if self._flush is not None:
            if not self._flush.done():
                return
            self._flush.result()
        if self._flusher is None:
            from concurrent.futures import ThreadPoolExecutor

            self._flusher = ThreadPoolExecutor(1)
        self._flush, self._unflushed = self._flusher.submit(_flush, os.dup(descriptor)), 0


def _by_kernel(goal: int, rest: FileBytes, count: int) -> int:
    """How many bytes the kernel copied to where the descriptor stands: none where it refuses, or the source ends."""
    try:
        return os.copy_file_range(rest.file.descriptor, goal, count, rest.offset)
    except (OSError, AttributeError) as error:  # a system without the call has no such attribute
        reason = error.strerror if isinstance(error, OSError) else f"{sys.platform} has no copy_file_range"
        tell_slower(f"not copied from page to page ({reason})", rest.nbytes)
        return 0


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


@contextmanager
def background(threads: int = 1) -> Iterator[Executor]:
    """Threads beside this one, for passes whose results are wanted at the end; what they have not begun then is left.

    Reads, checksums, memcmp and flushes run without Python's lock."""
    from concurrent.futures import ThreadPoolExecutor

    if _alone.get():
        yield _at_once()
        return
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def without_threads() -> Iterator[None]:
    """Do in this thread what ``background`` would do beside it: for files so small that a thread costs more."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@cache
def _at_once() -> Executor:
    from concurrent.futures import Executor, Future

    class AtOnce(Executor):
        """Does what it is given before it gives anything back."""

        def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
            future: Future[T] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for, as by a thread
                future.set_exception(error)
            return future

        def map(
            self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
        ) -> Iterator[T]:
            return map(fn, *iterables)

    return AtOnce()


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Bytes in memory, in the same blocks as ``stream``."""
    for start in range(0, data.nbytes, BLOCK):
        yield data[start : start + BLOCK]
