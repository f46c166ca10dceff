"""Folds an inferred map into rules: one for all layers of a stack, for weight and bias, and for split tensors."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.parts import Box, Part, Shape, Shapes, extent
from ckptfix.core.rename_map import LABELS, MapRule, RenameMap
from ckptfix.maps.elements import normal
from ckptfix.maps.layout import Cut, Rearrange, Some, Steps, shares
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.names import segments
from ckptfix.maps.patterns import parse
from ckptfix.maps.resolving import ParsedRule

_DIGITS = re.compile(r"\d+")
MANY = 4  # if the layers of one kind need more rules than this, one rule lists their numbers instead

LETTERS = "nmklijpqrstuvwxyz"


class _Instance(Struct, frozen=True):
    """Tensors of the source that become tensors of the target, independently of all others."""

    source: str
    target: str  # patterns of keys: lists in braces for concat and split, ``{e}`` for stack and unstack
    steps: tuple[str, ...]
    keys: tuple[str, ...]  # the keys of the target

    @property
    def template(self) -> tuple[str, str, tuple[str, ...]]:
        return _hashed(self.source), _hashed(self.target), self.steps

    @property
    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _numbers(self.source), _numbers(self.target)


def fold(inference: Inference) -> RenameMap:
    """Return the rules for the keys that change in an inferred map; they give exactly the inferred parts.

    Keys that no rule can express are among the missing ones."""
    source, target = inference.source, inference.target
    moved = {key: match for key, match in inference.matches.items() if match.parts != (Part.whole(key, target[key]),)}
    order = {key: at for at, key in enumerate(source)}
    components = sorted(_components(moved), key=lambda keys: order[moved[keys[0]].parts[0].source])
    found = {tuple(keys): _instance(keys, moved, source, target) for keys in components}
    rules = list(_rules(instance for instance in found.values() if instance is not None))
    exact: dict[int, list[tuple[MapRule, list[_Instance]]]] = {}
    taken: dict[int, set[str]] = defaultdict(set)  # keys matched by the rules with that many variables
    for at in sorted(range(len(rules)), key=lambda at: ParsedRule.parse(rules[at][0]).width):
        exact[at] = list(_exact(*rules[at], inference, taken))
        for line in (ParsedRule.parse(rule) for rule, _ in exact[at]):
            taken[line.width].update(filter(line.source.matches, source))
    unsaid = [key for keys, instance in found.items() if instance is None for key in keys]
    labelled = tuple(_labelled(*each, moved) for at in sorted(exact) for each in exact[at])
    return RenameMap(labelled, missing=(*inference.missing, *unsaid), unused=tuple(inference.unused))


def _components(moved: Mapping[str, Match]) -> Iterator[list[str]]:
    """Yield the connected components of the target's keys that share sources."""
    users: dict[str, list[str]] = defaultdict(list)
    for key, match in moved.items():
        for part in match.parts:
            users[part.source].append(key)
    seen: set[str] = set()
    for key in moved:
        if key not in seen:
            component, todo = {key: None}, [key]
            while todo:
                for part in moved[todo.pop()].parts:
                    new = [other for other in users[part.source] if other not in component]
                    component |= dict.fromkeys(new)
                    todo += new
            seen |= component.keys()
            yield [key for key in moved if key in component] if len(component) > 1 else [key]


def _instance(keys: list[str], moved: Mapping[str, Match], source: Shapes, target: Shapes) -> _Instance | None:
    """Return a component with its steps, None if no steps give the inferred parts."""
    parts = {key: moved[key].parts for key in keys}
    sources = list(dict.fromkeys(part.source for pieces in parts.values() for part in pieces))
    own, wanted = {key: source[key] for key in sources}, {key: target[key] for key in keys}
    for steps, ours, theirs in _candidates(sources, keys, parts, source, target):
        source_pattern, target_pattern = _named(ours, steps.stack), _named(theirs, steps.unstack)
        if steps.some:
            row = ours[0] if steps.concat else theirs[0]
            options = parse(_joined(row)).variables[0].options
            texts = (text for key, text in zip(row, options, strict=True) if key in steps.some.names)
            steps = replace(steps, some=replace(steps.some, names=tuple(texts)))
        instance = _Instance(source_pattern, target_pattern, steps.texts(), tuple(keys))
        with suppress(ValueError):
            if _gives(ParsedRule.parse(MapRule(instance.source, instance.target, instance.steps)), parts, own, wanted):
                return instance
    return None


