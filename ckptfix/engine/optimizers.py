"""Applies the ``Regroup``, ``Moments`` and ``Omit`` edits of ``rules.following`` to the optimizers of a checkpoint,
lazily, as with weights."""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, ContainerPath, value_at
from ckptfix.core.edits import Assemble, Edit, Moments, Omit, Regroup
from ckptfix.core.objects import MANY
from ckptfix.core.parts import full
from ckptfix.core.spec import TensorSpec, contiguous_strides, with_own_storage
from ckptfix.engine.changes import assembled, mismatch
from ckptfix.maps.optimizer_states import BLOCKWISE, IN_LOOKAHEAD, SCALARS, Optimizer, beginning, flat, optimizers_of
from ckptfix.reading.tensors import spec_of_number


def with_optimizers(checkpoint: Checkpoint, edits: Sequence[Edit], rule: str) -> Checkpoint:
    """Return the checkpoint after the edits of its optimizers. Raises ``PlanError`` if they do not fit it."""
    root, beside = checkpoint.root, dict(checkpoint.beside)
    found = {optimizer.name: optimizer for optimizer in optimizers_of(checkpoint)}
    for edit in edits:
        if isinstance(edit, (Regroup, Omit)) and edit.where not in found:
            raise mismatch(checkpoint, f"{rule} edits the optimizer {edit.where}, which does not exist")
    for regroup in (edit for edit in edits if isinstance(edit, Regroup)):
        optimizer = found[regroup.where]
        made = regrouped(checkpoint, optimizer, edits, rule)
        if optimizer.is_flat:
            made = flat(made["state"], made["param_groups"])
        # If several optimizers have the same number of groups, the scheduler may belong to any of them.
        is_alone = all(each is optimizer or len(each.groups) != len(optimizer.groups) for each in found.values())
        like = regroup.like if is_alone and not optimizer.is_flat else ()
        is_beside = bool(optimizer.path) and optimizer.path[0] in beside
        old = {} if optimizer.is_flat else value_at(beside if is_beside else root, optimizer.path)
        if IN_LOOKAHEAD in old:
            made[IN_LOOKAHEAD] = made.pop("state")
        if is_beside:
            beside = _with(beside, optimizer.path, {**old, **made})
        else:
            root = _with(root, optimizer.path, {**old, **made})
        if like and like != tuple(range(len(optimizer.groups))):
            root, beside = (_with_schedulers(one, like, len(optimizer.groups)) for one in (root, beside))
    for edit in edits:
        if isinstance(edit, Omit):
            root = _with(root, found[edit.where].path, None)
    ordered = (key for edit in edits if isinstance(edit, Regroup) for key in edit.order)
    entries = {**{key: checkpoint.entries[key] for key in ordered if key in checkpoint.entries}, **checkpoint.entries}
    return replace(checkpoint, root=root, beside=beside, entries=entries)


# Names of a scheduler's lists with an item per group, unlike milestones, phases, and the schedulers of a sequence.
_OF_GROUPS = re.compile("lr|lambda|momentum|values")


def _with_schedulers(root: Any, like: tuple[int, ...], count: int, depth: int = 4) -> Any:
    """Return a container in which the lists of schedulers with an item per group follow the new groups."""
    if isinstance(root, list) and len(root) <= MANY and depth:
        return [_with_schedulers(one, like, count, depth - 1) for one in root]
    if not isinstance(root, dict) or len(root) > MANY or not depth:
        return root
    is_scheduler = "last_epoch" in root
    result = copy(root)
    for name, value in root.items():
        if is_scheduler and isinstance(value, list) and len(value) == count and _OF_GROUPS.search(str(name)):
            result[name] = [value[place] for place in like]
        else:
            result[name] = _with_schedulers(value, like, count, depth - 1)
    return result


def _with(root: Any, path: ContainerPath, value: dict[str, Any] | None) -> Any:
    """Return a copy of a container with another value at a path, or without the entry if the value is None."""
    if not path:
        return value
    result = copy(root)
    made = _with(root[path[0]], path[1:], value)
    if made is None and isinstance(root, dict):
        del result[path[0]]
    else:  # a list keeps its length, so that the indices of the others stay the same
        result[path[0]] = {} if made is None else made
    return result


