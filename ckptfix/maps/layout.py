"""The steps of a rule: how the tensors of the source are joined, rearranged and taken apart, in this order.

    concat            the texts of {q,k,v} one after another: `concat`, `concat 3:1:1` (their shares), `concat dim 1`
    stack             the numbers of {e} on a new first axis
    (h d 2) … -> …    the axes in another order, in the notation of einops: `(h d 2) ... -> (h 2 d) ... with d=64`
    swap              the two halves of the first axis exchanged; a step by itself
    unstack, split    the inverse of stack and concat: `split 3`, `split 3:1:1`, `split 2 dim 1`
    … -> … for q,k    the axes of these texts only, before the concat or after the split

What a step does is computed on boxes of the tensors, never on values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import gcd, prod

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.parts import Box, Part, Shape, extent, full, merged

_CUT = re.compile(r"(concat|split)(?: ([1-9]\d{0,4}(?::[1-9]\d{0,9})*))?(?: dim (\d))?")
_AXES = re.compile(r"\([^()]*\)|\.\.\.|[^\s()]+")
Grid = list[list[tuple[str, Shape]]]  # tensors by their number in a stack, and then by their place among several


class Cut(Struct, frozen=True):
    """Where one tensor is several: the share of each (None: equal ones) and the axis."""

    shares: tuple[int, ...] = ()
    axis: int = 0

    def sizes(self, size: int, count: int) -> list[int]:
        """Return the rows of each of ``count`` parts of an axis. Raises ``ValueError`` if it splits unevenly."""
        shares = self.shares or (1,) * count
        if len(shares) != count:
            raise ValueError(f"{count} names for {len(shares)} parts")
        unit, rest = divmod(size, sum(shares))
        if rest:
            raise ValueError(f"{size} rows do not split as {':'.join(map(str, shares))}")
        return [unit * share for share in shares]

    def text(self, word: str) -> str:
        shares = f" {':'.join(map(str, self.shares))}" if len(set(self.shares)) > 1 else ""
        shares = shares or (f" {len(self.shares)}" if word == "split" and self.shares else "")
        return f"{word}{shares}{f' dim {self.axis}' if self.axis else ''}"


class Rearrange(Struct, frozen=True):
    """Axes in another order; those in one group are one axis of the tensor."""

    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def inverse(self) -> Rearrange:
        return Rearrange(self.after, self.before, self.sizes)

    def expanded(self, ndim: int) -> Rearrange:
        """Return the same with an axis for each that ``...`` covers."""
        if ("...",) not in self.before:
            return self
        rest = tuple((f"...{at}",) for at in range(ndim - len(self.before) + 1))
        sides = []
        for side in (self.before, self.after):
            at = side.index(("...",))
            sides.append((*side[:at], *rest, *side[at + 1 :]))
        return Rearrange(sides[0], sides[1], self.sizes)

    def factors(self, shape: Shape, wanted: Sequence[int | None] | None) -> dict[str, int]:
        """Return the size of each axis. Raises ``ValueError`` if the shape does not say it, or contradicts it."""
        if len(self.before) != len(shape):
            raise ValueError(f"{_shown(self.before)} names {len(self.before)} axes, the tensor has {list(shape)}")
        named = {name for group in (*self.before, *self.after) for name in group}
        known = dict(self.sizes) | {name: int(name) for name in named if name.isdigit()}
        knowns = list(zip(self.before, shape, strict=True))
        if wanted is not None and len(wanted) == len(self.after):
            knowns += [(group, size) for group, size in zip(self.after, wanted, strict=True) if size is not None]
        for _ in knowns:
            for group, size in knowns:
                unknown = [name for name in group if name not in known]
                if len(unknown) == 1:
                    inner = prod(known[name] for name in group if name in known)
                    known[unknown[0]] = size // inner if inner else 0
        for group, size in knowns[: len(shape)]:
            if unknown := [name for name in group if name not in known]:
                raise ValueError(f"the size of {unknown[0]} is not known; add 'with {unknown[0]}=…' to the step")
            if prod(known[name] for name in group) != size:
                raise ValueError(f"an axis of {size} does not divide as {_shown([group])} says")
        return known

    @property
    def text(self) -> str:
        sizes = f" with {' '.join(f'{name}={size}' for name, size in self.sizes)}" if self.sizes else ""
        return f"{_shown(self.before)} -> {_shown(self.after)}{sizes}"


def _shown(groups: Sequence[Sequence[str]]) -> str:
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


def _rearrange(text: str) -> Rearrange | None:
    axes, _, given = text.partition(" with ")
    sides = [tuple(tuple(group.strip("()").split()) for group in _AXES.findall(side)) for side in axes.split("->")]
    if len(sides) != 2:
        return None
    names = [[name for group in side for name in group if name != "1"] for side in sides]
    if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) < len(names[0]) or not names[0]:
        raise ValueError(f"{axes.strip()!r} does not name the same axes on both sides, each once")
    sizes = tuple((name, int(size)) for name, size in re.findall(r"(\w+)=([1-9]\d{0,8})\b", given))
    if {name for name, _ in sizes} - set(names[0]) or ("with" in text) != bool(sizes):
        raise ValueError(f"{given.strip()!r} does not give sizes of its axes, such as d=64")
    return Rearrange(sides[0], sides[1], sizes)


class Some(Struct, frozen=True):
    """Axes in another order for some of the tensors that are joined or that one is split into: those of these texts."""

    axes: Rearrange
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.axes.text} for {','.join(self.names)}"


class Steps(Struct, frozen=True):
    """What is done to the tensors of a rule."""

    concat: Cut | None = None
    stack: bool = False
    rearrange: Rearrange | None = None
    unstack: bool = False
    split: Cut | None = None
    some: Some | None = None
    swap: bool = False

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Steps:
        """Return the steps of their texts. Raises ``ValueError`` for one that is unknown or in the wrong place."""
        steps, last = cls(), -1
        for text in texts:
            words, _, names = text.strip().partition(" for ")
            words = "a b -> b a" if words == "transpose" else words
            if found := _CUT.fullmatch(words):
                shares = tuple(int(share) for share in (found[2] or "").split(":") if share)
                if len(shares) == 1:
                    shares = (1,) * shares[0]
                cut = Cut(shares, int(found[3] or 0))
                name, step = found[1], cls(concat=cut) if found[1] == "concat" else cls(split=cut)
            elif words in ("stack", "unstack", "swap"):
                name, step = words, replace(cls(), **{words: True})
            elif made := _rearrange(words):
                name, step = "rearrange", cls(rearrange=made)
                if names:
                    name = ORDER[-1] if last >= 0 else ORDER[0]
                    step = cls(some=Some(made, tuple(each.strip() for each in names.split(","))))
            else:
                raise ValueError(
                    f"there is no step {text!r:.60}; the steps are concat, stack, transpose, axes as in 'a b -> b a', "
                    "swap, unstack and split"
                )
            if ORDER.index(name) <= last:
                raise ValueError(f"the step {text!r:.60} comes too late; the order is {', '.join(ORDER[1:-1])}")
            last = ORDER.index(name)
            field = name.partition(" ")[0]
            steps = replace(steps, **{field: getattr(step, field)})
        if steps.swap and len(texts) > 1:
            raise ValueError("swap is a step by itself")
        is_first = bool(texts) and " for " in texts[0]
        if steps.some and (bool(steps.concat), bool(steps.split)) != (is_first, not is_first):
            raise ValueError("axes for some of the texts need a concat after them, or a split before them")
        return steps

    def texts(self) -> tuple[str, ...]:
        """Return the steps as text."""
        axes = self.rearrange.text if self.rearrange else "swap" if self.swap else ""
        some = self.some.text if self.some else ""
        return tuple(filter(None, (
            some if self.concat else "",
            self.concat.text("concat") if self.concat else "",
            "stack" if self.stack else "",
            "transpose" if axes == "a b -> b a" else axes,
            "unstack" if self.unstack else "",
            self.split.text("split") if self.split else "",
            some if self.split else "",
        )))  # fmt: skip

    def inverse(self) -> Steps:
        """Return the steps that undo these."""
        some = Some(self.some.axes.inverse(), self.some.names) if self.some else None
        back = self.rearrange.inverse() if self.rearrange else None
        return Steps(self.split, self.unstack, back, self.stack, self.concat, some, self.swap)

    def apply(
        self, grid: Grid, texts: Sequence[str], wanted: Sequence[int | None] | None = None
    ) -> list[list[tuple[Shape, tuple[Part, ...]]]]:
        """Return the tensors that the steps make of a grid of tensors: their shapes and parts.

        ``texts`` are those of what is joined, or of what a split has to give, ``wanted`` the shape after ``rearrange``
        as far as it is known. Raises ``ValueError`` if the shapes do not allow it."""
        if self.swap:
            return [[_swapped(key, shape)] for ((key, shape),) in grid]
        changed: dict[str, tuple[Shape, Shape]] = {}  # the shapes of tensors before and after their own change of axes
        if self.some and self.concat:
            for tensors in grid:
                for key, shape in (each for at, each in enumerate(tensors) if texts[at] in self.some.names):
                    changed[key] = shape, _turned(Part(key, full(shape), full(shape)), shape, self.some.axes)[0]
            grid = [[(key, changed[key][1] if key in changed else shape) for key, shape in tensors] for tensors in grid]
        boxes, shape = self._joined(grid)
        if self.rearrange:
            rearrange = self.rearrange.expanded(len(shape))
        else:
            axes = tuple((f"...{at}",) for at in range(len(shape)))
            rearrange = Rearrange(axes, axes)
        sizes = rearrange.factors(shape, wanted)
        result = []
        count = len(texts) if self.split else 1
        for row in self._taken_apart(tuple(prod(sizes[name] for name in group) for group in rearrange.after), count):
            made = []
            for at, (into, out) in enumerate(row):
                parts = merged(
                    part for key, box, own in boxes for part in _moved(key, box, own, into, out, rearrange, sizes)
                )
                shape = extent(out)
                if self.some and changed:
                    parts = tuple(each for part in parts for each in _before(part, changed, self.some.axes))
                elif self.some and self.split and texts[at] in self.some.names:
                    if len(parts) != 1:
                        raise ValueError(f"only what one tensor is split into has axes for {','.join(self.some.names)}")
                    shape, parts = _turned(parts[0], shape, self.some.axes)
                made.append((shape, parts))
            result.append(made)
        return result

    def _joined(self, grid: Grid) -> tuple[list[tuple[str, Box, Box]], Shape]:
        """Return the key of each source with its box in the joined tensor and its own box, and the joined shape."""
        boxes: list[tuple[str, Box, Box]] = []
        cut = self.concat or Cut()
        shapes = set()
        for number, row in enumerate(grid):
            first = row[0][1]
            if self.concat and cut.axis >= len(first):
                raise ValueError(f"{row[0][0]} has no axis {cut.axis}")
            rests = {shape[: cut.axis] + shape[cut.axis + 1 :] for _, shape in row}
            if len(rests) > 1 or len({len(shape) for _, shape in row}) > 1:
                raise ValueError(f"{row[0][0]} and {row[-1][0]} differ in more than one axis")
            start = 0
            for key, shape in row:
                size = shape[cut.axis] if self.concat else 0
                at = ((start, start + size),) if self.concat else ()
                box = (*full(shape[: cut.axis]), *at, *full(shape[cut.axis + 1 :])) if self.concat else full(shape)
                boxes.append((key, ((number, number + 1), *box) if self.stack else box, full(shape)))
                start += size
            if self.concat:
                if cut.shares and [shape[cut.axis] for _, shape in row] != cut.sizes(start, len(row)):
                    raise ValueError(f"{row[0][0]} and its siblings are not as {':'.join(map(str, cut.shares))}")
                first = (*first[: cut.axis], start, *first[cut.axis + 1 :])
            shapes.add(first)
        if len(shapes) > 1:
            raise ValueError(f"{grid[0][0][0]} and {grid[-1][0][0]} have other shapes and cannot be stacked")
        return boxes, (len(grid), *shapes.pop()) if self.stack else shapes.pop()

    def _taken_apart(self, shape: Shape, names: int) -> Iterator[list[tuple[Box, Box]]]:
        """Yield for each of the results its box in the rearranged tensor, and the box of a tensor of its own."""
        inner = shape[1:] if self.unstack else shape
        if self.unstack and not shape:
            raise ValueError("a single number cannot be unstacked")
        for number in range(shape[0]) if self.unstack else (None,):
            front: Box = () if number is None else ((number, number + 1),)
            if self.split is None:
                yield [((*front, *full(inner)), full(inner))]
                continue
            axis = self.split.axis
            if axis >= len(inner):
                raise ValueError(f"a tensor of shape {list(inner)} has no axis {axis}")
            ends = [0, *accumulate(self.split.sizes(inner[axis], names))]
            row = []
            for start, stop in pairwise(ends):
                own = full((*inner[:axis], stop - start, *inner[axis + 1 :]))
                row.append(((*front, *own[:axis], (start, stop), *own[axis + 1 :]), own))
            yield row


ORDER = ("some before", "concat", "stack", "rearrange", "swap", "unstack", "split", "some after")


def _swapped(key: str, shape: Shape) -> tuple[Shape, tuple[Part, ...]]:
    """Return the shape and the parts of a tensor with the halves of its first axis exchanged."""
    size, *rest = shape or (1,)
    if size % 2:
        raise ValueError(f"the {size} rows of {key} have no halves")
    low, high = (((start, start + size // 2), *full(rest)) for start in (0, size // 2))
    return shape, (Part(key, high, low), Part(key, low, high))


def _turned(part: Part, shape: Shape, axes: Rearrange) -> tuple[Shape, tuple[Part, ...]]:
    """Return the shape and the parts of what a part fills, a tensor of this shape, with its axes in another order."""
    if part.axes or part.view or part.place != full(shape) or extent(part.box)[len(part.box) - len(shape) :] != shape:
        raise ValueError("axes that change for some texts cannot change again for all")
    (((made, parts),),) = Steps(rearrange=axes).apply([[("", shape)]], [""])
    lead = part.box[: len(part.box) - len(shape)]  # the place in a stack
    begins = [start for start, _ in part.box[len(lead) :]]
    return made, tuple(
        replace(
            each,
            source=part.source,
            view=each.view or (extent(each.box) if each.axes else ()),
            box=(*lead, *((at + start, at + stop) for at, (start, stop) in zip(begins, each.box, strict=True))),
        )
        for each in parts
    )


def _before(part: Part, changed: dict[str, tuple[Shape, Shape]], axes: Rearrange) -> Iterator[Part]:
    """Yield the parts of a source whose axes change before it becomes the part: undone, backwards."""
    if part.source not in changed:
        yield part
        return
    _, parts = _turned(part.inverse(""), changed[part.source][1], axes.inverse())
    yield from (_simple(each.inverse(part.source)) for each in parts)


def _moved(key: str, box: Box, own: Box, into: Box, out: Box, axes: Rearrange, sizes: dict[str, int]) -> Iterator[Part]:
    """Yield the parts of a source that come into a target: ``box`` and ``into`` are their boxes in what is between,
    ``own`` and ``out`` those in their own tensors."""
    before = [[name for name in group if name != "1"] for group in axes.before]
    after = [[name for name in group if name != "1"] for group in axes.after]
    names = [name for group in before for name in group]
    for one in product(
        *(boxes_of(*edges, [sizes[n] for n in group]) for edges, group in zip(box, before, strict=True))
    ):
        mine = dict(zip(names, (each for ranges in one for each in ranges), strict=True))
        for two in product(
            *(boxes_of(*edges, [sizes[n] for n in group]) for edges, group in zip(into, after, strict=True))
        ):
            theirs = zip((name for group in after for name in group), (each for rs in two for each in rs), strict=True)
            common = {name: (max(mine[name][0], a), min(mine[name][1], b)) for name, (a, b) in theirs}
            if all(start < stop for start, stop in common.values()):
                for piece in _whole({name: common[name] for name in names}, (before, after), sizes):
                    view, order = _view(piece, before, after)
                    bounds = [tuple(_range(piece, group, sizes) for group in side) for side in (before, after)]
                    yield _simple(Part(key, _within(bounds[0], box, own), _within(bounds[1], into, out), view, order))


def boxes_of(start: int, stop: int, sizes: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Take a range of an axis apart into boxes of the axes that it consists of."""
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


