"""Applies a map to the keys of a file: resolves each key of the target into parts of the file's tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.parts import Part, Shape, Shapes
from ckptfix.core.rename_map import AMBIGUOUS, MapRule, RenameMap
from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, PlanError, UsageError
from ckptfix.maps.layout import KeyGrid, Steps
from ckptfix.maps.patterns import Binding, Pattern, Variable, parse

Cell = tuple[int | str, int | str]


class Move(Struct, frozen=True):
    """A tensor of the target: its shape, its parts, and the rule that it comes from."""

    shape: Shape
    parts: tuple[Part, ...]
    rule: MapRule


class ParsedRule(Struct, frozen=True):
    """A rule with its patterns and steps parsed.

    ``joined`` and ``stacked`` are the variables that only the source has, those of a concat and a stack; ``parted`` and
    ``unstacked`` are those that only the target has, of a split and an unstack."""

    rule: MapRule
    source: Pattern
    target: Pattern
    steps: Steps
    joined: Variable | None
    stacked: Variable | None
    parted: Variable | None
    unstacked: Variable | None

    @classmethod
    def parse(cls, rule: MapRule) -> ParsedRule:
        """Parse a rule. Raises ``ValueError`` if it is invalid."""
        source, target, steps = parse(rule.source), parse(rule.target), Steps.parse(rule.steps)
        mine = [variable for variable in _distinct(source) if variable.name not in target.names]
        theirs = [variable for variable in _distinct(target) if variable.name not in source.names]
        if not steps.concat and not steps.split:  # {weight,bias} → {gamma,beta}
            pairs = list(zip([v for v in mine if v.options], [v for v in theirs if v.options], strict=False))
            if any(len(one.options) != len(other.options) for one, other in pairs):
                raise ValueError("the two lists in braces have different lengths; concat or split is missing")
            target = target.renamed({other.name: one.name for one, other in pairs})
            mine = [variable for variable in mine if variable.name not in target.names]
            theirs = [variable for variable in _distinct(target) if variable.name not in source.names]
        joined, stacked = _only(mine, bool(steps.concat), steps.stack, "concat", "stack")
        parted, unstacked = _only(theirs, bool(steps.split), steps.unstack, "split", "unstack")
        several = joined or parted
        if steps.some and several and (unknown := set(steps.some.names) - set(several.options)):
            raise ValueError(f"{min(unknown)} is not one of {{{several.name}}}")
        return cls(rule, source, target, steps, joined, stacked, parted, unstacked)

    @property
    def width(self) -> int:
        """The number of variables other than lists in braces; a rule with fewer is more specific."""
        return sum("," not in name for name in self.source.names)

    def inverse(self) -> MapRule:
        """Return the rule that undoes this one."""
        return replace(self.rule, source=self.rule.target, target=self.rule.source, steps=self.steps.inverse().texts())

    def expand(self, source: Shapes, target: Shapes | None = None) -> Iterator[tuple[str, Move]]:
        """Yield the tensors that the rule makes from the tensors of a file. Raises ``ValueError`` if it does not fit.

        The shapes of the target determine sizes that the rule leaves open."""
        groups: dict[tuple[tuple[str, int | str], ...], dict[Cell, str]] = defaultdict(dict)
        shared = sorted(self.source.names & self.target.names)
        for key in source:
            values = self.source.match(key)
            if values is not None:
                cell = (
                    values[self.stacked.name] if self.stacked else 0,
                    values[self.joined.name] if self.joined else 0,
                )
                cells = groups[tuple((name, values[name]) for name in shared)]
                if cell in cells:
                    raise ValueError(f"{cells[cell]} and {key} map to the same place in the target")
                cells[cell] = key
        if not self.rule.optional:
            self._refuse_unmatched([dict(group) for group in groups], source, target)
        for group, cells in groups.items():
            yield from self._assembled(dict(group), self._grid(cells, source), target)

    def _refuse_unmatched(
        self, found: list[dict[str, int | str]], file: Collection[str], target: Collection[str] | None
    ) -> None:
        if not found:
            there = self.rule.target != "*" and any(map(self.target.matches, file))
            has = f"; it already has {self.rule.target}" if there else ""
            raise ValueError(f"no key of the file matches {self.rule.source}{has}")
        variables = [each for each in _distinct(self.source) if each.options and each != self.joined]
        wanted = [values for key in (target or () if variables else ()) if (values := self.target.match(key))]
        for variable in variables:
            for at, option in enumerate(variable.options):
                # Layers may have no bias, if the target's have none either.
                lacks = target is not None and not any(group.get(variable.name) == at for group in wanted)
                if not lacks and not any(group.get(variable.name) == at for group in found):
                    raise ValueError(f"no key of the file matches with {option}")

    def _grid(self, cells: Mapping[Cell, str], source: Shapes) -> KeyGrid:
        """Return the keys by number and place. Raises ``ValueError`` if one is missing."""
        numbers = sorted({int(number) for number, _ in cells})
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ValueError(f"the numbers {numbers} of {{{self.stacked.name if self.stacked else ''}}} have a gap")
        options = self.joined.options if self.joined else ("",)
        for number in numbers:
            for at, option in enumerate(options):
                if (number, at) not in cells:
                    raise ValueError(f"{next(iter(cells.values()))} has no sibling {option}")
        return [[(key := cells[number, at], source[key]) for at in range(len(options))] for number in numbers]

    def _assembled(self, values: Binding, grid: KeyGrid, target: Shapes | None) -> Iterator[tuple[str, Move]]:
        pattern = self.target
        numbers = [v.name for v in _distinct(pattern) if v.is_number and v.name not in values and v != self.unstacked]
        extra = {each.name: 0 for each in (self.parted, self.unstacked) if each}
        if numbers:
            fits = [found for key in target or () if (found := pattern.match(key)) and values.items() <= found.items()]
            choices = {tuple(found[name] for name in numbers) for found in fits}
            if len(choices) != 1:
                raise ValueError(f"the value of {{{numbers[0]}}} is not known; give a target")
            values = {**values, **dict(zip(numbers, choices.pop(), strict=True))}
        if self.steps == Steps():
            ((key, shape),) = grid[0]
            yield pattern.key(values), Move(shape, (Part.whole(key, shape),), self.rule)
            return
        first = target.get(pattern.key({**values, **extra})) if target is not None else None
        wanted: list[int | None] | None = None
        if first is not None:
            wanted = [None if self.steps.split and at == self.steps.split.axis else n for at, n in enumerate(first)]
            wanted = [None, *wanted] if self.steps.unstack else wanted
        several = self.parted or self.joined
        texts = several.options if several else ("",)
        for number, row in enumerate(self.steps.apply(grid, texts, wanted)):
            for at, (shape, parts) in enumerate(row):
                own = {each.name: n for each, n in ((self.unstacked, number), (self.parted, at)) if each}
                yield pattern.key({**values, **own}), Move(shape, parts, self.rule)


def _distinct(pattern: Pattern) -> tuple[Variable, ...]:
    return tuple({variable.name: variable for variable in pattern.variables}.values())


def _only(
    variables: list[Variable], cuts: bool, stacks: bool, cut: str, stack: str
) -> tuple[Variable | None, Variable | None]:
    """Return the variables of one side's concat or split, and of its stack or unstack."""
    lists = [variable for variable in variables if variable.options]
    numbers = [variable for variable in variables if variable.is_number]
    if stars := [variable for variable in variables if variable not in lists + numbers]:
        raise ValueError(f"one side has {len(stars)} more * than the other")
    if len(lists) != cuts:
        raise ValueError(
            f"{cut} needs a list in braces that only one side has"
            if cuts
            else f"{{{lists[0].name}}} is only on one side; {cut} is missing"
        )
    if stacks and len(numbers) != 1:
        raise ValueError(f"{stack} needs one number in braces that only one side has")
    return (lists[0] if cuts else None), (numbers[0] if stacks else None)