def regrouped(checkpoint: Checkpoint, optimizer: Optimizer, proposed: Sequence[Edit], rule: str) -> dict[str, Any]:
    """Return the new ``state`` and ``param_groups``. Ids that are names become the keys of the result. Raises
    ``PlanError`` if the edits do not match the optimizer."""
    regroup = next(edit for edit in proposed if isinstance(edit, Regroup) and edit.where == optimizer.name)
    edits = [edit for edit in proposed if isinstance(edit, Moments) and edit.where == optimizer.name]
    ids = {str(number): number for number in optimizer.ids}
    used = {edit.source for edit in edits if edit.source is not None}
    used |= {part.source for edit in edits for part in edit.parts}
    out_of_range = any(edit.group >= len(regroup.like) for edit in edits)
    if not used <= ids.keys() or out_of_range or any(place >= len(optimizer.groups) for place in regroup.like):
        raise mismatch(
            checkpoint, f"{rule} names a parameter or a group that the optimizer {optimizer.name} does not have"
        )
    if regroup.layout not in ("", optimizer.layout):
        raise mismatch(
            checkpoint, f"{rule} is for an optimizer with other groups, names or states than {optimizer.name}"
        )
    shapes = {key: spec.shape for key, spec in checkpoint.specs.items()}
    known = {*shapes.values()}  # a parameter whose key is its number may be any of them
    sized = [edit for edit in edits if edit.shape]
    if others := [e.key for e in sized if e.shape not in ({shapes[e.key]} if e.key in shapes else known)]:
        raise mismatch(checkpoint, f"{rule} gives {optimizer.name} a state of another shape than that of {others[0]}")
    members: list[list[Any]] = [[] for _ in regroup.like]
    names: list[list[str]] = [[] for _ in regroup.like]
    state: dict[Any, Any] = {}
    ordered = sorted(edits, key=lambda edit: edit.group)
    rows = _assembled_rows(checkpoint, optimizer, ids, ordered, rule)
    for number, edit in enumerate(ordered):
        new = edit.key if optimizer.is_keyed else number
        members[edit.group].append(new)
        names[edit.group].append(edit.key)
        row = rows.get(edit.key)
        if edit.source is not None:
            row = optimizer.state.get(ids[edit.source])
            row = _reshaped(row, edit.shape) if edit.shape and row is not None else row
        if row is None and edit.source is None:
            row = _begun(optimizer, optimizer.groups[regroup.like[edit.group]], edit.shape)
        if row is not None:
            state[new] = row
    extra = {key: value for key, value in optimizer.state.items() if str(key) not in ids}
    groups = []
    for place, ids_of_group, keys in zip(regroup.like, members, names, strict=True):
        group = {**optimizer.groups[place], "params": ids_of_group}
        groups.append({**group, "param_names": keys} if "param_names" in group else group)
    return {"state": {**state, **extra}, "param_groups": groups}


def _begun(optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Return the initial state of a new parameter, None if it needs none."""
    numbers = beginning(optimizer, group)
    like = next(filter(None, map(optimizer.row, optimizer.ids)), {})
    found: dict[str, Any] = {}
    for name, number in (numbers or {}).items():
        value = like[name]
        is_tensor = isinstance(value, TensorSpec)
        found[name] = (
            spec_of_number(value.dtype, value.shape if name in SCALARS else shape, number) if is_tensor else number
        )
    return found or None


def _reshaped(row: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a row with its elementwise tensors reshaped."""
    count = TensorSpec("uint8", shape).numel
    result: dict[str, Any] = {}
    for name, value in row.items():
        is_of_blocks = name == "step" or BLOCKWISE.fullmatch(name)
        if isinstance(value, Mapping):
            result[name] = _reshaped(value, shape)
        elif isinstance(value, TensorSpec) and value.shape and value.numel == count and not is_of_blocks:
            result[name] = replace(value, shape=shape, strides=contiguous_strides(shape))
        else:
            result[name] = value
    return result


def _assembled_rows(
    checkpoint: Checkpoint, optimizer: Optimizer, ids: Mapping[str, Any], edits: Sequence[Moments], rule: str
) -> dict[str, dict[str, Any]]:
    """Return the rows that are assembled from parts of others, by key of the result. Moments are assembled like the
    weights; anything else is taken from the first source."""
    made_of = [edit for edit in edits if edit.parts]
    rows: dict[str, dict[str, Any]] = {edit.key: {} for edit in made_of}
    fields = {name: None for edit in made_of for name in optimizer.row(ids[edit.parts[0].source])}
    for field in fields:
        specs = {text: optimizer.row(number).get(field) for text, number in ids.items()}
        wanted = []
        for edit in made_of:
            first = specs[edit.parts[0].source]
            if isinstance(first, TensorSpec) and (first.numel > 1 or edit.parts[0].box == full(first.shape)):
                wanted.append(Assemble(edit.key, first.dtype, edit.shape, edit.parts))
            elif field in optimizer.row(ids[edit.parts[0].source]):
                rows[edit.key][field] = with_own_storage(first)
        entries = {text: spec for text, spec in specs.items() if isinstance(spec, TensorSpec)}
        for made in assembled(replace(checkpoint, entries=entries), wanted, rule).values():
            for key, spec in made:
                rows[key][field] = spec
    return rows
