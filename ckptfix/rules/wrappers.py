"""What the KEY rules share: the names that wrappers put into keys, and arithmetic on path segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptfix.finding import Edit, Rename

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Segments that only wrappers make; no module of a user is called so."""

MODULE = "module"
"""The attribute under which DataParallel, DistributedDataParallel and AveragedModel keep the model; users use the name
too.
"""


def has_wrapper_segment(key: str) -> bool:
    """Whether a reserved segment stands anywhere in the key."""
    return not WRAPPER_SEGMENTS.isdisjoint(key.split("."))


def strip_segments(key: str) -> str:
    """The key without its reserved segments."""
    return ".".join(part for part in key.split(".") if part not in WRAPPER_SEGMENTS)


def bare(key: str) -> str:
    """The key without reserved segments and without ``module`` anywhere before its last segment: the same for every
    wrapping.
    """
    *path, name = strip_segments(key).split(".")
    return ".".join((*(part for part in path if part != MODULE), name))


def leading_modules(key: str) -> int:
    """How many segments ``module`` the key begins with, its last segment not counted."""
    path = key.split(".")[:-1]
    return next((count for count, part in enumerate(path) if part != MODULE), len(path))


def without_first(key: str, count: int) -> str:
    """The key without its first ``count`` segments."""
    return ".".join(key.split(".")[count:])


def colliding(keys: Iterable[str], new: Mapping[str, str]) -> str | None:
    """A name that two keys would have after the renames; None where all stay apart."""
    seen: set[str] = set()
    for key in keys:
        name = new.get(key, key)
        if name in seen or not name:
            return name or key
        seen.add(name)
    return None


def renames(new: Mapping[str, str]) -> tuple[Edit, ...]:
    """The edits for a map of keys; keys that stay have none."""
    return tuple(Rename(key, name) for key, name in new.items() if key != name)