def _candidates(
    sources: list[str], keys: list[str], parts: Mapping[str, tuple[Part, ...]], source: Shapes, target: Shapes
) -> Iterator[tuple[Steps, list[list[str]], list[list[str]]]]:
    """Yield candidate steps, with the keys of both sides by number in a stack and by place."""
    first = parts[keys[0]][0]
    turned = all(part.axes == (1, 0) and not part.view for pieces in parts.values() for part in pieces)
    some = None
    if not turned and len(sources) != len(keys) == 1:
        some = _some({part.source: (part, source[part.source], extent(part.place)) for part in parts[keys[0]]})
    elif not turned and len(keys) != len(sources) == 1:
        some = _some({key: (pieces[0], extent(pieces[0].box), target[key]) for key, pieces in parts.items()})
    axes = Rearrange((("a",), ("b",)), (("b",), ("a",))) if turned else None
    if len(sources) == len(keys) == 1 and len(parts[keys[0]]) == 2:
        yield Steps(swap=True), [sources], [keys]
    elif len(sources) == len(keys) == 1:
        shape, wanted = source[sources[0]], target[keys[0]]
        if not turned and (first.axes or shape != wanted):
            with suppress(ValueError):
                yield Steps(rearrange=_permuted(first, shape, wanted)), [sources], [keys]
        else:
            yield Steps(rearrange=axes), [sources], [keys]
    elif len(sources) == 1:
        pieces = sorted((parts[key][0].box, key) for key in keys)
        boxes = [box[::-1] if turned else box for box, _ in pieces]
        for unstack, split, rows in _cuts(boxes, [key for _, key in pieces], {len(target[key]) for key in keys}):
            yield Steps(rearrange=axes, unstack=unstack, split=split, some=some), [sources], rows
    elif len(keys) == 1:
        placed = sorted(parts[keys[0]], key=lambda part: part.place)
        boxes = [part.place[::-1] if turned else part.place for part in placed]
        for stack, concat, rows in _cuts(
            boxes, [part.source for part in placed], {len(source[key]) for key in sources}
        ):
            yield Steps(concat=concat, stack=stack, rearrange=axes, some=some), rows, [keys]
    else:
        ours = list(dict.fromkeys(part.source for key in keys for part in parts[key]))
        sizes = [[shapes[key][0] for key in side] for shapes, side in ((source, ours), (target, keys))]
        concat, split = (Cut(shares(rows)) for rows in sizes)
        yield Steps(concat=concat, split=split), [ours], [keys]


def _some(parts: Mapping[str, tuple[Part, Shape, Shape]]) -> Some | None:
    """Return the rearrangement that some of the keys share, None if they need different ones."""
    with suppress(ValueError):
        orders = {key: _permuted(*each) for key, each in parts.items() if each[0].axes}
        if len(set(orders.values())) == 1:
            return Some(next(iter(orders.values())), tuple(orders))
    return None


def _cuts(boxes: list[Box], keys: list[str], ndims: set[int]) -> Iterator[tuple[bool, Cut | None, list[list[str]]]]:
    """Yield whether the boxes are a stack and how they are divided, with their keys by number and place."""
    differ = [axis for axis in range(len(boxes[0])) if len({box[axis] for box in boxes}) > 1]
    is_stack = differ[:1] == [0] and ndims == {len(boxes[0]) - 1}
    rows = [list(range(len(boxes)))]
    if is_stack:
        rows = [list(row) for _, row in groupby(range(len(boxes)), key=lambda at: boxes[at][0])]
        differ = differ[1:]
    if len(differ) <= 1:
        cut = None
        if differ:
            axis = differ[0]
            cut = Cut(shares([stop - start for start, stop in (boxes[at][axis] for at in rows[0])]), axis - is_stack)
        yield is_stack, cut, [[keys[at] for at in row] for row in rows]


