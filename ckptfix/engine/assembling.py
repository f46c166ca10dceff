"""Puts tensors together from parts of others, as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Assemble
from ckptfix.core.parts import Part, PartsError, check_bijection
from ckptfix.core.spec import TensorSpec, computed, contiguous_strides
from ckptfix.errors import PlanError
from ckptfix.reading.boxes import boxed, bytes_of_boxes, shaped
from ckptfix.reading.tensors import RowMajorBytes


def assembled(checkpoint: Checkpoint, edits: Sequence[Assemble], rule: str) -> dict[str, list[tuple[str, TensorSpec]]]:
    """Return the assembled tensors with their keys, by the source of their first part. Raises ``PlanError`` unless each
    element is used exactly once."""
    sources = {part.source for edit in edits for part in edit.parts}
    specs = {key: spec for key in sources if isinstance(spec := checkpoint.entries.get(key), TensorSpec)}
    parts = {edit.key: edit.parts for edit in edits}
    if len(parts) != len(edits):
        raise PlanError(f"{checkpoint.path}: {rule} assembles a key twice in a step; remove one of the two edits")
    try:
        check_bijection(parts, {key: spec.shape for key, spec in specs.items()}, {e.key: e.shape for e in edits})
    except PartsError as error:
        raise PlanError(f"{checkpoint.path}: {rule} cannot assemble {error}; make the plan again") from error
    made: dict[tuple[Any, ...], TensorSpec] = {}
    result: dict[str, list[tuple[str, TensorSpec]]] = {}
    for edit in edits:
        views = tuple((specs[part.source].view, replace(part, source="")) for part in edit.parts)
        same = (edit.shape, views)
        if same not in made:  # two names of one tensor stay two names of one tensor
            made[same] = _assembled(checkpoint, edit, specs)
        result.setdefault(edit.parts[0].source, []).append((edit.key, made[same]))
    return result


def _assembled(checkpoint: Checkpoint, edit: Assemble, specs: dict[str, TensorSpec]) -> TensorSpec:
    first = specs[edit.parts[0].source]
    is_plain = first.layout == "strided" and first.quantizer is None and first.is_contiguous
    if edit.is_reshape and is_plain and first.dtype == edit.dtype:
        return replace(
            first, shape=edit.shape, strides=contiguous_strides(edit.shape)
        )  # still the same view of its storage
    for part in edit.parts:
        spec = specs[part.source]
        if spec.dtype != edit.dtype or spec.storage is None or spec.parts or spec.quantizer or spec.per_byte > 1:
            raise PlanError(
                f"{checkpoint.path}: {part.source} is {spec.dtype} ({spec.layout}) and cannot become a part of "
                f"{edit.key}, which is {edit.dtype}; the plan belongs to another file"
            )
    pieces = [(part.place, _piece(specs[part.source], part, checkpoint.path)) for part in edit.parts]
    source = bytes_of_boxes(edit.shape, first.itemsize, pieces)
    storages = (one for part in edit.parts for one in specs[part.source].storages)
    return computed(first, edit.key, source, storages, shape=edit.shape)


def _piece(spec: TensorSpec, part: Part, path: str) -> TensorSpec:
    """Return the box of a part as a tensor of the same storage, in the order of its axes."""
    if spec.math_bits:  # torch resolves them
        spec = computed(spec, part.source, RowMajorBytes(spec, path), ())
    piece = boxed(spec, part.box)
    if part.view:
        piece = shaped(piece, part.view)
    if part.axes:
        shape, strides = (tuple(sizes[axis] for axis in part.axes) for sizes in (piece.shape, piece.strides))
        piece = replace(piece, shape=shape, strides=strides)
    return piece
