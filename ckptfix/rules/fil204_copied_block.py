"""FIL204 copied-block: a block of a file that holds the bytes of another block.

## What it finds
Blocks of 4 KiB inside of weight matrices whose bytes are those of another block of the file, where the bytes before and
after are different. Only in files without checksums, and only whole blocks of the file: matrices and rows that are
equal from end to end, as of tied or copied layers, are not reported.

## Why it matters
Files of torch before 1.6, and safetensors, have no checksum. A block that a disk, a cache or a download put in the
wrong place is full of ordinary numbers: the file loads, no figure is odd, and a part of a layer is another one's.

## Fix safety
There is no fix: which of the two is the copy is not in the file. Compare the file with another copy of it.

## Example
Byte 40960 to 45056 of the file, in `layers.0.weight`, are also at byte 81920, in `layers.3.weight`.

## Sources
https://www.usenix.org/conference/fast-08/analysis-data-corruption-storage-stack (misdirected and lost writes)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from ckptfix.bytes.sources import FileBytes, located
from ckptfix.core.checkpoint import IN_MEMORY
from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.core.lazy import np
from ckptfix.core.spec import DISK_BLOCK, TensorSpec
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.roles import is_layers_own

FEW = 1 << 17  # blocks of which a set is sooner made than numpy imported
MOST = 256  # pairs of blocks with the same first bytes of which the rest is compared
_PIECE = 1 << 20  # bytes that are compared at once: a run may be as long as a layer
_BEYOND = 8  # bytes before and after a block that have to differ


class _Matrix(NamedTuple):
    """A matrix in a file: where it begins and ends there, and the bytes of a row."""

    key: str
    file: FileBytes
    start: int
    stop: int
    row: int


def copied_block(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name the tensors with a block that is somewhere else too; propose nothing."""
    if context.checkpoint.format == IN_MEMORY:
        return
    files: dict[str, list[tuple[_Matrix, bytes]]] = defaultdict(list)
    for key, figures in context.matrices.items():
        if figures.words and is_layers_own(key):
            matrix = _placed(key, context.checkpoint.specs[key])
            files[matrix.file.file.path].append((matrix, figures.words))
    found = [pair for matrices in files.values() for pair in _copies(matrices)]
    if found:
        keys = dict.fromkeys(matrix.key for one, other, _, _ in found for matrix in (one, other))
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(found), 'block')} of {DISK_BLOCK} bytes or more with the bytes of another place of the file",
            keys=keys,
            evidence={"bytes_of_file": [[at, other] for _, _, at, other in found]},
            remedies=advise("compare the file with another copy"),
        )


def _placed(key: str, spec: TensorSpec) -> _Matrix:
    file = located(spec.storage.source) if spec.storage is not None else None
    assert file is not None, "words are kept of what is in a file"
    start = file.offset + spec.offset * spec.itemsize
    return _Matrix(key, file, start, start + spec.nbytes, spec.nbytes // spec.shape[0])


def _copies(matrices: list[tuple[_Matrix, bytes]]) -> Iterator[tuple[_Matrix, _Matrix, int, int]]:
    """Yield two matrices and the two places of the file at which a run of equal blocks begins."""
    count = sum(len(words) // 8 for _, words in matrices)
    if count <= FEW and len({*chain.from_iterable(memoryview(words).cast("Q") for _, words in matrices)}) == count:
        return
    numbers, places, owners = [], [], []
    for at, (matrix, words) in enumerate(matrices):
        first = -(-matrix.start // DISK_BLOCK)
        numbers.append(np.frombuffer(words, np.uint64))
        places.append(first + np.arange(len(numbers[-1])))
        owners.append(np.full(len(numbers[-1]), at))
    place, chosen = np.unique(np.concatenate(places), return_index=True)  # tied tensors are in one place
    word, owner = np.concatenate(numbers)[chosen], np.concatenate(owners)[chosen]
    order = np.argsort(word, kind="stable")
    is_same = (word[order][1:] == word[order][:-1]) & (word[order][1:] >> np.uint64(32) != word[order][1:] & 0xFFFFFFFF)
    one, other = order[:-1][is_same], order[1:][is_same]
    step = int(place[-1]) + 2  # what the number of a pair grows by to that of the two blocks after it
    pairs = np.sort(place[one] * (step - 1) + place[other])
    pairs = pairs[np.argsort(pairs % step, kind="stable")]  # so that runs are together
    begins = np.flatnonzero(np.diff(pairs, prepend=-1) != step)
    lengths = np.diff(begins, append=len(pairs))
    for pair, length in zip(pairs[begins[:MOST]].tolist(), lengths.tolist(), strict=False):
        a, b = divmod(pair, step - 1)
        mine, theirs = (matrices[owner[np.searchsorted(place, at)]][0] for at in (a, b))
        if _is_copied(mine, theirs, a * DISK_BLOCK, b * DISK_BLOCK, length * DISK_BLOCK):
            yield mine, theirs, a * DISK_BLOCK, b * DISK_BLOCK


def _is_copied(one: _Matrix, other: _Matrix, at: int, to: int, length: int) -> bool:
    """Return whether two runs of blocks are equal, their surroundings differ, and one ends inside of a row."""
    runs = ((one, at), (other, to))
    if not any((edge - matrix.start) % matrix.row for matrix, start in runs for edge in (start, start + length)):
        return False

    def both(offset: int, size: int) -> list[bytes]:
        return [matrix.file.file.read(start + offset, size) for matrix, start in runs]

    before = min(_compared(start - matrix.start) for matrix, start in runs)
    after = min(_compared(matrix.stop - start - length) for matrix, start in runs)
    for offset, size in ((-before, before), (length, after)):
        mine, theirs = both(offset, size)
        if mine == theirs and mine:  # none after the end of the file
            return False
    for offset in range(0, length, _PIECE):
        size = min(_PIECE, length - offset)
        mine, theirs = both(offset, size)
        if mine != theirs or len(mine) != size or (not offset and _is_repeated(mine)):
            return False
    return True


def _compared(rest: int) -> int:
    """Return how many bytes beyond a block are compared, if the matrix goes on for ``rest`` bytes there."""
    return min(_BEYOND, rest) if rest > 0 else _BEYOND


def _is_repeated(data: bytes) -> bool:
    """Return whether a block is a few numbers over and over, as an initialisation may be."""
    return len(set(memoryview(data[: len(data) // 8 * 8]).cast("Q"))) < len(data) // 32
