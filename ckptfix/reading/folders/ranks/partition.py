"""Tensor parallelism: how the ranks that share a layer divide its tensors, as data, and how they are joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.chunks import Box, differ, merge_parts
from ckptfix.reading.folders.sharded import is_same


@dataclass(frozen=True)
class Split:
    """How a tensor is divided: along an axis, or not at all (None), in which case every rank has a copy.

    ``stacked`` matrices lie one after another along the axis, and each of them is divided by itself. ``holders`` ranks
    in a row hold the same part."""

    axis: int | None
    stacked: int = 1
    holders: int = 1


WHOLE = Split(None)


@dataclass(frozen=True)
class Rule:
    """The names of tensors that are divided in one way; the pattern is the end of a name."""

    pattern: re.Pattern[str]
    axis: int | None
    is_gated: bool = False
    """Whether two matrices may be stacked in it, as in gated linear units."""


def rules(*lines: str) -> tuple[Rule, ...]:
    """Return rules from lines such as ``0 linear_qkv.weight linear_qkv.bias``; ``-`` is a copy, ``0+`` may be gated."""
    made = []
    for line in lines:
        axis, *names = line.split()
        for name in names:
            pattern = re.compile(rf"(?:^|.*\.){name}")
            made.append(Rule(pattern, None if axis == "-" else int(axis.rstrip("+")), axis.endswith("+")))
    return tuple(made)


def find_rule(table: Sequence[Rule], name: str) -> Rule | None:
    """Return the first rule for a name."""
    return next((rule for rule in table if rule.pattern.fullmatch(name)), None)


def joined(name: str, parts: Sequence[TensorSpec], split: Split, path: str) -> TensorSpec:
    """Return the whole of a tensor from its parts, in the order of the ranks.

    Raises ``UnreadableError`` if their shapes do not go together, or if copies differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if split.axis is None:
        return first
    axis = split.axis % max(len(first.shape), 1)
    if any(
        (part.dtype, len(part.shape), part.shape[:axis], part.shape[axis + 1 :])
        != (first.dtype, len(first.shape), first.shape[:axis], first.shape[axis + 1 :])
        or part.shape[axis] % split.stacked
        for part in parts
    ):
        shapes = ", ".join(str(list(part.shape)) for part in parts[:4])
        raise UnreadableError(f"{path}: the parts of {name} do not go together along dimension {axis}: {shapes}")
    owners = parts[:: split.holders]
    size = sum(part.shape[axis] for part in owners)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    copies: dict[Box, list[TensorSpec]] = {}
    for number in range(split.stacked):
        begin = number * size // split.stacked
        for rank, part in enumerate(parts):
            length = part.shape[axis] // split.stacked
            piece = narrowed(part, axis, number * length, length)
            offsets = (*(0,) * axis, begin, *(0,) * (len(shape) - axis - 1))
            copies.setdefault(Box(offsets, piece.shape), []).append(piece)
            if (rank + 1) % split.holders == 0:
                begin += length
    return merge_parts(name, TensorSpec(first.dtype, shape, contiguous_strides(shape)), copies, path)


def narrowed(spec: TensorSpec, axis: int, start: int, length: int) -> TensorSpec:
    """Return the view of a tensor that takes ``length`` elements of an axis from ``start`` on."""
    shape = (*spec.shape[:axis], length, *spec.shape[axis + 1 :])
    return replace(spec, shape=shape, offset=spec.offset + start * spec.strides[axis])


def agree(parts: Sequence[TensorSpec], path: str) -> bool:
    """Return whether copies are the same: by their checksums, or byte for byte if the files have none."""
    first = parts[0]
    for other in parts[1:]:
        if other.shape != first.shape or other.dtype != first.dtype or differ(first, other):
            return False
        if (first.storage is None or first.storage.crc32 is None) and not is_same(first, other, path):
            return False
    return True


@dataclass
class Joining:
    """The joining of the state_dicts of ranks: what is said of copies that differ."""

    table: Sequence[Rule]
    path: str
    differing: dict[str, None]

    def join(
        self,
        states: Sequence[Mapping[str, object]],
        split_of: Callable[[str, Rule, Sequence[TensorSpec]], Split],
    ) -> Iterator[tuple[str, object]]:
        """Yield the entries of the whole, in the order of the first rank.

        Raises ``UnreadableError`` if a rank lacks a key, or holds other values of one that no rule knows."""
        keys = dict.fromkeys(key for state in states for key in state)
        for key in keys:
            entries = [state.get(key) for state in states]
            parts = [entry for entry in entries if isinstance(entry, TensorSpec)]
            if not parts:
                yield key, next((entry for entry in entries if entry is not None), None)
                continue
            if len(parts) < len(states):
                raise UnreadableError(
                    f"{self.path}: {len(parts)} of {len(states)} ranks hold {key}; its files are of different saves"
                )
            rule = find_rule(self.table, key)
            if rule is not None and rule.axis is not None:
                yield key, joined(key, parts, split_of(key, rule, parts), self.path)
                continue
            if not agree(parts, self.path):
                if rule is None:
                    raise UnreadableError(
                        f"{self.path}: its ranks hold different values of {key}, and no rule says how it is divided;"
                        " merge them with the tool of the framework"
                    )
                self.differing[key] = None
            yield key, parts[0]