def resolve(rename_map: RenameMap, source: Shapes, target: Shapes | None = None) -> dict[str, Move]:
    """Return the tensors that the map makes from the tensors of a file, by key of the target.

    A map that only fits in reverse is applied in reverse, without its rules by hand, which have one direction. Raises
    ``PlanError``, which names the rule (``UsageError`` for one by hand), for a key that the file or the target lacks,
    two sources for one element, and an uneven split."""
    lines = parsed(rename_map)
    if not _matches(lines, source):
        back = inverse(rename_map)
        if _matches(parsed(back), source):
            rename_map, lines = back, parsed(back)
    moves: dict[str, Move] = {}
    users: dict[str, MapRule] = {}
    shares = _shares(lines, source)
    for number, line in enumerate(lines):
        if line.rule.label == AMBIGUOUS:
            continue
        with _naming(rename_map, number):
            found = dict(line.expand(shares[number], target))
            if target is not None and line.steps != Steps():
                cut = line.steps.split or line.steps.concat
                _refuse_other_shapes({key: move.shape for key, move in found.items()}, target, cut.axis if cut else -1)
            if target is not None and line.rule.optional:  # skip tensors that have no place in the target
                lacking = {part.source for key, move in found.items() if key not in target for part in move.parts}
                found = {key: move for key, move in found.items() if lacking.isdisjoint(p.source for p in move.parts)}
            for key, move in found.items():
                if target is not None and key not in target:
                    raise ValueError(f"the target has no key {key}{_hint(key, target)}")
                if key in moves:
                    raise ValueError(f"{key} already gets its source from {moves[key].rule}")
                for part in move.parts:
                    if users.setdefault(part.source, line.rule) is not line.rule:
                        raise ValueError(f"{part.source} is already used by {users[part.source]}")
                moves[key] = move
    for key, move in moves.items():
        if key not in users and key in source:
            with _naming(rename_map, [line.rule for line in lines].index(move.rule)):
                raise ValueError(f"the file has another {key}, which would be overwritten")
    return moves


