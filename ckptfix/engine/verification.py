"""Reopens a written file and compares it with what should have been written, down to the last byte.

Most bytes were read back when they were copied or computed. If the reopened file has a tensor in such a range, at the
same distance from its source, they are not read again; all others are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import Content, SmallParts, located
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.metadata import metadata_text
from ckptfix.core.objects import tensors_in
from ckptfix.core.progress import Task
from ckptfix.core.spec import ByteSource, Storage, TensorSpec, ties
from ckptfix.errors import CkptfixError, WriteError
from ckptfix.maps.optimizer_states import optimizers_in
from ckptfix.reading import safetensors
from ckptfix.reading.boxes import have_same_bytes
from ckptfix.reading.formats import read_document
from ckptfix.writing.output import Written
from ckptfix.writing.plain import plain_root
from ckptfix.writing.safetensors import lost_extras


def verify(temporary: Path, expected: Checkpoint, output: Path, written: Sequence[Written] = ()) -> None:
    """Reopen the written file and compare names, order, shapes, dtypes, ties, ``_metadata`` and every byte with
    ``expected``.

    Ranges that were read back while ``written`` was written are not read again if they are in the right place. Raises
    ``WriteError`` on any difference, and ``UnreadableError`` if a source has changed meanwhile."""
    from ckptfix.reading.opening import open_file

    try:
        found = open_file(str(temporary), path_name(expected.container))
    except CkptfixError as error:
        raise WriteError(
            f"{output}: cannot reopen the written file ({error}); it was removed; please report this"
        ) from error
    difference = _difference(found, expected) or _difference_of_bytes(found, expected, _ReadBack(written))
    for file in _files_of(expected):
        file.refuse_changed()
    if difference:
        raise WriteError(
            f"{output}: the written file differs from the plan: {difference}; it was removed; please report this"
        )


def verify_tree(temporary: Path, expected: object, output: Path) -> None:
    """Compare each tensor of a written optimizer with its source. Raises ``WriteError`` if one differs."""
    found = list(tensors_in(read_document(Content.of_file(str(temporary))).root))
    wanted = list(tensors_in(expected))
    is_equal = len(found) == len(wanted) and all(
        (one.dtype, one.shape) == (other.dtype, other.shape) and have_same_bytes(other, one, str(output))
        for one, other in zip(found, wanted, strict=True)
    )
    if not is_equal:
        raise WriteError(f"{output}: the written file differs from the plan; it was removed; please report this")


def _files_of(checkpoint: Checkpoint) -> set[OpenFile]:
    """Return the files that a checkpoint's tensors are in or are computed from."""
    roots = (root for spec in checkpoint.specs.values() for root in spec.storages)
    # Tensors spread over the same ranks share one tuple of storages.
    alone = {(id(root.parts) if root.parts else id(root)): root for root in roots}
    found = (located(one.source) for root in alone.values() for one in _made_of(root))
    small = (root.parts.files for root in alone.values() if isinstance(root.parts, SmallParts))
    return {*(place.file for place in found if place is not None), *chain.from_iterable(small)}


def _made_of(storage: Storage) -> Iterator[Storage]:
    """Yield the storages of files that a storage is computed from, except small parts, or the storage itself if there
    are none."""
    for part in () if isinstance(storage.parts, SmallParts) else storage.parts:
        yield from _made_of(part)
    if not storage.parts:
        yield storage


def _difference(written: Checkpoint, expected: Checkpoint) -> str:
    """Return what differs apart from the bytes; empty if nothing does."""
    is_safetensors = written.format.endswith(safetensors.NAME)  # in one file or in shards
    # Entries that the format cannot hold were reported before; they are not tensors.
    lost = set(lost_extras(expected)) - set(expected.specs) if is_safetensors else set()
    if list(written.entries) != [key for key in expected.entries if key not in lost]:
        return "other keys, or in another order"
    if metadata_text(written.metadata or {}) != metadata_text(expected.metadata or {}):
        return "another _metadata"
    for key, spec in expected.specs.items():
        other = written.specs.get(key)
        if other is None or other.dtype != spec.dtype or other.shape != spec.shape or other.layout != spec.layout:
            return f"the tensor {key}"
        if (spec.quantizer and spec.quantizer.form) != (other.quantizer and other.quantizer.form):
            return f"the quantiser of {key}"
        if is_safetensors:
            continue
        if spec.can_learn != other.can_learn or spec.is_parameter != other.is_parameter:
            return f"requires_grad of {key}"
    if set(ties(written.specs)) != set(ties(expected.specs)):
        return "the ties"
    return ""


