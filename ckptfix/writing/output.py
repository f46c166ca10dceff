"""Writes a checkpoint to a file in one of the formats, which is compared with the plan while the disk takes it up."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from packaging.version import Version

from ckptfix.bytes.copying import Copied, Copier
from ckptfix.bytes.threads import background
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.settings import PTH, SAFETENSORS
from ckptfix.reading import safetensors
from ckptfix.writing import safetensors as safetensors_write
from ckptfix.writing import torch_files as torch_write
from ckptfix.writing.atomic import flush_file, unwritten

FIRST_ZIP = "1.6"  # the first torch that writes and reads the zip container by default

# Writes a checkpoint to a file, and gives the copier that has the ranges that were read back from it.
Write = Callable[[Checkpoint, BinaryIO], Copier]


def output_format(checkpoint: Checkpoint, asked: str | None) -> str:
    """``pth``, ``safetensors`` or ``universal``: what was asked for, else one of the first two, as the source is."""
    if asked is not None:
        return asked
    return SAFETENSORS if checkpoint.format.endswith(safetensors.NAME) else PTH


def writer_for(form: str, for_torch: str | None) -> Write:
    """Return the function that writes a format; an old ``--for-torch`` gets the legacy container."""
    if form == SAFETENSORS:
        return safetensors_write.write
    if for_torch is not None and Version(for_torch) < Version(FIRST_ZIP):
        return torch_write.write_legacy
    return torch_write.write_zip


def without_state_dict(checkpoint: Checkpoint, root: object) -> Checkpoint:
    """Return other data of a checkpoint as one to be written: an optimizer's file, or a single tensor."""
    # No container has an empty place in it.
    return replace(checkpoint, entries={}, metadata=None, container=("",), root=root)


@dataclass(frozen=True)
class Written:
    """A file that was written, and is perhaps not on the disk yet; what of it was read back since, and found equal to
    its source."""

    path: Path
    copied: Sequence[Copied]


def write_to(temporary: Path, checkpoint: Checkpoint, write: Write, output: Path) -> Written:
    """Write the checkpoint. Raises ``WriteError`` if the disk is full or refuses."""
    try:
        with os.fdopen(_open(temporary), "r+b", buffering=1 << 20) as file:
            return Written(temporary, write(checkpoint, file).copied)
    except OSError as error:
        raise unwritten(output, error) from error


def _open(path: Path) -> int:
    """Return a descriptor to write a file and read it back, also where it has the permissions of a source that is
    read-only.

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
    """Flush files to the disk while the body reads them, if that is wanted.

    Raises ``WriteError`` at the end if the disk refuses."""
    with background() as pool:
        flushes = [pool.submit(flush_file, file.path) for file in files] if is_wanted else []
        yield
        try:
            for flush in flushes:
                flush.result()
        except OSError as error:
            raise unwritten(output, error) from error
