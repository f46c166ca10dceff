"""Where the elements of a tensor come from: a key of the target as boxes of keys of the source, each used once.

A part says: take this box of that tensor, look at it in the shape ``view``, put its axes in the order ``axes``, and put
the result into the box ``place``. That covers renaming, reshaping, transposing, splitting, concatenating, stacking,
interleaving and the permutation of rotary embeddings; each part has an inverse of the same kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Annotated

from msgspec import Meta, Struct

Size = Annotated[int, Meta(ge=0)]
Shape = tuple[Size, ...]
Bounds = tuple[tuple[Size, Size], ...]  # a box of a tensor: where it starts and stops along each axis


class Part(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``source[box].reshape(view).permute(axes)``, laid into the box ``place``; without ``axes`` the order stays."""

    source: str
    box: Bounds
    place: Bounds
    view: Shape = ()
    axes: Shape = ()

    def __post_init__(self) -> None:
        seen = self.view or extent(self.box)
        if prod(seen) != self.numel or (self.axes and sorted(self.axes) != list(range(len(seen)))):
            raise ValueError("the view or the axes do not fit the box")

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.box)

    def inverse(self, key: str) -> Part:
        """Return the part of ``source`` that this part of ``key`` gives back."""
        if not self.axes:
            return Part(key, self.place, self.box)
        seen = self.view or extent(self.box)
        back = tuple(self.axes.index(axis) for axis in range(len(self.axes)))
        return Part(key, self.place, self.box, tuple(seen[axis] for axis in self.axes), back)


Parts = Mapping[str, tuple[Part, ...]]


class PartsError(ValueError):
    """Parts that do not use each element exactly once: the key, and what is wrong with it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


def full(shape: Sequence[int]) -> Bounds:
    return tuple((0, size) for size in shape)


def extent(box: Bounds) -> Shape:
    return tuple(stop - start for start, stop in box)


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join the parts that continue each other on both sides."""
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
    return Part(one.source, box, place, axes=one.axes) if box and place else None


def _united(one: Bounds, other: Bounds) -> Bounds | None:
    differ = [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(differ) != 1 or one[differ[0]][1] != other[differ[0]][0]:
        return None
    axis = differ[0]
    return (*one[:axis], (one[axis][0], other[axis][1]), *one[axis + 1 :])


def check_bijection(parts: Parts, source: Mapping[str, Shape], target: Mapping[str, Shape]) -> None:
    """Raise PartsError unless each element of the keys that ``parts`` touches is used exactly once."""
    taken: dict[str, list[Bounds]] = defaultdict(list)
    for key, pieces in parts.items():
        for part in pieces:
            if part.source not in source:
                raise PartsError(key, f"{part.source} is not a key of the source")
            if part.numel != prod(extent(part.place)):
                raise PartsError(key, f"the part of {part.source} has {part.numel} elements, its place another number")
            taken[part.source].append(part.box)
        _check_cover(key, [part.place for part in pieces], target[key])
    for key, boxes in taken.items():
        _check_cover(key, boxes, source[key])


def _check_cover(key: str, boxes: list[Bounds], shape: Shape) -> None:
    for box in boxes:
        if len(box) != len(shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
        ):
            raise PartsError(key, f"a part is outside of its shape {list(shape)}")
    boxes = sorted(boxes)
    for at, box in enumerate(boxes):
        for other in boxes[at + 1 :]:
            if shape and other[0][0] >= box[0][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                raise PartsError(key, "two parts overlap: an element would be used twice")
    if sum(prod(extent(box)) for box in boxes) != prod(shape):
        raise PartsError(key, "the parts leave elements unused")


def shape_of(parts: tuple[Part, ...]) -> Shape:
    """Return the shape of the tensor that the parts fill."""
    return tuple(max(stops) for stops in zip(*([stop for _, stop in part.place] for part in parts), strict=True))


def used_in_full(parts: Parts, source: Mapping[str, Shape]) -> dict[str, tuple[Part, ...]]:
    """Leave out the keys that use a part of a tensor whose other parts have no place."""
    used: Counter[str] = Counter()
    for pieces in parts.values():
        for part in pieces:
            used[part.source] += part.numel
    torn = {key for key, numel in used.items() if numel != prod(source[key])}
    return {key: pieces for key, pieces in parts.items() if not any(part.source in torn for part in pieces)}


def inverse(parts: Parts) -> dict[str, tuple[Part, ...]]:
    """Return the parts that give the source back."""
    found: dict[str, list[Part]] = defaultdict(list)
    for key, pieces in parts.items():
        for part in pieces:
            found[part.source].append(part.inverse(key))
    return {key: tuple(sorted(pieces, key=lambda part: part.place)) for key, pieces in found.items()}
