"""FIL204 copied-block: a part of a weight matrix that also appears elsewhere in the file.

## What it finds
Runs of 512 bytes or more inside weight matrices that also occur elsewhere in the file, with different bytes before and
after. It hardly misses a run of 4 KiB in small files, or of 64 KiB in any file; a 4 KiB block that replaced another
block of a file without checksums is always found. Equality by design is not reported: whole matrices, rows and kernels,
the same place in two matrices of the same shape, rows that differ only in their last bits, and anything that two
matrices share many times.

## Why it matters
A block that a disk, cache or download misplaced, or that a program copied before saving, is full of ordinary numbers:
the file loads, no statistic looks odd, and part of a layer belongs to another one.

## Fix safety
There is no fix, because the file does not show which of the two is the copy. Compare it with another copy of the file.

## Example
Byte 40960 to 45056 of the file, in `layers.0.weight`, are also at byte 81920, in `layers.3.weight`.

## Sources
https://www.usenix.org/conference/fast-08/analysis-data-corruption-storage-stack (misdirected and lost writes)"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Literal

from msgspec import Struct

from ckptfix.bytes.sources import SECTOR, FileBytes, located
from ckptfix.core.checkpoint import IN_MEMORY
from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.core.lazy import np
from ckptfix.core.spec import DISK_BLOCK, TensorSpec
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.roles import is_layers_own
from ckptfix.values.scan import kernel

MOST = 256  # distances between places with equal hashes at which runs are compared
LONGEST = 1 << 24  # bytes of the shortest run that is part of the layout rather than a block
TOGETHER = 4  # most runs that two matrices share if these are copies
UNIT = 8  # a row or kernel with more numbers does not begin or end with a run by chance
LONG = 64  # numbers of a row per number that may be equal beyond its end, as in rows that are nearly alike
BESIDE = 8  # numbers on each side of a run that are compared too
# By itemsize: the integers that the bits are read as, and the units in the last place that rounding and a few gradients
# change.
LAST_BITS: dict[int, tuple[Literal["h", "i", "q"], int]] = {
    2: ("h", 4),
    4: ("i", 1 << 13),
    8: ("q", 1 << 42),
}
_PIECES = (1 << 12, 1 << 20)  # bytes per comparison: the first one, and all others


class _StoredMatrix(Struct, frozen=True, gc=False):
    """A matrix in a file: where it begins and ends, and its shape."""

    key: str
    file: FileBytes
    start: int
    stop: int
    shape: tuple[int, ...]
    itemsize: int

    def is_edge(self, place: int) -> bool:
        """Return whether a row or kernel begins or ends at this offset of the file, or near it if the row is long: its
        next numbers may be equal by chance."""
        number, unit = (place - self.start) // self.itemsize, 1
        for size in reversed(self.shape[1:]):
            unit *= size
            if unit > UNIT and min(number % unit, -number % unit) <= unit // LONG:
                return True
        return False


# Two matrices, the run's offset in the file for each, and its bytes.
CopiedRun = tuple[_StoredMatrix, _StoredMatrix, int, int, int]


def copied_block(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the tensors with a run that also occurs elsewhere; propose nothing."""
    if context.checkpoint.format == IN_MEMORY:
        return
    files: dict[str, list[tuple[_StoredMatrix, bytes, bytes]]] = defaultdict(list)
    for key, figures in context.matrices.items():
        if (figures.words or figures.marks) and is_layers_own(key):
            matrix = _placed(key, context.checkpoint.specs[key])
            files[matrix.file.file.path].append((matrix, figures.words, figures.marks))
    found = [run for matrices in files.values() for run in _copies(matrices)]
    if found:
        keys = dict.fromkeys(matrix.key for one, other, *_ in found for matrix in (one, other))
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(found), 'run')} of {SECTOR} bytes or more with bytes from another place in the file",
            keys=keys,
            evidence={"bytes_of_file": [[at, to] for _, _, at, to, _ in found], "length": [size for *_, size in found]},
            remedies=advise("compare the file with another copy"),
        )


def _placed(key: str, spec: TensorSpec) -> _StoredMatrix:
    file = located(spec.storage.source) if spec.storage is not None else None
    assert file is not None, "words and marks are kept of what is in a file"
    start = file.offset + spec.offset * spec.itemsize
    return _StoredMatrix(key, file, start, start + spec.nbytes, spec.shape, spec.itemsize)


