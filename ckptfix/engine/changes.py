"""Computes the tensors that edits produce, lazily, from the file itself, a model, a donor, an adapter or data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ckptfix.bytes.checksums import is_sound
from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Adapt, Assemble, Cast, Dequantise, Edit, Fill, Fold, MergeAdapter, Replace, Zero
from ckptfix.core.lazy import torch
from ckptfix.core.parts import Part, PartsError, check_bijection
from ckptfix.core.spec import Storage, TensorSpec, computed, contiguous_strides
from ckptfix.core.target import Target
from ckptfix.errors import Opt, PlanError
from ckptfix.reading.boxes import boxed, bytes_of_boxes, row_major, shaped
from ckptfix.reading.opening import open_file
from ckptfix.reading.tensors import spec_of_number, spec_of_tensor
from ckptfix.values.casting import can_be_zeroed, cast_spec, zeroed_spec
from ckptfix.values.dequantising import dequantised_spec

# Measures the running statistics of some keys of a checkpoint on the data in a file.
Measure = Callable[[Checkpoint, Collection[str], str], "Mapping[str, torch.Tensor]"]


class ValueSources(Struct, frozen=True):
    """The sources of new values: the model or file to fit, the donor of ``--fill FILE``, or the user's data."""

    target: Target | None = None
    donor: Checkpoint | None = None
    measure: Measure | None = None
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    adapters: dict[str, Checkpoint] = field(default_factory=dict)  # the adapters opened so far, by path

    def adapter(self, path: str) -> Checkpoint:
        """Return an opened adapter. Raises ``UnreadableError`` if it no longer exists."""
        if path not in self.adapters:
            self.adapters[path] = open_file(path)
        return self.adapters[path]


def with_measurements(checkpoint: Checkpoint, edits: Iterable[Edit], value_sources: ValueSources) -> ValueSources:
    """Return the sources of values with all statistics that a step needs, measured in one run."""
    wanted = [edit for edit in edits if isinstance(edit, Replace) and edit.origin == "data"]
    if not wanted:
        return value_sources
    if value_sources.measure is None or wanted[0].source is None:
        raise PlanError(f"{checkpoint.path}: {wanted[0].key} has to be measured with a model; add ", Opt("model"))
    return replace(
        value_sources, measured=value_sources.measure(checkpoint, [edit.key for edit in wanted], wanted[0].source)
    )


# The edits that compute a tensor from one in the file.
CHANGES = frozenset({Adapt, Cast, Dequantise, Fold, MergeAdapter, Replace, Zero})


def changed(checkpoint: Checkpoint, spec: object, edit: Edit, value_sources: ValueSources) -> TensorSpec:
    """Return the tensor that an edit computes from ``spec``. Raises ``PlanError`` if ``spec`` does not match the
    edit."""
    path = checkpoint.path
    if not isinstance(spec, TensorSpec):
        raise mismatch(checkpoint, f"{asdict(edit)['key']} is not a tensor and cannot be changed")
    if isinstance(edit, Adapt):
        return adapted(checkpoint, spec, edit, value_sources)
    if isinstance(edit, Zero):
        if spec.dtype != edit.dtype or not can_be_zeroed(spec):
            what = f"the {edit.which} numbers of {edit.key} cannot be set to zero, because it is {spec.dtype}"
            raise mismatch(checkpoint, what)
        return zeroed_spec(spec, edit.which, path)
    if isinstance(edit, (Cast, Dequantise)):
        if spec.dtype != edit.before:
            raise mismatch(checkpoint, f"{edit.key} is {spec.dtype} and not {edit.before}")
        if isinstance(edit, Cast):
            return cast_spec(spec, edit.dtype, path)
        if (made := dequantised_spec(spec, checkpoint.specs, edit, path)) is None:
            raise mismatch(checkpoint, f"{edit.source} does not have the scales of {edit.key}")
        return made
    assert isinstance(edit, (Fold, MergeAdapter, Replace)), "the kinds of CHANGES"
    has_data = isinstance(edit, Replace) or spec.storage is not None
    if (spec.dtype, spec.shape) != (edit.dtype, edit.shape) or not has_data:
        what = f"{edit.key} is {spec.dtype} {spec.shape} and not {edit.dtype} {edit.shape}"
        raise mismatch(checkpoint, what)
    if isinstance(edit, Replace):
        found = _replaced(checkpoint, edit, value_sources)
        return found if found.dtype == edit.dtype else cast_spec(found, edit.dtype, path)
    if isinstance(edit, Fold):
        from ckptfix.values.adapted_tensors import folded_spec

        return folded_spec(spec, [_of_adapter(checkpoint, "", key, value_sources) for key in edit.sources], edit, path)
    from ckptfix.values.merged_tensors import merged_spec

    factors = [
        [_of_adapter(checkpoint, delta.adapter, key, value_sources) for key in delta.factors] for delta in edit.deltas
    ]
    return merged_spec(spec, edit, factors, path)


