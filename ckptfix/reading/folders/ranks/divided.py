"""Tensors of which a rank has parts: ``ShardedTensor`` (FSDP 1) and ``DTensor``, and the boxes of these parts.

Sources: ``torch/distributed/_shard/sharded_tensor/api.py``, ``torch/distributed/tensor/placement_types.py``,
``torch/distributed/device_mesh.py`` (2.0 to 2.15)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptfix.core.objects import Opaque
from ckptfix.core.parts import Box, box_at
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.core.wording import first_names
from ckptfix.reading.boxes import may_overlap
from ckptfix.reading.folders.ranks.files import MOST_RANKS
from ckptfix.reading.pickles.claims import sizes

# How a mesh splits a tensor: each dimension of the mesh in order, its size, and the dimension of the tensor.
_MeshSplits = tuple[tuple[int, int, int], ...]


class Divided(Struct):
    """A tensor of which a rank has parts: its class, the shape of the whole, the number of ranks, and the rank's parts
    with their boxes. ``splits`` is how a mesh splits it; None if each part has its own box."""

    kind: str
    shape: tuple[int, ...]
    world: int
    parts: list[tuple[Box, TensorSpec]]
    splits: _MeshSplits | None = None

    @property
    def is_spread(self) -> bool:
        """Whether a mesh splits it, and a rank's part, of which others may have copies, is a plain range of bytes."""
        if not self.splits:
            return False
        ((_, part),) = self.parts
        return part.storage is not None and not part.math_bits and part.quantizer is None


def divided(tensor: Opaque, known: dict[int, Divided] | None = None) -> Divided:
    """Return the parts of a pickled tensor. Raises ``ValueError`` or another of ``MALFORMED`` if it is invalid.

    ``known`` has the tensors so far by the ids of their layouts, which have to live as long: ten thousand tensors may
    have a few layouts, and then share shapes and boxes."""
    is_on_mesh = "_local_tensor" in tensor.attributes
    made = _like_known(tensor, {} if known is None else known) if is_on_mesh else _of_shards(tensor)
    if made.splits != () and any(may_overlap(part) for _, part in made.parts):
        raise ValueError("its strides make elements of its part overlap")
    return made


def _like_known(tensor: Opaque, known: dict[int, Divided]) -> Divided:
    layout = id(tensor.attributes["_spec"])
    if (alike := known.get(layout)) is None:
        alike = known[layout] = _of_mesh(tensor)
    ((box, _),) = alike.parts
    parts = [(box, tensor.attributes["_local_tensor"])]
    return Divided(tensor.cls.name, alike.shape, alike.world, parts, alike.splits)


def _of_shards(tensor: Opaque) -> Divided:
    shards, metadata, *rest = tensor.state
    parts = []
    for shard in shards:
        local, place = shard.attributes["tensor"], shard.attributes["metadata"].attributes
        parts.append((box_at(sizes(place["shard_offsets"]), sizes(place["shard_sizes"])), local))
    group = rest[0].attributes if rest and isinstance(rest[0], Opaque) else {}
    world = group.get("global_world_size", 0)
    return Divided(tensor.cls.name, sizes(metadata.attributes["size"]), world if type(world) is int else 0, parts)


def _of_mesh(tensor: Opaque) -> Divided:
    local, spec = tensor.attributes["_local_tensor"], tensor.attributes["_spec"].attributes
    meta = spec["tensor_meta"]  # a named tuple of shape, strides and dtype
    shape = sizes(meta.args[0] if meta.args else meta.attributes["shape"])
    mesh = spec["mesh"].attributes
    coordinates, counts = sizes(mesh["_coordinate_on_dim"]), _mesh_shape(mesh)
    placements = spec["placements"]
    if not len(coordinates) == len(counts) == len(placements) or not 0 < math.prod(counts) <= MOST_RANKS:
        raise ValueError(f"{len(placements)} placements on a mesh of shape {list(counts)}")
    splits = []
    for axis in _order(placements, spec.get("shard_order")):
        kind = placements[axis].cls.name
        if kind in ("Shard", "_StridedShard"):
            splits.append((axis, counts[axis], placements[axis].attributes["dim"]))
        elif kind != "Replicate":
            raise ValueError(f"it is placed as {kind}: each rank holds a term of a sum")
    _check_order(mesh, counts, splits)
    box = box_on_mesh(shape, tuple(splits), coordinates)
    return Divided(tensor.cls.name, shape, math.prod(counts), [(box, local)], tuple(splits))


def _check_order(mesh: Mapping[str, Any], counts: Sequence[int], splits: Sequence[tuple[int, int, int]]) -> None:
    """Raise ``ValueError`` if the ranks along a dimension that splits a tensor are not in order: torch distributes the
    parts by rank, but labels them by coordinates in the mesh, unless it is to preserve this order (since 2.15)."""
    if mesh.get("_preserve_rank_order"):
        return
    ranks = list(mesh.get("_flatten_rank_map") or mesh.get("_flatten_mesh_list") or ())  # since 2.9, and before
    if ranks == sorted(ranks):
        return
    strides = contiguous_strides(tuple(counts))
    is_whole = len(ranks) == math.prod(counts)  # not a part of another mesh
    for axis, count, _ in splits:
        step = strides[axis]
        firsts = [at for at in range(len(ranks) - step) if at // step % count + 1 < count]
        if not is_whole or any(ranks[at] > ranks[at + step] for at in firsts):
            raise ValueError(f"the ranks of its mesh are not in order: {first_names(ranks)}")


def box_on_mesh(shape: tuple[int, ...], splits: _MeshSplits, coordinates: Sequence[int]) -> Box:
    """Return the box of a tensor on the rank with these coordinates in the mesh."""
    offsets, lengths = [0] * len(shape), list(shape)
    for axis, count, dim in splits:
        share = -(-lengths[dim] // count)
        begin = min(share * coordinates[axis], lengths[dim])
        offsets[dim], lengths[dim] = offsets[dim] + begin, min(share, lengths[dim] - begin)
    return box_at(offsets, lengths)


def _mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a mesh, from its tensor of ranks, or since torch 2.9 from its layout."""
    if isinstance(mesh.get("mesh"), TensorSpec):
        return tuple(mesh["mesh"].shape)
    layout = mesh["_layout"]
    fields = layout.attributes
    if "axes" in fields:
        # An axis has no sizes of 1, and several sizes if it was flattened from axes that are not adjacent.
        return tuple(math.prod(sizes(axis.attributes["shape"])) for axis in fields["axes"])
    shape = fields["shape"] if "shape" in fields else layout.args[0]
    return (shape,) if isinstance(shape, int) else sizes(shape)


def _order(placements: Sequence[Any], shard_order: Any) -> list[int]:
    """Return the dimensions of the mesh in the order in which they split the tensor.

    A ``_StridedShard`` marks a dimension that tensor parallelism split first, although its dimension of the mesh comes
    after that of FSDP."""
    if shard_order:
        dims = [entry.args[1] if entry.args else entry.attributes["mesh_dims"] for entry in shard_order]
        order = [axis for own in dims for axis in sizes(own)]
        return [*order, *(axis for axis in range(len(placements)) if axis not in order)]
    axes = list(range(len(placements)))
    return axes[::-1] if any(place.cls.name == "_StridedShard" for place in placements) else axes
