"""Match two trees of modules: the largest subtrees with the same shapes first, and what they contain afterwards.

A stack of equal blocks is matched once: the blocks of a pool are laid on top of each other, so that a leaf of the pool has the
shapes of all its instances, and a decision is supported by the evidence of all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckptfix.maps.assignment import assign
from ckptfix.maps.leaves import Leaf, Path, Shape
from ckptfix.maps.names import STATISTICS, bag, numbers, similarity, weights


@dataclass(frozen=True, slots=True)
class Pooled:
    """One leaf of a template: its path in the template, and the leaf of each instance."""

    path: Path
    leaves: tuple[Leaf, ...]

    @property
    def signature(self) -> tuple[tuple[Shape, ...], str]:
        return tuple(leaf.shape for leaf in self.leaves), STATISTICS.get(self.path[-1] if self.path else "", "")


@dataclass(eq=False)
class Node:
    """A subtree of a template: the path that leads to it, and its leaves with their places in the template."""

    path: Path
    members: list[int]
    signature: tuple[object, ...]
    order: float
    words: Counter[str] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Decision:
    """One choice: which node of a group belongs to which, with what it was based on."""

    source: tuple[Leaf, ...]
    target: tuple[Leaf, ...]
    margin: float
    """How much worse the best map without this pair is; infinite if there is only one map."""


@dataclass
class Matcher:
    """Match pools from the largest to the smallest, so that equal blocks of different stages meet in one pool."""

    order_weight: float
    name_weight: float = 1.0
    decisions: list[Decision] = field(default_factory=list)
    _pools: dict[tuple[object, ...], list[tuple[list[Pooled], list[Pooled]]]] = field(default_factory=dict)
    _heap: list[tuple[int, int, tuple[object, ...]]] = field(default_factory=list)

    def match(self, source: Sequence[Leaf], target: Sequence[Leaf]) -> None:
        self._level(
            [Pooled(leaf.path, (leaf,)) for leaf in source], [Pooled(leaf.path, (leaf,)) for leaf in target], 0
        )
        while self._heap:
            key = heapq.heappop(self._heap)[2]
            sources, targets = zip(*self._pools.pop(key), strict=True)
            self._level(_stacked(sources), _stacked(targets), 1)

    def _level(self, source: list[Pooled], target: list[Pooled], depth: int) -> None:
        """Match the subtrees of one template; those at depth 0 include the root."""
        groups: dict[tuple[object, ...], tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
        for side, leaves in enumerate((source, target)):
            for node in _nodes(leaves, skip_root=bool(depth)):
                groups[node.signature][side].append(node)
        taken: tuple[set[int], set[int]] = (set(), set())
        for signature in sorted(groups, key=len, reverse=True):
            here, there = (
                [node for node in nodes if node.members[0] not in used]
                for nodes, used in zip(groups[signature], taken, strict=True)
            )
            for one, other, margin in self._pairs(here, there):
                taken[0].update(one.members)
                taken[1].update(other.members)
                ones, others = [source[at] for at in one.members], [target[at] for at in other.members]
                if len(signature) == 1:
                    self.decisions.append(Decision(ones[0].leaves, others[0].leaves, margin))
                else:
                    self._push(_below(ones, len(one.path)), _below(others, len(other.path)))

    def _push(self, source: list[Pooled], target: list[Pooled]) -> None:
        key = tuple(leaf.path for leaf in source), tuple(leaf.path for leaf in target)
        if key not in self._pools:
            self._pools[key] = []
            heapq.heappush(self._heap, (-len(source), len(self._pools) + len(self.decisions), key))
        self._pools[key].append((source, target))

    def _pairs(self, source: list[Node], target: list[Node]) -> Iterator[tuple[Node, Node, float]]:
        if not source or not target:
            return
        scores = self._scores(source, target)
        for row, column in assign(scores):
            yield source[row], target[column], 0.0

    def _scores(self, source: list[Node], target: list[Node]) -> list[list[float]]:
        ranks = [_ranks(nodes) for nodes in (source, target)]
        counted = [_numbered(nodes) for nodes in (source, target)]
        named = weights([node.words for node in source], [node.words for node in target])
        within = weights([node.inner for node in source], [node.inner for node in target])
        rows = []
        for at, one in enumerate(source):
            row = []
            for to, other in enumerate(target):
                score = self.name_weight * similarity(one.words, other.words, named)
                score += 0.25 * self.name_weight * similarity(one.inner, other.inner, within)
                score -= self.order_weight * abs(ranks[0][at] - ranks[1][to])
                score += 0.3 * _same_numbers(counted[0][at], counted[1][to])
                score += 0.5 * (one.path == other.path)
                row.append(score)
            rows.append(row)
        return rows


def _nodes(leaves: list[Pooled], skip_root: bool) -> Iterator[Node]:
    """Yield the subtrees, those of one child left out: their path is that of the child."""
    below: dict[Path, list[int]] = defaultdict(list)
    for at, leaf in enumerate(leaves):
        for depth in range(len(leaf.path) + 1):
            below[leaf.path[:depth]].append(at)
    for path, members in below.items():
        if len(members) == 1 and path != leaves[members[0]].path:
            continue
        if len(members) > 1 and len(below[path + leaves[members[0]].path[len(path) : len(path) + 1]]) == len(members):
            continue
        if skip_root and len(members) == len(leaves):
            continue
        inside = [leaves[at] for at in members]
        yield Node(
            path,
            members,
            tuple(sorted(leaf.signature for leaf in inside)),
            sum(leaf.leaves[0].order for leaf in inside) / len(inside),
            bag(path),
            bag(segment for leaf in inside for segment in leaf.path[len(path) :]),
        )


def _below(leaves: list[Pooled], depth: int) -> list[Pooled]:
    return [Pooled(leaf.path[depth:], leaf.leaves) for leaf in leaves]


def _stacked(instances: Sequence[list[Pooled]]) -> list[Pooled]:
    return [
        Pooled(leaf.path, tuple(leaf for instance in instances for leaf in instance[at].leaves))
        for at, leaf in enumerate(instances[0])
    ]


def _ranks(nodes: list[Node]) -> list[float]:
    order = sorted(range(len(nodes)), key=lambda at: nodes[at].order)
    ranks = [0.0] * len(nodes)
    for rank, at in enumerate(order):
        ranks[at] = rank / max(len(nodes) - 1, 1)
    return ranks


def _numbered(nodes: list[Node]) -> list[tuple[int, ...]]:
    """Return the numbers in each path, each counted from the first that occurs at its place."""
    found = [numbers(node.path) for node in nodes]
    seen: dict[int, set[int]] = defaultdict(set)
    for each in found:
        for place, number in enumerate(each):
            seen[place].add(number)
    rank = {place: {number: at for at, number in enumerate(sorted(values))} for place, values in seen.items()}
    return [tuple(rank[place][number] for place, number in enumerate(each)) for each in found]


def _same_numbers(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    if not one or not other:
        return 0.0
    size = max(len(one), len(other))
    return sum(a == b for a, b in zip(reversed(one), reversed(other), strict=False)) / size
