"""The steps of a rule: how the tensors of the source are joined, rearranged and split, in this order.

    concat            concatenates the texts of {q,k,v}: `concat`, `concat 3:1:1` (their shares), `concat dim 1`
    stack             stacks the numbers of {e} along a new first axis
    (h d 2) … -> …    rearranges the axes, in the notation of einops: `(h d 2) ... -> (h 2 d) ... with d=64`
    swap              swaps the two halves of the first axis; cannot be combined
    unstack, split    the inverses of stack and concat: `split 3`, `split 3:1:1`, `split 2 dim 1`
    … -> … for q,k    rearranges the axes of these texts only, before the concat or after the split

The steps are applied to ``Elements``, which have no values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd, prod

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.parts import Part, Shape
from ckptfix.maps.elements import Elements

_CUT = re.compile(r"(concat|split)(?: ([1-9]\d{0,4}(?::[1-9]\d{0,9})*))?(?: dim (\d))?")
_AXES = re.compile(r"\([^()]*\)|\.\.\.|[^\s()]+")
KeyGrid = list[list[tuple[str, Shape]]]  # keys and shapes, by number in a stack and then by place in a concat


class Cut(Struct, frozen=True):
    """How one tensor is divided into several: the share of each (empty: equal shares) and the axis."""

    shares: tuple[int, ...] = ()
    axis: int = 0

    def sizes(self, size: int, count: int) -> list[int]:
        """Return the sizes of ``count`` parts of an axis. Raises ``ValueError`` if it does not divide evenly."""
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
    """A permutation of axes in the notation of einops; each group is one axis of the tensor."""

    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def inverse(self) -> Rearrange:
        return Rearrange(self.after, self.before, self.sizes)

    def expanded(self, ndim: int) -> Rearrange:
        """Return the permutation with ``...`` replaced by the axes that it covers."""
        if ("...",) not in self.before:
            return self
        rest = tuple((f"...{at}",) for at in range(ndim - len(self.before) + 1))
        sides = []
        for side in (self.before, self.after):
            at = side.index(("...",))
            sides.append((*side[:at], *rest, *side[at + 1 :]))
        return Rearrange(sides[0], sides[1], self.sizes)

    def factors(self, shape: Shape, wanted: Sequence[int | None] | None) -> dict[str, int]:
        """Return the size of each axis. Raises ``ValueError`` if it does not follow from the shape, or contradicts
        it."""
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

    def applied(self, tensor: Elements, wanted: Sequence[int | None] | None = None) -> Elements:
        """Return the rearranged tensor; ``wanted`` is its shape as far as it is known."""
        axes = self.expanded(len(tensor.shape))
        sizes = axes.factors(tensor.shape, wanted)
        before, after = (
            [name for group in side for name in group if name != "1"] for side in (axes.before, axes.after)
        )
        turned = tensor.viewed(tuple(sizes[name] for name in before)).permuted([before.index(name) for name in after])
        return turned.viewed(tuple(prod(sizes[name] for name in group) for group in axes.after))

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
        raise ValueError(f"{given.strip()!r} does not give sizes of its axes, like d=64")
    return Rearrange(sides[0], sides[1], sizes)


class Some(Struct, frozen=True):
    """A rearrangement of some of the tensors of a concat or split, those of the texts ``names``."""

    axes: Rearrange
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.axes.text} for {','.join(self.names)}"


class Steps(Struct, frozen=True):
    concat: Cut | None = None
    stack: bool = False
    rearrange: Rearrange | None = None
    unstack: bool = False
    split: Cut | None = None
    some: Some | None = None
    swap: bool = False

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Steps:
        """Parse steps. Raises ``ValueError`` for one that is unknown or in the wrong place."""
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
            raise ValueError("axes for only some of the strings need a concat after them or a split before them")
        return steps

    def texts(self) -> tuple[str, ...]:
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
        self, grid: KeyGrid, texts: Sequence[str], wanted: Sequence[int | None] | None = None
    ) -> list[list[tuple[Shape, tuple[Part, ...]]]]:
        """Return the shapes and parts of the tensors that the steps make from a grid of tensors.

        ``texts`` name the tensors of the concat or split, ``wanted`` is the shape after ``rearrange`` as far as it is
        known. Raises ``ValueError`` if the shapes do not fit."""
        shapes = {key: shape for row in grid for key, shape in row}
        rows = [self._joined(row, texts) for row in grid]
        if any(row.shape != rows[0].shape for row in rows):
            raise ValueError(f"{grid[0][0][0]} and {grid[-1][0][0]} differ in shape and cannot be stacked")
        made = Elements.stacked(rows) if self.stack else rows[0]
        if self.rearrange:
            made = self.rearrange.applied(made, wanted)
        if self.swap:
            size = made.shape[0] if made.shape else 1
            if size % 2:
                raise ValueError(f"swap needs an even number of rows, but {grid[0][0][0]} has {size}")
            made = Elements.joined(made.split([size // 2] * 2)[::-1])
        if self.unstack and not made.shape:
            raise ValueError("a single number cannot be unstacked")
        results = [made.selected(0, number) for number in range(made.shape[0])] if self.unstack else [made]
        return [[(each.shape, each.parts(shapes)) for each in self._parted(result, texts)] for result in results]

    def _joined(self, row: Sequence[tuple[str, Shape]], texts: Sequence[str]) -> Elements:
        """Concatenate the tensors of one row of the grid."""
        if self.concat is None:
            return Elements.of(*row[0])
        axis, (first, last) = self.concat.axis, (row[0], row[-1])
        made = self._turned([Elements.of(*each) for each in row], texts)
        shapes = [each.shape for each in made]
        if axis >= len(shapes[0]):
            raise ValueError(f"{first[0]} has no axis {axis}")
        if len({(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}) > 1:
            raise ValueError(f"{first[0]} and {last[0]} differ in more than one axis")
        sizes = [shape[axis] for shape in shapes]
        if self.concat.shares and sizes != self.concat.sizes(sum(sizes), len(row)):
            ratio = ":".join(map(str, self.concat.shares))
            raise ValueError(f"the sizes of {first[0]} and its siblings are not in the ratio {ratio}")
        return Elements.joined(made, axis)

    def _parted(self, tensor: Elements, texts: Sequence[str]) -> list[Elements]:
        """Return the tensors into which a result is split."""
        if self.split is None:
            return [tensor]
        axis = self.split.axis
        if axis >= len(tensor.shape):
            raise ValueError(f"a tensor of shape {list(tensor.shape)} has no axis {axis}")
        return self._turned(tensor.split(self.split.sizes(tensor.shape[axis], len(texts)), axis), texts)

    def _turned(self, tensors: list[Elements], texts: Sequence[str]) -> list[Elements]:
        """Return the tensors, with those that ``some`` names rearranged."""
        some = self.some
        if some is None:
            return tensors
        pairs = zip(texts, tensors, strict=True)
        return [some.axes.applied(each) if text in some.names else each for text, each in pairs]


ORDER = ("some before", "concat", "stack", "rearrange", "swap", "unstack", "split", "some after")


def shares(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the smallest integers with the same ratios."""
    unit = gcd(*sizes) or 1
    return tuple(size // unit for size in sizes)