def _refuse_other_shapes(made: Shapes, target: Shapes, cut: int) -> None:
    """Raise ``ValueError`` for wrong axes or shares: tensors with the same total number of elements as the target's but
    other shapes, or matrices that differ only along the axis ``cut``."""
    wanted = {key: target[key] for key in made if key in target}
    is_same = made.keys() == wanted.keys() and sum(map(prod, made.values())) == sum(map(prod, wanted.values()))
    for key, shape in wanted.items():
        differ = [at for at, (one, other) in enumerate(zip(made[key], shape, strict=False)) if one != other]
        if made[key] != shape and (is_same or (len(made[key]) == len(shape) > 1 and differ == [cut])):
            raise ValueError(f"{key} would be {list(made[key])}, but the target wants {list(shape)}")


def _matches(lines: Sequence[ParsedRule], keys: Collection[str]) -> bool:
    return any(line.source.matches(key) for line in lines if not line.rule.by_hand for key in keys)


def _shares(lines: Sequence[ParsedRule], source: Shapes) -> list[Shapes]:
    """Return the tensors of the file for each rule, without those matched by a rule with fewer variables."""
    widths = [line.width for line in lines]
    left, found = dict(source), {}
    for width in sorted(set(widths)):
        found[width] = dict(left)
        for line, own in zip(lines, widths, strict=True):
            if own == width:
                left = {key: shape for key, shape in left.items() if not line.source.matches(key)}
    return [found[width] for width in widths]


def parsed(rename_map: RenameMap) -> list[ParsedRule]:
    """Return the parsed rules. Raises ``PlanError``, which names the rule, if one is invalid (``UsageError`` for one by
    hand)."""
    lines = []
    for number, rule in enumerate(rename_map.rules):
        with _naming(rename_map, number):
            lines.append(ParsedRule.parse(rule))
    return lines


def inverse(rename_map: RenameMap) -> RenameMap:
    """Return the map that undoes this one; rules by hand are unchanged."""
    rules = (line.rule if line.rule.by_hand else line.inverse() for line in parsed(rename_map))
    return replace(rename_map, rules=tuple(rules))


@contextmanager
def _naming(rename_map: RenameMap, number: int) -> Iterator[None]:
    """Turn a ``ValueError`` into a ``PlanError`` that names the rule, or a ``UsageError`` for a rule by hand."""
    try:
        yield
    except ValueError as error:
        rule = rename_map.rules[number]
        if rule.by_hand:
            raise UsageError(
                Opt("rename", f"{rule.source}={rule.target}"), f": {error}; correct the pattern, or omit it"
            ) from error
        where = f"{rename_map.name or 'the map'}: rule {number + 1} ({rule})"
        raise PlanError(f"{where}: {error}; correct the rule") from error


def _hint(key: str, keys: Collection[str]) -> str:
    close = nearest(key, keys)
    return f", but {close}" if close else ""
