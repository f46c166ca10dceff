"""Tensors that several files of a zoo have in common: what a store that keeps each of them once would save.

The lines of ``weights.jsonl`` are read one by one. A tensor of each is a record of fixed size, sorted by its hash into
one of many piles; a pile is counted by itself. So memory holds a pile and not the zoo, and the piles go to a temporary
file as soon as they are many."""

from __future__ import annotations

import struct
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from typing import Any, BinaryIO

from ckptfix.core.dtypes import DTYPES

PILES = 1024
"""Of a million files with two hundred tensors each, the largest pile takes some 20 MB when it is counted."""

HELD = 16 << 20
"""Bytes of records that are kept in memory: those of half a million tensors."""

TELLING = 4096
"""Bytes from which on a tensor says that two files belong together. Counters and biases are alike by chance."""

_RECORD = struct.Struct("<16sQI?")
_DIGEST = 16


@dataclass(frozen=True)
class Family:
    """Files that have telling tensors in common, directly or through others of them."""

    files: tuple[str, ...]
    tensors: int
    """How many of their telling tensors are in more than one of them."""
    nbytes: int
    """How many bytes keeping each of those once would save."""


@dataclass(frozen=True)
class Duplicates:
    """How much of a zoo is there more than once."""

    files: int = 0
    tensors: int = 0
    nbytes: int = 0
    """Of all tensors."""
    repeated: int = 0
    """Tensors that are a copy of one in another file, or in the same."""
    saved: int = 0
    """Bytes of these: what a store that keeps each tensor once would save."""
    families: tuple[Family, ...] = ()
    """Those that save most first."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def find_duplicates(lines: Iterable[Mapping[str, Any]], *, families: bool = True) -> Duplicates:
    """The duplicates among the files of these lines of ``weights.jsonl``. Who wants no ``families`` saves the memory
    for the names of the files."""
    piles = _Piles()
    names: list[str] = []
    files = tensors = nbytes = 0
    with piles:
        for line in lines:
            for layer in line["layers"]:
                size = _nbytes(layer)
                tensors, nbytes = tensors + 1, nbytes + size
                if layer.get("xxh3"):
                    piles.add(bytes.fromhex(layer["xxh3"]), size, files, _is_telling(layer, size))
            files += 1
            if families:
                names.append(line["source"])
        repeated = saved = 0
        forest = _Families()
        for pile in piles:
            for size, holders, is_telling in _counted(pile):
                repeated, saved = repeated + len(holders) - 1, saved + size * (len(holders) - 1)
                if families and is_telling:
                    forest.join(holders, size)
    return Duplicates(files, tensors, nbytes, repeated, saved, forest.found(names))


def _nbytes(layer: Mapping[str, Any]) -> int:
    dtype = DTYPES.get(layer["dtype"])
    numel = 1
    for size in layer["shape"]:
        numel *= size
    return 0 if dtype is None else numel * dtype.itemsize // dtype.per_byte


def _is_telling(layer: Mapping[str, Any], size: int) -> bool:
    """Whether two files that both have this tensor have it from one source, and not because all such are alike."""
    return size >= TELLING and layer.get("minimum") != layer.get("maximum")


def _counted(pile: bytes) -> Iterator[tuple[int, list[int], bool]]:
    """The tensors of a pile that are there more than once: size, the files that have them, and whether they tell."""
    # Sorted records take a quarter of the memory of a table by digest.
    records = sorted(pile[start : start + _RECORD.size] for start in range(0, len(pile), _RECORD.size))
    for _, alike in groupby(records, key=lambda record: record[:_DIGEST]):
        sizes: defaultdict[int, list[int]] = defaultdict(list)
        is_telling = False
        for record in alike:
            _, size, file, tells = _RECORD.unpack(record)
            sizes[size].append(file)
            is_telling |= tells
        for size, files in sizes.items():
            if len(files) > 1:
                yield size, files, is_telling


class _Piles:
    """Records in piles by their hash: in memory, beyond ``HELD`` in pieces of a temporary file."""

    def __init__(self) -> None:
        self._held = [bytearray() for _ in range(PILES)]
        self._count = 0
        self._spilled: BinaryIO | None = None
        self._bounds: list[array[int]] = []
        """Of each time that memory was full: where the piece of each pile begins in the file, and the last ends."""

    def __enter__(self) -> _Piles:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spilled is not None:
            self._spilled.close()

    def add(self, digest: bytes, size: int, file: int, is_telling: bool) -> None:
        """Put a record on its pile."""
        self._held[int.from_bytes(digest[:4], "big") % PILES] += _RECORD.pack(digest, size, file, is_telling)
        self._count += _RECORD.size
        if self._count > HELD:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        for pile, held in enumerate(self._held):
            yield b"".join((*(self._piece(bounds[pile], bounds[pile + 1]) for bounds in self._bounds), bytes(held)))

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes it
        self._bounds.append(array("Q", accumulate(map(len, self._held), initial=self._spilled.tell())))
        for held in self._held:
            self._spilled.write(held)
            held.clear()
        self._count = 0

    def _piece(self, start: int, end: int) -> bytes:
        assert self._spilled is not None, "a piece without a file"
        self._spilled.seek(start)
        return self._spilled.read(end - start)


@dataclass
class _Families:
    """Files by the family that they are known to be of so far: a forest, whose roots stand for the families."""

    parents: dict[int, int] = field(default_factory=dict)
    shared: defaultdict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    """Of files: how many tensors they have in common with others, and how many bytes keeping those once saves."""

    def join(self, holders: list[int], size: int) -> None:
        """Note that files have a tensor in common."""
        first = self._root(holders[0])
        for other in holders[1:]:
            self.parents[self._root(other)] = first
        if len(set(holders)) > 1:
            tensors, nbytes = self.shared[first]
            self.shared[first] = tensors + 1, nbytes + size * (len(holders) - 1)

    def found(self, files: list[str]) -> tuple[Family, ...]:
        """The families of two files or more."""
        members: defaultdict[int, list[str]] = defaultdict(list)
        for file in self.parents:
            members[self._root(file)].append(files[file])
        tensors: defaultdict[int, int] = defaultdict(int)
        nbytes: defaultdict[int, int] = defaultdict(int)
        for file, (count, saved) in self.shared.items():
            tensors[self._root(file)] += count
            nbytes[self._root(file)] += saved
        families = [
            Family(tuple(sorted(names)), tensors[root], nbytes[root])
            for root, names in members.items()
            if len(names) > 1
        ]
        return tuple(sorted(families, key=lambda family: (-family.nbytes, family.files)))

    def _root(self, file: int) -> int:
        self.parents.setdefault(file, file)
        while self.parents[file] != file:
            self.parents[file] = file = self.parents[self.parents[file]]
        return file
