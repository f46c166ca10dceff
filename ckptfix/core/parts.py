"""Where the elements of a tensor come from: a target tensor as boxes of source tensors, each used once.

A part means: take this box of that tensor, view it in the shape ``view``, permute its axes to the order ``axes``, and
write the result into the box ``place``. That covers renaming, reshaping, transposing, splitting, concatenating,
stacking, interleaving and the permutation of rotary embeddings; each part has an inverse of the same kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product, takewhile
from math import prod
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Shape = tuple[Size, ...]
Shapes = Mapping[str, Shape]  # by key
Box = tuple[tuple[Size, Size], ...]  # a block of a tensor: start and stop along each axis


class Part(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``source[box].reshape(view).permute(axes)``, written into the box ``place``; without ``axes``, not permuted."""

    source: str
    box: Box
    place: Box
    view: Shape = ()
    axes: Shape = ()

    def __post_init__(self) -> None:
        seen = self.view or extent(self.box)
        if prod(seen) != self.numel or (self.axes and sorted(self.axes) != list(range(len(seen)))):
            raise ValueError("the view or the axes do not fit the box")

    @classmethod
    def whole(cls, source: str, shape: Shape, into: Shape | None = None) -> Part:
        """Return the part that is a whole tensor of this shape, reshaped ``into`` another one if that is given."""
        return cls(source, full(shape), full(shape if into is None else into))

    @property
    def numel(self) -> int:
        return numel(self.box)

    def inverse(self, key: str) -> Part:
        """Return the part that restores ``source`` from ``key``, which this part fills."""
        if not self.axes:
            return Part(key, self.place, self.box)
        seen = self.view or extent(self.box)
        back = tuple(self.axes.index(axis) for axis in range(len(self.axes)))
        return Part(key, self.place, self.box, tuple(seen[axis] for axis in self.axes), back)


Parts = Mapping[str, tuple[Part, ...]]


class PartsError(ValueError):
    """The parts of ``key`` do not use each element exactly once; ``problem`` says why."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


def full(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_at(offsets: Sequence[int], shape: Sequence[int]) -> Box:
    return tuple((start, start + size) for start, size in zip(offsets, shape, strict=True))


def extent(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join parts that are adjacent both in their source and in their place."""
    result = sorted(parts, key=lambda part: part.place)
    count = 0
    while count != len(result):
        count, rest, result = len(result), result, []
        for part in rest:
            joined = _joined(result[-1], part) if result else None
            result[-1:] = [joined] if joined else [*result[-1:], part]
    return tuple(result)


def _joined(one: Part, other: Part) -> Part | None:
    if one.source != other.source or one.axes != other.axes or one.view or other.view:
        return None
    box, place = _united(one.box, other.box), _united(one.place, other.place)
    if box is None or place is None:
        return None
    sizes = extent(one.box)
    # In row-major order two adjacent blocks alternate once for each index before the axis along which they meet, so
    # that number must be equal on both sides.
    rows = prod(sizes[axis] for axis in takewhile(box.axis.__ne__, one.axes or range(len(sizes))))
    if rows != prod(extent(one.place)[: place.axis]):
        return None
    return Part(one.source, box.whole, place.whole, axes=one.axes)


class _United(NamedTuple):
    axis: int  # along which they meet
    whole: Box


def _united(one: Box, other: Box) -> _United | None:
    differ = [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(differ) != 1 or one[differ[0]][1] != other[differ[0]][0]:
        return None
    axis = differ[0]
    return _United(axis, (*one[:axis], (one[axis][0], other[axis][1]), *one[axis + 1 :]))


def check_bijection(parts: Parts, source: Mapping[str, Shape], target: Mapping[str, Shape]) -> None:
    """Raise ``PartsError`` unless each element of the keys that ``parts`` touches is used exactly once."""
    taken: dict[str, list[Box]] = defaultdict(list)
    for key, pieces in parts.items():
        for part in pieces:
            if part.source not in source:
                raise PartsError(key, f"{part.source} is not a key of the source")
            if part.numel != numel(part.place):
                raise PartsError(key, f"the part of {part.source} and its place have different numbers of elements")
            taken[part.source].append(part.box)
        check_cover(key, [part.place for part in pieces], target[key])
    for key, boxes in taken.items():
        check_cover(key, boxes, source[key])


def check_cover(key: str, boxes: Sequence[Box], shape: Shape) -> None:
    """Raise ``PartsError`` unless the boxes fill a tensor of this shape, each element once."""
    if not all(lies_in(box, shape) for box in boxes):
        raise PartsError(key, f"a part is outside of its shape {list(shape)}")
    filled = [box for box in boxes if numel(box)]
    if (count := sum(map(numel, filled))) != prod(shape):
        raise PartsError(key, f"the parts have {count} of the {prod(shape)} elements of its shape")
    if not _are_disjoint(filled, shape):
        raise PartsError(key, "two parts overlap: an element is used twice")


def _are_disjoint(boxes: Sequence[Box], shape: Shape) -> bool:
    """Return whether boxes inside a tensor, with as many elements as it has in all, contain each element once.

    The corners of each box get alternating signs along each dimension. Boxes that tile the tensor have signs that
    cancel, except at the corners of the whole. The time is linear in the number of boxes."""
    axes = [axis for axis, size in enumerate(shape) if any(box[axis] != (0, size) for box in boxes)]
    if len(axes) > _MOST_DIVIDED or not axes:
        return not axes and len(boxes) < 2
    if len(axes) == 1:  # as for nearly all tensors
        return all(one[1] == after[0] for one, after in pairwise(sorted(box[axes[0]] for box in boxes)))
    signs: Counter[tuple[int, ...]] = Counter()
    for box, first in [(full(shape), -1), *((box, 1) for box in boxes)]:
        for corner in product(*([(box[axis][0], 1), (box[axis][1], -1)] for axis in axes)):
            signs[tuple(end for end, _ in corner)] += first * prod(sign for _, sign in corner)
    return not any(signs.values())


_MOST_DIVIDED = 6  # dimensions along which a tensor is divided; device meshes hardly have more


def lies_in(box: Box, shape: Shape) -> bool:
    """Return whether a box is inside a tensor of this shape."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def shape_of(parts: tuple[Part, ...]) -> Shape:
    """Return the shape of the tensor that the parts fill."""
    return shape_over(part.place for part in parts)


def shape_over(boxes: Iterable[Box]) -> Shape:
    """Return the shape of the smallest tensor that contains these boxes."""
    return tuple(max(stops) for stops in zip(*([stop for _, stop in box] for box in boxes), strict=True))


def used_in_full(parts: Parts, source: Mapping[str, Shape]) -> dict[str, tuple[Part, ...]]:
    """Drop the keys with a part of a tensor that is not used completely."""
    used: Counter[str] = Counter()
    for pieces in parts.values():
        for part in pieces:
            used[part.source] += part.numel
    torn = {key for key, numel in used.items() if numel != prod(source[key])}
    return {key: pieces for key, pieces in parts.items() if not any(part.source in torn for part in pieces)}


def inverse(parts: Parts) -> dict[str, tuple[Part, ...]]:
    """Return the parts that restore the source tensors."""
    found: dict[str, list[Part]] = defaultdict(list)
    for key, pieces in parts.items():
        for part in pieces:
            found[part.source].append(part.inverse(key))
    return {key: tuple(sorted(pieces, key=lambda part: part.place)) for key, pieces in found.items()}
