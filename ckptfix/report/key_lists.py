"""Long key lists in few lines: ``layers.{0…11}.attn.{q,k,v}.weight``.

Keys are split into segments. Two patterns that differ in only one segment are merged into one with both alternatives,
so each pattern is a full product and stands for exactly the keys that were put in."""

import math
import re
from collections.abc import Callable, Iterable

from msgspec import Struct

from ckptfix.report.style import at_most

MAX_NAMES = 6  # more alternatives than this are hard to read, unless they are numbers
_MAX_SEGMENTS = 64  # A key of a million dots must not take quadratic time; the rest of it counts as one segment.
_INTEGER = re.compile(r"(?:0|[1-9][0-9]{0,17})")
_NUMBERED = re.compile(r"(.*?[^0-9])(0|[1-9][0-9]{0,17})", re.DOTALL)
Alternatives = tuple[str, ...]  # the alternatives of one segment, in a fixed order
FoldedKey = tuple[Alternatives, ...]


class KeyGroup(Struct, frozen=True):
    """The keys of a full product of alternatives. ``spec`` is the text that they share beside the pattern."""

    slots: FoldedKey
    spec: str = ""

    @property
    def count(self) -> int:
        """Number of keys."""
        return math.prod(len(slot) for slot in self.slots)

    def __str__(self) -> str:
        return ".".join(_slot_text(slot) for slot in self.slots)


def fold_keys(keys: Iterable[str], spec: Callable[[str], str] | None = None) -> list[KeyGroup]:
    """Fold keys into patterns, in the order of their first keys.

    With ``spec``, only keys for which it returns the same text are merged. Duplicates count once."""
    ranks: dict[str, int] = {}
    # Patterns of different length or spec never merge. The number is that of the first key, for the order.
    groups: dict[tuple[str, int], dict[FoldedKey, int]] = {}
    for number, key in enumerate(keys):
        segments = key.split(".", _MAX_SEGMENTS - 1)
        for segment in segments:
            ranks.setdefault(segment, len(ranks))
        group = groups.setdefault((spec(key) if spec else "", len(segments)), {})
        group.setdefault(tuple((segment,) for segment in segments), number)

    folds = [
        (number, KeyGroup(pattern, text))
        for (text, _), patterns in groups.items()
        for pattern, number in _folded(patterns, ranks).items()
    ]
    return [fold for _, fold in sorted(folds, key=lambda item: item[0])]


def folded_lines(
    keys: Iterable[str], limit: int | None = 12, spec: Callable[[str], str] | None = None, width: int | None = None
) -> list[str]:
    """Return the folded keys in at most ``limit`` lines, the last of which counts the rest.

    With ``width``, the specs are aligned in a column after keys of up to that many characters."""
    folds = fold_keys(keys, spec)
    shown = at_most(folds, limit)
    counts = [f"  ({fold.count})" if fold.count > 1 else "" for fold in shown]
    if width is None:
        lines = [f"{fold}  {fold.spec}".rstrip() + count for fold, count in zip(shown, counts, strict=True)]
    else:
        names = [f"{fold}{count}" for fold, count in zip(shown, counts, strict=True)]
        width = min(width, max(map(len, names), default=0))
        lines = [f"{name:<{width}}  {fold.spec}".rstrip() for name, fold in zip(names, shown, strict=True)]
    rest = sum(fold.count for fold in folds[len(shown) :])
    return [*lines, f"… and {rest} more"] if rest else lines


def _folded(patterns: dict[FoldedKey, int], ranks: dict[str, int]) -> dict[FoldedKey, int]:
    """Merge until nothing merges: numbers first, then numbered names (``layer1``), then names."""
    length = len(next(iter(patterns)))
    while True:
        before = len(patterns)
        for kind in (_number_kind, _stem, _name_kind):
            # Names from the right: the leaves of one module (``weight``, ``bias``) belong together before modules do.
            for position in range(length) if kind is _number_kind else reversed(range(length)):
                patterns = _merged(patterns, position, kind, ranks)
        if len(patterns) == before:
            return patterns


def _merged(
    patterns: dict[FoldedKey, int], position: int, kind: Callable[[Alternatives], str | None], ranks: dict[str, int]
) -> dict[FoldedKey, int]:
    """Return the patterns after merging those that differ only in this position, where both slots are of one kind."""
    groups: dict[tuple[str | None, FoldedKey], list[FoldedKey]] = {}
    if len({pattern[position] for pattern in patterns}) == 1:
        return patterns
    for pattern in patterns:
        of_kind = kind(pattern[position])
        rest = pattern if of_kind is None else (*pattern[:position], *pattern[position + 1 :])
        groups.setdefault((of_kind, rest), []).append(pattern)

    result: dict[FoldedKey, int] = {}
    for members in groups.values():
        alternatives = {segment for pattern in members for segment in pattern[position]}
        if len(members) > 1 and not (kind is _name_kind and len(alternatives) > MAX_NAMES):
            slot = tuple(sorted(alternatives, key=lambda segment: _order(segment, ranks)))
            merged = (*members[0][:position], slot, *members[0][position + 1 :])
            result[merged] = min(patterns[pattern] for pattern in members)
        else:
            result.update((pattern, patterns[pattern]) for pattern in members)
    return result


def _number_kind(slot: Alternatives) -> str | None:
    return "number" if _INTEGER.fullmatch(slot[0]) else None


def _name_kind(slot: Alternatives) -> str | None:
    return None if _INTEGER.fullmatch(slot[0]) else "name"


def _stem(slot: Alternatives) -> str | None:
    """Return the text before the number of numbered names (``layer`` of ``layer1, layer2``), None for other names."""
    matches = [_NUMBERED.fullmatch(segment) for segment in slot]
    stems = {match[1] if match else None for match in matches}
    return stems.pop() if len(stems) == 1 else None


def _order(segment: str, ranks: dict[str, int]) -> tuple[int, str, int, int]:
    """Return the key to sort by: numbers by value, numbered names by stem and number, others as first seen."""
    if _INTEGER.fullmatch(segment):
        return (0, "", int(segment), 0)
    if match := _NUMBERED.fullmatch(segment):
        return (1, match[1], int(match[2]), 0)
    return (2, "", 0, ranks[segment])


def _slot_text(slot: Alternatives) -> str:
    if len(slot) == 1:
        return slot[0]
    if all(_INTEGER.fullmatch(segment) for segment in slot):
        return f"{{{_ranges([int(segment) for segment in slot])}}}"
    if (stem := _stem(slot)) is not None:
        return f"{stem}{{{_ranges([int(segment[len(stem) :]) for segment in slot])}}}"
    return f"{{{','.join(slot)}}}"


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, with runs abbreviated: ``0…3,7,9,10``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}…{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
