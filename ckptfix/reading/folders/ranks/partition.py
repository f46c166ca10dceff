"""Tensor parallelism: how ranks split the tensors of a layer, and how the parts are joined."""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, field

from ckptfix.bytes.sources import is_torn
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.core.parts import Box, full, lies_in, numel
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError
from ckptfix.reading.boxes import boxed, may_overlap
from ckptfix.reading.folders.chunks import agree, gone, merge_parts


class Split(Struct, frozen=True):
    """How a tensor is split: along an axis, or not at all (None), so that every rank has a copy.

    ``stacked`` is the number of matrices along the axis, each of which is split separately. ``holders`` is the number
    of consecutive ranks that have the same part. ``is_uneven`` is whether parts may have different lengths, as those of
    DeepSpeed's AutoTP and of FSDP; Megatron's have one length.

    Other splits have ``places``: for every rank, the boxes of the whole that it has, each with its box in the rank's
    part; and the ``shape`` of the whole."""

    axis: int | None
    stacked: int = 1
    holders: int = 1
    places: tuple[tuple[tuple[Box, Box], ...], ...] = ()
    shape: tuple[int, ...] = ()
    is_uneven: bool = False


WHOLE = Split(None)


def stacked(axis: int, widths: Sequence[Sequence[int]], part: TensorSpec) -> Split:
    """Return the split of several tensors that are concatenated along an axis, in the whole and on each rank.

    ``widths`` has, for each tensor, its length on every rank. ``part`` is the part of one rank."""
    places: list[list[tuple[Box, Box]]] = [[] for _ in widths[0]]
    begin, starts = 0, [0] * len(places)
    for own in widths:
        for rank, length in enumerate(own):
            whole, inside = (_stretch(part.shape, axis, start, length) for start in (begin, starts[rank]))
            places[rank].append((whole, inside))
            begin, starts[rank] = begin + length, starts[rank] + length
    shape = (*part.shape[:axis], begin, *part.shape[axis + 1 :])
    return Split(axis, places=tuple(map(tuple, places)), shape=shape)


_Key = TypeVar("_Key")


class SplitRule(Struct, frozen=True):
    """The axis along which tensors with certain names are split; the pattern matches the end of a name."""

    pattern: re.Pattern[str]
    axis: int | None
    is_gated: bool = False  # whether two matrices may be stacked in it, as in gated linear units


def rules(*lines: str) -> tuple[SplitRule, ...]:
    """Parse rules such as ``0 linear_qkv.weight linear_qkv.bias``; ``-`` is a copy, and ``0+`` may be gated."""
    made = []
    for line in lines:
        axis, *names = line.split()
        pattern = re.compile(rf"(?:^|.*\.)(?:{'|'.join(names)})")
        made.append(SplitRule(pattern, None if axis == "-" else int(axis.rstrip("+")), axis.endswith("+")))
    return tuple(made)


def find_rule(table: Sequence[SplitRule], name: str) -> SplitRule | None:
    return next((rule for rule in table if rule.pattern.fullmatch(name)), None)


# Returns how a tensor is split into these parts; None if its name is unknown.
SplitOf = Callable[[str, Sequence[TensorSpec]], "Split | None"]


def joined(name: str, parts: Sequence[TensorSpec], split: Split, path: str) -> TensorSpec:
    """Join a tensor from its parts in order of the ranks. Raises ``UnreadableError`` if their shapes do not fit."""
    first = parts[0]
    if split.places:
        return _placed(name, parts, split, path)
    if len(parts) == 1 or split.axis is None:
        return next((part for part in parts if not is_torn(part)), first)
    axis = split.axis % max(len(first.shape), 1)
    if any(
        (part.dtype, len(part.shape), part.shape[:axis], part.shape[axis + 1 :])
        != (first.dtype, len(first.shape), first.shape[:axis], first.shape[axis + 1 :])
        or part.shape[axis] % split.stacked
        or (part.shape[axis] != first.shape[axis] and not split.is_uneven)
        or may_overlap(part)
        for part in parts
    ):
        shapes = first_names([f"{part.dtype} {list(part.shape)}" for part in parts])
        raise UnreadableError(
            f"{path}: the parts of {name} do not fit along dimension {axis}: {shapes}; put the files of one"
            " save together"
        )
    owners = parts[:: split.holders]
    size = sum(part.shape[axis] for part in owners)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    copies: dict[Box, list[TensorSpec]] = {}
    for number in range(split.stacked):
        begin = number * size // split.stacked
        for rank, part in enumerate(parts):
            length = part.shape[axis] // split.stacked
            piece = boxed(part, _stretch(part.shape, axis, number * length, length))
            copies.setdefault(_stretch(shape, axis, begin, length), []).append(piece)
            if (rank + 1) % split.holders == 0:
                begin += length
    return merge_parts(name, first.dtype, shape, copies, path)


def _placed(name: str, parts: Sequence[TensorSpec], split: Split, path: str) -> TensorSpec:
    copies: dict[Box, list[TensorSpec]] = {}
    for part, places in zip(parts, split.places, strict=True):
        own = [box for _, box in places]
        if sum(map(numel, own)) != part.numel or not all(lies_in(box, part.shape) for box in own):
            raise UnreadableError(
                f"{path}: a part of {name} is {list(part.shape)}, which does not match how its ranks split it"
            )
        for whole, inside in places:
            copies.setdefault(whole, []).append(boxed(part, inside))
    if not all(agree(same, path) for same in copies.values()):
        raise UnreadableError(f"{path}: its ranks hold different copies of {name}; put the files of one save together")
    return merge_parts(name, parts[0].dtype, split.shape, copies, path)


