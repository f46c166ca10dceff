"""Matches two trees of modules: the largest subtrees with equal shapes first, then their contents.

A stack of equal blocks is matched once: its blocks are pooled into one template, whose leaves have the shapes of all
instances, so that each decision uses the evidence of all blocks."""

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from math import inf
from operator import sub

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.parts import Shape
from ckptfix.maps.leaves import Leaf, Segments
from ckptfix.maps.names import (
    BACKWARD,
    EXCLUSIVE,
    FROM_THE_TOP,
    STATISTICS,
    bag,
    conflicts,
    kind,
    module,
    numbers,
    similarity,
    template,
    weights,
)

FORBIDDEN = 99.0  # penalty of a pair that must not be chosen
NARROW = 0.05  # a choice with a smaller margin is ambiguous

# The choice of most blocks outweighs the order in one template: some list their shortcut first, others last.
VOTE_WEIGHT = 1.5
NEAR_WEIGHT = 1.5  # of the places of neighbours that are certain
LARGE = 8  # leaves; larger subtrees are hardly equal by chance

ListPlaces = Mapping[Segments, tuple[int, int]]  # the index of a numbered module, and the number of its siblings
SubtreeSignature = tuple[int, ...]  # the kinds of the leaves as numbers, sorted
TemplateKey = tuple[tuple[Segments, ...], ...]  # a template: the paths of its leaves on both sides
Choice = tuple[TemplateKey, Segments, Segments]  # a pair of subtrees of a template that belong together


class Pooled(Struct, frozen=True):
    """A leaf of a template: its path in the template, and the leaf of each instance."""

    path: Segments
    leaves: tuple[Leaf, ...]

    @property
    def signature(self) -> tuple[tuple[Shape, ...], str]:
        return tuple(leaf.shape for leaf in self.leaves), STATISTICS.get(self.path[-1] if self.path else "", "")


class Subtree(Struct, eq=False, dict=True):
    """A subtree of a template: its path, and the indices of its leaves among those of the template (``members``).

    ``order`` is its position among the leaves, from 0 to 1."""

    path: Segments
    members: list[int]
    signature: SubtreeSignature
    order: float
    leaves: list[Pooled]

    @cached_property
    def words(self) -> Counter[str]:
        return bag(self.path)

    @cached_property
    def inner(self) -> Counter[str]:
        return bag(segment for at in self.members for segment in self.leaves[at].path[len(self.path) :])


Near = Mapping[Segments, Counter[Segments]]
"""For each module of one side, the number of its certain leaves in each module of the other side."""

Scores = list[list[float]]

Groups = Mapping[SubtreeSignature, tuple[list[Subtree], list[Subtree]]]  # the subtrees of each signature on both sides


class Label(IntEnum):
    """The confidence in a match."""

    AMBIGUOUS = 0  # other maps fit equally well
    LIKELY = 1  # follows from names and order; shapes would allow another map
    CERTAIN = 2  # shapes and structure allow only this map
    VERIFIED = 3  # both models give equal outputs for the same input


class Decision(Struct, frozen=True):
    """A match of one leaf of a template: the leaves of all instances on both sides, each with its label."""

    source: tuple[Leaf, ...]
    target: tuple[Leaf, ...]
    labels: tuple[Label, ...]
    alternatives: tuple[tuple[Leaf, ...], ...]


class _SubtreePair(Struct, frozen=True):
    source: Subtree
    target: Subtree
    label: Label
    alternatives: tuple[Subtree, ...]


class _Pool(Struct, frozen=True):
    """Both sides of one template, and the label of each instance so far."""

    source: list[Pooled]
    target: list[Pooled]
    labels: tuple[Label, ...]


class _TreeLevel(Struct, frozen=True):
    """A template while its subtrees are matched. It is complete if both sides have equal leaves."""

    key: TemplateKey
    pool: _Pool
    places: tuple[ListPlaces, ListPlaces]
    is_complete: bool


