"""The segments that wrappers of modules add to keys, and how to remove them."""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

# The attribute in which DataParallel, DistributedDataParallel and AveragedModel keep the model. Users' models have
# modules of this name too.
MODULE = "module"

# The segment that each wrapper adds.
WRAPPERS: Mapping[str, str] = {
    MODULE: "DataParallel or DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "a strategy of Lightning",
}
WRAPPER_SEGMENTS = WRAPPERS.keys() - {MODULE}  # reserved: users' modules do not have these names

_LEADING = f"{MODULE}."
COUNTER = "n_averaged"  # AveragedModel's own buffer, next to `module`: 0-d, int64, zero in a fresh one


def has_wrapper_segment(path: str) -> bool:
    """Return whether a reserved segment is anywhere in the key or module path."""
    return _may_have_segment(path) and not WRAPPER_SEGMENTS.isdisjoint(path.split("."))


def strip_segments(path: str) -> str:
    """Return the key or module path without its reserved segments."""
    if not _may_have_segment(path):
        return path
    return ".".join(part for part in path.split(".") if part not in WRAPPER_SEGMENTS)


def without_segments(paths: Iterable[str]) -> dict[str, str]:
    """Return the keys or module paths that have reserved segments, mapped to their names without them."""
    return {path: strip_segments(path) for path in paths if has_wrapper_segment(path)}


def _may_have_segment(path: str) -> bool:
    # A fast check of the text, because nearly all of a hundred thousand keys have none.
    return "._" in path or path.startswith("_")


@lru_cache(maxsize=1 << 14)  # without the cache, a check of an optimizer takes a tenth longer
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
    """Return the number of leading ``module`` segments of the key, not counting its last segment."""
    count = 0
    while key.startswith(_LEADING, count * len(_LEADING)):
        count += 1
    return count


def shared_modules(keys: Collection[str]) -> int:
    """Return the number of leading ``module`` segments that all keys share."""
    # A common prefix of the smallest and the largest key is shared by all keys between them.
    return min(leading_modules(min(keys)), leading_modules(max(keys))) if keys else 0


def without_first(key: str, count: int) -> str:
    return ".".join(key.split(".", count)[count:])


def colliding(keys: Iterable[str], new: Mapping[str, str]) -> str | None:
    """Return a name that two keys would have after the renames, or a key that would be empty; else None."""
    seen: set[str] = set()
    for key in keys:
        name = new.get(key, key)
        if name in seen or not name:
            return name or key
        seen.add(name)
    return None


def two_sets(keys: Iterable[str]) -> str | None:
    """Return a name that two keys would have without their reserved segments, else None.

    Such a file holds a wrapped set of weights and a plain one, and no rule may rename either of them."""
    keys = tuple(keys)
    new = without_segments(keys)
    return colliding(keys, new) if new else None


def segments_in(paths: Iterable[str]) -> list[str]:
    """Return the reserved segments in keys or module paths, sorted."""
    return sorted({part for path in paths if _may_have_segment(path) for part in path.split(".")} & WRAPPER_SEGMENTS)
