"""Plans: the edits of the rules as data, and the one place where they are applied.

A plan is a row of steps. The edits of one step apply at once, so that two keys may swap their names; each step sees the
result of those before it. Applying gives a new lazy checkpoint: no tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ckptfix.checkpoint import Checkpoint, Storage, TensorSpec, contiguous_strides
from ckptfix.errors import PlanError
from ckptfix.finding import EDITS, Cast, Drop, Edit, Fill, Plain, Rename, Reshape, Retag, Tie
from ckptfix.formats.plain import plain_root
from ckptfix.formats.sources import MemoryBytes
from ckptfix.metadata import rename_metadata

if TYPE_CHECKING:
    import torch

PLAN_VERSION = 1
"""The version of a plan's JSON form."""

CONVERTED_REMARKS = frozenset({"protocol", "numpy-weights", "tensor-subclass", "non-string-key", "plain-pickle"})
"""What was noticed while reading and is cured by writing plain data."""


@dataclass(frozen=True)
class Step:
    """The edits that one rule proposed, applied together."""

    rule: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Supplies:
    """Where the values of a ``Fill`` come from: the model's own initialisation, and the donor of ``--fill FILE``."""

    initial: Callable[[], Mapping[str, torch.Tensor]] | None = None
    donor: Checkpoint | None = None


