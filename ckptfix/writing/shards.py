"""Writes a state_dict as numbered shards with an index, as ``save_pretrained`` of transformers names and lays them out.

The shards and the index are made in a temporary folder, opened again as the one checkpoint that they are, compared with
the plan, and only then put in place, the index last. Nothing is replaced: as long as the index is not there, no
reader finds the new shards, whatever kills the process."""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import WriteError
from ckptfix.reading.folders.shard_index import WEIGHT_MAP
from ckptfix.writing.atomic import deliver_files, remove_leftovers, temporary_folder_beside, unwritten
from ckptfix.writing.output import Write, Written, flushing, write_to


def split(checkpoint: Checkpoint, limit: int) -> list[Checkpoint]:
    """Return the state_dict in parts of at most ``limit`` bytes of tensors, in its order; a larger tensor is a part
    alone.

    Tensors that share a storage stay together, so that a tie stays a tie. The ``_metadata`` lies in the first part."""
    parts: list[OrderedDict[str, Any]] = [OrderedDict()]
    sizes = [0]
    part_of: dict[int, int] = {}
    for key, entry in checkpoint.entries.items():
        storages = [id(part.storage) for part in entry.strided_parts()] if isinstance(entry, TensorSpec) else []
        home = next((part_of[storage] for storage in storages if storage in part_of), None)
        nbytes = entry.nbytes if isinstance(entry, TensorSpec) else 0
        if home is None:
            if sizes[-1] and sizes[-1] + nbytes > limit:
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
        stem, suffix = self.output.stem, self.output.suffix
        return [f"{stem}-{number:05}-of-{self.count:05}{suffix}" for number in range(1, self.count + 1)]

    @property
    def index(self) -> Path:
        """``model.safetensors.index.json``."""
        return self.output.with_name(f"{self.output.name}.index.json")

    @property
    def longest(self) -> Path:
        """The longest of the names."""
        return max((self.index, self.output.with_name(self.shards[0])), key=lambda path: len(path.name))

    def check_free(self) -> None:
        """Raise ``WriteError`` if one of the files is there already."""
        for name in (self.index.name, *self.shards):
            if (self.output.parent / name).exists():
                raise WriteError(f"{self.output.parent / name}: is there already; move it away, or name another output")


# Compares a written file with the checkpoint that it should hold; raises if they differ.
Verify = Callable[[Path, Checkpoint, Path, Sequence[Written]], None]


@contextlib.contextmanager
def temporary_shards(
    output: Path, checkpoint: Checkpoint, limit: int, write: Write, verify: Verify
) -> Iterator[tuple[Path, ShardNames]]:
    """Provide the index of the checkpoint in shards, in a temporary folder beside the output, written and verified.

    The folder is gone at the end. ``checkpoint`` is a state_dict without a container around it."""
    parts = split(checkpoint, limit)
    names = ShardNames(output, len(parts))
    remove_leftovers(output.parent)  # shards that a run was killed with half of them in place
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
        with index.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritten(output, error) from error


def deliver_shards(index: Path, names: ShardNames) -> None:
    """Put the shards in place, and the index when all of them are there and on the disk."""
    deliver_files(index.parent, [*(names.output.with_name(name) for name in names.shards), names.index])
