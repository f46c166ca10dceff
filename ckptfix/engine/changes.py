"""The values of one tensor after an edit: lazily, from the file itself, a model, a donor, an adapter or data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ckptfix.bytes.checksums import is_sound
from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Adapt, Cast, Dequantise, Edit, Fill, Fold, MergeAdapter, Replace, Zero
from ckptfix.core.lazy import torch
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import Opt, PlanError
from ckptfix.reading.opening import open_file
from ckptfix.reading.tensors import spec_of_number, spec_of_tensor
from ckptfix.values.casting import WHICH, can_be_zeroed, cast_spec, dequantised_spec, zeroed_spec

# Measures the running statistics of these keys of a checkpoint on the data of a file.
Measure = Callable[[Checkpoint, Collection[str], str], "Mapping[str, torch.Tensor]"]


class Supplies(Struct, frozen=True):
    """Where new values come from: the model's own initialisation, the donor of ``--fill FILE``, or the user's data."""

    initial: Callable[[], Mapping[str, torch.Tensor]] | None = None
    donor: Checkpoint | None = None
    measure: Measure | None = None
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    adapters: dict[str, Checkpoint] = field(default_factory=dict)  # the adapters that edits have named so far, by path

    def adapter(self, path: str) -> Checkpoint:
        """Open an adapter. Raises ``UnreadableError`` if it is not there any more."""
        if path not in self.adapters:
            self.adapters[path] = open_file(path)
        return self.adapters[path]


def with_measurements(checkpoint: Checkpoint, edits: Iterable[Edit], supplies: Supplies) -> Supplies:
    """Return the supplies with the statistics of a step, which are measured together."""
    wanted = [edit for edit in edits if isinstance(edit, Replace) and edit.origin == "data"]
    if not wanted:
        return supplies
    if supplies.measure is None or wanted[0].source is None:
        raise PlanError(
            f"{checkpoint.path}: {wanted[0].key} is to be measured, which takes a model; add ", Opt("model")
        )
    return replace(supplies, measured=supplies.measure(checkpoint, [edit.key for edit in wanted], wanted[0].source))


def changed(checkpoint: Checkpoint, spec: object, edit: Edit, supplies: Supplies) -> TensorSpec:
    """Return what an edit makes of a tensor. Raises ``PlanError`` if it is not the tensor that the edit is about."""
    if not isinstance(spec, TensorSpec):
        raise _foreign(checkpoint, f"{asdict(edit)['key']} is not a tensor and cannot be changed")
    return CHANGES[type(edit)](checkpoint, spec, edit, supplies)


def _cast(checkpoint: Checkpoint, spec: TensorSpec, edit: Cast, supplies: Supplies) -> TensorSpec:
    _expect_dtype(checkpoint, spec, edit)
    return cast_spec(spec, edit.dtype, checkpoint.path)


def _dequantised(checkpoint: Checkpoint, spec: TensorSpec, edit: Dequantise, supplies: Supplies) -> TensorSpec:
    _expect_dtype(checkpoint, spec, edit)
    scales = checkpoint.entries.get(edit.source)
    made = dequantised_spec(spec, scales, edit, checkpoint.path) if isinstance(scales, TensorSpec) else None
    if made is None:
        raise _foreign(checkpoint, f"{edit.source} does not have the scales of {edit.key}")
    return made


def _zeroed(checkpoint: Checkpoint, spec: TensorSpec, edit: Zero, supplies: Supplies) -> TensorSpec:
    if spec.dtype != edit.dtype or edit.which not in WHICH or not can_be_zeroed(spec):
        raise _foreign(
            checkpoint, f"the {edit.which} numbers of {edit.key} cannot be set to zero, as it is {spec.dtype}"
        )
    return zeroed_spec(spec, edit.which, checkpoint.path)


def _merged(checkpoint: Checkpoint, spec: TensorSpec, edit: MergeAdapter, supplies: Supplies) -> TensorSpec:
    from ckptfix.values.merged_tensors import merged_spec

    _expect_form(checkpoint, spec, edit)
    factors = [
        [_of_adapter(checkpoint, delta.adapter, key, supplies) for key in delta.factors] for delta in edit.deltas
    ]
    return merged_spec(spec, edit, factors, checkpoint.path)


def adapted(checkpoint: Checkpoint, spec: object, edit: Adapt, supplies: Supplies) -> TensorSpec:
    """Return the tensor that a recipe makes of one of the file."""
    from ckptfix.values.adapted_tensors import adapted_spec

    if not isinstance(spec, TensorSpec):
        raise _foreign(checkpoint, f"{edit.source} is not a tensor to adapt")
    fill = Fill(edit.key, edit.dtype, edit.shape, "target")
    return adapted_spec(spec, edit, checkpoint.path, filled(checkpoint, fill, supplies) if edit.untrained else None)


def _folded(checkpoint: Checkpoint, spec: TensorSpec, edit: Fold, supplies: Supplies) -> TensorSpec:
    from ckptfix.values.adapted_tensors import folded_spec

    _expect_form(checkpoint, spec, edit)
    beside = [_of_adapter(checkpoint, "", key, supplies) for key in edit.sources]
    return folded_spec(spec, beside, edit, checkpoint.path)


def _replaced(checkpoint: Checkpoint, spec: TensorSpec, edit: Replace, supplies: Supplies) -> TensorSpec:
    """Return the values that take the place of a tensor's, in its dtype."""
    _expect_form(checkpoint, spec, edit)
    if edit.origin == "twin":
        from ckptfix.values.twins import entry_at

        found = entry_at(checkpoint, edit.place or "", edit.source or edit.key)
        if not isinstance(found, TensorSpec) or found.shape != edit.shape or not found.has_data:
            raise _foreign(
                checkpoint,
                f"{edit.key} is to be taken from {edit.place or 'beside it'}, which does not have it in this shape",
            )
    elif edit.origin == "data":
        found = spec_of_tensor(supplies.measured[edit.key])
    elif edit.origin == "ones":
        found = spec_of_number(edit.dtype, edit.shape, 1)
    else:
        found = filled(checkpoint, Fill(edit.key, edit.dtype, edit.shape, edit.origin, edit.source), supplies)
    return found if found.dtype == edit.dtype else cast_spec(found, edit.dtype, checkpoint.path)


