"""KEY102 wrapper-prefix: keys that begin with `module.`, as data-parallel wrappers save them.

## What it finds
A leading `module.`, once or repeated, left by DataParallel, DistributedDataParallel or AveragedModel; for the latter
also its counter `n_averaged` or, with a target, mmengine's `steps`. With a target: every key that the target wants
without the prefix, or all keys if that matches more of the target. Without one: a file in which every key has the
prefix.

## Why it matters
`load_state_dict` reports every key twice, as missing and as unexpected (`Unexpected key(s) in state_dict:
"module.conv1.weight"`).

## Fix safety
Safe if every key has the prefix, or if the target wants the key without it in the same shape. A submodule that is
really named `module` stays: the target has it, some keys lack the prefix, or every key has it again further down
(`module.0.module.0.weight` of torchrl). Only a target can tell a half-prefixed
file from such a model; without one, the file is reported and left unchanged. A universal checkpoint made of
DeepSpeed's ranks (`--format universal`) keeps the prefix, because the run looks for its own names.

## Example
`module.conv1.weight` becomes `conv1.weight`; `_metadata` moves along.

## Sources
pytorch#3805; `torch/nn/parallel/data_parallel.py`, `torch/optim/swa_utils.py`. Cutting by text instead of by segment
turns `module.backbone_module.blocks` into `backbone_blocks` (HumanBench#12)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Drop, renames
from ckptfix.core.finding import MODEL, Finding, Fix, Level, Remedy, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import (
    COUNTER,
    MODULE,
    bare,
    colliding,
    is_counter,
    leading_modules,
    shared_modules,
    strip_segments,
    two_sets,
    without_first,
)
from ckptfix.reading.weights.prefixed_sets import copied_under
from ckptfix.rules.fil101_several_state_dicts import choice_of_copies
from ckptfix.rules.rule import Context, Rule

if TYPE_CHECKING:
    from ckptfix.core.target import Target

_NUMBERED = re.compile(r"((?:[^.\d][^.]*\.)+)(\d+)\.")

# The counter of mmengine's averaged models. Other modules use this name too, so it is dropped only if a target has no
# place for it.
STEPS = "steps"

DEEPEST = 16  # nested wrappers to try: each try renames all keys, and a crafted key can have any number of segments


def wrapper_prefix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Remove leading ``module.`` segments, and the counters of AveragedModel next to the model."""
    checkpoint, target = context.checkpoint, context.target
    if context.keeps_wrappers or two_sets(checkpoint.entries):
        return
    counters = _counters(checkpoint, target)
    keys = [key for key in checkpoint.entries if key not in counters]
    # Without a target, remove as many ``module.`` as every key has.
    shared = shared_modules(keys) if target is None and not _is_own_name(keys) else 0
    new = {key: without_first(key, shared) for key in keys} if shared else {}
    if target is not None:
        new = _by_target(checkpoint, keys, target)
    if not new and not counters:
        if target is None and (halves := _half_prefixed(keys)):
            yield rule.finding(
                Level.WARNING,
                f"{counted(len(halves), 'key')} with a leading `module.` that other keys of the same modules lack",
                keys=halves,
                remedies=(
                    Remedy.of("shows which names are right", model=MODEL),
                    *(choice_of_copies(keys) if copied_under(keys) else ()),
                ),
            )
        return
    message = f"{counted(len(new), 'key')} with the wrapper prefix `module.`" if new else ""
    if clash := colliding(keys, new):
        yield rule.finding(
            Level.ERROR,
            f"{message}, but without it two keys would both be {clash}",
            keys=new,
            remedies=choice_of_copies(checkpoint.entries),
        )
        return
    if counters:
        named = ", ".join(sorted({key.rpartition(".")[2] for key in counters}))
        message += f"{', and ' if message else ''}AveragedModel's counter {named} next to the model"
    edits = (*renames(new), *(Drop(key) for key in counters))
    yield rule.finding(Level.ERROR, message, keys=(*new, *counters), fix=Fix.safe(edits))