def adapted(checkpoint: Checkpoint, spec: object, edit: Adapt, value_sources: ValueSources) -> TensorSpec:
    """Return the tensor that a recipe computes from ``spec``. Raises ``PlanError`` if ``spec`` does not match."""
    from ckptfix.values.adapted_tensors import adapted_spec

    if not isinstance(spec, TensorSpec):
        raise mismatch(checkpoint, f"{edit.source} is not a tensor to adapt")
    fill = Fill(edit.key, edit.dtype, edit.shape, "target")
    return adapted_spec(
        spec, edit, checkpoint.path, filled(checkpoint, fill, value_sources) if edit.untrained else None
    )


def _replaced(checkpoint: Checkpoint, edit: Replace, value_sources: ValueSources) -> TensorSpec:
    """Return the tensor with the new values of a replacement."""
    if edit.origin == "data":
        return spec_of_tensor(value_sources.measured[edit.key])
    if edit.origin == "ones":
        return spec_of_number(edit.dtype, edit.shape, 1)
    if edit.origin != "twin":
        return filled(checkpoint, Fill(edit.key, edit.dtype, edit.shape, edit.origin, edit.source), value_sources)
    return _of_set(checkpoint, edit, edit.place or "", edit.source or edit.key)


def _of_set(checkpoint: Checkpoint, edit: Fill | Replace, place: str, key: str) -> TensorSpec:
    """Return a tensor from another set of weights in the file, or from the same one if ``place`` is empty."""
    from ckptfix.values.twins import entry_at

    found = entry_at(checkpoint, place, key)
    if not isinstance(found, TensorSpec) or found.shape != edit.shape or not found.has_data:
        place = place or "the same state_dict"
        raise mismatch(checkpoint, f"{edit.key} should be taken from {place}, which lacks it in this shape")
    return found


def assembled(checkpoint: Checkpoint, edits: Sequence[Assemble], rule: str) -> dict[str, list[tuple[str, TensorSpec]]]:
    """Return the assembled tensors with their keys, by the source of the first part. Raises ``PlanError`` unless each
    element is used exactly once."""
    sources = {part.source for edit in edits for part in edit.parts}
    specs = {key: spec for key in sources if isinstance(spec := checkpoint.entries.get(key), TensorSpec)}
    parts = {edit.key: edit.parts for edit in edits}
    if len(parts) != len(edits):
        raise PlanError(f"{checkpoint.path}: {rule} assembles a key twice in one step; remove one of the two edits")
    try:
        check_bijection(parts, {key: spec.shape for key, spec in specs.items()}, {e.key: e.shape for e in edits})
    except PartsError as error:
        raise PlanError(f"{checkpoint.path}: {rule} cannot assemble {error}; create the plan again") from error
    made: dict[tuple[Any, ...], TensorSpec] = {}
    result: dict[str, list[tuple[str, TensorSpec]]] = {}
    for edit in edits:
        views = tuple((specs[part.source].view, replace(part, source="")) for part in edit.parts)
        same = (edit.shape, views)
        if same not in made:  # tied tensors stay tied
            made[same] = _assembled(checkpoint, edit, specs)
        result.setdefault(edit.parts[0].source, []).append((edit.key, made[same]))
    return result


def _assembled(checkpoint: Checkpoint, edit: Assemble, specs: dict[str, TensorSpec]) -> TensorSpec:
    first = specs[edit.parts[0].source]
    is_plain = first.layout == "strided" and first.quantizer is None and first.is_contiguous
    if edit.is_reshape and is_plain and first.dtype == edit.dtype:
        strides = contiguous_strides(edit.shape)
        return replace(first, shape=edit.shape, strides=strides)  # shares its storage
    for part in edit.parts:
        spec = specs[part.source]
        if spec.dtype != edit.dtype or spec.storage is None or spec.parts or spec.quantizer or spec.per_byte > 1:
            raise PlanError(
                f"{checkpoint.path}: {part.source} is {spec.dtype} ({spec.layout}) and cannot become part of "
                f"{edit.key}, which is {edit.dtype}; the plan belongs to another file"
            )
    pieces = [(part.place, _piece(specs[part.source], part, checkpoint.path)) for part in edit.parts]
    source = bytes_of_boxes(edit.shape, first.itemsize, pieces)
    storages = (one for part in edit.parts for one in specs[part.source].storages)
    return computed(first, edit.key, source, storages, shape=edit.shape)


