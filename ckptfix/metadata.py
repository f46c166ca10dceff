"""``_metadata`` follows the renames of the tensors.

It maps module paths to versions, and has rows for modules without tensors too. Which module became which is read off
the renames: where an old and a new key end in the same segments, what stands before is the same module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Metadata = Mapping[str, Mapping[str, Any]]


def rename_metadata(metadata: Metadata | None, renames: Mapping[str, str]) -> Metadata | None:
    """The metadata under the new module paths; ``renames`` has every key that stays in the file, most of them to
    themselves.

    A wrapper's own row (``module`` next to ``module.fc``) gives way to the row of the module that takes its place.
    """
    if metadata is None or all(old == new for old, new in renames.items()):
        return metadata
    modules = _module_renames(renames)
    moved: dict[str, Mapping[str, Any]] = {}
    stayed: dict[str, Mapping[str, Any]] = {}
    for path, versions in metadata.items():
        new = _renamed(path, modules)
        (stayed if new == path else moved)[new] = versions
    order = {new: None for path in metadata for new in [_renamed(path, modules)]}
    both = {**stayed, **moved}
    return {path: both[path] for path in order}


def _module_renames(renames: Mapping[str, str]) -> dict[str, str]:
    modules: dict[str, str] = {}
    # Keys that stay come first: a module that holds one of them stays too.
    for old, new in sorted(renames.items(), key=lambda rename: rename[0] != rename[1]):
        before, after = old.split("."), new.split(".")
        while len(before) > 1 and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
            source = ".".join(before)
            if modules.setdefault(source, ".".join(after)) != ".".join(after):
                break
        # A path that was only lengthened or cut at its front: the root moved too.
        if len(before) == 1 and after and before[-1] == after[-1]:
            modules.setdefault("", ".".join(after[:-1]))
    return modules


def _renamed(path: str, modules: Mapping[str, str]) -> str:
    """The new path of a module: that of its nearest ancestor with a known one, and the rest."""
    segments = path.split(".") if path else []
    for depth in range(len(segments), -1, -1):
        ancestor = ".".join(segments[:depth])
        if ancestor in modules:
            return ".".join(part for part in (modules[ancestor], *segments[depth:]) if part)
    return path
