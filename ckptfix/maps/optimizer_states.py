"""First of five steps for an optimizer: finds its state in the container of a checkpoint.

An ``Optimizer`` has a row of moments for each parameter, and the groups of parameters, by numbers or names. The next
step is ``rules.origins``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, ContainerPath, is_inside, path_name, value_at
from ckptfix.core.objects import DEPTH, MANY, Opaque, is_flat_optimizer, tensors_in
from ckptfix.core.parts import Shape
from ckptfix.core.spec import TensorSpec

# The hyperparameter of Adagrad that is the initial sum of squared gradients.
INITIAL = "initial_accumulator_value"
SCALARS = frozenset(("step", "mu_product"))  # state that is one number for a parameter of any shape
_BEGINNINGS: Mapping[str, float | str] = {
    **dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"), 0),
    **dict.fromkeys(("grad_avg", "acc_delta", "exp_inf", "prev"), 0),
    "mu_product": 1,
    "sum": INITIAL,
    "step_size": "lr",
}
"""Initial values of the state of torch's optimizers: a number, or the hyperparameter with the number."""
SLOW = frozenset(("slow_param", "slow_params", "slow_buffer"))  # copies of the weights that Lookahead keeps
IN_LOOKAHEAD = "fast_state"  # what the state of an optimizer in a Lookahead may be called
STATES = ("state", IN_LOOKAHEAD)


class Optimizer(Struct, frozen=True):
    """The state of an optimizer in a container: a row for each id, and the groups of ids."""

    path: ContainerPath
    state: Mapping[Any, Any]
    groups: tuple[Mapping[str, Any], ...]
    is_flat: bool = False  # whether the file has flat keys: `state.fc.weight.exp_avg`
    copies: str = ""
    """The entry inside or next to it that lists a copy of each parameter, as apex and Megatron keep in float32, and
    Lookahead as it was some steps ago."""

    @property
    def name(self) -> str:
        """Its place in the container: ``optimizer``, ``optimizer_states[0]``."""
        return path_name(self.path)

    @property
    def label(self) -> str:
        """Its name in a sentence: ``the optimizer``, ``the optimizer in optimizer_states[0]``."""
        return "the optimizer" if self.name == "optimizer" else f"the optimizer in {self.name}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of parameters of each group."""
        return tuple(len(group["params"]) for group in self.groups)

    @property
    def ids(self) -> list[Any]:
        """The ids of all groups, in order."""
        return [number for group in self.groups for number in group["params"]]

    @property
    def is_keyed(self) -> bool:
        """Whether the ids are names, so that their order has no meaning."""
        return bool(self.ids) and all(isinstance(number, str) for number in self.ids)

    @property
    def is_joint(self) -> bool:
        """Whether some state belongs to all parameters together, as in LBFGS, and so cannot follow a change of one."""
        return bool(self.copies) or any("prev_flat_grad" in self.row(number) for number in self.ids)

    @property
    def layout(self) -> str:
        """A checksum of the ids and stored names in each group, and of the names and shapes in their states."""
        groups = [(group["params"], group.get("param_names")) for group in self.groups]
        states = [
            [(name, value.shape if isinstance(value, TensorSpec) else None) for name, value in self.row(number).items()]
            for number in self.ids
        ]
        return f"{crc32(repr((groups, states)).encode()):08x}"

    def row(self, number: Any) -> Mapping[str, Any]:
        """Return the state of a parameter; empty if it never had a gradient."""
        row = self.state.get(number)
        return row if isinstance(row, Mapping) else {}


def optimizer_of(value: object, path: ContainerPath) -> Optimizer | None:
    """Return an optimizer's ``state_dict``, None for any other value."""
    if not isinstance(value, Mapping):
        return None
    if is_flat_optimizer(value):
        return _from_flat(value, path)
    state, groups = next((value[name] for name in STATES if name in value), None), value.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not groups:
        return None
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return None
    found = _with_copies(Optimizer(path, state, tuple(groups)), value)
    ids = found.ids
    is_usual = all(type(number) in (int, str) for number in ids) and len(set(map(str, ids))) == len(ids)
    return found if is_usual else None


def _with_copies(optimizer: Optimizer, around: Mapping[Any, Any]) -> Optimizer:
    """Return the optimizer with the name of the entry of ``around`` that lists a tensor for each of its parameters, if
    any: all in one list, one list per group, or one row per parameter."""
    for name, value in around.items():
        lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        if all(isinstance(each, list) for each in lists):
            tensors = [one for each in lists for one in each]
            if 1 < len(tensors) == sum(optimizer.sizes) and all(isinstance(one, TensorSpec) for one in tensors):
                return replace(optimizer, copies=str(name))
        rows = value.values() if isinstance(value, Mapping) and name not in STATES else ()
        if rows and all(isinstance(row, Mapping) and not SLOW.isdisjoint(row) for row in rows):
            return replace(optimizer, copies=str(name))
    return optimizer


def _from_flat(value: Mapping[Any, Any], path: ContainerPath) -> Optimizer | None:
    """Return the optimizer from flat keys, with a group per parameter, because options are stored per parameter."""
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, kept in value.items():
        part, _, rest = str(key).partition(".")
        name, _, option = rest.rpartition(".")
        if part not in parts or not name:
            return None
        parts[part].setdefault(name, {})[option] = kept
    groups = tuple({**options, "params": [name]} for name, options in parts["param_groups"].items())
    return (
        Optimizer(path, parts["state"], groups, is_flat=True)
        if parts["state"].keys() <= parts["param_groups"].keys()
        else None
    )


