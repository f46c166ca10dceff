"""Where new values come from: the model's own initialisation, a donor, another set of the file, the user's data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Edit, Fill, Replace
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import Opt, PlanError
from ckptfix.values.integrity import Integrity
from ckptfix.values.twins import entry_at

if TYPE_CHECKING:
    import torch

Measure = Callable[[Checkpoint, Collection[str], str], "Mapping[str, torch.Tensor]"]
"""Measures the running statistics of these keys of a checkpoint on the data of a file."""


@dataclass(frozen=True)
class Supplies:
    """Where new values come from: the model's own initialisation, the donor of ``--fill FILE``, or the user's data."""

    initial: Callable[[], Mapping[str, torch.Tensor]] | None = None
    donor: Checkpoint | None = None
    measure: Measure | None = None
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    integrity: Integrity = field(default_factory=Integrity)


def with_measurements(checkpoint: Checkpoint, changes: Iterable[Edit], supplies: Supplies) -> Supplies:
    """The supplies with the statistics of a step, which are measured together."""
    wanted = [edit for edit in changes if isinstance(edit, Replace) and edit.origin == "data"]
    if not wanted:
        return supplies
    if supplies.measure is None or wanted[0].source is None:
        raise PlanError(
            f"{checkpoint.path}: {wanted[0].key} is to be measured, which takes a model; add ", Opt("model")
        )
    return replace(supplies, measured=supplies.measure(checkpoint, [edit.key for edit in wanted], wanted[0].source))


def filled(checkpoint: Checkpoint, fill: Fill, supplies: Supplies) -> TensorSpec:
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
        from ckptfix.reading.live import spec_of_tensor

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
    donor_key = fill.donor_key or fill.key
    donor = supplies.donor.entries.get(donor_key) if supplies.donor is not None else None
    if not isinstance(donor, TensorSpec) or donor.shape != fill.shape:
        raise PlanError(
            f"{checkpoint.path}: {fill.key} is to be filled from a donor that does not have it in this shape; name "
            "another one with ",
            Opt("fill"),
        )
    storages = (part.storage for part in donor.strided_parts())
    if not all(storage is None or supplies.integrity.is_sound(storage) for storage in storages):
        raise PlanError(
            f"{checkpoint.path}: the donor's own {donor_key} fails the checksum of its archive; name another one with ",
            Opt("fill"),
        )
    return donor


def replaced(checkpoint: Checkpoint, change: Replace, supplies: Supplies) -> TensorSpec:
    """The values that take the place of a tensor's, in its dtype."""
    if change.origin == "twin":
        found = entry_at(checkpoint, change.place or "", change.source or change.key)
        if not isinstance(found, TensorSpec) or found.shape != change.shape or not found.has_data:
            raise PlanError(
                f"{checkpoint.path}: {change.key} is to be taken from {change.place or 'beside it'}, which does not "
                "have it in this shape; the plan belongs to another file"
            )
    elif change.origin == "data":
        from ckptfix.reading.live import spec_of_tensor

        found = spec_of_tensor(supplies.measured[change.key])
    elif change.origin == "ones":
        from ckptfix.reading.live import spec_of_ones

        found = spec_of_ones(change.dtype, change.shape)
    else:
        found = filled(checkpoint, Fill(change.key, change.dtype, change.shape, change.origin, change.source), supplies)
    if found.dtype == change.dtype:
        return found
    from ckptfix.values.casting import cast_spec

    return cast_spec(found, change.dtype, checkpoint.path)