@dataclass(frozen=True)
class Plan:
    """What will be done to a checkpoint, step by step."""

    steps: tuple[Step, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits in order."""
        return tuple(edit for step in self.steps for edit in step.edits)

    def __bool__(self) -> bool:
        return bool(self.steps)

    def then(self, step: Step) -> Plan:
        """The plan with one more step."""
        return Plan((*self.steps, step))

    def apply(self, checkpoint: Checkpoint, supplies: Supplies | None = None) -> Checkpoint:
        """The checkpoint after all steps. Raises ``PlanError`` where the plan does not fit it."""
        for step in self.steps:
            checkpoint = apply_step(checkpoint, step, supplies or Supplies())
        return checkpoint

    def inverse(self) -> Plan:
        """The plan that undoes this one. Raises ``PlanError`` for drops, casts and conversions, which lose data."""
        return Plan(
            tuple(Step(step.rule, tuple(_invert(edit) for edit in step.edits)) for step in reversed(self.steps))
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        steps = [{"rule": step.rule, "edits": [edit.to_json() for edit in step.edits]} for step in self.steps]
        return {"ckptfix-plan": PLAN_VERSION, "steps": steps}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """The plan of JSON data. Raises ``PlanError`` where it is none."""
        try:
            if data["ckptfix-plan"] != PLAN_VERSION:
                raise PlanError(
                    f"the plan has version {data['ckptfix-plan']!r}, this ckptfix applies version {PLAN_VERSION}; "
                    "make it again"
                )
            return cls(
                tuple(Step(str(step["rule"]), tuple(_edit(edit) for edit in step["edits"])) for step in data["steps"])
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"this is no plan of ckptfix ({type(error).__name__}: {error}); write one with --plan FILE"
            ) from error


def _edit(data: Mapping[str, Any]) -> Edit:
    kind = EDITS.get(data["edit"])
    if kind is None:
        raise PlanError(
            f"the plan has an edit {data['edit']!r:.40} that this ckptfix does not know; use the version that wrote it"
        )
    known = {field.name for field in fields(kind)}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name != "edit"
    }
    if not values.keys() <= known:
        raise PlanError(
            f"the plan's edit {kind.kind} has an unknown field {sorted(values.keys() - known)[0]}; write the plan again"
        )
    return kind(**values)


def _invert(edit: Edit) -> Edit:
    if isinstance(edit, Rename):
        return Rename(edit.to, edit.key)
    if isinstance(edit, Reshape):
        return Reshape(edit.key, edit.shape, edit.before)
    if isinstance(edit, (Fill, Tie)):
        return Drop(edit.key)
    raise PlanError(f"the edit {edit.kind} cannot be undone: what it removed is not in the plan; keep the source file")


def apply_step(checkpoint: Checkpoint, step: Step, supplies: Supplies) -> Checkpoint:
    """The checkpoint after one step. Raises ``PlanError`` on a conflict: two sources for one key, an edit of a key that
    is not there.
    """
    renames = _unique({edit.key: edit.to for edit in step.edits if isinstance(edit, Rename)}, step, Rename)
    dropped = {edit.key for edit in step.edits if isinstance(edit, Drop)}
    changes = [edit for edit in step.edits if isinstance(edit, (Cast, Reshape))]
    additions = [edit for edit in step.edits if isinstance(edit, (Fill, Tie))]
    for key in (*renames, *dropped, *(edit.key for edit in changes)):
        if key not in checkpoint.entries:
            raise PlanError(
                f"{checkpoint.path}: {step.rule} edits the key {key}, which is not there; the plan belongs to another "
                "file"
            )
    if both := renames.keys() & dropped:
        raise PlanError(
            f"{checkpoint.path}: {step.rule} both renames and drops {min(both)}; remove one of the two edits"
        )
    entries: dict[str, Any] = {}
    for key, entry in checkpoint.entries.items():
        if key not in dropped:
            name = renames.get(key, key)
            if name in entries:
                raise PlanError(
                    f"{checkpoint.path}: {step.rule} gives {name} two sources; look at the keys with `ckptfix inspect`"
                )
            entries[name] = entry
    for change in changes:
        name = renames.get(change.key, change.key)
        entries[name] = _changed(checkpoint, entries[name], change)
    entries = _with_additions(checkpoint, step, entries, additions, supplies)
    kept = {key: renames.get(key, key) for key in checkpoint.entries if key not in dropped}
    metadata = rename_metadata(checkpoint.metadata, kept)
    result = checkpoint.with_entries(entries, metadata)
    if any(isinstance(edit, Plain) for edit in step.edits):
        root, _ = plain_root(result)
        remarks = tuple(remark for remark in result.remarks if remark.kind not in CONVERTED_REMARKS)
        result = replace(result, root=root, remarks=remarks)
    retagged = {edit.device for edit in step.edits if isinstance(edit, Retag)}
    return (
        replace(result, devices=tuple(device for device in result.devices if device not in retagged))
        if retagged
        else result
    )


def _unique(renames: dict[str, str], step: Step, kind: type[Edit]) -> dict[str, str]:
    if len(renames) != sum(isinstance(edit, kind) for edit in step.edits):
        raise PlanError(f"{step.rule} renames one key twice in a step; remove one of the two edits")
    return renames


def _changed(checkpoint: Checkpoint, spec: object, change: Cast | Reshape) -> TensorSpec:
    if not isinstance(spec, TensorSpec):
        raise PlanError(
            f"{checkpoint.path}: {change.key} is no tensor and cannot be changed; the plan belongs to another file"
        )
    if isinstance(change, Cast):
        if spec.dtype != change.before:
            raise PlanError(
                f"{checkpoint.path}: {change.key} is {spec.dtype} and not {change.before}; the plan belongs to "
                "another file"
            )
        from ckptfix.tensors import cast_spec

        return cast_spec(spec, change.dtype, checkpoint.path)
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


def _filled(checkpoint: Checkpoint, fill: Fill, supplies: Supplies) -> TensorSpec:
    if fill.origin == "zeros":
        spec = TensorSpec(fill.dtype, fill.shape)
        storage = Storage("zeros", MemoryBytes(bytes(spec.nbytes)))
        return replace(spec, strides=contiguous_strides(fill.shape), storage=storage)
    if fill.origin == "target":
        if supplies.initial is None:
            raise PlanError(
                f"{checkpoint.path}: {fill.key} is to be filled from the model, and no model is given; add --model"
            )
        from ckptfix.tensors import spec_of_tensor

        values = supplies.initial()
        if fill.key not in values:
            raise PlanError(
                f"{checkpoint.path}: the model has no {fill.key} to fill from; the plan belongs to another model"
            )
        return replace(spec_of_tensor(values[fill.key].detach()), is_parameter=False)
    donor = supplies.donor.entries.get(fill.donor_key or fill.key) if supplies.donor is not None else None
    if not isinstance(donor, TensorSpec) or donor.shape != fill.shape:
        raise PlanError(
            f"{checkpoint.path}: {fill.key} is to be filled from a donor that does not have it in this shape; give it "
            "with --fill FILE"
        )
    return donor


def _with_additions(
    checkpoint: Checkpoint, step: Step, entries: dict[str, Any], additions: list[Fill | Tie], supplies: Supplies
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
            value: object = _filled(checkpoint, addition, supplies)
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