def _is_own_name(keys: Iterable[str]) -> bool:
    """Return whether every key has ``module`` again below another segment: modules that wrap each other, as those of
    tensordict do, have it as a name of their own."""
    return all(f".{MODULE}." in without_first(key, leading_modules(key)) for key in keys)


def _counters(checkpoint: Checkpoint, target: Target | None) -> tuple[str, ...]:
    """Return the counters of AveragedModels that wrap the whole model: all other keys have one more ``module``."""
    if target is not None and any(is_counter(key) for key in target.slots):
        return ()
    specs = checkpoint.specs
    candidates = [key for key in specs if key.endswith(COUNTER) and is_counter(key)]
    if target is not None:
        candidates += [key for key in specs if bare(key) == STEPS and key not in target.slots]
    found = {key for key in candidates if (specs[key].dtype, specs[key].numel) == ("int64", 1)}
    if not found:
        return ()
    depths = {key: leading_modules(strip_segments(key)) for key in checkpoint.entries}
    depth = min((depths[key] for key in depths if key not in found), default=0)
    return tuple(key for key in depths if key in found and depths[key] < depth)


def _by_target(checkpoint: Checkpoint, keys: list[str], target: Target) -> dict[str, str]:
    """Return one cut for all keys, or the best one for each key, whichever agrees more with the target."""

    def agreement(new: Mapping[str, str]) -> int:
        return sum(_wants(checkpoint, key, target, new.get(key, key)) for key in keys)

    shared = shared_modules(keys)
    cuts = [{key: without_first(key, count) for key in keys} for count in range(1, min(shared, DEEPEST) + 1)]
    single = _each_for_itself(checkpoint, keys, target)
    least = max(agreement(single), agreement({}) + 1)
    return max((cut for cut in cuts if agreement(cut) >= least), key=agreement, default=single)


def _each_for_itself(checkpoint: Checkpoint, keys: list[str], target: Target) -> dict[str, str]:
    """Return new names for keys that the target lacks: the shortest cut that it wants, then those of another shape."""
    strange = [key for key in keys if key not in target.slots and key not in target.entries]
    names = {
        key: [without_first(key, count) for count in range(1, min(leading_modules(key), DEEPEST) + 1)]
        for key in strange
    }
    wanted = {key: [name for name in names[key] if _wants(checkpoint, key, target, name)] for key in strange}
    new = {key: found[0] for key, found in wanted.items() if found}
    taken = {*checkpoint.entries, *new.values()}
    for key in [key for key in strange if key not in new] if new else ():
        if found := [name for name in names[key] if name in target.slots and name not in taken]:
            new[key] = found[0]
            taken.add(found[0])
    return new


def _wants(checkpoint: Checkpoint, key: str, target: Target, name: str) -> bool:
    entry = checkpoint.entries[key]
    return name in target.entries or (isinstance(entry, TensorSpec) and target.accepts(name, entry.shape))


def _half_prefixed(keys: list[str]) -> list[str]:
    """Return the prefixed keys whose module also has keys without the prefix (``module.bn1.weight`` and ``bn1.bias``),
    or whose numbered layers continue without it (``module.blocks.0.weight`` and ``blocks.1.weight``)."""
    stripped = {key: without_first(key, depth) for key in keys if (depth := leading_modules(key))}
    if not stripped:
        return []
    rest = [key for key in keys if key not in stripped]
    plain = {key.rpartition(".")[0] for key in rest} - {""}
    mine, theirs = _numbers(stripped.values()), _numbers(rest)
    goes_on = {stack for stack in mine.keys() & theirs.keys() if mine[stack].isdisjoint(theirs[stack])}
    return [
        key
        for key, name in stripped.items()
        if name.rpartition(".")[0] in plain or ((found := _NUMBERED.match(name)) and found[1] in goes_on)
    ]


def _numbers(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the layer numbers of each stack: ``{"blocks.": {"0", "1"}}``."""
    numbers: dict[str, set[str]] = {}
    for found in filter(None, map(_NUMBERED.match, keys)):
        numbers.setdefault(found[1], set()).add(found[2])
    return numbers
