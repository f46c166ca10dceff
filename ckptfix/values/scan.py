"""Computes the statistics of tensors block by block, in several threads.

Blocks go to the compiled kernel if it supports their dtype, else to numpy. Large tensors are split into parts, whose
statistics are joined in order, so the result does not depend on the number of threads."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from ckptfix.bytes.checksums import crc32, is_pending, note_checksum
from ckptfix.bytes.sources import SECTOR, located
from ckptfix.bytes.threads import batched, side_by_side
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.lazy import np
from ckptfix.core.spec import DISK_BLOCK, FAINT, Storage, TensorSpec, TensorStatistics
from ckptfix.values.decode import Array, Encoding, Narrowing, encoding
from ckptfix.values.tally import BLOCK, join, nonfinite_units, tally_codes, tally_integers, tally_units
from ckptfix.values.walk import Walk

PART = 1 << 23  # bytes of a part, which one thread scans
FEW = 1 << 12  # bytes of integers scanned without numpy, whose import takes longer than a small file
SAMPLED = 256  # numbers of a tensor kept for its histogram

# Bytes that a thread scans per task. Signals are handled between tasks; smaller tasks cost more than they save.
BATCH = 1 << 25


class Scanner:
    """Accumulates the statistics of a tensor, or of a part of it, from blocks of whole elements.

    ``order`` maps positions in feeding order (an int64 array of element numbers) to row-major indices; None if the
    elements are fed in row-major order. ``narrowing`` is a cast whose losses are counted. ``position`` is that of the
    first element fed. One word in 2^``rarity`` is marked; none if it is 0."""

    def __init__(
        self,
        encoding: Encoding,
        order: Callable[[Array], Array] | None = None,
        narrowing: Narrowing | None = None,
        position: int = 0,
        rarity: int = 0,
    ) -> None:
        self._rarity = rarity
        self._encoding = encoding
        self._order = order
        self._narrowing = narrowing
        self._position = position
        self.found = TensorStatistics()  # of everything that was fed

    def feed(self, block: memoryview) -> None:
        """Add the next bytes. Raises ``ValueError`` if they are not a whole number of elements."""
        if block.nbytes % (self._encoding.itemsize * self._encoding.units):
            raise ValueError(f"{block.nbytes} bytes are not a whole number of elements")
        if not block.nbytes:
            return
        at = self._position * self._encoding.itemsize * self._encoding.units
        found = _tally(block, self._encoding, self._narrowing, self._rarity, at)
        if (unit := found.first_nonfinite) is not None:
            index = self._position + unit // self._encoding.units
            found.first_nonfinite = index if self._order is None else self._least_index(block)
        self._position += block.nbytes // self._encoding.itemsize // self._encoding.units
        if self.found.numel:
            join(self.found, found)
        else:  # true of nearly all tensors
            self.found = found

    def _least_index(self, block: memoryview) -> int:
        """Return the row-major index of the first non-finite number of a block that has one."""
        assert self._order is not None
        units = np.frombuffer(block, self._encoding.unit)
        found = self._position + nonfinite_units(units, self._encoding) // self._encoding.units
        return int(self._order(found).min())


def _tally(
    block: memoryview, encoding: Encoding, narrowing: Narrowing | None = None, rarity: int = 0, at: int = 0
) -> TensorStatistics:
    """Return the statistics of a block; ``first_nonfinite`` counts units. Only the kernel makes marks."""
    compiled = kernel()
    if compiled is not None and encoding.part in KINDS:
        return compiled.tally(block, encoding, narrowing, rarity, at)
    if not encoding.smallest_normal and block.nbytes <= FEW and (numbers := DTYPES[encoding.part].few(block.tobytes())):
        return tally_integers(numbers)
    units = np.frombuffer(block, dtype=encoding.unit)
    if compiled is not None and encoding.itemsize == 1:
        return tally_codes(units, compiled.count(block), encoding, narrowing)
    with np.errstate(all="ignore"):  # NaN, infinities and subnormals are expected here
        return tally_units(units, encoding, narrowing)


class ScanPart(NamedTuple):
    """Elements ``start`` to ``stop`` of a walk. ``proved`` is the storage whose checksum is computed on the way;
    ``place`` the tensor's offset in the file, if words of it are kept; ``row`` the bytes of a row, if the matrix may
    have faint ones; ``distance`` the bytes between two numbers of the sample; ``rarity`` as for ``Scanner``."""

    walk: Walk
    stored: Encoding
    narrowing: Narrowing | None
    start: int
    stop: int
    nbytes: int
    proved: Storage | None = None
    place: int | None = None
    row: int = 0
    distance: int = 0
    rarity: int = 0

    def look(self, given: Iterable[memoryview] | None = None) -> TensorStatistics:
        """Return the statistics of the given bytes, or of those in the file. Raises ``UnreadableError`` if the file is
        too short."""
        order = None if self.walk.is_row_major else self.walk.logical_order
        scanner, crc = Scanner(self.stored, order, self.narrowing, self.start, self.rarity), 0
        words: list[bytes] = []
        sample: list[bytes] = []
        is_faint, at = False, self.start * self.walk.spec.itemsize
        for block in self.walk.blocks(self.start, self.stop) if given is None else given:
            scanner.feed(block)
            crc = crc32(block, crc) if self.proved is not None else 0
            if self.place is not None:
                words.append(_sampled(block, at + self.place, DISK_BLOCK, 8))
            if self.row and not is_faint and (starts := _sampled(block, at, self.row, self.stored.itemsize)):
                is_faint = _tally(memoryview(starts), self.stored, _FAINT).vanishing > 0
            sample.append(_decoded(_sampled(block, at, self.distance, self.stored.itemsize), self.stored))
            at += block.nbytes
        if self.proved is not None:
            note_checksum(self.proved, crc)
        scanner.found.words, scanner.found.has_faint_rows = b"".join(words), is_faint
        scanner.found.sample = b"".join(sample)
        return scanner.found


_UNSIGNED: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _sampled(block: memoryview, at: int, step: int, size: int) -> bytes:
    """Return the units of ``size`` bytes at each multiple of ``step`` that lie within a block, which begins at byte
    ``at``."""
    rest = block[-at % step :]
    units = rest[: rest.nbytes - rest.nbytes % size].cast(_UNSIGNED[size])
    sampled: memoryview = units[:: step // size]
    return sampled.tobytes()


def _decoded(units: bytes, stored: Encoding) -> bytes:
    """Convert numbers to float32, and return their bytes."""
    if stored.part == "float32" or not units:
        return units
    if (numbers := DTYPES[stored.part].few(units)) is not None:
        return array("f", numbers).tobytes()  # what a float32 cannot hold becomes infinite, NaN stays NaN
    return stored.decode(np.frombuffer(units, stored.unit)).astype(np.float32).tobytes()


def _distance(numel: int) -> int:
    """Return the step at which at most ``SAMPLED`` of the numbers are sampled.

    It has no common divisor with their count, or the sample would come from a few columns of a matrix."""
    distance = -(-numel // SAMPLED)
    while math.gcd(distance, numel) > 1:
        distance += 1
    return distance


_FAINT = Narrowing(math.nextafter(FAINT, 0), math.inf)  # no float16 is that small


Edges = Sequence[tuple[int, int]]


def parts_of(spec: TensorSpec, narrowing: Narrowing | None, edges: Edges = (), rarity: int = 0) -> list[ScanPart]:
    """Split a non-empty strided tensor with a storage into parts. ``edges`` gives the first element of each, and one
    past the last; by default they are chosen here. ``rarity`` is for the marks of matrices in a file."""
    dtype, stored, walk, storage = DTYPES[spec.dtype], encoding(spec.dtype), Walk(spec), spec.storage
    assert stored is not None, f"{spec.dtype} holds no numbers"
    cast = narrowing if dtype.is_float else None
    size, distinct = dtype.itemsize, walk.distinct
    nbytes = distinct * size
    # A checksum covers a whole storage in order.
    is_whole = storage is not None and not spec.offset and nbytes == storage.nbytes and walk.is_plain
    proved = storage if is_whole and storage is not None and is_pending(storage) else None
    place, row, is_marked = _samples(spec, walk)
    rarity *= is_marked
    distance = _distance(distinct * stored.units) * stored.itemsize
    if not edges and (nbytes <= PART or proved is not None or not walk.is_run):
        return [ScanPart(walk, stored, cast, 0, distinct, nbytes, proved, place, row, distance, rarity)]
    step = max(PART // size, 1)
    edges = edges or [(start, min(start + step, distinct)) for start in range(0, distinct, step)]
    return [
        ScanPart(walk, stored, cast, start, stop, (stop - start) * size, None, place, row, distance, rarity)
        for start, stop in edges
    ]


def _samples(spec: TensorSpec, walk: Walk) -> tuple[int | None, int, bool]:
    """Return a tensor's offset in the file, if words of it are kept; the bytes of a row, if rows are examined; and
    whether it is marked."""
    storage = spec.storage
    if len(spec.shape) < 2 or not walk.is_plain or storage is None or not DTYPES[spec.dtype].is_float:
        return None, 0, False
    row = spec.nbytes // spec.shape[0] if spec.dtype in ("float64", "float32", "bfloat16") else 0
    file = located(storage.source) if spec.nbytes > SECTOR else None
    place = None if file is None or storage.crc32 is not None else file.offset + spec.offset * spec.itemsize
    return place, row, file is not None


def looks(parts: Sequence[ScanPart]) -> Iterator[TensorStatistics]:
    """Yield the statistics of parts, of one or more tensors, in order."""
    batches = list(batched(parts, lambda part: part.nbytes, BATCH))
    return chain.from_iterable(side_by_side(lambda batch: [part.look() for part in batch], batches))


def channels_with(spec: TensorSpec, chosen: Callable[[Array], Array], least: int = 1) -> tuple[int, ...]:
    """Return the indices along the first dimension with at least ``least`` chosen numbers.

    ``chosen`` returns a mask for an array of float32 or float64. Returns nothing for tensors without channels: 0-d and
    sparse ones, and those that repeat a single channel. Raises ``UnreadableError`` if the file is too short."""
    stored = encoding(spec.dtype)
    if stored is None or stored.units != 1 or spec.storage is None or spec.parts or not spec.numel:
        return ()
    walk = Walk(spec)
    if 0 not in walk.axes:
        return ()
    length = walk.distinct // spec.shape[0]
    counts = np.zeros(spec.shape[0], dtype=np.int64)
    seen = 0
    for block in walk.blocks():
        units = np.frombuffer(block, dtype=stored.unit)
        for start in range(0, len(units), BLOCK):
            part = units[start : start + BLOCK]
            with np.errstate(all="ignore"):  # some callers look for NaN and infinities
                positions = seen + np.flatnonzero(chosen(stored.decode(part)))
            if len(positions):
                places = positions if walk.is_row_major else walk.logical_order(positions)
                channels = places // length
                found = np.bincount(channels - (first := channels.min()))
                counts[first : first + len(found)] += found
            seen += len(part)
    return tuple(np.flatnonzero(counts >= least).tolist())


def first_units(spec: TensorSpec, count: int) -> Array:
    """Return up to ``count`` of the first numbers of a float tensor, as stored."""
    stored = encoding(spec.dtype)
    assert stored is not None, f"{spec.dtype} holds no numbers"
    for block in Walk(spec).blocks():
        units: Array = np.frombuffer(block, dtype=stored.unit)
        return units[:count]
    return np.empty(0, dtype=stored.unit)


def first_numbers(spec: TensorSpec, count: int) -> Array:
    """Return up to ``count`` of the first numbers of a float tensor, as float64."""
    units, stored = first_units(spec, count), encoding(spec.dtype)
    assert stored is not None
    return stored.decode(units).astype(np.float64)


LIBRARY = Path(__file__).parent / "_kernel.so"
INTERFACE = 8  # as in `kernel.c`; a library with another interface was built from other sources and is not used
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
MARK = 16  # bytes of a mark
STRIP = 16  # columns that `ckptfix_add_product` processes at a time


class _Figures(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in "finite nan pos_inf neg_inf zeros subnormals".split()),
        *((name, ctypes.c_uint64) for name in "overflowing vanishing".split()),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_double) for name in "minimum maximum sum squares".split()),
    )


class _Cast(ctypes.Structure):
    _fields_ = (("vanishing", ctypes.c_double), ("largest", ctypes.c_double), ("wanted", ctypes.c_int))


class _Marks(ctypes.Structure):
    _fields_ = (
        *(("mask", ctypes.c_uint32), ("wanted", ctypes.c_uint32)),
        *((name, ctypes.c_size_t) for name in "place room found".split()),
        ("marks", ctypes.c_void_p),
    )


_NO_CAST, _NO_MARKS = _Cast(), _Marks()


class Kernel:
    """The compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan, self._count = library.ckptfix_scan, library.ckptfix_count
        pointer = ctypes.c_void_p
        self._scan.argtypes = (ctypes.c_int, pointer, ctypes.c_size_t, *map(ctypes.POINTER, (_Cast, _Figures, _Marks)))
        self._count.argtypes = (pointer, ctypes.c_size_t, pointer)
        self._scan.restype = self._count.restype = None
        self.merges, self._merge = bool(library.ckptfix_multiplies_as_torch()), library.ckptfix_add_product
        self._merge.argtypes = (
            *(ctypes.c_int, pointer, pointer, pointer),
            *(ctypes.c_size_t,) * 3,
            *(ctypes.c_float, ctypes.c_int),
        )
        self._merge.restype = None
        self._pairs = library.ckptfix_pairs
        self._pairs.argtypes = (pointer, ctypes.c_size_t, pointer, ctypes.c_size_t, pointer)
        self._pairs.restype = ctypes.c_size_t

    def merge(
        self, dtype: str, rows: memoryview, two: Array, one: Array, width: int, scaling: float, rounds: bool
    ) -> None:
        """Add a scaled product to rows of ``width`` numbers in place.

        ``two`` is [rows, rank], contiguous float32; ``one`` is [rank, width], cut by ``strips``. With ``rounds``, the
        product is rounded to ``dtype`` before it is added."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(rows))
        self._merge(
            KINDS[dtype], address, two.ctypes.data, one.ctypes.data, len(two), width, two.shape[1], scaling, rounds
        )

    def tally(
        self, block: memoryview, encoding: Encoding, narrowing: Narrowing | None, rarity: int = 0, at: int = 0
    ) -> TensorStatistics:
        """Return the statistics of a block of one of the ``KINDS``; ``first_nonfinite`` counts units."""
        cast, marks, kept = _NO_CAST if narrowing is None else _Cast(*narrowing, 1), _NO_MARKS, b""
        if rarity:
            # A word holds two 16-bit numbers, whose exponents vary little.
            mask = (1 << rarity) - 1 << 4 if encoding.itemsize == 4 else 0x7F | ((1 << rarity - 7) - 1) << 16
            room = (block.nbytes >> rarity) + 16
            buffer = ctypes.create_string_buffer(room * MARK)
            marks = _Marks(mask, 0x5A5A5A5A & mask, at, room, 0, ctypes.addressof(buffer))
        found, count = _Figures(), block.nbytes // encoding.itemsize
        self._scan(KINDS[encoding.part], _aligned(block, encoding.itemsize), count, cast, found, marks)
        if marks.found:
            kept = buffer.raw[: marks.found * MARK]
        return TensorStatistics(
            count,
            found.nan,
            found.pos_inf,
            found.neg_inf,
            found.zeros,
            found.subnormals,
            found.overflowing,
            found.vanishing,
            found.minimum if found.finite else 0.0,
            found.maximum if found.finite else 0.0,
            found.sum / found.finite if found.finite else 0.0,
            math.sqrt(found.squares / found.finite) if found.finite else 0.0,
            None if found.first < 0 else found.first,
            marks=kept,
        )

    def count(self, block: memoryview) -> Array:
        """Return how often each of the 256 byte values occurs."""
        counts = np.zeros(256, np.uint64)
        self._count(_aligned(block, 1), block.nbytes, counts.ctypes.data)
        return counts

    def pairs(self, hashes: bytes) -> memoryview:
        """Return the index of each repeated 64-bit hash, followed by the index of its next occurrence, as uint32.

        Hashes with two equal halves are skipped."""
        count = len(hashes) // 8
        table = (ctypes.c_uint32 * (1 << (count + count // 2).bit_length()))()
        pairs = (ctypes.c_uint32 * (2 * count))()
        found = self._pairs(hashes, count, table, len(table), pairs)
        return memoryview(pairs).cast("B").cast("I")[: 2 * found]


def _aligned(block: memoryview, size: int) -> object:
    """Return a block as an argument for the library; a copy if it is read-only, or not aligned to ``size``."""
    first = None if block.readonly else ctypes.c_char.from_buffer(block)
    if first is None or ctypes.addressof(first) % size:
        first = ctypes.c_char.from_buffer(bytearray(block))
    return ctypes.byref(first)


def strips(matrix: Array) -> Array:
    """Cut a float32 matrix into strips of columns: [strips, rows, ``STRIP``], padded with zeros."""
    rows, width = matrix.shape
    padded = np.zeros((rows, -(-width // STRIP) * STRIP), np.float32)
    padded[:, :width] = matrix
    return np.ascontiguousarray(padded.reshape(rows, -1, STRIP).swapaxes(0, 1))


@cache
def kernel() -> Kernel | None:
    """Load the library. Returns None if it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    return Kernel(library) if library.ckptfix_interface() == INTERFACE else None
