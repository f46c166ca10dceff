"""What shards hold beside and around their tensors, and whether two of them hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptfix.checkpoint import Checkpoint, PathPart, Remark, TensorSpec
from ckptfix.dtypes import DTYPES


def remarks_of(shard: Checkpoint) -> Iterator[Remark]:
    """The remarks on a shard; what is said of all its tensors is said of each, as the others are not meant."""
    for remark in shard.remarks:
        if remark.kind == "doubtful-values" and remark.where == ".":
            yield from (replace(remark, where=key) for key in shard.specs)
        else:
            yield remark


def odd_shard(shards: Mapping[str, Checkpoint]) -> str | None:
    """The first shard that has no dtype of floats in common with any of the others; None where there is none."""
    dtypes = {
        name: {spec.dtype for spec in shard.specs.values() if DTYPES[spec.dtype].is_float}
        for name, shard in shards.items()
    }
    for name, own in dtypes.items():
        others = set().union(*(held for other, held in dtypes.items() if other != name))
        if own and others and not own & others:
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
    from ckptfix.formats.safetensors_write import contiguous_blocks

    return all(
        first == second
        for before, after in zip(one.strided_parts(), other.strided_parts(), strict=True)
        for first, second in zip(contiguous_blocks(before, path), contiguous_blocks(after, path), strict=True)
    )
