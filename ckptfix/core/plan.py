"""Plans: the edits of the rules as data, which print, go to JSON and back, and can be undone.

A plan is a row of steps; each step sees the result of those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ckptfix.core.display import Displayed
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import EDITS, Assemble, Delta, Drop, Edit, Fill, MergeAdapter, Rename, RenameModule, Tie
from ckptfix.core.finding import counted
from ckptfix.core.parts import Part, inverse, shape_of
from ckptfix.errors import PlanError

PLAN_VERSION = 1  # the version of a plan's JSON form


class Step(Struct, frozen=True):
    """The edits that one rule proposed, applied together."""

    rule: str
    edits: tuple[Edit, ...]


class Plan(Displayed, Struct, frozen=True):
    """What will be done to a checkpoint, step by step."""

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

    def then(self, *steps: Step) -> Plan:
        """Return the plan with more steps."""
        return Plan((*self.steps, *steps))

    def inverse(self) -> Plan:
        """Return the plan that undoes this one. Raises ``PlanError`` for edits that lose data, such as casts."""
        steps: list[Step] = []
        for step in reversed(self.steps):
            # The rows of _metadata were renamed after the keys, and so go back before them.
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
        """Return the plan of JSON data. Raises ``PlanError`` if it is none."""
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
                f"not a ckptfix plan ({type(error).__name__}: {error}); a dry run of ckptfix repair writes one"
            ) from error


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


# What the fields of an edit take, by their annotation.
_FITS: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: type(value) is int and value >= 0,
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "float": lambda value: isinstance(value, float),
    "tuple[int, ...]": _is_shape,
    "tuple[str, ...]": lambda value: isinstance(value, tuple) and all(isinstance(text, str) for text in value),
    "tuple[Delta, ...]": lambda value: isinstance(value, tuple) and all(isinstance(delta, Delta) for delta in value),
    "tuple[Part, ...]": lambda value: isinstance(value, tuple) and all(isinstance(part, Part) for part in value),
}


def _edit(data: Mapping[str, Any]) -> Edit:
    kind = EDITS.get(data["edit"])
    if kind is None:
        raise PlanError(
            f"the plan has an edit {data['edit']!r:.40} that this ckptfix does not know; use the version that wrote it"
        )
    values = {name: value for name, value in data.items() if name != "edit"}
    if "parts" in values:
        try:
            values["parts"] = tuple(Part.from_json(part) for part in data["parts"])
        except ValueError as error:
            raise PlanError(
                f"the plan's edit {kind.kind} has a malformed part ({error}); write the plan again"
            ) from error
    if kind is MergeAdapter:
        values["deltas"] = tuple(Delta(**_fields(Delta, kind.kind, delta)) for delta in data["deltas"])
    values = _fields(kind, kind.kind, values)
    if values.get("dtype", "float32") not in DTYPES:
        raise PlanError(f"the plan's edit {kind.kind} has the dtype {values['dtype']!r:.40}, which torch does not have")
    return kind(**values)


def _fields(kind: type[Edit | Delta], edit: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part of a plan. Raises ``PlanError`` for one that is unknown, or of another type."""
    known = {name: kind.__annotations__[name] for name in kind.__struct_fields__}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    if not values.keys() <= known.keys():
        raise PlanError(
            f"the plan's edit {edit} has an unknown field {sorted(values.keys() - known)[0]}; write the plan again"
        )
    for name, value in values.items():
        if not _FITS[known[name]](value):
            raise PlanError(f"the plan's edit {edit} has the {name} {value!r:.40}; write the plan again")
    return values


def _taken_apart(edits: list[Assemble]) -> Iterator[Assemble]:
    """Yield the edits that give back the tensors whose parts were assembled."""
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
