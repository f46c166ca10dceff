"""KEY101 wrapper-segment: keys with a segment that a wrapper put in.

## What it finds
Path segments that only wrappers make: `_orig_mod` (torch.compile), `_fsdp_wrapped_module` (FSDP),
`_checkpoint_wrapped_module` (activation checkpointing) and `_forward_module` (Lightning, DeepSpeed), at any depth, in
any order, any number of times. FSDP and activation checkpointing clean the keys that they save and leave the segments
in the module paths of `_metadata`; that is found too, as a note.

## Why it matters
`load_state_dict` compares whole keys. A model that is not wrapped in the same way reports every key as missing and
every key as unexpected; with `strict=False` it loads nothing at all and says nothing. Under a stale path of `_metadata`
torch does not find the version of a module, and takes it for one that was saved before versions were kept.

## Fix safety
Safe: the names are reserved by torch, whole segments are taken out, and no value changes. Where two keys would become
one, nothing is renamed. Where the target itself has such segments, KEY103 matches the two namings instead.

## Example
`module._orig_mod.layer1.0.weight` becomes `module.layer1.0.weight`, and KEY102 takes the rest.

## Sources
timm PR#2003, pytorch#117399, ray#43594; `torch/_dynamo/eval_frame.py`, `torch/distributed/fsdp/_common_utils.py`,
`torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckptfix.core.edits import RenameModule, renames
from ckptfix.core.finding import Applicability, Finding, Fix, Level, counted
from ckptfix.core.metadata import rename_metadata
from ckptfix.rules.rule import Context, Rule, rule
from ckptfix.rules.several_state_dicts import choice_of_copies

# Segments that only wrappers make; no module of a user is called so.
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})

# The attribute under which DataParallel, DistributedDataParallel and AveragedModel keep the model; users use the name
# too.
MODULE = "module"

_LEADING = f"{MODULE}."
COUNTER = "n_averaged"  # AveragedModel's own buffer, beside its `module`: 0-d, int64, zero in a fresh one


def has_wrapper_segment(path: str) -> bool:
    """Return whether a reserved segment stands anywhere in the key or module path."""
    return _may_have_segment(path) and not WRAPPER_SEGMENTS.isdisjoint(path.split("."))


def strip_segments(path: str) -> str:
    """Return the key or module path without its reserved segments."""
    if not _may_have_segment(path):
        return path
    return ".".join(part for part in path.split(".") if part not in WRAPPER_SEGMENTS)


def without_segments(paths: Iterable[str]) -> dict[str, str]:
    """Return the keys or module paths that have reserved segments, each with its name without them."""
    suspects = [path for path in paths if "._" in path or path.startswith("_")]
    return {path: strip_segments(path) for path in suspects if has_wrapper_segment(path)}


def _may_have_segment(path: str) -> bool:
    # A look at the text alone, because nearly all of a hundred thousand keys have none.
    return "._" in path or path.startswith("_")


def bare(key: str) -> str:
    """Return the key without reserved segments and without ``module``: the same for every wrapping."""
    if MODULE not in key and not _may_have_segment(key):
        return key
    *path, name = strip_segments(key).split(".")
    return ".".join((*(part for part in path if part != MODULE), name))


def is_counter(key: str) -> bool:
    """Return whether the key is where an AveragedModel around the whole model keeps its counter."""
    return key.endswith(COUNTER) and bare(key) == COUNTER


def leading_modules(key: str) -> int:
    """Return how many segments ``module`` the key begins with, its last segment not counted."""
    count = 0
    while key.startswith(_LEADING, count * len(_LEADING)):
        count += 1
    return count


def shared_modules(keys: Collection[str]) -> int:
    """Return how many segments ``module`` all of the keys begin with."""
    # What the first and the last of a sorted list begin with, all between them begin with.
    return min(leading_modules(min(keys)), leading_modules(max(keys))) if keys else 0


def without_first(key: str, count: int) -> str:
    """Return the key without its first ``count`` segments."""
    return ".".join(key.split(".", count)[count:])


def colliding(keys: Iterable[str], new: Mapping[str, str]) -> str | None:
    """Return a name that two keys would have after the renames; None if all stay apart."""
    keys = tuple(keys)
    names = [new.get(key, key) for key in keys]
    if all(names) and len(set(names)) == len(names):
        return None
    seen: set[str] = set()
    for key, name in zip(keys, names, strict=True):
        if name in seen or not name:
            return name or key
        seen.add(name)
    return None


def two_sets(keys: Iterable[str]) -> str | None:
    """Return a name that two keys would have without their reserved segments: then the file holds a wrapped set of
    weights and another one, and no rule may move either of them out of the other's way."""
    keys = tuple(keys)
    new = without_segments(keys)
    return colliding(keys, new) if new else None


@rule("KEY101", "wrapper-segment")
def wrapper_segment(rule: Rule, context: Context) -> Iterator[Finding]:
    """Take the segments of wrappers out of every key, and out of the paths of ``_metadata``."""
    target = context.target
    if target is not None and any(has_wrapper_segment(key) for key in target.slots):
        return
    entries = context.checkpoint.entries
    new = without_segments(entries)
    clash = colliding(entries, new) if new else None
    if new:
        yield _keys(rule, new, clash, entries)
    if not clash and (target is None or not any(has_wrapper_segment(path) for path in target.modules or ())):
        yield from _rows(rule, context, new)


def _keys(rule: Rule, new: Mapping[str, str], clash: str | None, entries: Collection[str]) -> Finding:
    keys = tuple(new)
    found = _segments(keys)
    message = f"{counted(len(keys), 'key')} with the wrapper segment {', '.join(found)}"
    if clash:
        return rule.finding(
            Level.ERROR,
            f"{message}, and without it two keys would both be {clash}",
            keys=keys,
            remedies=choice_of_copies(entries),
        )
    return rule.finding(
        Level.ERROR, message, keys=keys, evidence={"segments": found}, fix=Fix(renames(new), Applicability.SAFE)
    )


def _rows(rule: Rule, context: Context, new: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the paths of ``_metadata`` that keep a segment when the keys have lost theirs."""
    metadata = context.checkpoint.metadata
    if new:
        metadata = rename_metadata(metadata, {key: new.get(key, key) for key in context.checkpoint.entries})
    rows = without_segments(metadata or ())
    if rows:
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(rows), 'module path')} of _metadata with the wrapper segment {', '.join(_segments(rows))}, "
            "which the keys do not have",
            evidence={"modules": list(rows)},
            fix=Fix(tuple(RenameModule(path, to) for path, to in rows.items()), Applicability.SAFE),
        )


def _segments(paths: Iterable[str]) -> list[str]:
    return sorted({part for path in paths for part in path.split(".") if part in WRAPPER_SEGMENTS})
