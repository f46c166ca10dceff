"""Opens a written file again and compares it with what was to be written, down to the last byte.

Most bytes were read back when they were copied. Where the opened file says that a tensor lies in such a range, as far
from its source as it was copied, they are not read once more; all others are.

Ranges of files are read into buffers that are used again and again, since fresh memory for each block would take longer
than the reading, by two threads. A mapping of the files would be a little faster, but a source that is cut meanwhile
would end the program then instead of raising an error."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ckptfix.checkpoint import Checkpoint, TensorSpec, path_name
from ckptfix.errors import CkptfixError, WriteError
from ckptfix.formats.output import Written
from ckptfix.formats.raw.batches import THREADS, batched
from ckptfix.formats.raw.copying import background
from ckptfix.formats.raw.files import OpenFile
from ckptfix.formats.raw.sources import FileBytes, located, stream
from ckptfix.formats.safetensors_files import safetensors
from ckptfix.formats.safetensors_files.safetensors_write import contiguous_blocks, lost_extras
from ckptfix.progress import Task

BATCH = 32 << 20
"""Bytes that a thread compares in one go: a signal waits for as many, and handing over fewer would take longer."""

WINDOW = 512 << 10
"""Bytes that are compared at once: they are in the processor's cache still."""

PIECE = 64 << 10
"""Bytes of a block that are copied at once where they have to be: so few that no fresh memory is asked for them."""


def verify(temporary: Path, expected: Checkpoint, output: Path, written: Sequence[Written] = ()) -> None:
    """Open the written file and compare names, order, shapes, dtypes, ties, ``_metadata`` and every byte with what was
    to be written.

    What was read back and found equal while the files of ``written`` were is not read again where it lies as it was to.
    Raises ``WriteError`` on any difference, and ``UnreadableError`` where a source has changed meanwhile: then the file
    is not delivered.
    """
    from ckptfix.formats import open_file

    try:
        found = open_file(str(temporary), path_name(expected.container))
    except CkptfixError as error:
        raise WriteError(
            f"{output}: the written file does not open again ({error}); it was removed; please report this"
        ) from error
    difference = _difference(found, expected) or _difference_of_bytes(found, expected, _ReadBack(written))
    for file in _files_of(expected):
        file.refuse_changed()
    if difference:
        raise WriteError(
            f"{output}: the written file differs from the plan: {difference}; it was removed; please report this"
        )


def _files_of(checkpoint: Checkpoint) -> set[OpenFile]:
    """The files whose bytes are a checkpoint's tensors as they are."""
    storages = {id(part.storage): part.storage for spec in checkpoint.specs.values() for part in spec.strided_parts()}
    places = (located(storage.source) for storage in storages.values() if storage is not None)
    return {place.file for place in places if place is not None}


def _difference(written: Checkpoint, expected: Checkpoint) -> str:
    """What differs beside the bytes; empty where nothing does."""
    is_safetensors = written.format.endswith(safetensors.NAME)  # in one file or in shards
    # What has no form in a format was said before; it is no tensor.
    lost = set(lost_extras(expected)) - set(expected.specs) if is_safetensors else set()
    if list(written.entries) != [key for key in expected.entries if key not in lost]:
        return "other keys, or in another order"
    if (written.metadata or {}) != (expected.metadata or {}):
        return "another _metadata"
    for key, spec in expected.specs.items():
        other = written.specs.get(key)
        if other is None or (other.dtype, other.shape, other.layout) != (spec.dtype, spec.shape, spec.layout):
            return f"the tensor {key}"
        if (spec.quantizer is None) != (other.quantizer is None) or _scheme(spec) != _scheme(other):
            return f"the quantiser of {key}"
        trained = (spec.requires_grad, spec.is_parameter) != (other.requires_grad, other.is_parameter)
        if trained and not is_safetensors:
            return f"requires_grad of {key}"
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


class _Range(NamedTuple):
    """Bytes of a key that lie in a file on both sides."""

    key: str
    before: FileBytes
    after: FileBytes


class _ReadBack:
    """The ranges that were read back, by the distance between their places in the two files."""

    def __init__(self, files: Iterable[Written]) -> None:
        self._spans: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for file in files:
            for place, start in file.copied:
                span = (place.offset, place.offset + place.nbytes)
                self._spans.setdefault((str(file.path), place.file, start - place.offset), []).append(span)
        for spans in self._spans.values():
            spans.sort()

    def has(self, pair: _Range) -> bool:
        """Whether the bytes lie within a range that was found equal."""
        before, after = pair.before, pair.after
        spans = self._spans.get((after.file.path, before.file, after.offset - before.offset), [])
        at = bisect_right(spans, before.offset, key=itemgetter(0)) - 1
        return at >= 0 and before.offset + before.nbytes <= spans[at][1]


