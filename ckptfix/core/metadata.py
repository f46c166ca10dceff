"""Makes ``_metadata`` follow the renames of the tensors.

It maps module paths to versions, and has rows for modules without tensors too. The renames of modules follow from those
of keys: if an old and a new key end in the same segments, what precedes these is the same module."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ckptfix.core.buffers import modules_of
from ckptfix.core.objects import Opaque

Metadata = Mapping[str, Mapping[str, Any]]

# The row of a wrapper that was added to the keys: `nn.Module._version`, which no wrapper of torch overrides.
NEW_ROW: Mapping[str, Any] = {"version": 1}


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return the metadata as JSON, the same for equal rows. An object in it, such as the ``torch.Size`` that tensordict
    stores, becomes a list of its class and arguments."""

    def listed(value: Opaque) -> list[Any]:
        return [str(value.cls), *value.args]

    return json.dumps(metadata, separators=(",", ":"), ensure_ascii=False, default=listed)


def rename_metadata(metadata: Metadata | None, renames: Mapping[str, str]) -> Metadata | None:
    """Return the metadata under the new module paths. ``renames`` maps every key that stays in the file to its new
    name, most of them to themselves.

    The row of a wrapper (``module`` next to ``module.fc``) is dropped with the wrapper, or replaced by that of the
    module that takes its place. A wrapper that was added to the keys gets a row."""
    if metadata is None or list(renames) == list(renames.values()):
        return metadata
    modules = _module_renames(renames)
    innermost = {new: old for old, new in sorted(modules.items(), key=lambda rename: len(rename[0]))}
    gone = _modules_of(renames) - _modules_of(renames.values())

    def move(path: str) -> str | None:
        old = path if path in modules else next((at for at in reversed([*_ancestors(path)]) if at in modules), None)
        if old is None or modules[old] == old:
            return None if path in gone or not gone.isdisjoint(_ancestors(path)) else path
        if old != path and innermost[modules[old]] != old:
            return None  # a module without tensors, next to the model in a removed wrapper
        return ".".join(part for part in (modules[old], path[len(old) :].strip(".")) if part)

    return _moved(metadata, move)


def rename_rows(metadata: Metadata | None, rows: Mapping[str, str]) -> Metadata | None:
    """Return the metadata with some rows moved to other paths. Raises ``KeyError`` if a row does not exist."""
    if not rows:
        return metadata
    if metadata is None or not rows.keys() <= metadata.keys():
        raise KeyError(min(rows.keys() - (metadata or {}).keys()))
    return _moved(metadata, lambda path: rows.get(path, path))


def _moved(metadata: Metadata, move: Callable[[str], str | None]) -> Metadata:
    """Return every row at its new path, in order; a row that moves to a path replaces the one that was there."""
    places = {path: move(path) for path in metadata}
    came = {new: metadata[path] for path, new in places.items() if new is not None and new != path}
    rows = {**{path: metadata[path] for path, new in places.items() if new == path}, **came}
    moved: dict[str, Mapping[str, Any]] = {}
    for path, new in places.items():
        if new is None or (new == path and new in came):
            continue
        if new != path and "" in metadata:
            # torch writes a row for every parent module; metadata without them stays so.
            for ancestor in _ancestors(new):
                moved.setdefault(ancestor, rows.get(ancestor, NEW_ROW))
        moved[new] = rows[new]
    return moved


def _ancestors(path: str) -> Iterator[str]:
    """Yield the modules that contain a module or key, starting with the root."""
    return chain([""] if path else (), modules_of(path))


def _modules_of(keys: Iterable[str]) -> set[str]:
    modules: set[str] = set()
    for key in keys:
        path, dot, _ = key.rpartition(".")
        while dot and path not in modules:  # the parents of a known module are known too
            modules.add(path)
            path, dot, _ = path.rpartition(".")
    return modules | {""} if any(keys) else modules


def _module_renames(renames: Mapping[str, str]) -> dict[str, str]:
    modules: dict[str, str] = {}
    # Unchanged keys come first: a module that contains one of them stays too.
    for old, new in sorted(renames.items(), key=lambda rename: rename[0] != rename[1]):
        for before, after in _aligned(old.split("."), new.split(".")):
            if before in modules:
                break  # its parents are known too; if the names differ, the first one is kept
            modules[before] = after
    return modules


def _aligned(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the parent modules of a key as pairs of old and new path, the innermost first."""
    here, there = len(old) - 1, len(new) - 1
    if old[here] != new[there]:
        return
    while True:
        yield ".".join(old[:here]), ".".join(new[:there])
        if here and there and old[here - 1] == new[there - 1]:
            here, there = here - 1, there - 1
        elif here and _is_within(new[:there], old[:here]):
            here -= 1  # a removed segment
        elif here and _is_within(old[:here], new[:there]):
            # Added segments: the innermost of them is the module's.
            while old[here - 1] != new[there - 1]:
                there -= 1
            here, there = here - 1, there - 1
        else:
            return


def _is_within(short: Sequence[str], long: Sequence[str]) -> bool:
    """Return whether ``short`` is a subsequence of ``long``."""
    rest = iter(long)
    return all(part in rest for part in short)
