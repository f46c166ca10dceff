"""Copies the bytes of storages into a new file by the shortest way that there is.

A range of a file that has the same place in its pages as it will have in the new file is copied by the kernel, which
moves it from page to page, or shares the blocks if the file system can. All else goes through one window of the new
file, which holds many small storages and what is between them: ranges that are placed differently, which the kernel
would split at every page, what it refuses (another file system, an old kernel), and bytes that have to be made first:
expanded, cast, put in order. The window is tried after every failure of the kernel, so that the error of a full disk or
of a source that cannot be read is that of the write or the read.

What was copied is read back at once, while it is in the processor's cache: a repair takes 10 to 25 % longer if that
happens later."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from ckptfix.bytes.checksums import Passing, crc32
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import FileBytes, located, ranges_of, stream
from ckptfix.bytes.threads import background
from ckptfix.core.progress import Task
from ckptfix.core.spec import ByteSource

if TYPE_CHECKING:
    from concurrent.futures import Executor

WINDOW = 512 << 10  # bytes that are written, and read back, at a time: few enough to be in the processor's cache still

# Calls that write end at multiples of this. The system keeps the pages of one call side by side in memory: of fewer it
# makes more pieces, and for more it has to search, on virtual machines even to ask the host. With 256 KiB, the merge of
# an adapter takes 7 % less with memory at hand, and ranks of 3 GB half as long again without.
EDGE = 64 << 10
PAGE = 4096  # bytes of a page: what begins at the same place in a page on both sides is copied without splitting any
LARGE = 1 << 20  # bytes from which a range is worth up to a page of padding, so that it keeps its place in its pages

# Bytes of a file to copy in one call of the kernel: progress is shown and signals are handled between calls.
CHUNK = 64 << 20
FLUSHED = 64 << 20  # bytes of a new file after which the disk is to begin with them
SMALL = 64 << 10  # up to this size, a part of a window is cheaper than calls of the kernel for the storage by itself

# Windows to use again: fresh memory for each file would take as long as all calls that read it back.
_BUFFERS: deque[tuple[bytearray, bytearray]] = deque(maxlen=2)


class Copied(NamedTuple):
    """A range of a file, or of a source that makes its bytes, that was copied, and was equal when it was read back from
    ``start`` of the new file on."""

    source: OpenFile | ByteSource
    offset: int
    nbytes: int
    start: int


class Copier:
    """Appends storages to a file, and what is around them, as a context; at its end, the file has all of it.

    What is copied is read back with the window that it is in, and is in ``copied`` if it is equal. ``passing`` takes
    in what passes of storages that are to be proved."""

    _begin: int  # of the window in the file
    _filled: int
    _room: int
    _flusher: Executor | None  # a thread that tells the disk to begin

    def __init__(self, file: BinaryIO, task: Task | None = None, passing: Passing | None = None) -> None:
        self.copied: list[Copied] = []
        self._file, self._passing = file, passing or Passing(())
        file.flush()
        self._descriptor = _descriptor(file)
        self._is_readable = self._descriptor is not None and file.readable()
        try:
            self._window, self._written = _BUFFERS.pop()
        except IndexError:
            self._window, self._written = bytearray(WINDOW), bytearray(WINDOW)
        self._view = memoryview(self._window)
        self._ranges: list[Copied] = []  # those in the window, the last one perhaps in part
        self._threads, self._flusher = ExitStack(), None
        self._begin_at(file.tell())
        self._task = task or Task("", 0)
        if self._descriptor is not None and self._task.total >= FLUSHED:
            _set_aside(self._descriptor, self._task.total)

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        with self._threads:
            if raised is None:
                self.seek(self.tell())
        _BUFFERS.append((self._window, self._written))

    def tell(self) -> int:
        """Return where the next byte goes."""
        return self._begin + self._filled

    def seek(self, position: int) -> None:
        """Go to another place of the file."""
        self._end_window()
        self._file.seek(position)
        self._begin_at(position)

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes that are in memory; from there, if they are enough for a window of their own."""
        rest = memoryview(data)
        while rest:
            if self._filled and len(rest) >= WINDOW:  # the next one begins at an edge
                self._room = min(self._room, EDGE - self.tell() % EDGE)
            part = rest[: self._room]
            if not self._filled and len(part) >= WINDOW // 2:
                part = part[: len(part) - (self._begin + len(part)) % EDGE]
                self._filled = len(part)
                self._end_window(part)
            else:
                self._space(len(part))[:] = part
                self._add(len(part))
            rest = rest[len(part) :]

    def write_block(self, block: memoryview) -> None:
        """Write bytes of a storage that were made."""
        self.write(block.cast("B"))
        self._task.advance(block.nbytes)

    def copy(self, source: ByteSource, start: int, stop: int, is_summed: bool = False) -> int:
        """Write bytes ``start`` to ``stop`` of a source, and return their CRC-32 if it is asked for: they are in the
        cache here, and need not be read once more."""
        place, crc = located(source), 0
        whole, offset = (source, start) if place is None else (place.file, place.offset + start)
        if self._is_readable:
            self._ranges.append(Copied(whole, offset, stop - start, self.tell()))
        if ranges := ranges_of(source, start, stop):
            for each in ranges:
                crc = self._copy_range(each.file, each.offset, each.nbytes, is_summed, crc)
            return crc
        # What is computed in pieces is put into the window as it comes.
        made = source.pieces(start, stop) if hasattr(source, "pieces") else stream(source, start, stop)
        for block in made:
            self.write_block(block)
            crc = crc32(block, crc) if is_summed else crc
            self._passing.take(whole, offset, block)
            offset += block.nbytes
        return crc

    def _copy_range(self, file: OpenFile, offset: int, nbytes: int, is_summed: bool, crc: int) -> int:
        begin, done = self.tell(), 0
        goal = None  # the file for the kernel, as long as it copies
        if nbytes > SMALL and (begin - offset) % PAGE == 0 and not file.is_remote:
            self._end_window()
            goal = self._descriptor
        while done < nbytes:
            count = min(self._room, nbytes - done)
            if goal is not None:
                moved = _by_kernel(goal, FileBytes(file, offset + done, nbytes - done), count)
                goal, count = (goal, moved) if moved else (None, count)
            if goal is None or self._is_readable or is_summed:
                block = self._space(count)
                file.fill(block, offset + done)
                crc = crc32(block, crc) if is_summed else crc
                self._passing.take(file, offset + done, block)
            self._add(count, is_in_file=goal is not None)
            self._task.advance(count)
            done += count
        return crc

    # The window: what comes from ``_begin`` of the file on
    # ------------------------------------------------------------------------------------------------------------------

    def _begin_at(self, position: int) -> None:
        """Begin an empty window, which will be full at an edge of the file."""
        self._begin, self._filled, self._room = position, 0, WINDOW - position % EDGE

    def _space(self, count: int) -> memoryview:
        """Return where the next bytes go, at most as many as there is room for."""
        return self._view[self._filled : self._filled + count]

    def _add(self, count: int, is_in_file: bool = False) -> None:
        """Count bytes that were put into the window; if the file has them already, they are the only ones."""
        self._filled += count
        self._room -= count
        if is_in_file or not self._room:
            self._end_window(is_in_file=is_in_file)

    def _end_window(self, made: memoryview | None = None, is_in_file: bool = False) -> None:
        """Write what is in the window, or ``made`` in its place, unless the file has it, compare it with the file, and
        begin the next one."""
        if not self._filled:
            return
        window = self._view[: self._filled] if made is None else made
        if not is_in_file:
            self._write_window(window)
        end = self.tell()
        if self._ranges:
            last = self._ranges[-1]
            ended = len(self._ranges) - (last.start + last.nbytes > end)
            if self._reads_back(window):
                self.copied += self._ranges[:ended]
                del self._ranges[:ended]
            else:
                self._ranges.clear()
        start = self._begin // FLUSHED * FLUSHED
        if start + FLUSHED <= end and self._descriptor is not None and hasattr(os, "posix_fadvise"):  # macOS has none
            # Let the disk begin with these bytes: a repair of 1 GB takes 13 to 16 % longer if all of them are left for
            # the end. Linux begins to write what it is told to forget, and keeps it as long as it is not written. The
            # call waits for the disk now and then: in this thread, a rename of all keys of 1.7 GB takes 10 % longer.
            if self._flusher is None:
                self._flusher = self._threads.enter_context(background())
            self._flusher.submit(os.posix_fadvise, self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
        self._begin_at(end)

    def _write_window(self, window: memoryview) -> None:
        done = 0
        if self._descriptor is None:
            self._file.write(window)
            return
        while done < self._filled:
            done += os.write(self._descriptor, window[done : done + EDGE - (self._begin + done) % EDGE])

    def _reads_back(self, window: memoryview) -> bool:
        assert self._descriptor is not None, "a file was read back that cannot be"
        count, done = self._filled, 0
        while done < count:
            read = os.preadv(self._descriptor, [memoryview(self._written)[done:count]], self._begin + done)
            if not read:
                return False
            done += read
        return self._written.startswith(window)  # by memcmp, without a copy


def _descriptor(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except OSError:  # io.UnsupportedOperation: a file in memory
        return None


def _set_aside(descriptor: int, nbytes: int) -> None:
    """Have the file system choose the blocks of a new file at once, if it can, and not while it writes them.

    A repair takes 5 % less time then. Where it cannot, ``os.posix_fallocate`` would write into every block."""
    if sys.platform == "linux":
        from ctypes import CDLL, c_long

        CDLL(None).fallocate(descriptor, _KEEP_SIZE, c_long(0), c_long(nbytes))


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the file stays as long as what was written


def _by_kernel(goal: int, rest: FileBytes, count: int) -> int:
    """Return how many bytes the kernel copied to the descriptor: none if it refuses or the source ends."""
    file = rest.file.opened()
    try:
        return os.copy_file_range(file.descriptor, goal, count, rest.offset)
    except (OSError, AttributeError):  # a system without the call has no such attribute
        return 0