def _permuted(part: Part, shape: Shape, wanted: Shape) -> Rearrange:
    """Return the rearrangement for a part that is a whole tensor, reshaped and perhaps permuted. Raises ``ValueError``
    if the axes of either side are not products of those of the view."""
    factors = [[size] if size > 1 else [] for size in part.view or shape]
    axes = part.axes or range(len(factors))

    def grouped(order: Sequence[int], dims: Shape) -> list[list[tuple[int, int]]]:
        left = [(at, number) for at in order for number in range(len(factors[at]))]
        groups = []
        for size in dims:
            group = []
            while size > 1:
                at, number = left.pop(0)
                have = factors[at][number]
                if size % have and have % size:
                    raise ValueError(f"{size} is not made of the view")
                if size % have:
                    factors[at][number : number + 1] = [size, have // size]
                    left = [(own, each + (own == at)) for own, each in left]
                    left.insert(0, (at, number + 1))
                group.append((at, number))
                size //= min(size, have)
            groups.append(group)
        return groups

    grouped(range(len(factors)), shape)
    grouped(axes, wanted)  # may divide axes of the first, so that is computed again
    sides = grouped(range(len(factors)), shape), grouped(axes, wanted)
    names = dict(zip((each for group in sides[0] for each in group), "abcdefghijklmnop", strict=False))
    sizes = [(names[at, number], factors[at][number]) for group in sides[0] for at, number in group[1:]]
    before, after = (tuple(tuple(names[each] for each in group) or ("1",) for group in side) for side in sides)
    return Rearrange(before, after, tuple(sizes))


# ---- names


def _named(grid: list[list[str]], is_stack: bool) -> str:
    """Return the keys of a grid as one pattern."""
    rows = [_joined(row) for row in grid]
    if not is_stack:
        return rows[0]
    numbers = [_numbers(row) for row in rows]
    place = next((at for at, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1), -1)
    found = list(_DIGITS.finditer(rows[0]))[place]
    number = f"{{e+{found[0]}}}" if int(found[0]) else "{e}"  # the numbers of a second kind of experts may continue
    return f"{rows[0][: found.start()]}{number}{rows[0][found.end() :]}"


def _joined(keys: Sequence[str]) -> str:
    """Return keys as one pattern: ``{q,k,v}_proj.weight``."""
    if len(keys) == 1:
        return keys[0]
    start = _common(keys)
    end = min(_common([key[::-1] for key in keys]), min(map(len, keys)) - start - 1)
    while start and keys[0][start - 1] not in "._":
        start -= 1
    while end > 0 and keys[0][-end] not in "._":
        end -= 1
    middles = [key[start : len(key) - max(end, 0)] for key in keys]
    return f"{keys[0][:start]}{{{','.join(middles)}}}{keys[0][len(keys[0]) - end :] if end > 0 else ''}"


def _common(keys: Sequence[str]) -> int:
    return next((at for at, chars in enumerate(zip(*keys, strict=False)) if len(set(chars)) > 1), min(map(len, keys)))


def _outside(text: str) -> list[re.Match[str]]:
    """Return the numbers of a pattern that are not in braces."""
    return [
        found
        for found in _DIGITS.finditer(text)
        if text.count("{", 0, found.start()) == text.count("}", 0, found.start())
    ]


def _hashed(text: str) -> str:
    return _put(text, ["#"] * len(_outside(text)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(found[0]) for found in _outside(text))


def _put(text: str, values: Sequence[str]) -> str:
    """Return the pattern with its numbers replaced by texts."""
    pieces, end = [], 0
    for found, value in zip(_outside(text), values, strict=True):
        pieces += [text[end : found.start()], value]
        end = found.end()
    return "".join(pieces) + text[end:]


# ---- numbers


def _fitted(instances: list[_Instance]) -> Iterator[tuple[MapRule, list[_Instance]]]:
    """Yield the rules for the instances of a template; one is enough if the numbers of one side follow from the
    other's."""
    ours, theirs = _columns(instances)
    texts = [[str(column[0]) for column in side] for side in (ours, theirs)]
    names = iter(LETTERS)
    named: dict[int, str] = {}
    for at, column in enumerate(ours):
        if len(set(column)) > 1:
            same = (_relation(ours[other], column, name) for other, name in named.items())
            known = next((text for name, text in filter(None, same) if len(name) == 3), "")
            if not known:
                named[at] = next(names)
            texts[0][at] = known or f"{{{named[at]}}}"
    scaled: set[int] = set()
    for to, column in enumerate(theirs):
        if len(set(column)) > 1:
            for at, name in named.items():
                if at not in scaled and (found := _relation(ours[at], column, name)):
                    texts[1][to] = found[1]
                    if found[0] != f"{{{name}}}":
                        scaled.add(at)
                        texts[0][at] = found[0]
                    break
            else:
                narrow = [each for some in _divided(instances, ours, theirs) for each in _fitted(some)]
                rule = _in_lists(instances) if len(narrow) > MANY else None
                yield from [(rule, instances)] if rule else narrow
                return
    one = instances[0]
    yield MapRule(_put(one.source, texts[0]), _put(one.target, texts[1]), one.steps), instances


def _in_lists(instances: Sequence[_Instance]) -> MapRule | None:
    """Return a rule with a list on each side, ``layer.{0,1,2,3}`` and ``blocks.{0.0,0.1,1.0,1.1}``, for instances whose
    numbers have no formula; None if a list cannot express them."""
    one = instances[0]
    source, target = (_joined(side) for side in zip(*((each.source, each.target) for each in instances), strict=True))
    is_flat = source.count("{") == target.count("{") == 1
    return MapRule(source, target, one.steps) if is_flat else None


def _columns(instances: Sequence[_Instance]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the numbers at each place of both patterns."""
    ours, theirs = zip(*(each.numbers for each in instances), strict=True)
    return list(zip(*ours, strict=True)), list(zip(*theirs, strict=True))


def _relation(ours: Sequence[int], theirs: Sequence[int], name: str) -> tuple[str, str] | None:
    for scale in (1, 2, 3, 4, -1) if len(set(ours)) > 2 else (1,):
        for one, other, turned in ((ours, theirs, False), (theirs, ours, True)):
            offset = other[0] - scale * one[0]
            if all(b == scale * a + offset for a, b in zip(one, other, strict=True)):
                number = f"{{{scale if scale > 1 else ''}{name}{f'{offset:+d}' if offset else ''}}}"
                if scale < 0:
                    number = f"{{{offset}-{name}}}"
                return (number, f"{{{name}}}") if turned else (f"{{{name}}}", number)
    return None


def _divided(
    instances: list[_Instance], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> Iterator[list[_Instance]]:
    """Yield the instances grouped by the number with the fewest distinct values."""
    columns = [column for column in (*ours, *theirs) if len(set(column)) > 1]
    column = min(columns, key=lambda column: len(set(column)))
    for value in dict.fromkeys(column):
        yield [each for each, own in zip(instances, column, strict=True) if own == value]


# ---- rules


def _rules(instances: Iterable[_Instance]) -> Iterator[tuple[MapRule, list[_Instance]]]:
    groups: dict[tuple[str, str, tuple[str, ...]], list[_Instance]] = defaultdict(list)
    for instance in instances:
        groups[instance.template].append(instance)
    yield from _with_endings(each for group in groups.values() for each in _fitted(group))


def _with_endings(rules: Iterable[tuple[MapRule, list[_Instance]]]) -> Iterator[tuple[MapRule, list[_Instance]]]:
    """Merge rules that differ only in the last segment of both keys: ``.weight`` and ``.bias``."""
    groups: dict[tuple[object, ...], list[tuple[str, MapRule, list[_Instance]]]] = {}
    for rule, instances in rules:
        last, end = segments(rule.source)[-1], segments(rule.target)[-1]
        front, other = rule.source.removesuffix(last), rule.target.removesuffix(end)
        key = (front, other, rule.steps) if last == end and "{" not in last and front else (rule,)
        groups.setdefault(key, []).append((last, rule, instances))
    for group in groups.values():
        lasts = sorted((last for last, _, _ in group), key=lambda last: last != "weight")
        rule = group[0][1]
        if len(group) > 1 and len(set(lasts)) == len(lasts):
            source, target = (
                f"{key.removesuffix(group[0][0])}{{{','.join(lasts)}}}" for key in (rule.source, rule.target)
            )
            yield replace(rule, source=source, target=target), [each for _, _, more in group for each in more]
        else:
            yield from ((rule, instances) for _, rule, instances in group)


def _exact(
    rule: MapRule, instances: list[_Instance], inference: Inference, taken: Mapping[int, set[str]]
) -> Iterator[tuple[MapRule, list[_Instance]]]:
    """Yield the rule, or several narrower ones if it would move more than was inferred."""
    line = ParsedRule.parse(rule)
    narrower = set[str]().union(*(keys for width, keys in taken.items() if width < line.width))
    left = {key: shape for key, shape in inference.source.items() if key not in narrower and line.source.matches(key)}
    parts = {key: inference.matches[key].parts for each in instances for key in each.keys}
    try:
        is_exact = _gives(line, parts, left, inference.target)
    except ValueError:
        is_exact = False
    if is_exact or len(instances) == 1:
        yield rule, instances
        return
    ours, theirs = _columns(instances)
    if all(len(set(column)) == 1 for column in (*ours, *theirs)):
        yield from ((MapRule(each.source, each.target, each.steps), [each]) for each in instances)
        return
    for some in _divided(instances, ours, theirs):
        for narrow, each in _rules(some):
            yield from _exact(narrow, each, inference, taken)


def _gives(line: ParsedRule, parts: Mapping[str, tuple[Part, ...]], source: Shapes, target: Shapes) -> bool:
    made = dict(line.expand(source, target))
    return made.keys() == parts.keys() and all(
        move.shape == target[key] and _placed(move.parts) == _placed(parts[key]) for key, move in made.items()
    )


def _placed(parts: Iterable[Part]) -> list[Part]:
    return sorted(map(normal, parts), key=lambda part: (part.place, part.source))


def _labelled(rule: MapRule, instances: list[_Instance], moved: Mapping[str, Match]) -> MapRule:
    matches = [moved[key] for each in instances for key in each.keys]
    label = min(match.label for match in matches)
    others = dict.fromkeys(_hashed(other).replace("#", "{n}") for match in matches for other in match.alternatives)
    return replace(rule, label=LABELS[label], alternatives=tuple(others))