# What makes another tensor of one of the file, by kind of edit.
CHANGES: Mapping[type[Edit], Callable[[Checkpoint, TensorSpec, Any, Supplies], TensorSpec]] = {
    Adapt: adapted,
    Cast: _cast,
    Dequantise: _dequantised,
    Fold: _folded,
    MergeAdapter: _merged,
    Replace: _replaced,
    Zero: _zeroed,
}


def filled(checkpoint: Checkpoint, fill: Fill, supplies: Supplies) -> TensorSpec:
    """Return the tensor that a fill puts in, from where it says. Raises ``PlanError`` if it is not there."""
    if fill.origin == "zeros":
        spec = TensorSpec(fill.dtype, fill.shape)
        storage = Storage("zeros", MemoryBytes(bytes(spec.nbytes)))
        return replace(spec, strides=contiguous_strides(fill.shape), storage=storage)
    if fill.origin == "target":
        if supplies.initial is None:
            raise PlanError(
                f"{checkpoint.path}: {fill.key} is to be filled from the model, and no model is given; add ",
                Opt("model"),
            )
        values = supplies.initial()
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
    if fill.origin in ("adapter", "tie"):
        path, _, key = (fill.donor_key or "").rpartition(":")
        return _of_adapter(checkpoint, path, key, supplies)
    donor_key = fill.donor_key or fill.key
    donor = supplies.donor.entries.get(donor_key) if supplies.donor is not None else None
    if not isinstance(donor, TensorSpec) or donor.shape != fill.shape:
        raise PlanError(
            f"{checkpoint.path}: {fill.key} is to be filled from a donor that does not have it in this shape; name "
            "another one with ",
            Opt("fill"),
        )
    storages = (part.storage for part in donor.strided_parts())
    if not all(storage is None or is_sound(storage) for storage in storages):
        raise PlanError(
            f"{checkpoint.path}: the donor's own {donor_key} fails the checksum of its archive; name another one with ",
            Opt("fill"),
        )
    return donor


def _of_adapter(checkpoint: Checkpoint, path: str, key: str, supplies: Supplies) -> TensorSpec:
    """Return a tensor of an adapter, or of the checkpoint itself if the adapter is inside of it."""
    spec = (supplies.adapter(path) if path else checkpoint).specs.get(key)
    if spec is None or spec.storage is None:
        raise PlanError(f"{path or checkpoint.path}: has no {key} to merge; the plan belongs to another adapter")
    if not is_sound(spec.storage):
        raise PlanError(f"{path or checkpoint.path}: {key} fails the checksum of its archive; fetch the adapter again")
    return spec


def _expect_dtype(checkpoint: Checkpoint, spec: TensorSpec, edit: Cast | Dequantise) -> None:
    if spec.dtype != edit.before:
        raise _foreign(checkpoint, f"{edit.key} is {spec.dtype} and not {edit.before}")


def _expect_form(checkpoint: Checkpoint, spec: TensorSpec, edit: Fold | MergeAdapter | Replace) -> None:
    has_data = isinstance(edit, Replace) or spec.storage is not None
    if (spec.dtype, spec.shape) != (edit.dtype, edit.shape) or not has_data:
        raise _foreign(checkpoint, f"{edit.key} is {spec.dtype} {spec.shape} and not {edit.dtype} {edit.shape}")


def _foreign(checkpoint: Checkpoint, what: str) -> PlanError:
    """Return the error of an edit that was made for another file."""
    return PlanError(f"{checkpoint.path}: {what}; the plan belongs to another file")