def _copies(found: Sequence[tuple[_StoredMatrix, bytes, bytes]]) -> Iterator[CopiedRun]:
    """Yield the runs that occur in two places."""
    apart: list[tuple[_StoredMatrix, bytes, bytes]] = []
    for each in sorted(found, key=lambda each: each[0].start):
        if not apart or each[0].start >= apart[-1][0].stop:  # tied tensors share a place: keep one
            apart.append(each)
    matrices = [matrix for matrix, *_ in apart]
    marks = [memoryview(data).cast("Q") for *_, data in apart]
    blocks = _runs(
        matrices,
        [words for _, words, _ in apart],
        lambda owner, number: (-(-matrices[owner].start // DISK_BLOCK) + number) * DISK_BLOCK,
    )
    marked = _runs(
        matrices,
        [some[::2].tobytes() for some in marks],
        lambda owner, number: matrices[owner].start + marks[owner][2 * number + 1],
    )
    copies = dict.fromkeys(run for run in chain(blocks, marked) if _is_copied(*run))
    together = Counter((one.key, other.key) for one, other, *_ in copies)
    yield from (run for run in copies if together[run[0].key, run[1].key] <= TOGETHER)


def _runs(
    matrices: Sequence[_StoredMatrix], hashes: Sequence[bytes], place: Callable[[int, int], int]
) -> Iterator[CopiedRun]:
    """Yield the runs around equal hashes: a few for each distance between two places.

    ``hashes`` has those of each matrix, in file order; ``place(matrix, number)`` returns the file offset of one."""
    begins = [0, *accumulate(len(some) // 8 for some in hashes)]
    by_distance: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    pairs = iter(_pairs(b"".join(hashes)))
    for one, other in zip(pairs, pairs, strict=True):
        mine, theirs = (bisect(begins, number) - 1 for number in (one, other))
        at, to = place(mine, one - begins[mine]), place(theirs, other - begins[theirs])
        by_distance[to - at].append((at, mine, theirs))
    for distance in sorted(by_distance)[:MOST]:
        places, number = by_distance[distance], 0
        for _ in range(TOGETHER + 1):
            if number < len(places):
                at, mine, theirs = places[number]
                run = _run(matrices[mine], matrices[theirs], at, at + distance)
                yield run
                number = max(number + 1, bisect(places, (run[2] + run[4],)))


def _pairs(hashes: bytes) -> Iterable[int]:
    """Return the index of each repeated hash, followed by the index of its next occurrence.

    Hashes with two equal halves are skipped: they come from repeated numbers. With numpy, 2 GB take 0.3 s longer, half
    of that to import it."""
    if (compiled := kernel()) is not None:
        return compiled.pairs(hashes)
    hashed = np.frombuffer(hashes, np.uint64)
    order = np.argsort(hashed, kind="stable")
    ranked = hashed[order]
    same = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] >> np.uint64(32) != ranked[1:] & 0xFFFFFFFF))
    found = np.stack([order[same], order[same + 1]], 1)
    return chain.from_iterable(found[np.argsort(found[:, 1])].tolist())


def _run(one: _StoredMatrix, other: _StoredMatrix, at: int, to: int) -> CopiedRun:
    """Return the run of equal numbers around two places, up to ``LONGEST``."""
    before = _equal(one, other, at, to, -1, min(at - one.start, to - other.start, LONGEST))
    after = _equal(one, other, at, to, 1, min(one.stop - at, other.stop - to, LONGEST))
    return one, other, at - before, to - before, before + after


def _equal(one: _StoredMatrix, other: _StoredMatrix, at: int, to: int, way: int, most: int) -> int:
    """Return how many bytes, in whole numbers, are equal after two places (``way`` 1) or before them (-1)."""
    done, piece = 0, _PIECES[0]
    while done < most:
        size = min(piece, most - done)
        mine, theirs = (
            matrix.file.file.read(place + done if way > 0 else place - done - size, size)
            for matrix, place in ((one, at), (other, to))
        )
        if len(mine) != len(theirs):
            return done
        if mine != theirs:
            one_bits, other_bits = (int.from_bytes(data, "little" if way > 0 else "big") for data in (mine, theirs))
            different = one_bits ^ other_bits
            first = (different & -different).bit_length() - 1
            return done + first // 8 // one.itemsize * one.itemsize
        done, piece = done + size, _PIECES[1]
    return done


def _is_copied(one: _StoredMatrix, other: _StoredMatrix, at: int, to: int, size: int) -> bool:
    """Return whether a run was copied rather than equal by design."""
    if not SECTOR <= size < LONGEST or (at - one.start == to - other.start and one.shape == other.shape):
        return False
    if any(matrix.is_edge(start) and matrix.is_edge(start + size) for matrix, start in ((one, at), (other, to))):
        return False
    if _are_alike(one, other, at, to, size):
        return False
    words = memoryview(one.file.file.read(at, min(size // 8 * 8, DISK_BLOCK))).cast("Q")
    return len({*words}) > len(words) // 2  # unlike an initialisation, which repeats a few numbers


def _are_alike(one: _StoredMatrix, other: _StoredMatrix, at: int, to: int, size: int) -> bool:
    """Return whether the numbers next to a run differ only in their last bits: rows with the same initial values."""
    reach, (kind, most), gaps = BESIDE * one.itemsize, LAST_BITS[one.itemsize], []
    for way in (-reach, size):
        beside = [
            memoryview(matrix.file.file.read(place + way, reach)).cast(kind)
            for matrix, place in ((one, at), (other, to))
            if matrix.start <= place + way and place + way + reach <= matrix.stop
        ]
        if len(beside) == 2:
            gaps += [abs(mine - theirs) for mine, theirs in zip(*beside, strict=True)]
    middle = sorted(gaps)[(len(gaps) - 1) // 2 : len(gaps) // 2 + 1]  # importing `statistics` takes longer
    return bool(gaps) and sum(middle) <= most * len(middle)
