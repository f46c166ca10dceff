"""The leaves to match: tensors, or parts of tensors that only one library fuses or stacks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.parts import Box, Shape
from ckptfix.maps.names import ROLES, bag, concepts, kind, module, parent, roles

Segments = tuple[str, ...]  # the path of a module or leaf


class Leaf(Struct, frozen=True):
    """A tensor or a box of one, with its axes permuted to ``axes``; ``order`` is its position in the file."""

    key: str
    path: Segments
    box: Box
    axes: tuple[int, ...]
    order: float

    @property
    def shape(self) -> Shape:
        """The shape without axes of size 1: ``(1, 64)`` and ``(64,)`` have the same values in the same order."""
        return _shape(self.box, self.axes)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def split(self, sizes: Sequence[int], paths: Sequence[Segments]) -> Iterator[Leaf]:
        """Yield the parts along the first axis whose size is not 1, in order."""
        axis = next(axis for axis in self.axes if self.box[axis][1] - self.box[axis][0] != 1)
        start = self.box[axis][0]
        for at, (size, path) in enumerate(zip(sizes, paths, strict=True)):
            box = (*self.box[:axis], (start, start + size), *self.box[axis + 1 :])
            yield replace(self, box=box, path=path, order=self.order + at / len(sizes) / 2)
            start += size


@lru_cache(maxsize=65536)
def _shape(box: Box, axes: tuple[int, ...]) -> Shape:
    return tuple(size for size in (box[axis][1] - box[axis][0] for axis in axes) if size != 1)


def whole(key: str, shape: Sequence[int], path: Segments, order: int) -> Leaf:
    return Leaf(key, path, tuple((0, size) for size in shape), tuple(range(len(shape))), order)


Leaves = list[Leaf]


def common(source: Leaves, target: Leaves) -> int:
    """Count the matrices that have a partner of the same shape."""
    ours, theirs = (Counter(leaf.shape for leaf in leaves if len(leaf.shape) > 1) for leaves in (source, target))
    return (ours & theirs).total()


def expanded(source: Leaves, target: Leaves) -> tuple[Leaves, Leaves]:
    """Split the leaves that only one side stacks or fuses."""
    source, target = _unstacked(source, target), _unstacked(target, source)
    one, other = _fused(source, target), _fused(target, source)
    return _taken_apart(source, one), _taken_apart(target, other)


def flipped(leaves: Leaves, kernels: bool | None = None) -> Leaves:
    """Transpose the matrices of stacked layers, as stored by GPT-2's ``Conv1D``.

    With ``kernels``, either these leaves (True) or those of the other side (False) are from JAX or TensorFlow, where
    the last axis of every layer, including convolutions, is its outputs and the one before its inputs."""
    if kernels is None:
        stacked = (any(name.rpartition("_")[2].isdigit() for name in leaf.path) for leaf in leaves)
        return [
            replace(leaf, axes=(1, 0)) if is_in and _flips(leaf) else leaf
            for is_in, leaf in zip(stacked, leaves, strict=True)
        ]
    return [
        replace(leaf, axes=(*axes[-2:][::-1], *axes[:-2]) if kernels else (*axes[2:], 1, 0))
        if (len(axes := leaf.axes) > 2 and leaf.path[-1] == "weight") or _flips(leaf)
        else leaf
        for leaf in leaves
    ]


def _flips(leaf: Leaf) -> bool:
    is_table = not {"embed", "position", "table"}.isdisjoint(bag(leaf.path))
    return len(leaf.shape) == 2 == len(leaf.box) and leaf.path[-1] == "weight" and not is_table


def _unstacked(leaves: Leaves, other: Leaves) -> Leaves:
    """Split ``experts.gate_up_proj`` if the other side has ``experts.0.w1.weight`` and so on."""
    runs = _runs(other)
    if not runs:
        return leaves
    here, there = Counter(leaf.shape for leaf in leaves), Counter(leaf.shape for leaf in other)
    result: Leaves = []
    for leaf in leaves:
        inner = leaf.shape[1:]
        wanted = runs.get(leaf.rows, {}).get(inner) if inner and here[leaf.shape] != there[leaf.shape] else None
        if wanted and wanted & bag(parent(leaf.path)[-1:]).keys():
            at = -2 if leaf.path[-1] in ("weight", "bias") else -1
            paths = [(*leaf.path[:at], str(number), *leaf.path[at:]) for number in range(leaf.rows)]
            result += leaf.split([1] * leaf.rows, paths)
        else:
            result.append(leaf)
    return result


def _runs(leaves: Leaves) -> dict[int, dict[Shape, set[str]]]:
    """Return the shapes in lists of numbered modules, by the length of the list, with the concepts of the list's
    name."""
    members: dict[Segments, dict[str, Leaves]] = defaultdict(lambda: defaultdict(list))
    for leaf in leaves:
        for depth, segment in enumerate(leaf.path[:-1]):
            if segment.isdigit():
                members[leaf.path[:depth]][segment].append(leaf)
    runs: dict[int, dict[Shape, set[str]]] = defaultdict(lambda: defaultdict(set))
    for front, children in members.items():
        if len(children) > 1 and front:
            first = next(iter(children.values()))
            named = set(bag(front[-1:]))
            for leaf in first:
                runs[len(children)][leaf.shape] |= named
            for group in _groups(first):
                runs[len(children)][group.shape] |= named
    return runs


class _RoleGroup(Struct, frozen=True):
    """Sibling modules that another library fuses: the number of rows of each role, and the shape of a row."""

    sizes: dict[str, int]
    rest: Shape

    @property
    def shape(self) -> Shape:
        return (sum(self.sizes.values()), *self.rest)


def _groups(leaves: Leaves) -> Iterator[_RoleGroup]:
    siblings: dict[tuple[Segments, Segments, frozenset[str]], Leaves] = defaultdict(list)
    for leaf in leaves:
        if roles(leaf.path):
            # q_proj, k_proj and v_proj are one group, and q_conv, k_conv and v_conv another.
            rest = frozenset(concepts(module(leaf.path))) - ROLES - {"proj"}
            siblings[parent(leaf.path), kind(leaf.path), rest].append(leaf)
    for members in siblings.values():
        sizes: dict[str, int] = {}
        for leaf in members:
            named = roles(leaf.path)
            if leaf.shape and leaf.rows % len(named) == 0:
                sizes |= dict.fromkeys(named, leaf.rows // len(named))
        if len(sizes) > 1 and len({leaf.shape[1:] for leaf in members}) == 1:
            yield _RoleGroup(sizes, members[0].shape[1:])


def _fused(leaves: Leaves, other: Leaves) -> dict[Leaf, dict[str, int]]:
    """Return the leaves to split, each with the number of rows per role."""
    here, there = Counter(leaf.shape for leaf in leaves), Counter(leaf.shape for leaf in other)
    groups = [*_groups(other), *_groups(leaves)]
    found = {}
    for leaf in leaves:
        named = roles(leaf.path)
        if len(named) > 1 and leaf.shape and here[leaf.shape] != there[leaf.shape]:
            sizes = _sizes(named, leaf, groups)
            if sizes:
                found[leaf] = sizes
    whole = {(parent(leaf.path), module(leaf.path)): sizes for leaf, sizes in found.items()}
    for leaf in leaves:  # a bias is split with its weight, whatever else has its shape
        sizes = whole.get((parent(leaf.path), module(leaf.path)))
        if sizes and leaf not in found and leaf.shape == (sum(sizes.values()),):
            found[leaf] = sizes
    taken = {leaf.shape for leaf in found}
    unnamed: dict[Shape, list[dict[str, int]]] = defaultdict(list)
    for group in _groups(other):
        for chosen in (("query", "key", "value"), ("key", "value"), ("gate", "up")):
            if all(role in group.sizes for role in chosen):
                sizes = {role: group.sizes[role] for role in chosen}
                shape = (sum(sizes.values()), *group.rest)
                unnamed[shape].append(sizes)
                break
    for shape, candidates in unnamed.items():
        if shape not in taken and here[shape] == len(candidates) and not there[shape]:
            found |= {leaf: candidates[0] for leaf in leaves if leaf.shape == shape}
    return found


def _sizes(named: Segments, leaf: Leaf, groups: Sequence[_RoleGroup]) -> dict[str, int] | None:
    for group in groups:
        if group.rest == leaf.shape[1:] and all(role in group.sizes for role in named):
            sizes = {role: group.sizes[role] for role in named}
            if sum(sizes.values()) == leaf.rows:
                return sizes
    return dict.fromkeys(named, leaf.rows // len(named)) if leaf.rows % len(named) == 0 else None


def _taken_apart(leaves: Leaves, fused: Mapping[Leaf, Mapping[str, int]]) -> Leaves:
    # BEiT has q_bias next to a fused qkv.weight: both belong to the module q.
    named = {(parent(leaf.path), roles(leaf.path)): module(leaf.path) for leaf in leaves}
    used = {leaf.path for leaf in leaves}
    result: Leaves = []
    for leaf in leaves:
        if leaf in fused:
            front = parent(leaf.path)
            sizes = fused[leaf]
            paths = [(*front, named.get((front, (role,)), role), *kind(leaf.path)) for role in sizes]
            if used.intersection(paths) or len(set(paths)) < len(paths):
                paths = [(*front, role, *kind(leaf.path)) for role in sizes]
            result += leaf.split(list(sizes.values()), paths)
        else:
            result.append(leaf)
    return result
