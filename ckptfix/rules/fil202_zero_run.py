"""FIL202 zero-run: a long run of zeros inside a tensor that is dense elsewhere.

## What it finds
A run of at least 512 zero bytes (a disk sector) in a floating-point matrix with at most 1 % zeros elsewhere. It is a
warning if it begins and ends on sector boundaries of the file, possibly in neighbouring tensors, or if it is whole
sectors long in a file with checksums, which was saved with the hole; else a note. Runs of whole rows (padding of a
vocabulary, pruned channels) are not reported, unless they are file blocks of several rows.

## Why it matters
Files of torch before 1.6, and safetensors, have no checksum. A block that a disk lost or a download skipped reads as
zeros, the file loads, and the layer is partly dead. If such weights are saved again, the new checksums are correct.

## Fix safety
There is no fix, because the zeros may be intended. Compare the file with another copy.

## Example
`layer1.0.weight` has zeros from byte 512 to 1024 of 2304.

## Sources
https://en.wikipedia.org/wiki/Data_corruption (sectors that cannot be read are returned as zeros by many tools)."""

from collections.abc import Iterator

from ckptfix.bytes.checksums import WORD, Hole, longest_holes, storages_of
from ckptfix.bytes.sources import SECTOR, located
from ckptfix.core.checkpoint import IN_MEMORY
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.core.spec import Storage, TensorSpec, TensorStatistics
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.casting import WITHOUT_ZERO

LEAST = SECTOR - WORD  # bytes of the whole words in a sector, if the storage is not aligned to words
DENSE = 0.01  # largest share of zeros among the other numbers of the matrix
PART = 64  # least bytes of a lost sector in a matrix, if the rest of the sector is in neighbouring tensors
AROUND = 1 << 16  # bytes of the file before and after a storage that are searched for the rest of a hole
FEW_ROWS = 4  # least rows per block for zeros in whole rows to count as a lost block


def zero_run(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the tensors with a hole; propose nothing."""
    if context.checkpoint.format == IN_MEMORY:
        return
    stored: list[tuple[Storage, dict[str, TensorSpec]]] = []
    for storage, keys in storages_of(context.checkpoint):
        inside = {key: context.checkpoint.specs[key] for key in keys if key in context.checkpoint.specs}
        matrices = {key: spec for key, spec in inside.items() if DTYPES[spec.dtype].is_float and len(spec.shape) > 1}
        if matrices:
            stored.append((storage, matrices))
    # All at once, because tensors are scanned in parallel.
    figures = dict(context.statistics.items()) if stored else {}
    suspects: list[tuple[Storage, dict[str, TensorSpec]]] = []
    for storage, matrices in stored:
        some = {key: spec for key, spec in matrices.items() if key in figures and _may_hold(spec, figures[key])}
        if some:
            suspects.append((storage, some))
    holes = longest_holes([storage for storage, _ in suspects])
    found: dict[str, Hole] = {}
    lost: list[str] = []
    for (storage, some), hole in zip(suspects, holes, strict=True):
        block = _block(storage, hole)
        for key, spec in some.items():
            across = _lies_across_rows(spec, hole)
            is_hole = bool(block) or hole.stop - hole.start >= LEAST
            is_hole &= across or (storage.crc32 is None and _is_of_rows(spec, hole, block))
            if is_hole and _is_dense_elsewhere(spec, figures[key].zeros, hole):
                found[key] = hole
                lost += [key] if block else []
    for level, keys, where in (
        (Level.WARNING, lost, "whole sectors"),
        (Level.NOTE, [key for key in found if key not in lost], "a long run"),
    ):
        if keys:
            yield rule.finding(
                level,
                f"{counted(len(keys), 'tensor')} with {where} of zeros among other numbers, like a lost block",
                keys=keys,
                evidence={"bytes_of_storage": {key: [found[key].start, found[key].stop] for key in keys}},
                remedies=advise("compare the file with another copy"),
            )


def _block(storage: Storage, hole: Hole) -> int:
    """Return the size in bytes of the file blocks that make up a hole and the zeros around its storage: a power of two,
    at least a sector; 0 if it does not begin and end on sector boundaries or at the end of the file, to within a word.

    In a file with checksums, the hole comes from an earlier file: only its length has to be whole sectors."""
    if storage.crc32 is not None:
        length = hole.stop - hole.start
        return SECTOR if length >= LEAST and -length % SECTOR <= 2 * WORD else 0
    place = located(storage.source)
    if place is None or hole.stop - hole.start < PART:
        return 0
    start, stop = place.offset + hole.start, place.offset + hole.stop
    if hole.start < WORD:
        before = bytes(place.file.read(max(0, place.offset - AROUND), min(place.offset, AROUND)))
        start = place.offset - (len(before) - len(before.rstrip(b"\0")))
    if hole.stop > storage.nbytes - WORD:
        after = bytes(place.file.read(place.offset + storage.nbytes, AROUND))
        stop = place.offset + storage.nbytes + len(after) - len(after.lstrip(b"\0"))
    first, last = start // SECTOR * SECTOR, -(-stop // SECTOR) * SECTOR
    is_end = place.file.size - stop < WORD
    if start - first >= WORD or not (is_end or last - stop < WORD) or stop - start < LEAST:
        return 0
    return first & -first if is_end else (first | last) & -(first | last)


def _is_of_rows(spec: TensorSpec, hole: Hole, block: int) -> bool:
    """Return whether whole rows inside a matrix are file blocks: with several rows per block, no coincidence."""
    first, stop = spec.extent
    row = (stop - first) // spec.shape[0]
    return spec.is_contiguous and first + WORD < hole.start and hole.stop < stop - WORD and FEW_ROWS * row <= block


def _may_hold(spec: TensorSpec, figures: TensorStatistics) -> bool:
    """Return whether a tensor has enough zeros for a hole. Most have none, and are not read again."""
    if spec.storage is None:
        return False  # sparse: its zeros are not stored
    if spec.dtype == WITHOUT_ZERO:
        return bool(spec.numel)
    inside = PART if spec.extent == (0, spec.storage.nbytes) else WORD
    return figures.zeros >= inside // spec.itemsize


def _is_dense_elsewhere(spec: TensorSpec, zeros: int, hole: Hole) -> bool:
    first, stop = spec.extent
    inside = (min(stop, hole.stop) - max(first, hole.start)) // spec.itemsize
    # One number on either side of the hole may be zero without filling a word.
    return zeros - inside <= 2 * WORD // spec.itemsize + DENSE * (spec.numel - inside) and inside < spec.numel


def _lies_across_rows(spec: TensorSpec, hole: Hole) -> bool:
    """Return whether a hole begins or ends inside a row of a matrix, to within a word."""
    first, stop = spec.extent
    if not spec.is_contiguous or hole.stop <= first or hole.start >= stop:
        return False
    row = (stop - first) // spec.shape[0]
    offsets = [edge - first for edge in (hole.start, hole.stop) if first < edge < stop]
    return any(WORD <= offset % row <= row - WORD for offset in offsets)
