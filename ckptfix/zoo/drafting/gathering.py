"""Which files belong together, and the shortest patterns that match exactly them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptfix.zoo.drafting.survey import Layout, Sight
from ckptfix.zoo.patterns import compile_patterns, literal

_ALIKE = 3
"""Files whose names differ only in numbers, from which on a pattern stands for them."""

_MOVING = re.compile(r"(?<![0-9a-z])[0-9a-f]{8,64}(?![0-9a-z])|\d+(?:\.\d+)?", re.IGNORECASE)
"""The parts of a name that change from one file of a run to the next: hashes and numbers."""


@dataclass(frozen=True)
class Group:
    """The checkpoints of one layout; those that hold several state_dicts apart from those that hold one."""

    layout: Layout
    sights: tuple[Sight, ...]
    patterns: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its files."""
        return tuple(sight.name for sight in self.sights)


def gather(sights: Sequence[Sight], others: Iterable[str]) -> list[Group]:
    """Return the groups of equal layout, the largest first. ``others`` are names that no pattern may match."""
    by_layout: dict[tuple[str, ...], list[Sight]] = defaultdict(list)
    for sight in sights:
        if sight.layout is not None:
            rivals = (sight.weights, *sight.candidates) if sight.candidates else ()
            key = (sight.layout.digest, *rivals)
            by_layout[key].append(sight)
    unread = [sight.name for sight in sights if sight.layout is None]
    names = {key: {sight.name for sight in members} for key, members in by_layout.items()}
    known = _Names([*(name for members in names.values() for name in members), *unread, *others])
    groups = [
        Group(members[0].layout, tuple(members), tuple(known.patterns(names[key])))
        for key, members in by_layout.items()
        if members[0].layout is not None
    ]
    return sorted(groups, key=lambda group: (-len(group.sights), group.names))


class _Names:
    """All names of a zoo, so that a pattern is known to match no other."""

    def __init__(self, names: Iterable[str]) -> None:
        self.below: dict[str, set[str]] = defaultdict(set)
        self.beside: dict[str, set[str]] = defaultdict(set)
        self.own: Counter[str] = Counter()
        for name in set(names):
            parts = name.split("/")
            self.own[parts[-1]] += 1
            self.beside["/".join(parts[:-1])].add(name)
            for depth in range(1, len(parts)):
                self.below["/".join(parts[:depth])].add(name)
        self.folders = Counter(folder.rpartition("/")[2] for folder in self.below)

    def patterns(self, wanted: set[str]) -> Iterator[str]:
        """Yield patterns that match these names and no other: whole folders, then one name in several folders, then
        similar names, then single ones."""
        left = set(wanted)
        for folder in sorted({name.rpartition("/")[0] for name in wanted} - {""}):
            place = self._highest(folder, wanted)
            if place is not None and len(left & self.below[place]) > 1:
                left -= self.below[place]
                yield self._anchored(f"{literal(place)}/", self.folders[place])
        by_own: dict[str, set[str]] = defaultdict(set)
        for name in left:
            by_own[name.rpartition("/")[2]].add(name)
        for own, same in sorted(by_own.items()):
            if 1 < len(same) == self.own[own]:
                left -= same
                yield literal(own)
        for pattern, alike in sorted(_alike(left).items()):
            expression = compile_patterns([pattern])
            folder = next(iter(alike)).rpartition("/")[0]
            if len(alike) >= _ALIKE and {name for name in self.beside[folder] if expression.fullmatch(name)} == alike:
                left -= alike
                yield pattern
        yield from (self._anchored(literal(name), self.own[name]) for name in sorted(left))

    def _highest(self, folder: str, wanted: set[str]) -> str | None:
        """The highest folder above, or the folder itself, all of whose files are wanted."""
        parts = folder.split("/")
        places = ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return next((place for place in places if self.below[place] <= wanted), None)

    def _anchored(self, pattern: str, count: int) -> str:
        """The pattern with a leading slash, if it would match something of that name elsewhere too."""
        return pattern if "/" in pattern.rstrip("/") or count == 1 else f"/{pattern}"


def _alike(names: set[str]) -> dict[str, set[str]]:
    """Names by the pattern that they have with a star for each part that is not the same in all of them."""
    forms: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(dict)
    for name in names:
        folder, _, own = name.rpartition("/")
        if moving := _MOVING.findall(own):
            form = (folder, *_MOVING.split(own))
            forms[form][name] = moving
    found: dict[str, set[str]] = {}
    for (folder, first, *others), members in forms.items():
        columns = zip(*members.values(), strict=True)
        stars = ["*" if len(set(column)) > 1 else literal(column[0]) for column in columns]
        own = "".join([literal(first), *(star + literal(part) for star, part in zip(stars, others, strict=True))])
        found[f"{literal(folder)}/{own.replace('**', '*')}"] = set(members)
    return found
