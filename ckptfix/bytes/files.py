"""Open files, and buffers over them, which slice like bytes and read only what is needed.

Files are read and not mapped: if a mapped file is truncated, or its disk or network share disappears, a signal ends the
program without a message. Little of a checkpoint is parsed, and reading that costs no more than page faults."""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ckptfix.errors import MissingFileError, UnreadableError, damaged

_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would block forever

_CHANGED = "changed while it was read; run the same command again"


def is_url(path: str) -> bool:
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.isalnum() and scheme not in ("file", "local")


class OpenFile:
    """A file held open for reading until its last storage is gone, so that it may be renamed meanwhile.

    ``descriptor`` is that of an open file without a name; it is closed in the same way."""

    is_remote = False  # whether each read may be a request over a network

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS) if descriptor is None else descriptor
        except (OSError, ValueError) as error:
            kind = MissingFileError if isinstance(error, FileNotFoundError) else UnreadableError
            raise kind(f"{path}: {why_unopened(path, error)}") from error
        weakref.finalize(self, os.close, self.descriptor)
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError(f"{path}: is not a regular file; save its content to one first")
        self._stamp = _stamp(found)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        """Return ``count`` bytes from ``start`` on, or fewer at the end of the file."""
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self.descriptor, min(count, 1 << 30), start)
            except OSError as error:
                raise UnreadableError(f"{self.path}: cannot be read at offset {start}: {error.strerror}") from error
            if len(part) == count and not parts:
                return part
            if not part:
                break
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return b"".join(parts)

    def fill(self, buffer: memoryview, start: int) -> None:
        """Fill the buffer from ``start`` on. Raises ``UnreadableError`` if the file ends before that."""
        done = 0
        while done < buffer.nbytes:
            try:
                count = os.preadv(self.descriptor, [buffer[done:]], start + done)
            except OSError as error:
                raise UnreadableError(
                    f"{self.path}: cannot be read at offset {start + done}: {error.strerror}"
                ) from error
            if not count:
                raise self.ends_early(start, buffer.nbytes, done)
            done += count

    def refuse_changed(self) -> None:
        """Raise ``UnreadableError`` if the file was written to since it was opened: what was read may be half old and
        half new."""
        if _stamp(os.fstat(self.descriptor)) != self._stamp:
            raise UnreadableError(f"{self.path}: {_CHANGED}")

    def opened(self) -> OpenFile:
        """Return the file with a valid ``descriptor``: itself."""
        return self

    def ends_early(self, start: int, expected: int, found: int) -> UnreadableError:
        """Return the error for a read beyond the end of the file."""
        return damaged(
            self.path,
            f"the file ends inside a storage: {expected} bytes were expected at offset {start}, {found} are there",
        )


class ReopenedFile(OpenFile):
    """A file that is opened for each read, because the process may not hold more files open."""

    def __init__(self, file: OpenFile) -> None:
        self.path, self.descriptor, self._stamp = file.path, -1, file._stamp

    @property
    def size(self) -> int:
        return self._stamp[0]

    def opened(self) -> OpenFile:
        """Open the file. Raises ``UnreadableError`` if it was changed or replaced."""
        file = OpenFile(self.path)
        if file._stamp != self._stamp:
            raise UnreadableError(f"{self.path}: {_CHANGED}")
        return file

    def read(self, start: int, count: int) -> bytes:
        return self.opened().read(start, count)

    def fill(self, buffer: memoryview, start: int) -> None:
        self.opened().fill(buffer, start)

    def refuse_changed(self) -> None:
        self.opened()


def open_bytes(path: str) -> OpenFile:
    """Open a file for reading. Raises ``UnreadableError`` if it does not open.

    A checkpoint may consist of tens of thousands of files. If the process reaches its limit of open files, the limit is
    raised as far as the system allows, and further files are opened for each read."""
    file = OpenFile(path)
    if file.descriptor < (most := resource.getrlimit(resource.RLIMIT_NOFILE))[0] - _SPARE:
        return file
    with suppress(ValueError, OSError):
        allowed = _MOST_ON_MACOS if sys.platform == "darwin" else most[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most[1]))
    return file if file.descriptor < resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE else ReopenedFile(file)


_MOST_ON_MACOS = 10240  # it reports an infinite limit, and refuses more than OPEN_MAX
_SPARE = 24  # left for output files, pipes and modules


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino


def why_unopened(path: str, error: OSError | ValueError) -> str:
    """Return why a file does not open and what to do, as a clause that follows its path."""
    if isinstance(error, FileNotFoundError) and path and (link := Path(path)).is_symlink():
        return f"is a link to {link.readlink()}, which does not exist; fetch the file again, or correct the link"
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "is not a regular file; save its content to one first"  # a socket
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "cannot be opened: too many files are open; raise the limit of the system (ulimit -n)"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    is_closed = isinstance(error, PermissionError)
    return f"cannot be opened: {reason}; {'ask its owner for read permission' if is_closed else 'check the path'}"


_SMALL = 1 << 20


def small_text(path: Path) -> str:
    """Return the text of a small file, such as a configuration; empty if it does not exist or is larger than 1 MiB."""
    is_small = path.is_file() and path.stat().st_size <= _SMALL
    return path.read_text(encoding="utf-8", errors="replace") if is_small else ""


# Bytes of the smallest read, so that the next small read nearby is free: in archives, the end of a member and the
# header of the next one, or several small members.
NEAR = 4096
SEARCHED = 1 << 20  # bytes that are searched at a time


class Buffer(Protocol):
    """Bytes, or an object that slices like them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int = ..., stop: int | None = ..., /) -> int: ...


class FileBuffer:
    """A file as it was when it was opened. Raises ``UnreadableError`` if it has become shorter since."""

    def __init__(self, file: OpenFile) -> None:
        self._length = file.size
        self._file = file
        self._near = (0, b"")  # the last small read and its start; replaced as one, because threads read in parallel

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> bytes:
        start, stop, _ = index.indices(self._length)
        if start >= stop:
            return b""
        first, near = self._near
        if start >= first and stop - first <= len(near):
            return near[start - first : stop - first]
        if stop - start >= NEAR:
            return self._read(start, stop)
        near = self._read(start, min(start + NEAR, self._length))
        self._near = (start, near)
        return near[: stop - start]

    def _read(self, start: int, stop: int) -> bytes:
        data = self._file.read(start, stop - start)
        if len(data) < stop - start:
            raise damaged(
                self._file.path,
                f"was cut short while it was read: it had {self._length} bytes and has {self._file.size}",
            )
        return data

    def find(self, sub: bytes, start: int = 0, stop: int | None = None) -> int:
        start, stop, _ = slice(start, stop).indices(self._length)
        count = NEAR  # at first: the match is often close
        while start + len(sub) <= stop:
            found = self._read(start, min(start + count + len(sub) - 1, stop)).find(sub)
            if found >= 0:
                return start + found
            start, count = start + count, SEARCHED
        return -1