def _whole(
    piece: dict[str, tuple[int, int]], sides: tuple[list[list[str]], list[list[str]]], sizes: dict[str, int]
) -> Iterator[dict[str, tuple[int, int]]]:
    """Cut a box of the axes until it is one box on both sides."""
    for group in (*sides[0], *sides[1]):
        for at, name in enumerate(group):
            start, stop = piece[name]
            if stop - start > 1 and any(piece[each] != (0, sizes[each]) for each in group[at + 1 :]):
                for index in range(start, stop):
                    yield from _whole({**piece, name: (index, index + 1)}, sides, sizes)
                return
    yield piece


def _range(piece: dict[str, tuple[int, int]], group: list[str], sizes: dict[str, int]) -> tuple[int, int]:
    first = last = 0
    for name in group:
        first, last = first * sizes[name] + piece[name][0], last * sizes[name] + piece[name][1] - 1
    return first, last + 1


def _within(box: Box, outer: Box, own: Box) -> Box:
    """Return a box of what is between as one of the tensor itself, which has no axis for its place in a stack."""
    shifted = [(start - begin, stop - begin) for (start, stop), (begin, _) in zip(box, outer, strict=True)]
    return tuple(shifted[len(shifted) - len(own) :])


def _view(
    piece: dict[str, tuple[int, int]], before: list[list[str]], after: list[list[str]]
) -> tuple[Shape, tuple[int, ...]]:
    """Return the shape in which the axes of a piece can be exchanged, and their order; both empty if it stays."""
    names = [name for group in before for name in group if piece[name][1] - piece[name][0] != 1]
    order = [names.index(name) for group in after for name in group if name in names]
    shape = [piece[name][1] - piece[name][0] for name in names]
    at = 0
    while at + 1 < len(order):  # neighbours that stay neighbours are one axis
        axis = order[at]
        if order[at + 1] == axis + 1:
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
            order = [other - (other > axis) for other in order[: at + 1] + order[at + 2 :]]
        else:
            at += 1
    return (tuple(shape), tuple(order)) if len(order) > 1 else ((), ())


def _simple(part: Part) -> Part:
    return replace(part, view=()) if part.view == extent(part.box) else part


def normal(part: Part) -> Part:
    """Return the part as the steps would make it: with the fewest axes."""
    if not part.axes:
        return replace(part, view=())
    seen = part.view or extent(part.box)
    names = [str(at) for at in range(len(seen))]
    piece = {name: (0, size) for name, size in zip(names, seen, strict=True)}
    view, axes = _view(piece, [names], [[str(axis) for axis in part.axes]])
    return _simple(replace(part, view=view, axes=axes))


def shares(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the smallest numbers with the same ratios."""
    unit = gcd(*sizes) or 1
    return tuple(size // unit for size in sizes)
