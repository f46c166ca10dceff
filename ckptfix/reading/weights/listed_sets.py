"""Sets of weights without names: lists of a model's parameters in order.

``torch_ema``, ``diffusers`` and score-based models store an average as ``{"shadow_params": [tensor, …]}``, made from
``model.parameters()``. The state_dict beside it has the same parameters in the same order, with buffers between them.
If their shapes allow only one assignment, the tensors of the list get its names. Without a state_dict, a rule uses the
model."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptfix.core.buffers import RUNNING_STATISTICS, split_key
from ckptfix.core.checkpoint import ContainerPath, is_inside, path_name
from ckptfix.core.spec import TensorSpec, ties
from ckptfix.reading.foreign.weightless import is_optimizer

DEPTH = 4  # levels of nested dicts that are searched


def listed_sets(value: Any, path: ContainerPath = ()) -> Iterator[tuple[ContainerPath, Sequence[TensorSpec]]]:
    """Yield the lists of tensors in nested dicts with their paths, except those of optimizers."""
    if isinstance(value, dict) and len(path) <= DEPTH and not is_optimizer(value):
        for name, child in value.items():
            if isinstance(name, str) and isinstance(child, (dict, list, tuple)):
                yield from listed_sets(child, (*path, name))
    elif isinstance(value, (list, tuple)) and len(value) > 1 and all(isinstance(each, TensorSpec) for each in value):
        yield path, value


def with_listed(root: Any, name: str, state_dict: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]] | None:
    """Return a state_dict with the tensors of the first list at or below path ``name`` added, and the set of weights
    that they form with the buffers: its keys, with the names of the tensors in the model.

    Each tensor gets a key of its own beside that of the same name. None if there is no such list."""
    for path, tensors in listed_sets(root):
        place = path_name(path)
        parameters = names_in_order(tensors, parameters_of(state_dict)) if is_inside(place, name) else None
        if parameters is not None:
            number_of = {key: number for number, key in enumerate(parameters)}
            for first, *aliases in ties(_specs(state_dict)):
                number_of |= dict.fromkeys(aliases, number_of[first]) if first in number_of else {}
            entries: dict[Any, Any] = {}
            names: dict[str, str] = {}
            for key, value in state_dict.items():
                own = f"{place}[{number_of[key]}] as {key}" if key in number_of else key
                entries |= {own: tensors[number_of[key]], key: value} if key in number_of else {key: value}
                names[own] = key
            return entries, names
    return None


def parameters_of(state_dict: Mapping[Any, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and shape of each parameter of a state_dict in order, tied ones once."""
    specs = _specs(state_dict)
    aliases = {key for group in ties(specs) for key in group[1:]}
    return [
        (key, spec.shape)
        for key, spec in specs.items()
        if key not in aliases and not spec.dtype.startswith("int") and split_key(key)[1] not in RUNNING_STATISTICS
    ]


def names_in_order(
    tensors: Collection[TensorSpec], parameters: Sequence[tuple[str, tuple[int, ...] | None]]
) -> list[str] | None:
    """Return the name of each tensor of a list by the order and shapes of the parameters; None if the assignment is not
    unique, or if half of the parameters or more are not in the list."""
    shapes = [tensor.shape for tensor in tensors]
    if not len(parameters) < 2 * len(shapes):
        return None
    first, last = _matched(shapes, parameters), _matched(reversed(shapes), reversed(parameters))
    return first if first == last[::-1] and len(first) == len(shapes) else None


def _matched(shapes: Iterable[tuple[int, ...]], parameters: Iterable[tuple[str, tuple[int, ...] | None]]) -> list[str]:
    """Return the name of the next parameter of each shape in turn, as far as there is one."""
    rest = iter(parameters)
    found = (next((key for key, own in rest if own == shape), None) for shape in shapes)
    return [key for key in found if key is not None]


def _specs(state_dict: Mapping[Any, Any]) -> dict[str, TensorSpec]:
    return {key: value for key, value in state_dict.items() if isinstance(key, str) and isinstance(value, TensorSpec)}