def _difference_of_bytes(written: Checkpoint, expected: Checkpoint, read_back: _ReadBack) -> str:
    task = Task(f"comparing {expected.path}", sum(spec.nbytes for spec in expected.specs.values()))
    ranges: list[_Range] = []
    made: list[tuple[str, TensorSpec, TensorSpec]] = []
    for key, spec in expected.specs.items():
        for before, after in zip(spec.strided_parts(), written.specs[key].strided_parts(), strict=True):
            in_files = _ranges(key, before, after)
            if in_files is None:
                made.append((key, before, after))
            else:
                for pair in in_files:
                    if read_back.has(pair):
                        task.advance(pair.before.nbytes)
                    else:
                        ranges.append(pair)
    batches = batched(ranges, lambda pair: pair.before.nbytes, BATCH)
    with background(THREADS) as pool:
        compared = [(batch, pool.submit(_first_difference, batch)) for batch in batches]
        for key, before, after in made:
            if not _same_blocks(before, after, expected.path):
                return f"the bytes of {key}"
            task.advance(before.nbytes)
        for batch, found in compared:
            if differing := found.result():
                return f"the bytes of {differing}"
            task.advance(sum(pair.before.nbytes for pair in batch))
    return ""


def _is_same_view(before: TensorSpec, after: TensorSpec) -> bool:
    """Whether what two tensors span can be compared without putting it into row-major order."""
    return before.strides == after.strides and before.math_bits == after.math_bits


def _ranges(key: str, before: TensorSpec, after: TensorSpec) -> list[_Range] | None:
    """The bytes of a tensor in pieces of at most ``BATCH``, where they are a range of a file on both sides."""
    left, right = _place(before), _place(after)
    if left is None or right is None or left.nbytes != right.nbytes or not _is_same_view(before, after):
        return None
    if 0 < left.nbytes <= BATCH:
        return [_Range(key, left, right)]
    return [_Range(key, _part(left, start), _part(right, start)) for start in range(0, left.nbytes, BATCH)]


def _place(spec: TensorSpec) -> FileBytes | None:
    """Where in a file the bytes lie that a tensor spans."""
    place = located(spec.storage.source) if spec.storage is not None else None
    if place is None:
        return None
    start, stop = spec.extent
    return FileBytes(place.file, place.offset + start, stop - start)


def _part(place: FileBytes, start: int) -> FileBytes:
    return FileBytes(place.file, place.offset + start, min(BATCH, place.nbytes - start))


def _first_difference(batch: list[_Range]) -> str | None:
    """The key of the first range that differs."""
    size = min(WINDOW, max(pair.before.nbytes for pair in batch))
    left, right = bytearray(size), bytearray(size)
    for key, before, after in batch:
        for start in range(0, before.nbytes, WINDOW):
            count = min(WINDOW, before.nbytes - start)
            before.file.fill(memoryview(left)[:count], before.offset + start)
            after.file.fill(memoryview(right)[:count], after.offset + start)
            # Behind what was read, both hold what was found equal before.
            if left != right:
                return key
    return None


def _same_blocks(before: TensorSpec, after: TensorSpec, path: str) -> bool:
    if _is_same_view(before, after) and before.storage is not None and after.storage is not None:
        left, right = stream(before.storage.source, *before.extent), stream(after.storage.source, *after.extent)
    else:
        left, right = contiguous_blocks(before, path), contiguous_blocks(after, path)
    return all(_equal(one, other) for one, other in zip(left, right, strict=True))


def _equal(one: memoryview, other: memoryview) -> bool:
    """A memoryview is compared number by number, a bytearray by memcmp: well worth the copy of a piece."""
    pieces = range(0, max(one.nbytes, other.nbytes), PIECE)
    return all(bytearray(one[start : start + PIECE]) == other[start : start + PIECE] for start in pieces)


def _tie_groups(checkpoint: Checkpoint) -> set[tuple[str, ...]]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for key, spec in checkpoint.specs.items():
        if spec.storage is not None and spec.numel:
            groups.setdefault(spec.view, []).append(key)
    return {tuple(group) for group in groups.values() if len(group) > 1}
