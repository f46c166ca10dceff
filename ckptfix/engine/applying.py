"""Applies edits to a checkpoint, which no other module changes.

The edits of a step apply at once, so that two keys can swap their names. The result is a new lazy checkpoint: no tensor
is read, except those of a donor, to verify their checksums."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, value_at
from ckptfix.core.edits import (
    Adapt,
    Assemble,
    Disarm,
    Drop,
    Edit,
    Fill,
    Omit,
    Plain,
    Regroup,
    Rename,
    RenameModule,
    Retag,
    Rewrite,
    Tie,
)
from ckptfix.core.facts import BESIDE, Kind
from ckptfix.core.metadata import Metadata, rename_metadata, rename_rows
from ckptfix.core.plan import Plan, Step
from ckptfix.core.spec import TensorSpec
from ckptfix.engine.changes import (
    CHANGES,
    ValueSources,
    adapted,
    assembled,
    changed,
    filled,
    mismatch,
    with_measurements,
)
from ckptfix.errors import PlanError
from ckptfix.reading.foreign.weightless import is_of_training
from ckptfix.reading.pickles.payload import GRAPH_CODE
from ckptfix.writing.plain import CONVERSIONS, plain_root

# Remarks that no longer apply once plain data is written.
CONVERTED_REMARKS = frozenset({*CONVERSIONS, Kind.NON_STRING_KEY, Kind.UNINITIALIZED})


def apply_plan(plan: Plan, checkpoint: Checkpoint, value_sources: ValueSources | None = None) -> Checkpoint:
    """Return the checkpoint after all steps of a plan. Raises ``PlanError`` if the plan does not fit it."""
    for step in plan.steps:
        checkpoint = apply_step(checkpoint, step, value_sources or ValueSources())
    return checkpoint


def apply_step(checkpoint: Checkpoint, step: Step, value_sources: ValueSources) -> Checkpoint:
    """Return the checkpoint after one step. Raises ``PlanError`` for two sources of a key or a missing key."""
    renames = {edit.key: edit.to for edit in step.edits if isinstance(edit, Rename)}
    dropped = {edit.key for edit in step.edits if isinstance(edit, Drop)}
    made_of = [edit for edit in step.edits if isinstance(edit, Assemble)]
    used = {part.source: edit.key for edit in reversed(made_of) for part in reversed(edit.parts)}
    changes: list[Any] = [edit for edit in step.edits if type(edit) in CHANGES and not _is_added(edit)]
    changed_keys = {edit.key for edit in changes} - {edit.key for edit in made_of if edit.is_reshape}
    _refuse_conflicts(checkpoint, step, renames.keys() | changed_keys, dropped, set(used))

    entries = _moved(checkpoint, step, renames, dropped, made_of, used)
    made: dict[tuple[object, ...], TensorSpec] = {}
    value_sources = with_measurements(checkpoint, changes, value_sources)
    for change in changes:
        name = renames.get(change.key, change.key)
        # Tied tensors with the same change stay tied.
        entry = entries[name]
        same = replace(change, key="", source="") if isinstance(change, Adapt) else replace(change, key="")
        view = (entry.view, same) if isinstance(entry, TensorSpec) and entry.storage else (name,)
        if view not in made:
            made[view] = changed(checkpoint, entry, change, value_sources)
        entries[name] = made[view]
    entries = _with_additions(checkpoint, step, entries, value_sources)

    renames |= used
    kept = {key: renames.get(key, key) for key in checkpoint.entries if key not in dropped}
    metadata = _with_rows(checkpoint, step, rename_metadata(checkpoint.metadata, kept))
    lost = {key: spec for key, spec in checkpoint.lost.items() if key not in entries}
    # `picked` has names of the file, which are no longer valid after a rename.
    picked = checkpoint.picked if all(old == new for old, new in renames.items()) else None
    return _with_file_edits(replace(checkpoint, entries=entries, metadata=metadata, lost=lost, picked=picked), step)


def _is_added(edit: Edit) -> bool:
    return isinstance(edit, (Fill, Tie)) or (isinstance(edit, Adapt) and edit.source != edit.key)


def _refuse_conflicts(checkpoint: Checkpoint, step: Step, edited: set[str], dropped: set[str], used: set[str]) -> None:
    renamed = [edit.key for edit in step.edits if isinstance(edit, Rename)]
    if len(renamed) != len(set(renamed)):
        raise PlanError(f"{checkpoint.path}: {step.rule} renames a key twice in one step; remove one of the two edits")
    if absent := (edited | dropped | used) - checkpoint.entries.keys():
        raise mismatch(checkpoint, f"{step.rule} edits the key {min(absent)}, which does not exist")
    if both := (edited & (dropped | used)) or (dropped & used):
        raise PlanError(
            f"{checkpoint.path}: {step.rule} both changes and drops {min(both)}; remove one of the two edits"
        )


def _moved(
    checkpoint: Checkpoint,
    step: Step,
    renames: Mapping[str, str],
    dropped: set[str],
    made_of: Sequence[Assemble],
    used: Mapping[str, str],
) -> dict[str, Any]:
    """Return the entries under their new names; an assembled tensor is in the place of its first part."""
    made = assembled(checkpoint, made_of, step.rule)
    entries: dict[str, Any] = {}
    for key, entry in checkpoint.entries.items():
        arrivals = made.get(key, ()) if key in used else [(renames.get(key, key), entry)] * (key not in dropped)
        for name, value in arrivals:
            if name in entries:
                raise PlanError(
                    f"{checkpoint.path}: {step.rule} gives {name} two sources; look at the keys with `ckptfix inspect`"
                )
            entries[name] = value
    return entries


def _with_additions(
    checkpoint: Checkpoint, step: Step, entries: dict[str, Any], value_sources: ValueSources
) -> dict[str, Any]:
    """Return the entries with the added ones, each after the last entry of its module, else at the end."""
    additions: list[Any] = [edit for edit in step.edits if _is_added(edit)]
    if not additions:
        return entries
    last_of_module = {key.rpartition(".")[0]: key for key in entries}
    after: dict[str | None, list[tuple[str, TensorSpec]]] = {}
    added: dict[str, TensorSpec] = {}
    for addition in additions:
        if addition.key in entries or addition.key in added:
            raise PlanError(
                f"{checkpoint.path}: {step.rule} adds the key {addition.key}, which already exists; nothing is "
                "overwritten"
            )
        if isinstance(addition, Fill):
            value: object = filled(checkpoint, addition, value_sources)
        elif isinstance(addition, Adapt):
            value = adapted(checkpoint, checkpoint.entries.get(addition.source), addition, value_sources)
        else:
            value = entries.get(addition.to, added.get(addition.to))
        if not isinstance(value, TensorSpec):
            raise mismatch(checkpoint, f"{step.rule} ties {addition.key} to a key that is not there")
        after.setdefault(last_of_module.get(addition.key.rpartition(".")[0]), []).append((addition.key, value))
        added[addition.key] = value
    result: dict[str, Any] = {}
    for key, entry in entries.items():
        result[key] = entry
        result.update(after.get(key, ()))
    result.update(after.get(None, ()))
    return result


def _with_rows(checkpoint: Checkpoint, step: Step, metadata: Metadata | None) -> Metadata | None:
    try:
        return rename_rows(metadata, {edit.module: edit.to for edit in step.edits if isinstance(edit, RenameModule)})
    except KeyError as error:
        raise mismatch(checkpoint, f"{step.rule} renames the row {error} of _metadata, which does not exist") from error


def _with_file_edits(result: Checkpoint, step: Step) -> Checkpoint:
    """Return the checkpoint after the edits of a step that change the file, its container or its optimizers."""
    if any(isinstance(edit, Rewrite) for edit in step.edits):
        kept = tuple(fact for fact in result.remarks if fact.kind not in (*BESIDE, Kind.OTHER_SUFFIX))
        result = replace(result, damage=(), remarks=kept)
    if any(isinstance(edit, Disarm) for edit in step.edits):
        result = _disarmed(result)
    if conversions := [edit for edit in step.edits if isinstance(edit, Plain)]:
        result = _converted(result, conversions)
    if any(isinstance(edit, (Regroup, Omit)) for edit in step.edits):
        from ckptfix.engine.optimizers import with_optimizers

        result = with_optimizers(result, step.edits, step.rule)
    if retagged := {edit.device for edit in step.edits if isinstance(edit, Retag)}:
        result = replace(result, devices=tuple(device for device in result.devices if device not in retagged))
    return result


def _converted(checkpoint: Checkpoint, conversions: Sequence[Plain]) -> Checkpoint:
    """Return the checkpoint with its objects converted to plain data."""
    if all(edit.before == GRAPH_CODE for edit in conversions):
        # Code is never written, so only the remark about it is removed.
        remarks = tuple(remark for remark in checkpoint.remarks if remark.kind is not Kind.STORED_CODE)
        return replace(checkpoint, remarks=remarks)
    root, _ = plain_root(checkpoint)
    state_dict = value_at(root, checkpoint.container)
    remarks = tuple(remark for remark in checkpoint.remarks if remark.kind not in CONVERTED_REMARKS)
    # The entries do not include an optimizer among the weights, not even one that was an object.
    entries = {
        str(key): entry
        for key, entry in state_dict.items()
        if str(key) in checkpoint.entries and not is_of_training(entry)
    }
    return replace(checkpoint, entries=entries, root=root, remarks=remarks)


def _disarmed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with only the tensors of the state_dict and the versions of ``_metadata``."""
    metadata = {
        module: {name: value for name, value in row.items() if isinstance(value, int)}
        for module, row in (checkpoint.metadata or {}).items()
    }
    tensors = dict(checkpoint.specs)
    bare = replace(checkpoint, entries=tensors, metadata=metadata or None, root=tensors, container=(), candidates=())
    return replace(bare, beside={}, remarks=())