def _piece(spec: TensorSpec, part: Part, path: str) -> TensorSpec:
    """Return the box of a part, reshaped and permuted, as a view of the same storage."""
    if spec.math_bits:
        spec = computed(spec, part.source, row_major(spec, path), ())
    piece = boxed(spec, part.box)
    if part.view:
        piece = shaped(piece, part.view)
    if part.axes:
        shape, strides = (tuple(sizes[axis] for axis in part.axes) for sizes in (piece.shape, piece.strides))
        piece = replace(piece, shape=shape, strides=strides)
    return piece


def filled(checkpoint: Checkpoint, fill: Fill, value_sources: ValueSources) -> TensorSpec:
    """Return the tensor that a fill adds. Raises ``PlanError`` if its source lacks it."""
    if fill.origin == "zeros":
        spec = TensorSpec(fill.dtype, fill.shape)
        storage = Storage("zeros", MemoryBytes(bytes(spec.nbytes)))
        return replace(spec, strides=contiguous_strides(fill.shape), storage=storage)
    if fill.origin in ("target", "formula"):
        target = value_sources.target
        if target is None or (target.initial is None and target.reference is None):
            raise PlanError(
                f"{checkpoint.path}: {fill.key} should be filled from the model, but no model was given; add ",
                Opt("model"),
            )
        if target.initial is None:
            return _of_donor(checkpoint, fill, target.reference)
        values = target.initial()
        if fill.key not in values:
            raise PlanError(
                f"{checkpoint.path}: the model has no {fill.key} to fill from; the plan belongs to another model"
            )
        spec = spec_of_tensor(values[fill.key].detach())
        if spec.shape != fill.shape:
            raise PlanError(
                f"{checkpoint.path}: {fill.key} is {spec.shape} in the model and not {fill.shape}; the plan belongs to "
                "another model"
            )
        return replace(spec, is_parameter=False)
    path, _, key = (fill.donor_key or "").rpartition(":")
    if fill.origin == "part":
        return _of_set(checkpoint, fill, path, key)
    if fill.origin in ("adapter", "tie"):
        return _of_adapter(checkpoint, path, key, value_sources)
    return _of_donor(checkpoint, fill, value_sources.donor)


def _of_donor(checkpoint: Checkpoint, fill: Fill, file: Checkpoint | None) -> TensorSpec:
    """Return the tensor of a fill from another file. Raises ``PlanError`` if that lacks it or it is damaged."""
    donor_key = fill.donor_key or fill.key
    donor = file.entries.get(donor_key) if file is not None else None
    if not isinstance(donor, TensorSpec) or donor.shape != fill.shape:
        raise PlanError(
            f"{checkpoint.path}: {fill.key} should be filled from a donor that lacks it in this shape; name another "
            "one with ",
            Opt("fill"),
        )
    storages = (part.storage for part in donor.strided_parts())
    if not all(storage is None or is_sound(storage) for storage in storages):
        raise PlanError(
            f"{checkpoint.path}: the donor's own {donor_key} fails the checksum of its archive; name another one with ",
            Opt("fill"),
        )
    return donor


def _of_adapter(checkpoint: Checkpoint, path: str, key: str, value_sources: ValueSources) -> TensorSpec:
    """Return a tensor of an adapter, or of the checkpoint itself if the adapter is inside it."""
    spec = (value_sources.adapter(path) if path else checkpoint).specs.get(key)
    if spec is None or spec.storage is None:
        raise PlanError(f"{path or checkpoint.path}: has no {key} to merge; the plan belongs to another adapter")
    if not is_sound(spec.storage):
        raise PlanError(f"{path or checkpoint.path}: {key} fails the checksum of its archive; fetch the adapter again")
    return spec


def mismatch(checkpoint: Checkpoint, what: str) -> PlanError:
    """Return the error for an edit that was made for another file."""
    return PlanError(f"{checkpoint.path}: {what}; the plan belongs to another file")