def emptied(state: Mapping[_Key, Any], path: str) -> dict[_Key, Any]:
    """Return the state_dict of a missing rank: that of another rank, with its bytes marked as lost. Tensors that are
    tied stay tied."""
    made: dict[object, TensorSpec] = {}
    for key, value in state.items():
        if isinstance(value, TensorSpec) and value.view not in made:
            made[value.view] = gone(str(key), value, path)
    return {key: made[value.view] if isinstance(value, TensorSpec) else value for key, value in state.items()}


def lost_bytes(parts: Sequence[TensorSpec], split: Split | None, are_lost: Sequence[bool]) -> int:
    """Return the size of the parts of a tensor of which only these ranks have a copy; without a rule, every part is
    one of its own."""
    if split is None:
        return sum(part.nbytes for part, is_lost in zip(parts, are_lost, strict=True) if is_lost)
    if split.places:
        placed = [
            (whole, is_lost) for is_lost, places in zip(are_lost, split.places, strict=True) for whole, _ in places
        ]
        lost = {whole for whole, _ in placed} - {whole for whole, is_lost in placed if not is_lost}
        return sum(map(numel, lost)) * parts[0].itemsize
    holders = len(parts) if split.axis is None else split.holders
    groups = range(0, len(parts), holders)
    return sum(parts[first].nbytes for first in groups if all(are_lost[first : first + holders]))


def _stretch(shape: tuple[int, ...], axis: int, start: int, length: int) -> Box:
    """Return the box of ``length`` elements of an axis from ``start`` on."""
    return (*full(shape[:axis]), (start, start + length), *full(shape[axis + 1 :]))


class Joining(Struct):
    """A join of state_dicts of ranks, with the keys whose copies differ, and the bytes of each tensor that no rank
    has, also by the name of the rank that had them. ``names`` are the names of the ranks."""

    path: str
    names: Sequence[str] = ()
    differing: dict[str, None] = field(default_factory=dict)
    lacking: dict[str, int] = field(default_factory=dict)
    held_by: Counter[str] = field(default_factory=Counter)

    def whole(self, states: Sequence[Mapping[str, Any]], split_of: SplitOf) -> Mapping[str, Any]:
        """Return the entries of the whole. The state_dict of a single rank is returned as it is, with ``_metadata``."""
        return states[0] if len(states) == 1 else OrderedDict(self.join(states, split_of))

    def join(self, states: Sequence[Mapping[str, object]], split_of: SplitOf) -> Iterator[tuple[str, Any]]:
        """Yield the entries of the whole in the order of the first rank. Tensors that are tied on all ranks stay tied.

        Raises ``UnreadableError`` if a rank lacks a key, or if copies of a key differ that has no rule, or that is
        an object with tensors."""
        keys = dict.fromkeys(key for state in states for key in state)
        made: dict[tuple[object, ...], TensorSpec] = {}
        for key in keys:
            entries = [state.get(key) for state in states]
            parts = [entry for entry in entries if isinstance(entry, TensorSpec)]
            if not parts:
                self._check_alike(key, entries)
                yield key, next((entry for entry in entries if entry is not None), None)
                continue
            if len(parts) < len(states):
                without = [rank for rank, entry in enumerate(entries) if not isinstance(entry, TensorSpec)]
                names = [self.names[rank] if self.names else f"rank {rank}" for rank in without]
                raise UnreadableError(
                    f"{self.path}: {len(parts)} of {len(states)} ranks hold {key}, and not {first_names(names)}: its"
                    " files are from different saves; put those of one save together"
                )
            views = tuple(part.view for part in parts)
            if views in made:
                yield key, made[views]
                continue
            split = split_of(key, parts)
            if split is None and any(map(is_torn, parts)):
                made[views] = gone(key, parts[0], self.path)
                self.lacking[key] = lost_bytes(parts, None, [*map(is_torn, parts)])
                yield key, made[views]
                continue
            made[views] = joined(key, parts, split or WHOLE, self.path)
            if is_torn(made[views]):
                self.lacking[key] = lost_bytes(parts, split or WHOLE, [*map(is_torn, parts)])
                if split is not None and split.axis is not None and split.holders == 1 and not split.places:
                    held = zip(self.names, parts, strict=False)
                    self.held_by.update({name: part.nbytes for name, part in held if is_torn(part)})
            holders = split.holders if split is not None else 1
            same = [parts[first : first + holders] for first in range(0, len(parts), holders) if holders > 1]
            if not all(agree(copies, self.path) for copies in same):
                raise UnreadableError(
                    f"{self.path}: {holders} ranks each should hold the same part of {key}, but do not; put the files"
                    " of one save together, with the sizes of their model"
                )
            if (split is None or split.axis is None) and not agree(parts, self.path):
                if split is None:
                    raise UnreadableError(
                        f"{self.path}: its ranks hold different values of {key}, and no rule says how it is split; "
                        "merge them with the framework's tool"
                    )
                self.differing[key] = None
            yield key, made[views]

    def _check_alike(self, key: str, entries: Sequence[object]) -> None:
        held = [[*tensors_in(entry)] for entry in entries if isinstance(entry, Opaque)]
        if not any(held) or key.endswith("_extra_state"):
            return
        if len({*map(len, held)}) > 1 or not all(agree(copies, self.path) for copies in zip(*held, strict=True)):
            raise UnreadableError(
                f"{self.path}: its ranks hold {key} as objects that only their class can merge; merge them with the"
                " framework's tool"
            )
