"""Applies edits to a checkpoint: the one place where one is changed.

The edits of one step apply at once, so that two keys may swap their names. The result is a new lazy checkpoint: no
tensor is read but a donor's, whose checksums are proved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptfix.bytes.checksums import is_sound
from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import (
    Adapt,
    Assemble,
    Cast,
    Dequantise,
    Disarm,
    Drop,
    Edit,
    Fill,
    MergeAdapter,
    Omit,
    Plain,
    Regroup,
    Rename,
    RenameModule,
    Replace,
    Reshape,
    Retag,
    Rewrite,
    Tie,
    Zero,
)
from ckptfix.core.facts import Kind
from ckptfix.core.metadata import Metadata, rename_metadata, rename_rows
from ckptfix.core.plan import Plan, Step
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.engine.assembling import assembled
from ckptfix.errors import Opt, PlanError
from ckptfix.reading.opening import open_file
from ckptfix.reading.pickles.payload import GRAPH_CODE
from ckptfix.writing.plain import plain_root

if TYPE_CHECKING:
    import torch

CONVERTED_REMARKS = frozenset(
    {
        Kind.PROTOCOL,
        Kind.NUMPY_WEIGHTS,
        Kind.TENSOR_SUBCLASS,
        Kind.NON_STRING_KEY,
        Kind.PLAIN_PICKLE,
        Kind.TORCHSCRIPT,
        Kind.TORCH_PACKAGE,
        Kind.TORCH_EXPORT,
        Kind.UNPACKED_FOLDER,
        Kind.TORCH_TAR,
        Kind.ODD_LAYOUT,
        Kind.ODD_METADATA,
        Kind.PYTHON2_TEXT,
        Kind.UNINITIALIZED,
    }
)
"""What was noticed while reading and is cured by writing plain data."""


Measure = Callable[[Checkpoint, Collection[str], str], "Mapping[str, torch.Tensor]"]
"""Measures the running statistics of these keys of a checkpoint on the data of a file."""


@dataclass(frozen=True)
class Supplies:
    """Where new values come from: the model's own initialisation, the donor of ``--fill FILE``, or the user's data."""

    initial: Callable[[], Mapping[str, torch.Tensor]] | None = None
    donor: Checkpoint | None = None
    measure: Measure | None = None
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    adapters: dict[str, Checkpoint] = field(default_factory=dict)
    """The adapters that edits have named so far, by path."""

    def adapter(self, path: str) -> Checkpoint:
        """Open an adapter. Raises ``UnreadableError`` if it is not there any more."""
        if path not in self.adapters:
            self.adapters[path] = open_file(path)
        return self.adapters[path]


def apply_plan(plan: Plan, checkpoint: Checkpoint, supplies: Supplies | None = None) -> Checkpoint:
    """Return the checkpoint after all steps of a plan. Raises ``PlanError`` if the plan does not fit it."""
    for step in plan.steps:
        checkpoint = apply_step(checkpoint, step, supplies or Supplies())
    return checkpoint


def apply_step(checkpoint: Checkpoint, step: Step, supplies: Supplies) -> Checkpoint:
    """The checkpoint after one step. Raises ``PlanError`` on a conflict: two sources for one key, an edit of a key that
    is not there.
    """
    renames = _unique({edit.key: edit.to for edit in step.edits if isinstance(edit, Rename)}, step, Rename)
    dropped = {edit.key for edit in step.edits if isinstance(edit, Drop)}
    changes = [
        edit
        for edit in step.edits
        if isinstance(edit, (Cast, Dequantise, MergeAdapter, Reshape, Replace, Zero))
        or (isinstance(edit, Adapt) and edit.source == edit.key)
    ]
    supplies = with_measurements(checkpoint, changes, supplies)
    additions = [
        edit
        for edit in step.edits
        if isinstance(edit, (Fill, Tie)) or (isinstance(edit, Adapt) and edit.source != edit.key)
    ]
    made_of = [edit for edit in step.edits if isinstance(edit, Assemble)]
    used = {part.source: edit.key for edit in reversed(made_of) for part in reversed(edit.parts)}
    for key in (*renames, *dropped, *used, *(edit.key for edit in changes)):
        if key not in checkpoint.entries:
            raise PlanError(
                f"{checkpoint.path}: {step.rule} edits the key {key}, which is not there; the plan belongs to another "
                "file"
            )
    changed = renames.keys() | {edit.key for edit in changes}
    if both := (changed & (dropped | used.keys())) or (dropped & used.keys()):
        raise PlanError(
            f"{checkpoint.path}: {step.rule} both changes and drops {min(both)}; remove one of the two edits"
        )
    specs = assembled(checkpoint, made_of, step.rule)
    entries: dict[str, Any] = {}
    for key, entry in checkpoint.entries.items():
        # What is assembled comes where the first of its parts was.
        arrivals = (
            [(edit.key, specs[edit.key]) for edit in made_of if edit.parts[0].source == key]
            if key in used
            else [(renames.get(key, key), entry)] * (key not in dropped)
        )
        for name, value in arrivals:
            if name in entries:
                raise PlanError(
                    f"{checkpoint.path}: {step.rule} gives {name} two sources; look at the keys with `ckptfix inspect`"
                )
            entries[name] = value
    made: dict[tuple[object, ...], TensorSpec] = {}
    for change in changes:
        name = renames.get(change.key, change.key)
        # The same change of two names of one tensor leaves them one tensor.
        entry = entries[name]
        same = replace(change, key="", source="") if isinstance(change, Adapt) else replace(change, key="")
        view = (entry.view, same) if isinstance(entry, TensorSpec) and entry.storage else (name,)
        if view not in made:
            made[view] = _changed(checkpoint, entry, change, supplies)
        entries[name] = made[view]
    entries = _with_additions(checkpoint, step, entries, additions, supplies)
    renames |= used
    kept = {key: renames.get(key, key) for key in checkpoint.entries if key not in dropped}
    metadata = _with_rows(checkpoint, step, rename_metadata(checkpoint.metadata, kept))
    lost = {key: spec for key, spec in checkpoint.lost.items() if key not in entries}
    # After the first rename the names of a picked set are not those of the file any more: it was taken before.
    picked = None if renames else checkpoint.picked
    result = replace(checkpoint.with_entries(entries, metadata), lost=lost, picked=picked)
    if any(isinstance(edit, Rewrite) for edit in step.edits):
        result = replace(result, damage=())
    if any(isinstance(edit, Disarm) for edit in step.edits):
        result = _disarmed(result)
    conversions = [edit for edit in step.edits if isinstance(edit, Plain)]
    if conversions and all(edit.before == GRAPH_CODE for edit in conversions):
        # What is written never holds code: only the word for it goes.
        remarks = tuple(remark for remark in result.remarks if remark.kind is not Kind.STORED_CODE)
        result = replace(result, remarks=remarks)
    elif conversions:
        root, _ = plain_root(result)
        state_dict: Any = root
        for part in result.container:
            state_dict = state_dict[part]
        remarks = tuple(remark for remark in result.remarks if remark.kind not in CONVERTED_REMARKS)
        entries = {str(key): entry for key, entry in state_dict.items()}
        result = replace(result, entries=entries, root=root, remarks=remarks)
    if any(isinstance(edit, (Regroup, Omit)) for edit in step.edits):
        from ckptfix.engine.optimizers import with_optimizers

        result = with_optimizers(result, step.edits, step.rule)
    retagged = {edit.device for edit in step.edits if isinstance(edit, Retag)}
    return (
        replace(result, devices=tuple(device for device in result.devices if device not in retagged))
        if retagged
        else result
    )


def _disarmed(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors of the state_dict alone, and of ``_metadata`` the versions."""
    metadata = {
        module: {name: value for name, value in row.items() if isinstance(value, int)}
        for module, row in (checkpoint.metadata or {}).items()
    }
    tensors = dict(checkpoint.specs)
    return replace(
        checkpoint, entries=tensors, metadata=metadata or None, root=tensors, container=(), candidates=(), remarks=()
    )


