"""Walks over the object tree of a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from ckptfix.core.objects import Opaque
from ckptfix.core.spec import TensorSpec

SMALL = 64
"""Members up to which a container without another one in it is looked at each time that it is met, and not remembered:
a million rows of numbers beside the weights would cost more to remember than to read."""


def tensors_in(root: Any, without: Callable[[Any], bool] = lambda _: False) -> Iterator[TensorSpec]:
    """Yield every strided tensor in a tree, in order, each object of the tree once, and nothing below the objects that
    ``without`` names."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorSpec):
            yield from value.strided_parts()
            continue
        if id(value) in seen or without(value):
            continue
        children = [child for child in _members(value) if isinstance(child, _LEADS_ON)]
        if children or len(_members(value)) > SMALL:
            seen.add(id(value))
        pending.extend(reversed(children))


_LEADS_ON = (TensorSpec, dict, list, tuple, Opaque)


def _members(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        # torch hangs `_metadata`, and others what they like, on an OrderedDict.
        attributes = getattr(value, "__dict__", None)
        return [*value.values(), *attributes.values()] if attributes else value.values()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Opaque):
        return [
            part
            for part in (value.args, value.state, value.items, value.pairs)
            if isinstance(part, TensorSpec | Opaque) or part
        ]
    return ()


def holds_tensors(entry: object) -> bool:
    """Return whether an entry of the state_dict that is no tensor has tensors in it: packed weights, an extra state."""
    return any(True for _ in tensors_in(entry))


MANY = 1000
"""Members of a container from which on it is a log, or the state_dict itself, and not a place for an optimizer."""


def is_flat_optimizer(root: Any) -> bool:
    """Return whether a container is an optimizer's state in flat keys, ``state.fc.weight.exp_avg`` and
    ``param_groups.fc.weight.lr``, as ``torch.distributed.checkpoint`` and torchtitan have it."""
    ends = (next(iter(root)), next(reversed(root))) if isinstance(root, dict) and len(root) > 1 else ()
    return {str(key).partition(".")[0] for key in ends} == {"state", "param_groups"} and all("." in key for key in ends)


def has_optimizer(root: Any, depth: int = 4) -> bool:
    """Return whether the ``state_dict`` of an optimizer may be in a container."""
    if isinstance(root, dict):
        return (
            "param_groups" in root
            or is_flat_optimizer(root)
            or (depth > 0 and len(root) <= MANY and any(has_optimizer(member, depth - 1) for member in root.values()))
        )
    return isinstance(root, list) and depth > 0 and any(has_optimizer(member, depth - 1) for member in root[:MANY])
