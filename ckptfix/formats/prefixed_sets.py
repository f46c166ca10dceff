"""Sets of weights that lie beside each other in one state_dict, each under a prefix of its own.

A trainer that keeps two networks in one module saves both: `student.` and `teacher.`, `encoder_q.` and `encoder_k.`,
`model.` and `ema_model.`, or the plain names beside those under `ema_model.`. Whether a model has both is not in the
file, so that nothing here decides; ``--weights PREFIX`` does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, TensorSpec
from ckptfix.errors import UsageError
from ckptfix.metadata import rename_metadata

PLAIN = "plain"
"""What the set is called that stands under no prefix, beside one that does."""

ALIKE = 0.9
"""Share of the tensors of either set that the other one has too, by name and shape, from which on both are of one
network."""

DEPTH = 3
"""Segments of a prefix at most, where it is looked for."""

_FOLLOWS = re.compile(
    r"(^|_)(ema|averaged|average|swa|shadow|teacher|target|momentum|offline)(_|$)|_k$|^key_|_m$", re.IGNORECASE
)
"""Names of networks that follow another one while it is trained."""


def keys_of_set(keys: Collection[str], name: str) -> dict[str, str]:
    """The keys of the set of this name, each with what it is called without the prefix; none where there is no such
    set. The name may leave out what stands in front of most keys: `teacher` for `module.teacher.`.
    """
    if name == PLAIN:
        copies = copied_under(keys)
        return {key: key for key in keys if not key.startswith(copies)} if copies else {}
    prefix = f"{name.rstrip('.')}."
    if found := {key: key[len(prefix) :] for key in keys if key.startswith(prefix)}:
        return found
    outer = Counter(key[:at] for key in keys if (at := f".{key}".find(f".{prefix}")) > 0)
    wide = [front for front in outer if 2 * sum(key.startswith(front) for key in keys) > len(keys)]
    whole = f"{wide[0]}{prefix}" if len(wide) == 1 else None
    return {key: key[len(whole) :] for key in keys if key.startswith(whole)} if whole else {}


def copied_under(keys: Collection[str]) -> tuple[str, ...]:
    """The prefixes under which most of the keys that stand beside them stand once more."""
    known = set(keys)
    twins = Counter(prefix for key in keys for prefix, rest in _cuts(key) if rest in known)
    found = []
    for prefix, number in twins.items():
        under = sum(key.startswith(prefix) for key in keys)
        if 2 * number > max(under, len(keys) - under):
            found.append(prefix)
    return tuple(found)


def sets_of(specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """The names of the two sets that make up most of a state_dict, where one follows the other by its name and has the
    same tensors; none where there are no such.
    """
    prefixes = dict.fromkeys(prefix for key in specs for prefix, _ in _cuts(key))
    followers = [prefix for prefix in prefixes if is_follower(prefix[:-1])]
    for prefix in followers:
        parent = prefix.removesuffix(f"{_last(prefix)}.")
        tensors = _under(specs, prefix)
        for other in prefixes:
            if other == prefix or other != f"{parent}{_last(other)}.":
                continue
            theirs = _under(specs, other)
            if _are_alike(tensors, theirs) and 2 * (len(tensors) + len(theirs)) > len(specs):
                return (other[:-1], prefix[:-1])
    copies = copied_under(specs) if followers else ()
    return (PLAIN, copies[0][:-1]) if len(copies) == 1 and copies[0] in followers else ()


def is_follower(name: str) -> bool:
    """Whether the name is that of a network which follows another one while it is trained, as its average does."""
    return bool(_FOLLOWS.search(name.rpartition(".")[2]))


def with_pick(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint with the set of this name picked. Raises ``UsageError`` where its keys have no such prefix."""
    picked = keys_of_set(checkpoint.entries, name)
    if not any(isinstance(checkpoint.entries[key], TensorSpec) for key in picked):
        raise UsageError(f"{checkpoint.path}: it has no weights under {name!r}; give the prefix of one set of its keys")
    return replace(checkpoint, picked=picked)


def narrowed(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the picked set alone, under its names without the prefix."""
    if checkpoint.picked is None:
        return checkpoint
    entries = {name: checkpoint.entries[key] for key, name in checkpoint.picked.items()}
    metadata = rename_metadata(checkpoint.metadata, checkpoint.picked)
    return replace(checkpoint.with_entries(entries, metadata), picked=None)


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    """The prefixes of a key, each with its dot, and what follows."""
    position = 0
    for _ in range(DEPTH):
        position = key.find(".", position) + 1
        if not position:
            return
        yield key[:position], key[position:]


def _last(prefix: str) -> str:
    return prefix[:-1].rpartition(".")[2]


def _under(specs: Mapping[str, TensorSpec], prefix: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors under a prefix, by what follows it."""
    return {key[len(prefix) :]: spec.shape for key, spec in specs.items() if key.startswith(prefix)}


def _are_alike(one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> bool:
    common = sum(other.get(name) == shape for name, shape in one.items())
    return common > 1 and common >= ALIKE * max(len(one), len(other))
