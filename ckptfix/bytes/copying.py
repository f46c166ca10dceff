"""Copies the bytes of storages into a new file in the fastest way available.

A range of a file whose offset within a page stays the same is copied by the kernel (``copy_file_range``), which copies
whole pages or shares blocks if the file system can. Everything else goes through a buffer, the window, which holds many
small storages and what is between them: ranges that move within a page, which the kernel would split at every page,
ranges that the kernel refuses (another file system, an old kernel), and bytes that are computed: unpacked, cast,
reordered. After any failure of the kernel the window is used, so a full disk or an unreadable source raises the error
of the write or the read.

Copied bytes are read back at once, while they are in the processor's cache: a repair takes 10 to 25 % longer if they
are read back later."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from ckptfix.bytes.checksums import Verifier, crc32
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import FileBytes, located, ranges_of, stream
from ckptfix.bytes.threads import background
from ckptfix.core.progress import Task
from ckptfix.core.spec import ByteSource

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

WINDOW = 512 << 10  # bytes that are written and read back at a time: they stay in the processor's cache

# Calls that write end at multiples of this. The system keeps the pages of one call contiguous in memory: smaller calls
# make more pieces; for larger ones it has to search, on virtual machines even to ask the host. With 256 KiB, merging an
# adapter takes 7 % less time if memory is free, and merging ranks of 3 GB takes half as long again if it is not.
EDGE = 64 << 10
PAGE = 4096  # bytes of a page: ranges with the same offset within a page are copied page by page
LARGE = 1 << 20  # bytes from which a range is worth up to a page of padding to keep its offset within a page

# Bytes of a file to copy in one call of the kernel: progress is shown and signals are handled between calls.
CHUNK = 64 << 20
FLUSHED = 64 << 20  # bytes of a new file after which they are flushed to disk
SMALL = 64 << 10  # up to this size, the window is cheaper than calls of the kernel for a single storage

# Windows for reuse: allocating them for each file would take as long as reading it back.
_BUFFERS: deque[tuple[bytearray, bytearray]] = deque(maxlen=2)


class Copied(NamedTuple):
    """A copied range of a file, or of a source that computes its bytes, that was equal when read back from position
    ``start`` of the new file."""

    source: OpenFile | ByteSource
    offset: int
    nbytes: int
    start: int


class Copier:
    """A writer of storages and the bytes between them to a file, as a context; at its end, everything is written.

    Copied ranges are read back with their window, and listed in ``copied`` if they are equal. ``verifier`` receives the
    bytes of storages that are to be verified."""

    _begin: int  # position of the window in the file
    _filled: int
    _room: int
    _flusher: Executor | None  # a thread that flushes the file to disk
    _flush: Future[None] | None  # its latest flush

    def __init__(self, file: BinaryIO, task: Task | None = None, verifier: Verifier | None = None) -> None:
        self.copied: list[Copied] = []
        self._file, self._verifier = file, verifier or Verifier(())
        file.flush()
        self._descriptor = _descriptor(file)
        self._is_readable = self._descriptor is not None and file.readable()
        try:
            self._window, self._written = _BUFFERS.pop()
        except IndexError:
            self._window, self._written = bytearray(WINDOW), bytearray(WINDOW)
        self._view = memoryview(self._window)
        self._ranges: list[Copied] = []  # ranges in the window, the last one possibly in part
        self._threads, self._flusher, self._flush = ExitStack(), None, None
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
                if self._flush is not None:
                    self._flush.result()
        _BUFFERS.append((self._window, self._written))

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._begin + self._filled

    def seek(self, position: int) -> None:
        """Move to another position of the file."""
        self._end_window()
        self._file.seek(position)
        self._begin_at(position)

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes that are in memory, without copying them into the window if they would fill one."""
        rest = memoryview(data)
        while rest:
            if self._filled and len(rest) >= WINDOW:  # so that the next window begins at an edge
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
        """Write computed bytes of a storage, and report them as progress."""
        self.write(block.cast("B"))
        self._task.advance(block.nbytes)

    def copy(self, source: ByteSource, start: int, stop: int, is_summed: bool = False) -> int:
        """Write bytes ``start`` to ``stop`` of a source. Return their CRC-32 if ``is_summed``, else 0: it is computed
        here while they are in the processor's cache."""
        place, crc = located(source), 0
        whole, offset = (source, start) if place is None else (place.file, place.offset + start)
        if self._is_readable:
            self._ranges.append(Copied(whole, offset, stop - start, self.tell()))
        if ranges := ranges_of(source, start, stop):
            for each in ranges:
                crc = self._copy_range(each.file, each.offset, each.nbytes, is_summed, crc)
            return crc
        # Computed pieces go straight into the window.
        made = source.pieces(start, stop) if hasattr(source, "pieces") else stream(source, start, stop)
        for block in made:
            self.write_block(block)
            crc = crc32(block, crc) if is_summed else crc
            self._verifier.take(whole, offset, block)
            offset += block.nbytes
        return crc

    def _copy_range(self, file: OpenFile, offset: int, nbytes: int, is_summed: bool, crc: int) -> int:
        begin, done = self.tell(), 0
        output = None  # descriptor of the new file, as long as the kernel copies
        if nbytes > SMALL and (begin - offset) % PAGE == 0 and not file.is_remote:
            self._end_window()
            output = self._descriptor
        while done < nbytes:
            count = min(self._room, nbytes - done)
            if output is not None:
                moved = _by_kernel(output, FileBytes(file, offset + done, nbytes - done), count)
                output, count = (output, moved) if moved else (None, count)
            if output is None or self._is_readable or is_summed:
                block = self._space(count)
                file.fill(block, offset + done)
                crc = crc32(block, crc) if is_summed else crc
                self._verifier.take(file, offset + done, block)
            self._add(count, is_in_file=output is not None)
            self._task.advance(count)
            done += count
        return crc

    # The window: the bytes from ``_begin`` of the file on
    # ------------------------------------------------------------------------------------------------------------------

    def _begin_at(self, position: int) -> None:
        """Begin an empty window, which ends at an edge of the file when it is full."""
        self._begin, self._filled, self._room = position, 0, WINDOW - position % EDGE

    def _space(self, count: int) -> memoryview:
        """Return the memory for the next ``count`` bytes; the window has to have room for them."""
        return self._view[self._filled : self._filled + count]

    def _add(self, count: int, is_in_file: bool = False) -> None:
        """Count bytes that were put into the window. If ``is_in_file``, the window holds no others."""
        self._filled += count
        self._room -= count
        if is_in_file or not self._room:
            self._end_window(is_in_file=is_in_file)

    def _end_window(self, made: memoryview | None = None, is_in_file: bool = False) -> None:
        """Write the window (or ``made`` in its place) unless the file has it already, compare it with the file, and
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
        if self._begin // FLUSHED < end // FLUSHED:
            self._start_flush()
        self._begin_at(end)

    def _start_flush(self) -> None:
        """Flush to disk what is written so far, while the next bytes are copied: merging ranks of 1 GB takes a fifth
        less time than if all is flushed at the end, with or without POSIX_FADV_DONTNEED before that. In the main
        thread, renaming all keys of a file of 1.7 GB would take 10 % longer.

        The system reports a failed write only once, to the flush that meets it, so its error is raised here."""
        if self._descriptor is None or not hasattr(os, "fdatasync"):  # macOS has none
            return
        if self._flush is not None:
            if not self._flush.done():
                return
            self._flush.result()
        if self._flusher is None:
            self._flusher = self._threads.enter_context(background())
        self._flush = self._flusher.submit(os.fdatasync, self._descriptor)

    def _write_window(self, window: memoryview) -> None:
        done = 0
        if self._descriptor is None:
            self._file.write(window)
            return
        while done < self._filled:
            done += os.write(self._descriptor, window[done : done + EDGE - (self._begin + done) % EDGE])

    def _reads_back(self, window: memoryview) -> bool:
        assert self._descriptor is not None, "a file that is not readable was read back"
        count, done = self._filled, 0
        while done < count:
            read = os.preadv(self._descriptor, [memoryview(self._written)[done:count]], self._begin + done)
            if not read:
                return False
            done += read
        return self._written.startswith(window)  # a memcmp without a copy


def _descriptor(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except OSError:  # io.UnsupportedOperation: a file in memory
        return None


def _set_aside(descriptor: int, nbytes: int) -> None:
    """Allocate the blocks of a new file in advance, if the file system can: a repair takes 5 % less time.

    If it cannot, ``os.posix_fallocate`` would write into every block, so it is not used."""
    if sys.platform == "linux":
        from ctypes import CDLL, c_long

        CDLL(None).fallocate(descriptor, _KEEP_SIZE, c_long(0), c_long(nbytes))


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: does not change the file's size


def _by_kernel(output: int, rest: FileBytes, count: int) -> int:
    """Copy up to ``count`` bytes to descriptor ``output``; return how many (0 if it refuses or the file ends)."""
    file = rest.file.opened()
    try:
        return os.copy_file_range(file.descriptor, output, count, rest.offset)
    except (OSError, AttributeError):  # AttributeError: the system has no such call
        return 0
