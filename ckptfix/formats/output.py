"""Writes the result so that whatever kills the process, either the old state or the whole new file is there.

The bytes go to a temporary file beside the output, which is opened again and compared with the plan while the disk
takes it up, and only then renamed over it. A rename within a folder is atomic (POSIX), and durable once the folder is
flushed too."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from packaging.version import Version

from ckptfix.checkpoint import Checkpoint, TensorSpec
from ckptfix.errors import CkptfixError, WriteError
from ckptfix.formats import safetensors, safetensors_write, torch_write
from ckptfix.formats.copying import background
from ckptfix.formats.safetensors_write import contiguous_blocks, lost_extras
from ckptfix.formats.sources import stream
from ckptfix.progress import Task

PTH, SAFETENSORS = "pth", "safetensors"
FIRST_ZIP = Version("1.6")
"""The first torch that writes and reads the zip container by default."""


def output_format(checkpoint: Checkpoint, asked: str | None) -> str:
    """``pth`` or ``safetensors``: what was asked for, else what the source is."""
    if asked is not None:
        return asked
    return SAFETENSORS if checkpoint.format.endswith(safetensors.NAME) else PTH


def writer_for(form: str, for_torch: str | None) -> Callable[[Checkpoint, BinaryIO], None]:
    """The function that writes a format; an old ``--for-torch`` gets the legacy container, the only one it reads."""
    if form == SAFETENSORS:
        return safetensors_write.write
    if for_torch is not None and Version(for_torch) < FIRST_ZIP:
        return torch_write.write_legacy
    return torch_write.write_zip


@contextlib.contextmanager
def temporary_beside(output: Path, like: Path | None) -> Iterator[Path]:
    """A temporary file in the folder of the output, with the permissions of ``like``; gone at the end unless it was
    renamed.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{output.name[:50]}.", suffix=".ckptfix-tmp", dir=output.parent)
    except OSError as error:
        raise WriteError(
            f"{output}: cannot write in {output.parent}: {error.strerror}; choose another place with -o"
        ) from error
    temporary = Path(name)
    try:
        os.fchmod(handle, _mode_of(like))
        os.close(handle)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _mode_of(like: Path | None) -> int:
    if like is not None and like.exists():
        return stat.S_IMODE(like.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_to(
    temporary: Path, checkpoint: Checkpoint, write: Callable[[Checkpoint, BinaryIO], None], output: Path
) -> None:
    """Write the checkpoint. Raises ``WriteError`` where the disk is full or refuses."""
    try:
        # Without O_TRUNC: ext4 would start to write when the file is closed, and keep us waiting.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            write(checkpoint, file)
    except OSError as error:
        raise _unwritten(output, error) from error


@contextlib.contextmanager
def flushing(files: Iterable[Path], output: Path) -> Iterator[None]:
    """Flush files to the disk while the body reads them. Raises ``WriteError`` at its end where the disk refuses.

    An error of the disk that nobody was told yet is told to the next who opens the file and flushes it
    (https://docs.kernel.org/filesystems/vfs.html#handling-errors-during-writeback)."""
    with background() as pool:
        flushed = [pool.submit(_flush, file) for file in files]
        yield
        try:
            for file in flushed:
                file.result()
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


def verify(temporary: Path, expected: Checkpoint, output: Path) -> None:
    """Open the written file and compare names, order, shapes, dtypes, ties, ``_metadata`` and every byte with what was
    to be written.

    Raises ``WriteError`` on any difference: then the file is not delivered.
    """
    from ckptfix.formats import open_file

    try:
        written = open_file(str(temporary), _written_name(expected))
    except CkptfixError as error:
        raise WriteError(
            f"{output}: the written file does not open again ({error}); it was removed; please report this"
        ) from error
    difference = _difference(written, expected)
    if difference:
        raise WriteError(
            f"{output}: the written file differs from the plan: {difference}; it was removed; please report this"
        )


def _written_name(expected: Checkpoint) -> str:
    from ckptfix.checkpoint import path_name

    return path_name(expected.container)


def _difference(written: Checkpoint, expected: Checkpoint) -> str:
    is_safetensors = written.format.endswith(safetensors.NAME)  # in one file or in shards
    # What has no form in a format was said before; it is no tensor.
    lost = set(lost_extras(expected)) - set(expected.specs) if is_safetensors else set()
    if list(written.entries) != [key for key in expected.entries if key not in lost]:
        return "other keys, or in another order"
    if (written.metadata or {}) != (expected.metadata or {}):
        return "another _metadata"
    task = Task(f"comparing {expected.path}", sum(spec.nbytes for spec in expected.specs.values()))
    for key, spec in expected.specs.items():
        other = written.specs.get(key)
        if other is None or (other.dtype, other.shape, other.layout) != (spec.dtype, spec.shape, spec.layout):
            return f"the tensor {key}"
        if (spec.quantizer is None) != (other.quantizer is None) or _scheme(spec) != _scheme(other):
            return f"the quantiser of {key}"
        trained = (spec.requires_grad, spec.is_parameter) != (other.requires_grad, other.is_parameter)
        if trained and not is_safetensors:
            return f"requires_grad of {key}"
        pairs = zip(spec.strided_parts(), other.strided_parts(), strict=True)
        if any(not _same_bytes(before, after, expected.path) for before, after in pairs):
            return f"the bytes of {key}"
        task.advance(spec.nbytes)
    if _tie_groups(written) != _tie_groups(expected):
        return "the ties"
    return ""


def _scheme(spec: TensorSpec) -> tuple[object, ...]:
    """A quantiser without the tensors in it, whose bytes are compared like all others."""
    quantizer = spec.quantizer
    if quantizer is None:
        return ()
    numbers = [None if isinstance(part, TensorSpec) else part for part in (quantizer.scale, quantizer.zero_point)]
    return (quantizer.scheme, quantizer.axis, *numbers)


def _same_bytes(before: TensorSpec, after: TensorSpec, path: str) -> bool:
    if (
        before.strides == after.strides
        and before.math_bits == after.math_bits
        and before.storage is not None
        and after.storage is not None
    ):
        # The same view on both sides: what it spans can be compared without putting it into row-major order.
        left, right = stream(before.storage.source, *before.extent), stream(after.storage.source, *after.extent)
    else:
        left, right = contiguous_blocks(before, path), contiguous_blocks(after, path)
    # A memoryview is compared number by number, a bytearray by memcmp: well worth the copy of a block in the cache.
    return all(bytearray(one) == other for one, other in zip(left, right, strict=True))


def _tie_groups(checkpoint: Checkpoint) -> set[tuple[str, ...]]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for key, spec in checkpoint.specs.items():
        if spec.storage is not None and spec.numel:
            groups.setdefault(spec.view, []).append(key)
    return {tuple(group) for group in groups.values() if len(group) > 1}


def deliver_file(temporary: Path, output: Path, backup_of: Path | None) -> None:
    """Rename the temporary file to the output and flush the folder. ``backup_of`` keeps its old content under
    ``<name>.bak``.
    """
    try:
        if backup_of is not None:
            backup = backup_of.with_name(backup_of.name + ".bak")
            if backup.exists():
                raise WriteError(f"{backup}: a backup is there already; move it away, or leave out --backup")
            os.link(backup_of, backup)
        temporary.replace(output)
        _flush(output.parent)
    except OSError as error:
        raise WriteError(f"{output}: cannot be put in place: {error.strerror}; the source is unchanged") from error
