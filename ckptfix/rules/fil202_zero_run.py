"""FIL202 zero-run: a long run of zeros inside of a tensor that is dense elsewhere.

## What it finds
A run of zero bytes of the size of a disk's sector (512) or more, in a matrix of floating-point numbers of which
elsewhere hardly one in a hundred is zero: a warning if it begins and ends where sectors of the file do, else a note.
Runs of whole rows are left in peace (padding of a vocabulary,
pruned channels), and so are storages that have a checksum, which says more (FIL201).

## Why it matters
Files of torch before 1.6, and safetensors, have no checksum. A block that a disk lost or a download skipped reads as
zeros, the file loads, and the layer is partly dead.

## Fix safety
There is no fix: the zeros may be meant. Compare the file with another copy of it.

## Example
`layer1.0.weight` has zeros from byte 512 to 1024 of 2304.

## Sources
https://en.wikipedia.org/wiki/Data_corruption (sectors that cannot be read are returned as zeros by many tools)."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.bytes.checksums import WORD, Hole, longest_holes, storages_of
from ckptfix.bytes.sources import SECTOR, located
from ckptfix.core.checkpoint import IN_MEMORY
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.core.spec import Storage, TensorSpec, TensorStatistics
from ckptfix.rules.rule import Context, Rule, rule
from ckptfix.values.casting import WITHOUT_ZERO

LEAST = SECTOR - WORD  # bytes of whole words in a sector that lies across them, as in a storage that no writer aligned
DENSE = 0.01  # the largest share of zeros among the other numbers of the matrix


@rule
def zero_run(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name the tensors with a hole; propose nothing."""
    if context.checkpoint.format == IN_MEMORY:
        return
    unproved: list[tuple[Storage, dict[str, TensorSpec]]] = []
    for storage, keys in storages_of(context.checkpoint):
        if storage.crc32 is not None:
            continue
        inside = {key: context.checkpoint.specs[key] for key in keys if key in context.checkpoint.specs}
        matrices = {key: spec for key, spec in inside.items() if DTYPES[spec.dtype].is_float and len(spec.shape) > 1}
        if matrices:
            unproved.append((storage, matrices))
    # Asked for together, since they are computed side by side.
    figures = dict(context.statistics.items()) if unproved else {}
    specs = context.checkpoint.specs
    suspects: list[tuple[Storage, dict[str, TensorSpec]]] = []
    for storage, matrices in unproved:
        some = {key: spec for key, spec in matrices.items() if key in figures and _may_hold(spec, figures[key])}
        if some:
            suspects.append((storage, some))
    holes = longest_holes([storage for storage, _ in suspects])
    found = {
        key: hole
        for (_, some), hole in zip(suspects, holes, strict=True)
        for key, spec in some.items()
        if hole.stop - hole.start >= LEAST
        and _lies_across_rows(spec, hole)
        and _is_dense_elsewhere(spec, figures[key].zeros, hole)
    }
    for level, keys, where in (
        (Level.WARNING, [key for key, hole in found.items() if _is_of_sectors(specs[key], hole)], "whole sectors"),
        (Level.NOTE, [key for key, hole in found.items() if not _is_of_sectors(specs[key], hole)], "a long run"),
    ):
        if keys:
            yield rule.finding(
                level,
                f"{counted(len(keys), 'tensor')} with {where} of zeros among other numbers: a lost block reads so",
                keys=tuple(keys),
                evidence={"bytes_of_storage": {key: [found[key].start, found[key].stop] for key in keys}},
                remedies=advise("compare the file with another copy"),
            )


def _is_of_sectors(spec: TensorSpec, hole: Hole) -> bool:
    """Return whether a hole begins and ends where sectors of the file do, or the file itself. It is known to a word."""
    place = located(spec.storage.source) if spec.storage is not None else None
    if place is None:
        return False
    start, stop = place.offset + hole.start, place.offset + hole.stop
    return start % SECTOR < WORD and min(-stop % SECTOR, abs(place.file.size - stop)) < WORD


def _may_hold(spec: TensorSpec, figures: TensorStatistics) -> bool:
    """Return whether there are as many zeros as a hole has, a few of them where a part of it may be outside of the
    tensor.

    Most tensors have not one, and so their bytes need not be read once more."""
    if spec.storage is None:
        return False  # sparse: its zeros are not stored
    if spec.dtype == WITHOUT_ZERO:
        return True
    inside = LEAST if spec.extent == (0, spec.storage.nbytes) else WORD
    return figures.zeros >= inside // spec.itemsize


def _is_dense_elsewhere(spec: TensorSpec, zeros: int, hole: Hole) -> bool:
    first, stop = spec.extent
    inside = (min(stop, hole.stop) - max(first, hole.start)) // spec.itemsize
    # One number on either side of the hole may be zero without filling a word.
    return zeros - inside <= 2 * WORD // spec.itemsize + DENSE * (spec.numel - inside) and inside < spec.numel


def _lies_across_rows(spec: TensorSpec, hole: Hole) -> bool:
    """Return whether the hole begins or ends in the middle of a row of a matrix. It is known to a word."""
    first, stop = spec.extent
    if not spec.is_contiguous or hole.stop <= first or hole.start >= stop:
        return False
    row = (stop - first) // spec.shape[0]
    offsets = [edge - first for edge in (hole.start, hole.stop) if first < edge < stop]
    return any(WORD <= offset % row <= row - WORD for offset in offsets)