def flat(state: Mapping[Any, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state and groups of an optimizer whose ids are names, as flat keys."""
    found = {f"state.{name}.{what}": value for name, row in state.items() for what, value in row.items()}
    return found | {
        f"param_groups.{name}.{option}": value
        for group in groups
        for name in group["params"]
        for option, value in group.items()
        if option != "params"
    }


def optimizers_in(root: object, path: ContainerPath = ()) -> Iterator[Optimizer]:
    """Yield the optimizers in a container, in order."""
    found = optimizer_of(root, path)
    if found is not None:
        yield found
        return
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(root, (Mapping, list)) and (len(root) <= MANY or not path) and len(path) < DEPTH:
        members = root.items() if isinstance(root, Mapping) else enumerate(root)
    for name, member in members:
        if isinstance(name, (str, int)) and isinstance(member, (Mapping, list)):
            for one in optimizers_in(member, (*path, name)):
                yield _with_copies(one, root) if path and isinstance(root, Mapping) and not one.copies else one


def beginning(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the initial values of a new parameter's state by name; None if it starts without state, or the values are
    not known. Adagrad has a state from the start, fused SGD fails if only some parameters have a momentum, and torch
    loads flat keys only if each parameter has all of them."""
    rows = [row for row in map(optimizer.row, optimizer.ids) if row]
    names = rows[0].keys() if rows else ()
    is_needed = optimizer.is_flat or INITIAL in group or (group.get("fused") and "momentum_buffer" in names)
    if not names or not is_needed or any(row.keys() != names for row in rows) or group.get("dampening"):
        return None
    known = {name: _BEGINNINGS.get(name) for name in names}
    values = {name: group.get(number) if isinstance(number, str) else number for name, number in known.items()}
    found = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return found if len(found) == len(names) else None


def optimizers_of(checkpoint: Checkpoint) -> list[Optimizer]:
    """Return the optimizers in a checkpoint and in the files next to it."""
    return [*optimizers_in(checkpoint.root), *optimizers_in(checkpoint.beside)]


def parts_beside(checkpoint: Checkpoint) -> Iterator[tuple[str, list[TensorSpec], bool]]:
    """Yield the parts of a file outside the state_dict that have tensors: the name of each, its tensors, and whether it
    is an optimizer, which is always a separate part."""
    optimizers = list(optimizers_in(checkpoint.root)) if checkpoint.rest else []
    for place, specs in checkpoint.rest.items():
        left = {id(spec): spec for spec in specs}
        for optimizer in optimizers:
            if is_inside(optimizer.name, place):
                own = map(id, tensors_in(value_at(checkpoint.root, optimizer.path)))
                if found := [left.pop(each) for each in own if each in left]:
                    yield optimizer.name, found, True
        if left:
            yield place, list(left.values()), False


def values_in(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the state of a parameter by name, including that in a nested dict of bitsandbytes."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from values_in(value)
        else:
            yield str(name), value


def logical_shape(value: object) -> Shape:
    """Return the shape of a tensor in the state, the outer shape if it is an instance of a tensor subclass; empty for
    numbers."""
    if isinstance(value, TensorSpec):
        return value.shape
    if isinstance(value, Opaque) and value.cls.name == "_rebuild_from_type_v2" and len(value.args) > 2:
        made = value.args[2]
        size = made[2] if isinstance(made, tuple) and len(made) > 2 else ()
        return tuple(size.args[0] if isinstance(size, Opaque) and size.args else size) if size else ()
    return ()


# State of bitsandbytes in addition to a quantised moment: the scales and code tables of its blocks.
BLOCKWISE = re.compile(r"(absmax|qmap|new_max|max|unorm_vec|gnorm_vec)\d?")
# Shampoo's state per axis; SOAP and Kron keep theirs in lists.
_OF_AXES = r"(inv_)?pre_?cond(itioner)?_?\d*"
# With a mask, as in SPAM, the moments are those of the elements that it selects.
_SLICED = frozenset(("s", "p0"))  # Prodigy's state that is flattened, and perhaps of every n-th element only


def fits(row: Mapping[str, Any], shape: Shape) -> bool:
    """Return whether each tensor of a row may belong to a parameter of this shape: it has the same shape, one element,
    or, unless it is known to be elementwise, the shape of a factored moment of Adafactor."""
    return _fits(tuple((name, logical_shape(value)) for name, value in values_in(row)), shape)


@lru_cache(maxsize=1 << 10)  # the rows of a file have few distinct forms, and each is compared under many recipes
def _fits(form: tuple[tuple[str, Shape], ...], shape: Shape) -> bool:
    axes = range(len(shape))  # those of a matrix, or in timm the two longest of a kernel
    factored = {(*shape[:axis], *one, *shape[axis + 1 :]) for axis in axes for one in ((), (1,))}
    whole = {shape, (), (1,)}
    return all(
        found in whole
        or (len(shape) > 1 and name not in _BEGINNINGS and found in factored)
        or (name == "state1" and found == (2, *shape))  # two averages of bitsandbytes' AdEMAMix
        or BLOCKWISE.fullmatch(name)
        or re.fullmatch(_OF_AXES, name)
        or ((name in _SLICED or ("mask", shape) in form) and len(found) == 1 and found[0] <= prod(shape))
        for name, found in form
    )