class Matcher(Struct):
    """Matches pools from the largest to the smallest, so that equal blocks of different stages end up in one pool.

    ``sorted_sides`` are the sides (0, 1) whose keys are sorted by name: order and numbers are no evidence there, except
    in a single list of modules. ``without`` are pairs that must not be chosen; ``choices`` are the chosen pairs that
    had alternatives, with their margins."""

    order_weight: float
    sorted_sides: tuple[int, ...] = ()
    without: frozenset[Choice] = frozenset()
    choices: dict[Choice, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    _pools: dict[TemplateKey, list[_Pool]] = field(default_factory=dict)
    _heap: list[tuple[int, int, TemplateKey]] = field(default_factory=list)
    _votes: dict[tuple[Segments, Segments], dict[TemplateKey, int]] = field(default_factory=dict)
    _others: dict[tuple[Segments, Segments], dict[TemplateKey, int]] = field(default_factory=dict)
    _shown: set[tuple[TemplateKey, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    _near: tuple[Near, Near] = field(default_factory=lambda: ({}, {}))

    def match(self, source: Sequence[Leaf], target: Sequence[Leaf]) -> None:
        """Match both sides twice: the second pass uses what other templates chose for modules of the same names."""
        for _ in range(2):
            self._near = _neighbours(self.decisions)
            self._others, self._votes = self._votes, defaultdict(lambda: defaultdict(int))
            self.decisions.clear()
            self.choices.clear()
            self._match(source, target)

    def _match(self, source: Sequence[Leaf], target: Sequence[Leaf]) -> None:
        root = _Pool(
            [Pooled(leaf.path, (leaf,)) for leaf in source],
            [Pooled(leaf.path, (leaf,)) for leaf in target],
            (Label.CERTAIN,),
        )
        self._level(root, ())
        while self._heap:
            key = heapq.heappop(self._heap)[2]
            pools = self._pools.pop(key)
            labels = tuple(label for pool in pools for label in pool.labels)
            sources, targets = [pool.source for pool in pools], [pool.target for pool in pools]
            self._level(_Pool(_stacked(sources), _stacked(targets), labels), key)

    def _level(self, pool: _Pool, key: TemplateKey) -> None:
        """Match the subtrees of one template; the root has no key."""
        groups: dict[SubtreeSignature, tuple[list[Subtree], list[Subtree]]] = defaultdict(lambda: ([], []))
        kinds: defaultdict[object, int] = defaultdict(lambda: len(kinds))
        signatures = [[kinds[leaf.signature] for leaf in leaves] for leaves in (pool.source, pool.target)]
        for side, leaves in enumerate((pool.source, pool.target)):
            for node in _nodes(leaves, signatures[side], with_root=not key):
                groups[node.signature][side].append(node)
        taken: tuple[set[int], set[int]] = (set(), set())
        places = _places(pool.source), _places(pool.target)
        level = _TreeLevel(key, pool, places, sorted(signatures[0]) == sorted(signatures[1]))
        crossed = _crossed(groups, places)
        for signature in sorted((each for each in groups if each not in crossed), key=len, reverse=True):
            here, there = (
                [node for node in nodes if node.members[0] not in used]
                for nodes, used in zip(groups[signature], taken, strict=True)
            )
            for pair in self._pairs(here, there, level):
                taken[0].update(pair.source.members)
                taken[1].update(pair.target.members)
                ones = [pool.source[at] for at in pair.source.members]
                others = [pool.target[at] for at in pair.target.members]
                if pair.label > Label.AMBIGUOUS:
                    self._votes[_ends(pair.source, pair.target, places)][key] += len(pool.labels)
                labels = tuple(min(label, pair.label) for label in pool.labels)
                if len(signature) == 1:
                    alternatives = tuple(pool.source[node.members[0]].leaves for node in pair.alternatives)
                    self.decisions.append(Decision(ones[0].leaves, others[0].leaves, labels, alternatives))
                else:
                    self._push(
                        _Pool(_below(ones, len(pair.source.path)), _below(others, len(pair.target.path)), labels)
                    )

    def _push(self, pool: _Pool) -> None:
        key = tuple(leaf.path for leaf in pool.source), tuple(leaf.path for leaf in pool.target)
        if key not in self._pools:
            self._pools[key] = []
            heapq.heappush(self._heap, (-len(pool.source), len(self._pools) + len(self.decisions), key))
        self._pools[key].append(pool)

    def _pairs(self, source: list[Subtree], target: list[Subtree], level: _TreeLevel) -> Iterator[_SubtreePair]:
        if not source or not target:
            return
        if len(source) == len(target) and _is_run(source) and _is_run(target):
            yield from self._pairs_by_number(source, target, level)
        elif (
            len(source) == len(target) == 1 and not level.is_complete and _is_moved(source[0], target[0], level.places)
        ):
            return  # its counterpart may be the one with a layer more or less
        elif runs := _equal_runs(source, target):
            ours, theirs = ([n for n in side if n not in run] for side, run in zip((source, target), runs, strict=True))
            part = replace(level, is_complete=False)
            yield from self._pairs(*runs, part)
            yield from self._pairs(ours, theirs, part)
        else:
            yield from self._pairs_by_score(source, target, level)

    def _pairs_by_number(
        self, source: list[Subtree], target: list[Subtree], level: _TreeLevel
    ) -> Iterator[_SubtreePair]:
        """Yield the pairs of two lists of equal length, which may be numbered from either end."""
        label = min(Label.CERTAIN if level.is_complete else Label.LIKELY, _counted(source, target))
        ours, theirs = _by_number(source), _by_number(target)
        lists = [_list(ours, level.pool.source), _list(theirs, level.pool.target)]
        is_shown = not self.sorted_sides  # sorted keys count up in any case
        if is_shown and _is_rising(ours) != _is_rising(theirs):  # one side is numbered from the other end
            theirs.reverse()
            label = min(label, Label.LIKELY)
        elif _may_count_down(lists):
            label = min(label, Label.LIKELY)
        straight, mirrored = (
            {(level.key, numbers(one.path), numbers(other.path)) for one, other in zip(ours, side, strict=True)}
            for side in (theirs, theirs[::-1])
        )
        is_mirrored = len(mirrored) > 2 and mirrored <= self._shown and not (straight - mirrored) & self._shown
        if is_mirrored or sum(FROM_THE_TOP in bag(path[-1:]) for path in lists) == 1:
            theirs.reverse()
            label = min(label, Label.LIKELY)
        for one, other in zip(ours, theirs, strict=True):
            yield _SubtreePair(one, other, label, ())

    def _pairs_by_score(
        self, source: list[Subtree], target: list[Subtree], level: _TreeLevel
    ) -> Iterator[_SubtreePair]:
        """Yield the best assignment by names, order, votes and neighbours, each pair with its alternatives."""
        key = level.key
        scores, by_name = self._all_scores(source, target, level)
        chosen = assign(scores)
        if self._is_doubtful_tower(source, target, chosen, scores, level):
            return
        is_hidden = bool(self.sorted_sides) and not self._is_in_order(source, target, chosen)
        is_contradicted = any(conflicts(source[at].words, target[to].words) for at, to in chosen)
        is_named = _are_named(source, target) and all(_same_end(source[at], target[to]) for at, to in chosen)
        unchosen = set(range(len(target))) - {to for _, to in chosen}
        for at, to in chosen:
            one, other = source[at], target[to]
            rivals = _rivals(at, to, chosen, scores)
            if rivals:
                self.choices[key, one.path, other.path] = min(margin for _, margin in rivals)
            elif len(source) == len(target):  # shapes identify the numbers
                self._shown.add((key, numbers(one.path), numbers(other.path)))
            hidden = _rivals(at, to, chosen, by_name) if is_hidden else []
            close = {source[rival].path: source[rival] for rival, margin in rivals + hidden if margin < NARROW}
            spare = [table[at] for table in ((scores, by_name) if is_hidden else (scores,))]
            if close or any(row[to] - row[other] < NARROW for row in spare for other in unchosen):
                label = Label.AMBIGUOUS
            elif len(source) == len(target) == 1:
                label = Label.CERTAIN if level.is_complete or len(one.members) >= LARGE else Label.LIKELY
                label = min(label, _counted(source, target))
            elif is_named:
                label = Label.CERTAIN if level.is_complete else Label.LIKELY
            else:
                label = Label.AMBIGUOUS if is_contradicted else Label.LIKELY
            yield _SubtreePair(one, other, label, tuple(close.values()))

    def _all_scores(self, source: list[Subtree], target: list[Subtree], level: _TreeLevel) -> tuple[Scores, Scores]:
        """Return the scores by all evidence, and the scores without the order, which is no evidence in sorted keys."""
        places, key = level.places, level.key
        scores = self._scores(source, target, places, self.order_weight)
        by_name = self._scores(source, target, places, 0.0, 0.0) if self.sorted_sides else scores
        by_order = _difference(scores, by_name)
        votes = [[self._vote(_ends(one, other, places), key) for other in target] for one in source]
        most = [max(column) for column in zip(*votes, strict=True)]
        for row, votes_of_row in zip(scores, votes, strict=True):
            for column, vote in enumerate(votes_of_row):
                if vote and vote == max(*votes_of_row, most[column]):
                    row[column] += VOTE_WEIGHT * vote / max(len(level.pool.labels), vote)
        if any(self._near):
            sides = (source, level.pool.source), (target, level.pool.target)
            near = [[_paths(node, leaves) for node in nodes] for nodes, leaves in sides]
            for row, instances in zip(scores, near[0], strict=True):
                for to, others in enumerate(near[1]):
                    row[to] += NEAR_WEIGHT * _nearness(instances, others, self._near)
        for at, one in enumerate(source if self.without else ()):
            for to, other in enumerate(target):
                scores[at][to] -= FORBIDDEN * ((key, one.path, other.path) in self.without)
        return scores, _difference(scores, by_order)

    def _is_doubtful_tower(
        self,
        source: list[Subtree],
        target: list[Subtree],
        chosen: list[tuple[int, int]],
        scores: Scores,
        level: _TreeLevel,
    ) -> bool:
        """Return whether the names of towers do not identify them. Then they are not matched as a whole, because only
        one of them may be equal on both sides, and their blocks may say more."""
        if not any(numbers(node.leaves[at].path[len(node.path) :]) for node in source for at in node.members):
            return False
        if any(conflicts(source[at].words, target[to].words, EXCLUSIVE) for at, to in chosen):
            return True
        named = self._scores(source, target, level.places, 0.0, 0.0) if self.order_weight else scores
        return len(source) != len(target) and any(margin < NARROW for margin in _spare(chosen, named))

    def _is_in_order(self, source: list[Subtree], target: list[Subtree], chosen: list[tuple[int, int]]) -> bool:
        """Return whether the numbers of a list with sorted keys follow the order of the modules on the other side."""
        if not all(_is_run((source, target)[side]) for side in self.sorted_sides):
            return False
        pairs = [(source[at], target[to]) for at, to in chosen]
        places = [
            [numbers(node.path) if side in self.sorted_sides else (node.order,) for node in nodes]
            for side, nodes in enumerate(zip(*pairs, strict=True))
        ]
        both = sorted(zip(*places, strict=True))
        return all(one[1] <= other[1] for one, other in pairwise(both))

    def _vote(self, ends: tuple[Segments, Segments], key: TemplateKey) -> int:
        """Count the instances of other templates in which these two were matched."""
        return sum(count for other, count in self._others.get(ends, {}).items() if other != key)

    def _scores(
        self,
        source: list[Subtree],
        target: list[Subtree],
        places: Sequence[ListPlaces],
        order_weight: float,
        number_weight: float = 0.3,
    ) -> list[list[float]]:
        ranks = [[node.order for node in nodes] for nodes in (source, target)]
        if len(source) == len(target):
            ranks = [_ranks(nodes) for nodes in (source, target)]
        counted = [
            [_numbered(node, side) for node in nodes] for nodes, side in zip((source, target), places, strict=True)
        ]
        named = weights([node.words for node in source], [node.words for node in target])
        within = weights([node.inner for node in source], [node.inner for node in target])
        rows = []
        for at, one in enumerate(source):
            row = []
            for to, other in enumerate(target):
                score = similarity(one.words, other.words, named)
                score += 0.25 * similarity(one.inner, other.inner, within)
                score -= order_weight * abs(ranks[0][at] - ranks[1][to])
                score += number_weight * _same_numbers(counted[0][at], counted[1][to])
                score += 0.5 * (one.path == other.path)
                score += 0.3 * (_same_end(one, other) and module(one.path)[-1:].isdigit())  # attn2 is attn2
                row.append(score)
            rows.append(row)
        return rows


def _nodes(leaves: list[Pooled], signatures: Sequence[int], with_root: bool) -> Iterator[Subtree]:
    """Yield the subtrees, without those that have one child, which stands for them."""
    below: dict[Segments, list[int]] = defaultdict(list)
    orders = [leaf.leaves[0].order for leaf in leaves]
    first, last = min(orders, default=0), max(orders, default=0)
    span = max(last - first, 1)
    for at, leaf in enumerate(leaves):
        for depth in range(len(leaf.path) + 1):
            below[leaf.path[:depth]].append(at)
    for path, members in below.items():
        if len(members) == 1 and path != leaves[members[0]].path:
            continue
        if len(members) > 1 and len(below[path + leaves[members[0]].path[len(path) : len(path) + 1]]) == len(members):
            continue
        if not with_root and len(members) == len(leaves):
            continue
        order = (sum(orders[at] for at in members) / len(members) - first) / span
        yield Subtree(path, members, tuple(sorted(signatures[at] for at in members)), order, leaves)


def _is_run(nodes: Sequence[Subtree]) -> bool:
    """Return whether nodes differ only by a number in their path."""
    return len(nodes) > 1 and len({template(".".join(node.path)) for node in nodes}) == 1


def _equal_runs(source: Sequence[Subtree], target: Sequence[Subtree]) -> tuple[list[Subtree], list[Subtree]] | None:
    """Return the longest list of modules on both sides that is unique in its length, None if there are no others."""
    sides: list[dict[int, list[list[Subtree]]]] = []
    for nodes in (source, target):
        runs: dict[str, list[Subtree]] = defaultdict(list)
        for node in nodes:
            runs[template(".".join(node.path))].append(node)
        lengths: dict[int, list[list[Subtree]]] = defaultdict(list)
        for run in runs.values():
            lengths[len(run)].append(run)
        sides.append(lengths)
    for length in sorted(sides[0].keys() & sides[1].keys(), reverse=True):
        ours, theirs = (side[length] for side in sides)
        if length > 2 and len(ours) == len(theirs) == 1 and len(source) + len(target) > 2 * length:
            return ours[0], theirs[0]
    return None


def _counted(source: Sequence[Subtree], target: Sequence[Subtree]) -> Label:
    """Return the label that the numbers allow: equal names with other numbers may be other layers, unless large blocks
    in the order of their numbers show that the lists only start at another number."""
    if template(".".join(source[0].path)) != template(".".join(target[0].path)):
        return Label.CERTAIN
    ours, theirs = ({numbers(node.path) for node in nodes} for nodes in (source, target))
    if ours == theirs:
        return Label.CERTAIN
    steps = ({tuple(map(sub, two, one)) for one, two in pairwise(sorted(side))} for side in (ours, theirs))
    is_shifted = bool(ours & theirs) and next(steps) == next(steps)
    in_order = all(one.order < two.order for nodes in (source, target) for one, two in pairwise(_by_number(nodes)))
    return Label.AMBIGUOUS if is_shifted and not (in_order and len(source[0].members) >= LARGE) else Label.LIKELY


def _end(path: Segments, places: ListPlaces) -> Segments:
    """Return the name of a module or leaf inside its template, with the lengths of the lists that it is in: the second
    of two differs from the second of three."""
    end = path[-2:] if kind(path) or (path and path[-1] in STATISTICS) else path[-1:]
    numbered = (path[: len(path) - at] for at in range(len(end)))
    return end + tuple(str(places[front][1]) for front in numbered if front in places)


def _ends(source: Subtree, target: Subtree, places: Sequence[ListPlaces]) -> tuple[Segments, Segments]:
    return _end(source.path, places[0]), _end(target.path, places[1])


def _by_number(nodes: Sequence[Subtree]) -> list[Subtree]:
    return sorted(nodes, key=lambda node: numbers(node.path))


def _is_rising(nodes: Sequence[Subtree]) -> bool:
    """Return whether modules are in this order in their file."""
    return nodes[0].order < nodes[-1].order


def _list(nodes: Sequence[Subtree], leaves: Sequence[Pooled]) -> Segments:
    """Return the path of a list of modules from the root of its file."""
    one, other = (_paths(node, leaves)[0] for node in nodes[:2])
    at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    return one[: at + (not one[at].isdigit())]


def _may_count_down(lists: Sequence[Segments]) -> bool:
    """Return whether lists with different names are in an upsampling path, which some libraries number from the deepest
    module."""
    is_named = len({template(".".join(path)) for path in lists}) == 1
    words = bag(path[-1] for path in lists if path).keys()
    fronts = bag(path[-2] for path in lists if path[1:]).keys() - {"decoder"}  # the layers of most decoders count up
    return not is_named and not BACKWARD.isdisjoint(words | fronts)


def _same_end(one: Subtree, other: Subtree) -> bool:
    """Return whether two modules or leaves have the same name."""
    return (
        bool(one.path and other.path) and module(one.path) == module(other.path) and kind(one.path) == kind(other.path)
    )


def _are_named(source: Sequence[Subtree], target: Sequence[Subtree]) -> bool:
    """Return whether the modules or leaves have the same names on both sides, without duplicates."""
    ours, theirs = ({(module(node.path), kind(node.path)) for node in nodes if node.path} for nodes in (source, target))
    return ours == theirs and len(ours) == len(source) == len(target)


def _rivals(row: int, column: int, chosen: list[tuple[int, int]], scores: list[list[float]]) -> list[tuple[int, float]]:
    """Return the rows that could have the column instead, with the loss in score of the map."""
    columns = dict(chosen)
    rivals = []
    for other, own in enumerate(scores):
        if other != row:
            at = columns.get(other)
            moved = own[at] - scores[row][at] if at is not None else 0.0
            rivals.append((other, scores[row][column] - own[column] + moved))
    return rivals


def _spare(chosen: list[tuple[int, int]], scores: Scores) -> Iterator[float]:
    """Yield the margin of each pair over pairs with what is left over on the longer side."""
    rows, columns = ({pair[side] for pair in chosen} for side in (0, 1))
    for row, column in chosen:
        yield from (scores[row][column] - scores[other][column] for other in range(len(scores)) if other not in rows)
        yield from (scores[row][column] - each for to, each in enumerate(scores[row]) if to not in columns)


def _difference(scores: Scores, others: Scores) -> Scores:
    return [[a - b for a, b in zip(one, other, strict=True)] for one, other in zip(scores, others, strict=True)]


def _below(leaves: list[Pooled], depth: int) -> list[Pooled]:
    return [Pooled(leaf.path[depth:], leaf.leaves) for leaf in leaves]


def _stacked(instances: Sequence[list[Pooled]]) -> list[Pooled]:
    return [
        Pooled(leaf.path, tuple(leaf for instance in instances for leaf in instance[at].leaves))
        for at, leaf in enumerate(instances[0])
    ]


def _ranks(nodes: list[Subtree]) -> list[float]:
    """Return the ranks by order, from 0 to 1; ties share the mean."""
    orders = sorted(node.order for node in nodes)
    sums = (bisect_left(orders, node.order) + bisect_right(orders, node.order) - 1 for node in nodes)
    return [each / 2 / max(len(nodes) - 1, 1) for each in sums]


def _neighbours(decisions: Sequence[Decision]) -> tuple[Near, Near]:
    near: tuple[dict[Segments, Counter[Segments]], ...] = defaultdict(Counter), defaultdict(Counter)
    for each in decisions:
        for one, other, label in zip(each.source, each.target, each.labels, strict=True):
            if label >= Label.CERTAIN:
                for side, (path, image) in enumerate(((one.path, other.path), (other.path, one.path))):
                    for depth in range(1, len(path)):
                        near[side][path[:depth]].update(image[:at] for at in range(len(image)))
    return near[0], near[1]


def _paths(node: Subtree, leaves: Sequence[Pooled]) -> list[Segments]:
    """Return the paths of the instances of a module from the root of its file."""
    pooled = leaves[node.members[0]]
    return [leaf.path[: len(leaf.path) - len(pooled.path)] + node.path for leaf in pooled.leaves]


def _nearness(ones: Sequence[Segments], others: Sequence[Segments], near: tuple[Near, Near]) -> float:
    """Return how near a match would be to the matches of certain neighbours, from 0 to 1."""
    total = 0.0
    for pair in zip(ones, others, strict=True):
        for side, images in enumerate(near):
            path, other = pair[side], pair[1 - side]
            module = next((path[:depth] for depth in range(len(path) - 1, 0, -1) if path[:depth] in images), None)
            if module is not None:
                found = images[module]
                shared = sum(found[other[:depth]] for depth in range(1, len(other)))
                total += shared / found[()] / max(len(other) - 1, 1) / 2
    return total / len(ones)


def _places(leaves: list[Pooled]) -> ListPlaces:
    """Return the index of each numbered module among its siblings with similar leaves, and the number of siblings with
    its name.

    Siblings with an additional leaf count, such as the first block of T5, but not siblings of another kind."""
    inside: dict[Segments, set[str]] = defaultdict(set)
    runs: dict[tuple[Segments, str], dict[Segments, None]] = defaultdict(dict)
    for leaf in leaves:
        for depth, segment in enumerate(leaf.path):
            if template(segment) != segment:
                inside[leaf.path[: depth + 1]].add(template(".".join(leaf.path[depth + 1 :])))
                runs[leaf.path[:depth], template(segment)][leaf.path[: depth + 1]] = None
    places: dict[Segments, tuple[int, int]] = {}
    for run in runs.values():
        kinds: list[list[Segments]] = []
        for path in sorted(run, key=lambda path: numbers(path[-1:])):
            own = inside[path]
            alike = (each for each in kinds if 2 * len(own & inside[each[0]]) >= len(own | inside[each[0]]))
            members = next(alike, None)
            if members is None:
                kinds.append(members := [])
            places[path] = len(members), len(run)
            members.append(path)
    return places


def _crossed(groups: Groups, places: Sequence[ListPlaces]) -> set[SubtreeSignature]:
    """Return the signatures of subtrees that are equal although others in their lists are in another order: if a layer
    between stages belongs to the previous stage on one side and to the next on the other, stages may look alike."""
    lists: dict[tuple[Segments, Segments, int], list[tuple[SubtreeSignature, int, int]]] = defaultdict(list)
    for signature, (source, target) in groups.items():
        if len(source) == len(target) == 1:
            one, other = source[0].path, target[0].path
            at, to = places[0].get(one), places[1].get(other)
            if at and to and at[1] == to[1]:
                lists[one[:-1], other[:-1], at[1]].append((signature, at[0], to[0]))
    return {
        signature
        for (*_, size), pairs in lists.items()
        if any(at != to for _, at, to in pairs)
        and any(at + to != size - 1 for _, at, to in pairs)  # a list may be numbered from its other end
        for signature, *_ in pairs
    }


def _is_moved(one: Subtree, other: Subtree, places: Sequence[ListPlaces]) -> bool:
    """Return whether two large modules have different indices in their lists, or the lists have other lengths."""
    ours, theirs = (
        next((side[node.path[:depth]] for depth in range(len(node.path), 0, -1) if node.path[:depth] in side), (0, 0))
        for node, side in zip((one, other), places, strict=True)
    )
    return len(one.members) >= LARGE and min(ours[1], theirs[1]) > 1 and ours != theirs


def _numbered(node: Subtree, places: ListPlaces) -> list[tuple[int, int]]:
    fronts = (node.path[: depth + 1] for depth in range(len(node.path)))
    return [places[front] for front in fronts if places.get(front, (0, 1))[1] > 1]


def _same_numbers(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> float:
    """Return the share of equal indices. Numbers that run through all blocks are not compared with numbers that restart
    in each stage."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    same = sum(at == to and size <= 2 * length <= 4 * size for (at, size), (to, length) in pairs)
    return same / max(len(one), len(other), 1)


def assign(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the assignment with the highest total score, one for each row or column,
    whichever are fewer."""
    if not scores or not scores[0]:
        return []
    if len(scores) > len(scores[0]):
        return sorted((row, column) for column, row in assign(list(zip(*scores, strict=True))))
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    if len(set(best)) == len(best):  # each row has its own maximum, so this is optimal
        return list(enumerate(best))
    return sorted((row, column) for column, row in _augment(scores).items())


def _augment(scores: Sequence[Sequence[float]]) -> dict[int, int]:
    width = len(scores[0])
    gains, prices = [0.0] * len(scores), [0.0] * (width + 1)
    holder = [-1] * (width + 1)  # the row of each column; the last column is where a search starts
    for start in range(len(scores)):
        holder[width], here = start, width
        slack, before, seen = [inf] * width, [width] * width, [False] * (width + 1)
        while holder[here] != -1:
            seen[here] = True
            row, delta, following = holder[here], inf, -1
            for column in range(width):
                if not seen[column]:
                    cost = -scores[row][column] - gains[row] - prices[column]
                    if cost < slack[column]:
                        slack[column], before[column] = cost, here
                    if slack[column] < delta:
                        delta, following = slack[column], column
            for column in range(width + 1):
                if seen[column]:
                    gains[holder[column]] += delta
                    prices[column] -= delta
                elif column < width:
                    slack[column] -= delta
            here = following
        while here != width:
            holder[here] = holder[before[here]]
            here = before[here]
    return {column: holder[column] for column in range(width) if holder[column] != -1}
