"""What shards hold beside and around their tensors, and whether two of them hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptfix.core.checkpoint import Checkpoint, PathPart
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import TensorSpec


def remarks_of(shard: Checkpoint) -> Iterator[Fact]:
    """The remarks on a shard; what is said of all its tensors is said of each, as the others are not meant."""
    for remark in shard.remarks:
        if remark.kind is Kind.DOUBTFUL_VALUES and remark.place == ".":
            yield from (replace(remark, place=key) for key in shard.specs)
        else:
            yield remark


def odd_shard(shards: Mapping[str, Checkpoint], total: int) -> str | None:
    """The shard that, had its floats a dtype of the others, would make the sum of all bytes the total.

    None where there is none. That a shard has dtypes of its own tells nothing: a head may be kept in float32, and many
    an index counts wrong."""
    whole = sum(spec.nbytes for shard in shards.values() for spec in shard.specs.values())
    floats = {
        name: [spec for spec in shard.specs.values() if DTYPES[spec.dtype].is_float] for name, shard in shards.items()
    }
    for name, own in floats.items():
        others = {spec.dtype for other, held in floats.items() if other != name for spec in held}
        rest = whole - sum(spec.nbytes for spec in own)
        count = sum(spec.nbytes // spec.itemsize for spec in own)
        is_apart = others.isdisjoint(spec.dtype for spec in own)
        if own and is_apart and any(rest + count * DTYPES[dtype].itemsize == total for dtype in others):
            return name
    return None


def surroundings(shard: Checkpoint) -> list[list[tuple[PathPart, Any]]] | None:
    """What a shard has around its state_dict, level by level, with None in the place of the next one.

    None where that is more than numbers and texts."""
    levels = []
    value = shard.root
    for part in shard.container:
        if not isinstance(value, dict):
            return None
        level = [(name, None if name == part else member) for name, member in value.items()]
        if not all(member is None or isinstance(member, (bool, int, float, str)) for _, member in level):
            return None
        levels.append(level)
        value = value[part]
    return levels


def is_same(one: Any, other: Any, path: str) -> bool:
    """Whether two entries are the same tensor, byte for byte."""
    if not isinstance(one, TensorSpec) or not isinstance(other, TensorSpec):
        return bool(one == other)
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    from ckptfix.reading.contiguous import contiguous_blocks

    return all(
        first == second
        for before, after in zip(one.strided_parts(), other.strided_parts(), strict=True)
        for first, second in zip(contiguous_blocks(before, path), contiguous_blocks(after, path), strict=True)
    )
