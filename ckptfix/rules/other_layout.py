"""Where the weights that a target misses are in the file after all, under names or in a layout that no rule can turn
into its own: what to say about it.

A release that renames query, key and value leaves three matrices of one shape without a place, and three missing. One
tensor for query, key and value or three of them, experts stacked or each for itself, a weight or the two parts that
``weight_norm`` makes of it: what is missing can be computed from what is left over, but not from names alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import advise, counted
from ckptfix.core.target import PARAMETER, Target

Shape = tuple[int, ...]

_NEW = "parametrizations.{tensor}"

_PARTS = {
    "weight_norm": (("{tensor}_g", "{tensor}_v"), (f"{_NEW}.original0", f"{_NEW}.original1")),
    "spectral_norm": (("{tensor}_orig", "{tensor}_u"), (f"{_NEW}.original", f"{_NEW}.0._u")),
}
"""The tensors that a parametrization has in the place of one, in old releases of torch and in new ones."""

MANY = 8
"""Missing tensors from which on it is no chance that all of their shapes are among those left over."""

DEEPEST = 32
"""Modules around each other that are looked at. A crafted key has any number of segments, and each path is kept."""


MOST = 0.5
"""Share of a model's parameters from which on a model without them is another one."""

NAME_THE_MODEL = advise("name the model that the file belongs to: most parameters of this one are not in the file")


def untrained(checkpoint: Checkpoint, target: Target) -> dict[str, int]:
    """Return the target's parameters for which the file has no tensor of this name and shape, with their number of
    elements. Tied ones count once."""
    found: dict[str, int] = {}
    seen: set[str] = set()
    for key, slot in target.slots.items():
        if slot.kind != PARAMETER or key in seen:
            continue
        group = target.tie_of.get(key, (key,))
        seen.update(group)
        if not any(name in checkpoint.specs and target.accepts(name, checkpoint.specs[name].shape) for name in group):
            found[key] = slot.numel
    return found


def is_of_another_model(checkpoint: Checkpoint, target: Target) -> bool:
    """Return whether half of the target's parameters or more are not in the file."""
    seen: set[str] = set()
    total = 0
    for key, slot in target.slots.items():
        if slot.kind == PARAMETER and key not in seen:
            seen.update(target.tie_of.get(key, (key,)))
            total += slot.numel
    return total > 0 and sum(untrained(checkpoint, target).values()) >= MOST * total


def other_layout(checkpoint: Checkpoint, target: Target) -> str:
    """How the leftover tensors of the file may hold the missing ones of the target, as a remedy; empty where they do
    not seem to.
    """
    known = target.slots.keys() | target.entries
    left = {key: spec.shape for key, spec in checkpoint.specs.items() if key not in known}
    gone = {
        key: slot.shape
        for key, slot in target.slots.items()
        if key not in checkpoint.entries and slot.shape is not None
    }
    adapted = {name for key in left if ".base_layer." in key for name in _without_adapter(key)}
    if number := sum(key in adapted for key in gone):
        return (
            f"{counted(number, 'weight')} of the file with an adapter beside, which was not merged: merge it "
            "first, with what made it (in peft: merge_and_unload()), and repair the result"
        )
    for norm in _PARTS:
        if number := sum(_has_parts(left, key, norm) for key in gone):
            return (
                f"the file has {counted(number, 'weight')} as {norm} splits it up: load it into the model with {norm} "
                f"applied, remove that from the model, and save it again"
            )
        if number := sum(_has_parts(gone, key, norm) for key in left):
            return (
                f"the model has {norm} applied to {counted(number, 'weight')} that the file has as it is: load the "
                f"file before {norm} is applied"
            )
    if told := _renamed(left, gone):
        return told
    modules = list(_rearranged(left, gone))
    if not modules:
        return ""
    path, mine, theirs = modules[0]
    return (
        f"{counted(len(modules), 'module')} may have the missing weights in another layout, as fused or split "
        f"projections are: {_shown(path, mine)} in the file has as many elements as {_shown(path, theirs)} of the "
        "target; convert them with the code of the model"
    )


def _renamed(left: Mapping[str, Shape], gone: Mapping[str, Shape]) -> str:
    """What to say where the missing tensors have the shapes of those left over."""
    shapes, wanted = Counter(left.values()), Counter(gone.values())
    is_telling = any(len(shape) > 1 for shape in wanted) and (shapes == wanted or len(gone) >= MANY)
    if not is_telling or not wanted <= shapes:
        return ""
    if {_without_numbers(key) for key in gone} <= {_without_numbers(key) for key in left}:
        return (
            f"look at the numbers first: {next(iter(left))} is left over and {next(iter(gone))} missing, and where the "
            "two sides count from different numbers, the keys that are in their places are wrong too"
        )
    alone = [key for key, shape in gone.items() if shapes[shape] == wanted[shape] == 1]
    pairs = [f"{next(name for name in left if left[name] == gone[key])} of {key}" for key in alone[:1]]
    return (
        f"those left over have the shapes of the missing keys{''.join(f' ({pair})' for pair in pairs)}: give them the "
        "model's names, as the code that loads such files does (in transformers: from_pretrained)"
    )


def _without_numbers(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _without_adapter(key: str) -> tuple[str, str]:
    """What the layer was called before peft put an adapter to it, and before it wrapped the model."""
    plain = key.replace(".base_layer.", ".")
    return plain, plain.removeprefix("base_model.model.")


def _has_parts(tensors: Mapping[str, Shape], key: str, norm: str) -> bool:
    path, dot, name = key.rpartition(".")
    return any(all(path + dot + part.format(tensor=name) in tensors for part in parts) for parts in _PARTS[norm])


@dataclass
class _Sum:
    """The tensors below a module on one side."""

    numel: int = 0
    keys: list[str] = field(default_factory=list)


def _rearranged(
    left: Mapping[str, Shape], gone: Mapping[str, Shape]
) -> Iterator[tuple[str, Mapping[str, Shape], Mapping[str, Shape]]]:
    """The innermost modules in which as many elements are left over as are missing, in tensors of other shapes."""
    mine, theirs = _sums(left), _sums(gone)
    equal = {path for path, own in mine.items() if path in theirs and own.numel == theirs[path].numel > 1}
    outer = {above for path in equal for above in _paths(path)}
    for path in mine:
        if path in equal and path not in outer:
            shapes = ({key: left[key] for key in mine[path].keys}, {key: gone[key] for key in theirs[path].keys})
            if sorted(shapes[0].values()) != sorted(shapes[1].values()):
                yield path, *shapes


def _sums(tensors: Mapping[str, Shape]) -> dict[str, _Sum]:
    """By the path of each module that has some of the tensors somewhere below it."""
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for key, shape in tensors.items():
        numel = math.prod(shape)
        for path in _paths(key):
            sums[path].numel += numel
            sums[path].keys.append(key)
    return sums


def _paths(name: str) -> Iterator[str]:
    """The modules that a name is in."""
    at = name.find(".")
    for _ in range(DEEPEST):
        if at < 0:
            return
        yield name[:at]
        at = name.find(".", at + 1)


def _shown(path: str, keys: Iterable[str]) -> str:
    names = [key.removeprefix(f"{path}.") for key in keys]
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{path}.{names[0]}" if len(names) == 1 else f"{path}.{{{listed}}}"
