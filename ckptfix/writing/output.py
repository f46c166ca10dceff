"""Writes the result so that whatever kills the process, either the old state or the whole new file is there.

The bytes go to a temporary file beside the output, which is opened again and compared with the plan while the disk
takes it up, and only then renamed over it. A rename within a folder is atomic (POSIX), and durable once the folder is
flushed too."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from packaging.version import Version

from ckptfix.bytes.copying import Copied, Copier
from ckptfix.bytes.threads import background
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.errors import WriteError
from ckptfix.reading import safetensors
from ckptfix.writing import safetensors as safetensors_write
from ckptfix.writing import torch_files as torch_write

PTH, SAFETENSORS = "pth", "safetensors"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
FIRST_ZIP = "1.6"
"""The first torch that writes and reads the zip container by default."""

Write = Callable[[Checkpoint, BinaryIO], Copier]
"""Writes a checkpoint to a file, and gives the copier that has the ranges that were read back from it."""


def output_format(checkpoint: Checkpoint, asked: str | None) -> str:
    """``pth`` or ``safetensors``: what was asked for, else what the source is."""
    if asked is not None:
        return asked
    return SAFETENSORS if checkpoint.format.endswith(safetensors.NAME) else PTH


def writer_for(form: str, for_torch: str | None) -> Write:
    """The function that writes a format; an old ``--for-torch`` gets the legacy container, the only one it reads."""
    if form == SAFETENSORS:
        return safetensors_write.write
    if for_torch is not None and Version(for_torch) < Version(FIRST_ZIP):
        return torch_write.write_legacy
    return torch_write.write_zip


@contextlib.contextmanager
def temporary_beside(output: Path, like: Path | None) -> Iterator[Path]:
    """A temporary file in the folder of the output, with the permissions of ``like``, and readable for us; gone at the
    end unless it was renamed.
    """
    temporary = temporary_name(output)
    try:
        try:
            handle = os.open(temporary, _NEW, 0o600)
        except OSError as error:
            raise WriteError(
                f"{output}: cannot write in {output.parent}: {error.strerror}; choose another place with -o"
            ) from error
        os.fchmod(handle, _mode_of(like) | stat.S_IRUSR)
        os.close(handle)
        yield temporary
    finally:
        if os.path.lexists(temporary):
            temporary.unlink()


def temporary_name(output: Path) -> Path:
    """A new name beside the output. It is known before anything has it: a signal may come while the system makes the
    file, and then ``tempfile`` would not say what to remove.
    """
    return output.parent / f".{output.name[:50]}.{secrets.token_hex(8)}.ckptfix-tmp"


def _mode_of(like: Path | None) -> int:
    if like is not None and like.exists():
        return stat.S_IMODE(like.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@dataclass(frozen=True)
class Written:
    """A file that was written, and is perhaps not on the disk yet."""

    path: Path
    copier: Copier

    @property
    def copied(self) -> Sequence[Copied]:
        """What of it was read back since and found equal to its source."""
        return self.copier.copied


def write_to(temporary: Path, checkpoint: Checkpoint, write: Write, output: Path) -> Written:
    """Write the checkpoint. Raises ``WriteError`` where the disk is full or refuses."""
    try:
        with os.fdopen(_open(temporary), "r+b", buffering=1 << 20) as file:
            return Written(temporary, write(checkpoint, file))
    except OSError as error:
        raise _unwritten(output, error) from error


def _open(path: Path) -> int:
    """A descriptor to write a file and read it back, also where it has the permissions of a source that is read-only.

    Without O_TRUNC: ext4 would start to write when the file is closed, and keep us waiting."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else stat.S_IWUSR
    if mode & stat.S_IWUSR:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    path.chmod(mode | stat.S_IWUSR)
    try:
        return os.open(path, os.O_RDWR)
    finally:
        path.chmod(mode)


@contextlib.contextmanager
def flushing(files: Iterable[Written], output: Path, is_wanted: bool = True) -> Iterator[None]:
    """Flush files to the disk while the body reads them; where that is not wanted, wait for what it has begun to take
    up. Raises ``WriteError`` at the end where the disk refuses.

    An error of the disk that nobody was told yet is told to the next who opens the file and flushes it
    (https://docs.kernel.org/filesystems/vfs.html#handling-errors-during-writeback)."""
    with background() as pool:
        files = tuple(files)
        flushes = [pool.submit(_flush, file.path) for file in files] if is_wanted else []
        yield
        try:
            for file in files:
                file.copier.wait()
            for flush in flushes:
                flush.result()
        except OSError as error:
            raise _unwritten(output, error) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritten(output: Path, error: OSError) -> WriteError:
    return WriteError(f"{output}: cannot be written: {error.strerror}; nothing was left behind")


def deliver_file(temporary: Path, output: Path, backup_of: Path | None, flush: bool = True) -> None:
    """Rename the temporary file to the output, and flush the folder unless the caller does. ``backup_of`` keeps its old
    content under ``<name>.bak``.
    """
    try:
        if backup_of is not None:
            backup = backup_of.with_name(backup_of.name + ".bak")
            if backup.exists():
                raise WriteError(f"{backup}: a backup is there already; move it away, or leave out --backup")
            os.link(backup_of, backup)
        temporary.replace(output)
    except OSError as error:
        raise WriteError(f"{output}: cannot be put in place: {error.strerror}; the source is unchanged") from error
    if flush:
        try:
            _flush(output.parent)
        except OSError as error:
            raise WriteError(
                f"{output}: is written and in place, but the disk does not confirm its name ({error.strerror}): a "
                "power cut could undo it; look at the disk"
            ) from error
