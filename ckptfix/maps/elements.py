"""Symbolic tensors that track where each element comes from while they are moved, split, joined and reshaped.

The steps of a map and the loaders of libraries are both traced this way, without reading any value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.parts import Part, Shape, extent, merged

# An axis as a product of source axes: size and stride of each, the outermost first.
Axis = tuple[tuple[int, int], ...]
MOST = 1 << 16  # pieces into which a reshape may divide one; real maps have far fewer


class UntraceableError(NotImplementedError, ValueError):
    """An operation on a tensor does more than move elements."""


class Piece(Struct, frozen=True):
    """Elements of the key ``source``, and the start of the box that they fill (``place``)."""

    source: str
    place: Shape
    axes: tuple[Axis, ...]
    offset: int = 0

    @property
    def sizes(self) -> Shape:
        return tuple(map(_size, self.axes))

    def sliced(self, axis: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the elements from ``start`` to ``stop`` of an axis, with places relative to ``start``."""
        begin = self.place[axis]
        first, last = max(start - begin, 0), min(stop - begin, _size(self.axes[axis]))
        if first < last:
            for at, offset, factors in _cut(self.axes[axis], first, last):
                place = (*self.place[:axis], begin + first + at - start, *self.place[axis + 1 :])
                axes = (*self.axes[:axis], factors, *self.axes[axis + 1 :])
                yield Piece(self.source, place, axes, self.offset + offset)

    def viewed(self, groups: Sequence[tuple[slice, slice]], before: Shape, after: Shape) -> Iterator[Piece]:
        """Yield the elements reshaped from ``before`` to ``after``; ``groups`` pairs axes of equal numel."""
        found = [list(_reshaped(self.place[a], self.axes[a], before[a], after[b])) for a, b in groups]
        if prod(map(len, found)) > MOST:
            raise UntraceableError("it falls into too many pieces")
        for parts in product(*found):
            place = tuple(start for starts, _, _ in parts for start in starts)
            axes = tuple(axis for _, own, _ in parts for axis in own)
            yield Piece(self.source, place, axes, self.offset + sum(offset for *_, offset in parts))

    def parts(self, shape: Shape) -> Iterator[Part]:
        """Yield the parts of the source, whose shape is given, that make up the piece: one for each box in it."""
        factors = [factor for axis in self.axes for factor in axis]
        axis_of = [at for at, axis in enumerate(self.axes) for _ in axis]
        order = sorted(range(len(factors)), key=lambda at: -factors[at][1])
        box, left = [], list(order)
        for axis, size in enumerate(shape):
            stride = expected = prod(shape[axis + 1 :])
            own = [at for at in left if stride <= factors[at][1] < stride * size] if size > 1 else []
            left = [at for at in left if at not in own]
            for at in reversed(own):
                if factors[at][1] != expected:  # not one box, as with every second row
                    outer = next(each for each in reversed(own) if factors[each][1] >= expected)
                    yield from (each for piece in self._along(axis_of[outer]) for each in piece.parts(shape))
                    return
                expected *= factors[at][0]
            start = self.offset // stride % size if size else 0
            box.append((start, start + expected // stride))
        if left:
            raise UntraceableError("an element is used several times")
        place = tuple((start, start + size) for start, size in zip(self.place, self.sizes, strict=True))
        part = Part(self.source, tuple(box), place)
        if order != list(range(len(order))):
            part = replace(
                part, view=tuple(factors[at][0] for at in order), axes=tuple(map(order.index, range(len(order))))
            )
        yield normal(part)

    def _along(self, axis: int) -> Iterator[Piece]:
        """Split the piece along the outermost factor of an axis."""
        (size, stride), *rest = self.axes[axis]
        axes = (*self.axes[:axis], tuple(rest), *self.axes[axis + 1 :])
        for index in range(size):
            begin = self.place[axis] + index * _size(axes[axis])
            yield Piece(
                self.source, (*self.place[:axis], begin, *self.place[axis + 1 :]), axes, self.offset + index * stride
            )


def _size(axis: Axis) -> int:
    return prod(size for size, _ in axis)


def _cut(axis: Axis, start: int, stop: int) -> Iterator[tuple[int, int, Axis]]:
    """Yield the ranges of an axis from ``start`` to ``stop``: the start of each, its offset in the source, and its
    factors."""
    at = 0
    for box in boxes_of(start, stop, [size for size, _ in axis]):
        factors = tuple((end - begin, stride) for (begin, end), (_, stride) in zip(box, axis, strict=True))
        yield at, sum(begin * stride for (begin, _), (_, stride) in zip(box, axis, strict=True)), factors
        at += _size(factors)


def boxes_of(start: int, stop: int, sizes: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Split a range of an axis into boxes of the axes of these ``sizes`` that it is a product of."""
    if not sizes:
        return [()]
    inner = prod(sizes[1:])
    if start == 0 and stop == inner * sizes[0]:
        return [tuple((0, size) for size in sizes)]
    boxes = []
    while start < stop:
        row, within = divmod(start, inner)
        if within or stop - start < inner:
            end = min(stop, (row + 1) * inner)
            boxes += [((row, row + 1), *rest) for rest in boxes_of(within, end - row * inner, sizes[1:])]
        else:
            end = stop - (stop - start) % inner
            boxes.append(((row, end // inner), *((0, size) for size in sizes[1:])))
        start = end
    return boxes


def _reshaped(
    place: Shape, axes: Sequence[Axis], before: Shape, after: Shape
) -> Iterator[tuple[Shape, list[Axis], int]]:
    """Yield the boxes that a box becomes in a reshape from ``before`` to ``after``: place, axes and offset of each."""
    sizes = [_size(axis) for axis in axes]
    first = next((at for at in reversed(range(len(sizes))) if sizes[at] != before[at]), 0)  # all after it are whole
    if prod(sizes[:first]) > MOST:
        raise UntraceableError("it falls into too many pieces")
    for outer in product(*map(range, sizes[:first])):
        start, offset = 0, 0
        for at, index in enumerate(outer):
            ((_, own, _),) = _cut(axes[at], index, index + 1)
            start, offset = start + (place[at] + index) * prod(before[at + 1 :]), offset + own
        start += place[first] * prod(before[first + 1 :]) if place else 0
        factors = tuple(factor for axis in axes[first:] for factor in axis)
        yield from _boxed(start, factors, offset, after)


def _boxed(start: int, factors: Axis, offset: int, shape: Shape) -> Iterator[tuple[Shape, list[Axis], int]]:
    """Yield the boxes of ``shape`` that a run of elements from ``start`` on fills."""
    boxes = boxes_of(start, start + _size(factors), shape)
    if len(boxes) == 1:
        begins, sizes = tuple(begin for begin, _ in boxes[0]), [end - begin for begin, end in boxes[0]]
        yield begins, list(_regrouped(factors, sizes)), offset
        return
    at = 0
    for box in boxes:
        count = prod(end - begin for begin, end in box)
        for within, more, own in _cut(factors, at, at + count):
            yield from _boxed(start + at + within, own, offset + more, shape)
        at += count


def _regrouped(factors: Axis, sizes: Sequence[int]) -> Iterator[Axis]:
    """Yield the axes of these sizes, made from ``factors``."""
    left = [factor for factor in factors if factor[0] != 1]
    for size in sizes:
        axis = []
        while size > 1:
            have, stride = left.pop(0)
            taken = have if size % have == 0 else size
            if have % taken:
                raise UntraceableError("the sizes do not divide")
            if taken < have:
                left.insert(0, (have // taken, stride))
            axis.append((taken, stride * (have // taken)))
            size //= taken
        yield tuple(axis)


def _groups(before: Shape, after: Shape) -> list[tuple[slice, slice]]:
    """Return the shortest groups of axes with the same number of elements in both shapes."""
    groups, at, to = [], 0, 0
    while at < len(before) or to < len(after):
        start, begin = at, to
        ours, theirs, at, to = prod(before[at : at + 1]), prod(after[to : to + 1]), at + 1, to + 1
        while ours != theirs and (at < len(before) or to < len(after)):
            if (ours < theirs and at < len(before)) or to >= len(after):
                ours, at = ours * before[at], at + 1
            else:
                theirs, to = theirs * after[to], to + 1
        groups.append((slice(start, min(at, len(before))), slice(begin, min(to, len(after)))))
    return groups


class Elements(Struct, frozen=True):
    """A tensor of this shape, and the pieces of other tensors that fill it, as far as known."""

    shape: Shape
    pieces: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, key: str, shape: Shape) -> Elements:
        """Return the tensor of a key of the file."""
        strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
        axes = tuple(((size, stride),) if size != 1 else () for size, stride in zip(shape, strides, strict=True))
        return cls(shape, (Piece(key, (0,) * len(shape), axes),) if 0 not in shape else ())

    @classmethod
    def joined(cls, tensors: Sequence[Elements], axis: int = 0) -> Elements:
        """Concatenate tensors along an axis."""
        pieces, start = list[Piece](), 0
        for tensor in tensors:
            for each in tensor.pieces:
                place = (*each.place[:axis], each.place[axis] + start, *each.place[axis + 1 :])
                pieces.append(replace(each, place=place))
            start += tensor.shape[axis]
        shape = tensors[0].shape
        return cls((*shape[:axis], start, *shape[axis + 1 :]), tuple(pieces))

    @classmethod
    def stacked(cls, tensors: Sequence[Elements], axis: int = 0) -> Elements:
        """Stack tensors along a new axis."""
        return cls.joined([each.viewed((*each.shape[:axis], 1, *each.shape[axis:])) for each in tensors], axis)

    def permuted(self, order: Sequence[int]) -> Elements:
        """Return the tensor with its axes permuted."""
        pieces = (
            replace(each, place=tuple(each.place[at] for at in order), axes=tuple(each.axes[at] for at in order))
            for each in self.pieces
        )
        return Elements(tuple(self.shape[at] for at in order), tuple(pieces))

    def viewed(self, shape: Shape) -> Elements:
        """Return the tensor reshaped."""
        groups = _groups(self.shape, shape)
        return Elements(shape, tuple(own for each in self.pieces for own in each.viewed(groups, self.shape, shape)))

    def sliced(self, axis: int, start: int, stop: int) -> Elements:
        """Return the elements from ``start`` to ``stop`` of an axis."""
        shape = (*self.shape[:axis], max(stop - start, 0), *self.shape[axis + 1 :])
        return Elements(shape, tuple(each for piece in self.pieces for each in piece.sliced(axis, start, stop)))

    def split(self, sizes: Sequence[int], axis: int = 0) -> list[Elements]:
        """Return the parts of these sizes along an axis."""
        return [self.sliced(axis, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]

    def selected(self, axis: int, index: int) -> Elements:
        """Return the tensor at an index of an axis, without this axis."""
        return self.sliced(axis, index, index + 1).viewed((*self.shape[:axis], *self.shape[axis + 1 :]))

    def parts(self, shapes: Mapping[str, Shape]) -> tuple[Part, ...]:
        """Return the tensor as parts of its source tensors, whose shapes are given by key."""
        return merged(part for piece in self.pieces for part in piece.parts(shapes[piece.source]))


def normal(part: Part) -> Part:
    """Return the same part with as few axes as possible."""
    if not part.axes:
        return replace(part, view=())
    seen = part.view or extent(part.box)
    kept = [axis for axis, size in enumerate(seen) if size != 1]
    order, shape = [kept.index(axis) for axis in part.axes if axis in kept], [seen[axis] for axis in kept]
    at = 0
    while at + 1 < len(order):  # merge axes that stay adjacent
        axis = order[at]
        if order[at + 1] == axis + 1:
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
            order = [other - (other > axis) for other in order[: at + 1] + order[at + 2 :]]
        else:
            at += 1
    if len(order) < 2:
        return replace(part, view=(), axes=())
    return replace(part, view=() if tuple(shape) == extent(part.box) else tuple(shape), axes=tuple(order))
