"""Plans: the edits of the rules as data, which can be printed, converted to JSON and back, and undone.

A plan is a sequence of steps; each step sees the result of the previous ones."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct, ValidationError, convert

from ckptfix.core.display import Displayed
from ckptfix.core.edits import EDITS, Assemble, Drop, Edit, Fill, Rename, RenameModule, Tie
from ckptfix.core.finding import counted
from ckptfix.core.parts import inverse, shape_of
from ckptfix.errors import PlanError

if TYPE_CHECKING:
    Edits = tuple[Edit, ...]
else:  # a union of all kinds, so that msgspec checks every field when a plan is read
    Edits = tuple[functools.reduce(operator.or_, EDITS.values()), ...]

PLAN_VERSION = 1  # the version of a plan's JSON form


class Step(Struct, frozen=True):
    """The edits that one rule proposed, applied together."""

    rule: str
    edits: Edits


class Plan(Displayed, Struct, frozen=True):
    """The edits to apply to a checkpoint, step by step."""

    steps: tuple[Step, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits in order."""
        return tuple(edit for step in self.steps for edit in step.edits)

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __repr__(self) -> str:
        rules = ", ".join(step.rule for step in self.steps)
        return f"<Plan: {counted(len(self.edits), 'edit')}{f' of {rules}' if rules else ''}>"

    def inverse(self) -> Plan:
        """Return the plan that undoes this one. Raises ``PlanError`` for edits that lose data, such as casts."""
        steps: list[Step] = []
        for step in reversed(self.steps):
            # The rows of _metadata were renamed after the keys, so they are renamed back before them.
            rows = tuple(_invert(edit) for edit in step.edits if isinstance(edit, RenameModule))
            assembled = [edit for edit in step.edits if isinstance(edit, Assemble)]
            others = (edit for edit in step.edits if not isinstance(edit, (RenameModule, Assemble)))
            rest = (*(_invert(edit) for edit in others), *_taken_apart(assembled))
            steps += [Step(step.rule, edits) for edits in (rows, rest) if edits]
        return Plan(tuple(steps))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON data."""
        steps = [{"rule": step.rule, "edits": [edit.to_json() for edit in step.edits]} for step in self.steps]
        return {"ckptfix-plan": PLAN_VERSION, "steps": steps}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Return the plan from its JSON form. Raises ``PlanError`` if the data is not a plan."""
        version = data.get("ckptfix-plan") if isinstance(data, dict) else None
        if version is None:
            raise PlanError('not a plan: it has no "ckptfix-plan", its version; a dry run of ckptfix repair writes one')
        if version != PLAN_VERSION:
            raise PlanError(
                f"the plan has version {version!r}, this ckptfix applies version {PLAN_VERSION}; make it again"
            )
        try:
            return convert({"steps": data.get("steps")}, cls)
        except ValidationError as error:
            raise PlanError(
                f"not a plan that this ckptfix applies ({error}); a dry run of ckptfix repair writes one"
            ) from error


def _taken_apart(edits: list[Assemble]) -> Iterator[Assemble]:
    """Yield the edits that restore the source tensors of ``edits``."""
    dtypes = {part.source: edit.dtype for edit in edits for part in edit.parts}
    for key, parts in inverse({edit.key: edit.parts for edit in edits}).items():
        yield Assemble(key, dtypes[key], shape_of(parts), parts)


def _invert(edit: Edit) -> Edit:
    if isinstance(edit, Rename):
        return Rename(edit.to, edit.key)
    if isinstance(edit, RenameModule):
        return RenameModule(edit.to, edit.module)
    if isinstance(edit, (Fill, Tie)):
        return Drop(edit.key)
    raise PlanError(f"the edit {edit.kind} cannot be undone: what it removed is not in the plan; keep the source file")
