"""Writes a checkpoint to a file, or to shards with an index, and flushes it while it is verified."""

import contextlib
import json
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct
from msgspec.structs import replace
from packaging.version import Version

from ckptfix.bytes.copying import Copied, Copier
from ckptfix.bytes.threads import background
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.settings import PTH, SAFETENSORS
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import WriteError
from ckptfix.reading import safetensors
from ckptfix.reading.folders.shard_index import WEIGHT_MAP, Numbering
from ckptfix.writing import safetensors as safetensors_write
from ckptfix.writing import torch_files as torch_write
from ckptfix.writing.atomic import deliver_files, flush_file, remove_leftovers, temporary_folder_beside, unwritten

FIRST_ZIP = "1.6"  # the first torch that writes and reads the zip container by default

# Writes a checkpoint to a file, and returns the copier with the ranges that were read back.
Write = Callable[[Checkpoint, BinaryIO], Copier]


def output_format(checkpoint: Checkpoint, asked: str | None) -> str:
    """Return ``pth``, ``safetensors`` or ``universal``: the format asked for, else that of the source."""
    if asked is not None:
        return asked
    return SAFETENSORS if checkpoint.format.endswith(safetensors.NAME) else PTH


def writer_for(form: str, for_torch: str | None) -> Write:
    """Return the function that writes a format; for torch before 1.6, a ``pth`` file gets the legacy container."""
    if form == SAFETENSORS:
        return safetensors_write.write
    if for_torch is not None and Version(for_torch) < Version(FIRST_ZIP):
        return torch_write.write_legacy
    return torch_write.write_zip


def without_state_dict(checkpoint: Checkpoint, root: object) -> Checkpoint:
    """Return a checkpoint that is written as ``root`` only: the file of an optimizer, or a single tensor."""
    # No container has a member with an empty name, so no state_dict is put in its place.
    return replace(checkpoint, entries={}, metadata=None, container=("",), root=root)


class Written(Struct, frozen=True):
    """A written file, which may not be flushed yet, and the ranges that were read back and equal their sources."""

    path: Path
    copied: Sequence[Copied]


def write_to(temporary: Path, checkpoint: Checkpoint, write: Write, output: Path) -> Written:
    """Write the checkpoint. Raises ``WriteError`` if writing fails."""
    try:
        with os.fdopen(_open(temporary), "r+b", buffering=1 << 20) as file:
            return Written(temporary, write(checkpoint, file).copied)
    except OSError as error:
        raise unwritten(output, error) from error


def _open(path: Path) -> int:
    """Return a descriptor to write a file and read it back, even if it has the permissions of a read-only source.

    O_TRUNC is not used: with it, closing the file on ext4 waits for the disk."""
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
    """Flush files to disk in a thread while the body reads them, if ``is_wanted``.

    Raises ``WriteError`` at the end if flushing fails."""
    with background() as pool:
        flushes = [pool.submit(flush_file, file.path) for file in files] if is_wanted else []
        yield
        try:
            for flush in flushes:
                flush.result()
        except OSError as error:
            raise unwritten(output, error) from error


def split(checkpoint: Checkpoint, limit: int) -> list[Checkpoint]:
    """Split the state_dict into parts of at most ``limit`` bytes of tensors, in order; a larger tensor gets a part of
    its own, with the entries without bytes after it.

    Tensors that share a storage stay together, which keeps ties. The first part has the ``_metadata``."""
    parts: list[OrderedDict[str, Any]] = [OrderedDict()]
    sizes = [0]
    part_of: dict[int, int] = {}
    for key, entry in checkpoint.entries.items():
        storages = [id(part.storage) for part in entry.strided_parts()] if isinstance(entry, TensorSpec) else []
        home = next((part_of[storage] for storage in storages if storage in part_of), None)
        nbytes = entry.nbytes if isinstance(entry, TensorSpec) else 0
        if home is None:
            if nbytes and sizes[-1] and sizes[-1] + nbytes > limit:  # so that every part has a tensor
                parts.append(OrderedDict())
                sizes.append(0)
            home = len(parts) - 1
            sizes[home] += nbytes
        parts[home][key] = entry
        part_of.update(dict.fromkeys(storages, home))
    return [
        replace(checkpoint, entries=part, metadata=checkpoint.metadata if part is parts[0] else None, root=part)
        for part in parts
    ]


class ShardNames(Struct, frozen=True):
    """The names of the files of one sharded checkpoint; ``output`` is the name that a single file would have."""

    output: Path
    count: int

    @property
    def shards(self) -> list[str]:
        """``model-00001-of-00002.safetensors`` and so on."""
        return Numbering(self.output.stem, f"{self.count:05}", self.output.suffix).names()

    @property
    def index(self) -> Path:
        """``model.safetensors.index.json``."""
        return self.output.with_name(f"{self.output.name}.index.json")

    @property
    def longest(self) -> Path:
        return max((self.index, self.output.with_name(self.shards[0])), key=lambda path: len(path.name))

    def check_free(self) -> None:
        for name in (self.index.name, *self.shards):
            if (self.output.parent / name).exists():
                raise WriteError(f"{self.output.parent / name}: already exists; move it away, or name another output")


# Compares a written file with the checkpoint that it should contain; raises if they differ.
Verify = Callable[[Path, Checkpoint, Path, Sequence[Written]], None]


@contextlib.contextmanager
def temporary_shards(
    output: Path, checkpoint: Checkpoint, limit: int, write: Write, verify: Verify
) -> Iterator[tuple[Path, ShardNames]]:
    """Write a checkpoint as shards with an index to a temporary folder beside the output, verify them, and provide the
    index and the names.

    The folder is removed at the end. ``checkpoint`` is a state_dict without a container around it."""
    parts = split(checkpoint, limit)
    names = ShardNames(output, len(parts))
    remove_leftovers(output.parent)  # shards of a run that was killed while moving them into place
    names.check_free()
    with temporary_folder_beside(output) as folder:
        written = []
        for name, part in zip(names.shards, parts, strict=True):
            written.append(write_to(folder / name, part, write, output))
        index = folder / names.index.name
        _write_index(index, names.shards, parts, checkpoint, output)
        with flushing(written, output):
            verify(index, checkpoint, output, written)
        yield index, names


def _write_index(index: Path, shards: list[str], parts: list[Checkpoint], checkpoint: Checkpoint, output: Path) -> None:
    home = {key: name for name, part in zip(shards, parts, strict=True) for key in part.entries}
    total = sum(spec.nbytes for spec in {spec.view: spec for spec in checkpoint.specs.values()}.values())
    content = {"metadata": {"total_size": total}, WEIGHT_MAP: {key: home[key] for key in checkpoint.entries}}
    try:
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        flush_file(index)
    except OSError as error:
        raise unwritten(output, error) from error


def deliver_shards(index: Path, names: ShardNames) -> None:
    """Move the shards into place, and then the index."""
    deliver_files(index.parent, [*(names.output.with_name(name) for name in names.shards), names.index])