def _with_rows(checkpoint: Checkpoint, step: Step, metadata: Metadata | None) -> Metadata | None:
    try:
        return rename_rows(metadata, {edit.module: edit.to for edit in step.edits if isinstance(edit, RenameModule)})
    except KeyError as error:
        raise PlanError(
            f"{checkpoint.path}: {step.rule} renames the row {error} of _metadata, which is not there; the plan "
            "belongs to another file"
        ) from error


def _unique(renames: dict[str, str], step: Step, kind: type[Edit]) -> dict[str, str]:
    if len(renames) != sum(isinstance(edit, kind) for edit in step.edits):
        raise PlanError(f"{step.rule} renames one key twice in a step; remove one of the two edits")
    return renames


def _changed(
    checkpoint: Checkpoint,
    spec: object,
    change: Adapt | Cast | Dequantise | MergeAdapter | Reshape | Replace | Zero,
    supplies: Supplies,
) -> TensorSpec:
    if not isinstance(spec, TensorSpec):
        raise PlanError(
            f"{checkpoint.path}: {change.key} is no tensor and cannot be changed; the plan belongs to another file"
        )
    if isinstance(change, (Cast, Dequantise)):
        if spec.dtype != change.before:
            raise PlanError(
                f"{checkpoint.path}: {change.key} is {spec.dtype} and not {change.before}; the plan belongs to "
                "another file"
            )
        from ckptfix.values.casting import cast_spec, dequantised_spec

        if isinstance(change, Cast):
            return cast_spec(spec, change.dtype, checkpoint.path)
        scales = checkpoint.entries.get(change.source)
        made = dequantised_spec(spec, scales, change, checkpoint.path) if isinstance(scales, TensorSpec) else None
        if made is None:
            raise PlanError(
                f"{checkpoint.path}: {change.source} does not have the scales of {change.key}; the plan belongs to "
                "another file"
            )
        return made
    if isinstance(change, Zero):
        from ckptfix.values.casting import WHICH, can_be_zeroed, zeroed_spec

        if spec.dtype != change.dtype or change.which not in WHICH or not can_be_zeroed(spec):
            raise PlanError(
                f"{checkpoint.path}: the {change.which} numbers of {change.key} cannot be set to zero, as it is "
                f"{spec.dtype}; the plan belongs to another file"
            )
        return zeroed_spec(spec, change.which, checkpoint.path)
    if isinstance(change, MergeAdapter):
        from ckptfix.values.merging import merged_spec

        if (spec.dtype, spec.shape) != (change.dtype, change.shape) or spec.storage is None:
            raise PlanError(
                f"{checkpoint.path}: {change.key} is {spec.dtype} {spec.shape} and not {change.dtype} {change.shape}; "
                "the plan belongs to another file"
            )
        factors = [
            [_of_adapter(checkpoint, delta.adapter, key, supplies) for key in delta.factors] for delta in change.deltas
        ]
        return merged_spec(spec, change, factors, checkpoint.path)
    if isinstance(change, Adapt):
        return adapted(checkpoint, change, supplies)
    if isinstance(change, Replace):
        if (spec.dtype, spec.shape) != (change.dtype, change.shape):
            raise PlanError(
                f"{checkpoint.path}: {change.key} is {spec.dtype} {spec.shape} and not {change.dtype} {change.shape}; "
                "the plan belongs to another file"
            )
        return replaced(checkpoint, change, supplies)
    if (
        spec.shape != change.before
        or TensorSpec(spec.dtype, change.shape).numel != spec.numel
        or not spec.is_contiguous
    ):
        raise PlanError(
            f"{checkpoint.path}: {change.key} of shape {spec.shape} cannot become {change.shape}; the plan belongs to "
            "another file"
        )
    return replace(spec, shape=change.shape, strides=contiguous_strides(change.shape))


