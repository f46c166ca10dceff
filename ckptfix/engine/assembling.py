"""Puts tensors together from parts of others: lazily, and streamed when they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ckptfix.bytes.sources import JoinedBytes, WindowBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Assemble
from ckptfix.core.parts import Part, PartsError, check_bijection, extent, full
from ckptfix.core.spec import ByteSource, Storage, TensorSpec, contiguous_strides
from ckptfix.errors import PlanError
from ckptfix.reading.folders.chunks import Box, ChunkedBytes, RowMajorBytes


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
    strides = contiguous_strides(edit.shape)
    is_plain = first.layout == "strided" and first.quantizer is None and first.is_contiguous
    if edit.is_reshape and is_plain and first.dtype == edit.dtype:
        return replace(first, shape=edit.shape, strides=strides)  # still the same view of its storage
    for part in edit.parts:
        spec = specs[part.source]
        if spec.dtype != edit.dtype or spec.storage is None or spec.parts or spec.quantizer or spec.per_byte > 1:
            raise PlanError(
                f"{checkpoint.path}: {part.source} is {spec.dtype} ({spec.layout}) and cannot become a part of "
                f"{edit.key}, which is {edit.dtype}; the plan belongs to another file"
            )
    pieces = [_piece(specs[part.source], part, checkpoint.path) for part in edit.parts]
    source = _joined(edit, pieces)
    if source is None:
        boxes = (Box(tuple(start for start, _ in part.place), extent(part.place)) for part in edit.parts)
        chunks = [(box, _InOrder(piece, checkpoint.path)) for box, piece in zip(boxes, pieces, strict=True)]
        source = ChunkedBytes(edit.shape, first.itemsize, chunks)
    storage = Storage(
        edit.key,
        source,
        first.storage.device if first.storage is not None else "cpu",
        parts=tuple(dict.fromkeys(one for part in edit.parts for one in specs[part.source].storages)),
    )
    return replace(first, shape=edit.shape, strides=strides, storage=storage, offset=0, math_bits={})


def _joined(edit: Assemble, pieces: Sequence[TensorSpec]) -> ByteSource | None:
    """Return the bytes of pieces that are ranges of their storages, one after another, such as a third of a fused
    projection, or a stack: a writer then copies them within the file system, which takes half the time."""
    ranges = {}
    for part, piece in zip(edit.parts, pieces, strict=True):
        is_range = piece.storage is not None and piece.is_contiguous and not piece.math_bits and piece.nbytes > 0
        if not is_range or part.place[1:] != full(edit.shape)[1:] or piece.storage is None:
            return None
        ranges[part.place] = WindowBytes(piece.storage.source, piece.offset * piece.itemsize, piece.nbytes)
    first, *others = [ranges[place] for place in sorted(ranges)]
    return JoinedBytes((first, *others)) if others else first


def _piece(spec: TensorSpec, part: Part, path: str) -> TensorSpec:
    """Return the box of a part as a tensor of the same storage, in the order of its axes."""
    offset = spec.offset + sum(start * step for (start, _), step in zip(part.box, spec.strides, strict=True))
    piece = replace(spec, shape=extent(part.box), offset=offset)
    if part.view:
        if not piece.is_contiguous or piece.math_bits:
            source = _InOrder(piece, path)
            piece = replace(piece, storage=Storage(part.source, source), offset=0, math_bits={})
        piece = replace(piece, shape=part.view, strides=contiguous_strides(part.view))
    if part.axes:
        shape, strides = (tuple(sizes[axis] for axis in part.axes) for sizes in (piece.shape, piece.strides))
        piece = replace(piece, shape=shape, strides=strides)
    return piece


class _InOrder(RowMajorBytes):
    """The bytes of a piece in row-major order. One that has to be put in order is kept until the next one is read."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``."""
        if self.spec.is_contiguous and not self.spec.math_bits:
            return super().read(start, stop)
        return _ordered(self)[start:stop]


@lru_cache(maxsize=1)
def _ordered(piece: _InOrder) -> memoryview:
    return RowMajorBytes(piece.spec, piece.path).read(0, piece.nbytes)