class _Range(NamedTuple):
    """Bytes from ``offset`` on in their source, and from ``start`` on in the written file."""

    source: OpenFile | ByteSource
    offset: int
    file: OpenFile
    start: int
    nbytes: int


class _ReadBack:
    """The ranges that were read back, by written file and in order."""

    def __init__(self, written: Iterable[Written]) -> None:
        self._copied = {str(file.path): sorted(file.copied, key=attrgetter("start")) for file in written}
        self._starts = {path: [copied.start for copied in found] for path, found in self._copied.items()}

    def has(self, pair: _Range) -> bool:
        """Return whether the bytes are within a range that was read back, at the same distance from its start on both
        sides."""
        at = bisect_right(self._starts.get(pair.file.path, ()), pair.start) - 1
        if at < 0:
            return False
        copied = self._copied[pair.file.path][at]
        behind = pair.start - copied.start
        return (
            copied.source is pair.source
            and copied.offset + behind == pair.offset
            and behind + pair.nbytes <= copied.nbytes
        )


def _in_order(state: Mapping[Any, Any]) -> list[Any]:
    """Return the entries of an optimizer's state sorted by name, because a folder with one file per entry has no
    order."""
    entries = [state[name] for name in sorted(state, key=str)]
    return [[each[name] for name in sorted(each, key=str)] if isinstance(each, dict) else each for each in entries]


def _difference_of_bytes(written: Checkpoint, expected: Checkpoint, read_back: _ReadBack) -> str:
    pairs = [(key, spec, written.specs[key]) for key, spec in expected.specs.items()]
    if not written.format.endswith(safetensors.NAME):
        wanted, found = ([*optimizers_in(root)] for root in (plain_root(expected)[0], written.root))
        if [(one.name, one.ids) for one in found] != [(one.name, one.ids) for one in wanted]:
            return "the optimizer"
        for one, other in zip(wanted, found, strict=True):
            tensors, others = ([*tensors_in(_in_order(found.state))] for found in (one, other))
            if [(spec.dtype, spec.shape) for spec in tensors] != [(spec.dtype, spec.shape) for spec in others]:
                return f"the state of {one.name}"
            pairs += [(one.name, *both) for both in zip(tensors, others, strict=True)]
    task = Task(f"comparing {expected.path}", sum(spec.nbytes for _, spec, _ in pairs))
    known = 0
    of_files: dict[int, bool] = {}
    for key, spec, other_spec in pairs:
        for before, after in zip(spec.strided_parts(), other_spec.strided_parts(), strict=True):
            pair = _range(before, after, of_files)
            if pair is not None and read_back.has(pair):
                known += pair.nbytes
            elif not have_same_bytes(before, after, expected.path):
                return f"the bytes of {key}"
            else:
                task.advance(before.nbytes)
    task.advance(known)
    return ""


def _range(before: TensorSpec, after: TensorSpec, of_files: dict[int, bool]) -> _Range | None:
    """Return the range of bytes of a tensor, None if it is not one range in the same order on both sides."""
    if before.storage is None or after.storage is None:
        return None
    if (before.strides, before.math_bits) != (after.strides, after.math_bits):
        return None
    source, file = located(before.storage.source), located(after.storage.source)
    (offset, stop), (start, end) = before.extent, after.extent
    if file is None or stop - offset != end - start:
        return None
    if source is None:
        parts = id(before.storage.parts)  # tensors spread over the same ranks share one tuple
        if parts not in of_files:
            of_files[parts] = all(located(storage.source) for storage in _made_of(before.storage))
        if not of_files[parts]:
            return None  # otherwise a change of the source would go unnoticed
    whole, first = (before.storage.source, 0) if source is None else (source.file, source.offset)
    return _Range(whole, first + offset, file.file, file.offset + start, stop - offset)
