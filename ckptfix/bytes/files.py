"""A file that is open for reading, and errors of the system in the words of this project."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from pathlib import Path

from ckptfix.errors import UnreadableError

_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would block for ever


class OpenFile:
    """A file held open for reading until its last storage is gone, so that a rename of its path does not matter.

    ``descriptor`` is that of a file without a name, which is closed in the same way."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS) if descriptor is None else descriptor
        except (OSError, ValueError) as error:
            raise UnreadableError(f"{path}: {_why_closed(path, error)}") from error
        weakref.finalize(self, os.close, self.descriptor)
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError(f"{path}: is no regular file; save what it gives to one first")
        self._stamp = _stamp(found)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        """``count`` bytes from ``start`` on, fewer at the end of the file."""
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
        """Read from ``start`` on as much as the buffer holds. Raises ``UnreadableError`` where the file ends before."""
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
        """Raise ``UnreadableError`` where somebody wrote to the file since it was opened: what was read of it may be
        half the old content and half the new.
        """
        if _stamp(os.fstat(self.descriptor)) != self._stamp:
            raise UnreadableError(f"{self.path}: changed while it was read; run the same command again")

    def ends_early(self, start: int, expected: int, found: int) -> UnreadableError:
        """The error of a file that is shorter than it was, or than it says."""
        return UnreadableError(
            f"{self.path}: the file ends inside a storage: {expected} bytes were expected at offset {start}, {found} "
            "are there; fetch the file again"
        )


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _why_closed(path: str, error: OSError | ValueError) -> str:
    """Why a file does not open, and what to do, as a clause behind its path."""
    if isinstance(error, FileNotFoundError) and path and (link := Path(path)).is_symlink():
        return f"is a link to {link.readlink()}, which is not there; fetch the file again, or correct the link"
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "is no regular file; save what it gives to one first"  # a socket
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    is_closed = isinstance(error, PermissionError)
    return f"cannot be opened: {reason}; {'ask its owner for the right to read it' if is_closed else 'check the path'}"
