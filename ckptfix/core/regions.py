"""Which bytes of a storage its tensors really cover.

A checkpoint may save a view together with a storage a thousand times its size (pytorch#1995), or many tensors as slices
of one flat buffer. What has to be kept are the bytes that the tensors touch, and that tensors which overlap still do: a
tie stays a tie, a flat buffer falls apart (field guide, rows 14 and 19)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptfix.core.spec import Storage, TensorSpec


@dataclass(frozen=True, eq=False)
class Region:
    """Bytes ``start`` to ``stop`` of a storage, covered by tensors that overlap one another. ``align`` is the size of
    the largest element among them, of which ``start`` is a multiple.
    """

    storage: Storage
    start: int
    stop: int
    align: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether the region is its whole storage."""
        return self.start == 0 and self.stop == self.storage.nbytes


class Regions:
    """The regions of a set of strided tensors."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        by_storage: dict[int, list[TensorSpec]] = {}
        for spec in specs:
            if spec.storage is not None:
                by_storage.setdefault(id(spec.storage), []).append(spec)
        self._regions: dict[int, list[Region]] = {key: _merge(views) for key, views in by_storage.items()}

    def __iter__(self) -> Iterator[Region]:
        for regions in self._regions.values():
            yield from regions

    def of(self, spec: TensorSpec) -> tuple[Region, int]:
        """Return the region that holds a tensor, and the tensor's offset in it, in elements."""
        regions = self._regions[id(spec.storage)]
        if len(regions) == 1 and not regions[0].start:
            return regions[0], spec.offset
        start, _ = spec.extent
        region = regions[_last_at(regions, start)] if len(regions) > 1 else regions[0]
        # An offset that is no whole number of bytes keeps its remainder.
        return region, (start - region.start) // spec.itemsize * spec.per_byte + spec.offset % spec.per_byte


def _last_at(regions: list[Region], start: int) -> int:
    """Return the index of the last region that begins at or before ``start``."""
    from bisect import bisect_right

    return max(bisect_right(regions, start, key=lambda region: region.start) - 1, 0)


def _merge(views: list[TensorSpec]) -> list[Region]:
    """Return the unions of overlapping extents, in order. Each begins where every dtype in it is aligned."""
    storage = views[0].storage
    assert storage is not None
    if len(views) == 1:
        (start, stop), align = views[0].extent, views[0].itemsize
        return [Region(storage, start // align * align, stop, align)]
    regions: list[Region] = []
    start, stop, align = -1, -1, 1
    for (begin, end), itemsize in sorted((view.extent, view.itemsize) for view in views):
        if begin >= stop and not (begin == start == stop):
            if start >= 0:
                regions.append(Region(storage, start // align * align, stop, align))
            start, stop, align = begin, end, itemsize
        else:
            stop, align = max(stop, end), max(align, itemsize)
    regions.append(Region(storage, start // align * align, stop, align))
    return regions