def _of_adapter(checkpoint: Checkpoint, path: str, key: str, supplies: Supplies) -> TensorSpec:
    """Return a tensor of an adapter, or of the checkpoint itself if the adapter is inside of it."""
    spec = (supplies.adapter(path) if path else checkpoint).specs.get(key)
    if spec is None or spec.storage is None:
        raise PlanError(f"{path or checkpoint.path}: has no {key} to merge; the plan belongs to another adapter")
    if not is_sound(spec.storage):
        raise PlanError(f"{path or checkpoint.path}: {key} fails the checksum of its archive; fetch the adapter again")
    return spec


def _with_additions(
    checkpoint: Checkpoint, step: Step, entries: dict[str, Any], additions: list[Fill | Tie | Adapt], supplies: Supplies
) -> dict[str, Any]:
    """The entries with the new ones, each behind the last entry of its module, or else at the end."""
    if not additions:
        return entries
    last_of_module = {key.rpartition(".")[0]: key for key in entries}
    behind: dict[str | None, list[tuple[str, TensorSpec]]] = {}
    added: dict[str, TensorSpec] = {}
    for addition in additions:
        if addition.key in entries or addition.key in added:
            raise PlanError(
                f"{checkpoint.path}: {step.rule} adds the key {addition.key}, which is there already; nothing is "
                "overwritten"
            )
        if isinstance(addition, Fill):
            value: object = filled(checkpoint, addition, supplies)
        elif isinstance(addition, Adapt):
            value = adapted(checkpoint, addition, supplies)
        else:
            value = entries.get(addition.to, added.get(addition.to))
        if not isinstance(value, TensorSpec):
            raise PlanError(
                f"{checkpoint.path}: {step.rule} ties {addition.key} to a key that is not there; the plan belongs to "
                "another file"
            )
        behind.setdefault(last_of_module.get(addition.key.rpartition(".")[0]), []).append((addition.key, value))
        added[addition.key] = value
    result: dict[str, Any] = {}
    for key, entry in entries.items():
        result[key] = entry
        result.update(behind.get(key, ()))
    result.update(behind.get(None, ()))
    return result


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


def adapted(checkpoint: Checkpoint, edit: Adapt, supplies: Supplies) -> TensorSpec:
    """The tensor that a recipe makes of one of the file."""
    from ckptfix.values.adapting import adapted_spec

    spec = checkpoint.entries.get(edit.source)
    if not isinstance(spec, TensorSpec):
        raise PlanError(f"{checkpoint.path}: {edit.source} is not a tensor to adapt; the plan belongs to another file")
    if edit.untrained:
        fresh = filled(checkpoint, Fill(edit.key, edit.dtype, edit.shape, "target"), supplies)
        return adapted_spec(spec, edit, checkpoint.path, fresh)
    return adapted_spec(spec, edit, checkpoint.path)


def replaced(checkpoint: Checkpoint, change: Replace, supplies: Supplies) -> TensorSpec:
    """The values that take the place of a tensor's, in its dtype."""
    if change.origin == "twin":
        from ckptfix.values.twins import entry_at

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
        from ckptfix.reading.live import spec_of_number

        found = spec_of_number(change.dtype, change.shape, 1)
    else:
        found = filled(checkpoint, Fill(change.key, change.dtype, change.shape, change.origin, change.source), supplies)
    if found.dtype == change.dtype:
        return found
    from ckptfix.values.casting import cast_spec

    return cast_spec(found, change.dtype, checkpoint.path)
