"""Inert stand-ins for the classes and objects of a pickle, and walks over the trees that they form."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from ckptfix.core.spec import TensorSpec


class Global(Struct, frozen=True, eq=False):
    """The name of a class or function in a pickle, which is never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


# Classes besides the built-in ones that `weights_only` accepts.
NATIVE = frozenset({"torch.Size", "torch.device", "collections.Counter"})

# The devices that torch knows without a plugin.
_DEVICE = (
    r"(cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone)"
    r"(:(0|[1-9]\d?))?"
)

_NO_PAIRS: Mapping[Any, Any] = MappingProxyType({})


class Opaque(Struct, eq=False):
    """A stand-in for an object: the name of its class, the arguments of its construction, and what was added later.

    ``items`` came by append, ``pairs`` by item assignment, ``state`` by ``__setstate__``. A file may hold a million
    objects, most of them without items and pairs, so containers are only created by ``own_items`` and ``own_pairs``."""

    cls: Global
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: _NO_PAIRS)
    state: Any = None
    _items: list[Any] | None = None
    _pairs: dict[Any, Any] | None = None

    @property
    def items(self) -> list[Any]:
        """The appended items, in order, for reading only."""
        return [] if self._items is None else self._items

    @property
    def pairs(self) -> dict[Any, Any]:
        """The items set by key, for reading only."""
        return {} if self._pairs is None else self._pairs

    def own_items(self) -> list[Any]:
        if self._items is None:
            self._items = []
        return self._items

    def own_pairs(self) -> dict[Any, Any]:
        if self._pairs is None:
            self._pairs = {}
        return self._pairs

    def __repr__(self) -> str:
        # Without the contents: a shared nested object would be printed 2^depth times.
        return f"<{self.cls}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """The instance dict, empty if the state is something else. A state ``(dict, slots)`` is merged into one."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2:
            return {str(k): v for part in self.state if isinstance(part, dict) for k, v in part.items()}
        return {}


def is_native(value: Opaque) -> bool:
    """Return whether an object is one that ``weights_only`` accepts, with arguments as torch pickles them."""
    name = str(value.cls)
    if name == "torch.device":
        is_said = all(isinstance(arg, str) or arg in range(100) for arg in value.args)
        return is_said and re.fullmatch(_DEVICE, ":".join(map(str, value.args))) is not None
    given = value.args[0] if value.args else {}
    is_whole = isinstance(given, (list, tuple)) and all(type(size) is int for size in given)
    is_made_by_torch = is_whole if value.args and name == "torch.Size" else isinstance(given, dict)
    return name in NATIVE and len(value.args) <= 1 and is_made_by_torch


# Containers of up to this many members, none of them a container, are visited each time and not recorded as seen: for a
# million rows of numbers next to the weights, recording costs more than visiting.
SMALL = 64


def tensors_in(root: Any, without: Callable[[Any], bool] = lambda _: False) -> Iterator[TensorSpec]:
    """Yield the strided tensors of a tree in order, visiting each object once and skipping those that ``without``
    returns True for."""
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


def tensors_by_path(root: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], TensorSpec]]:
    """Yield the tensors in nested dicts and lists, up to ``DEPTH`` levels, each with its path."""
    if isinstance(root, TensorSpec):
        yield from ((path, part) for part in root.strided_parts())
    elif isinstance(root, (dict, list, tuple)) and len(path) < DEPTH:
        for name, child in root.items() if isinstance(root, dict) else enumerate(root):
            if isinstance(child, _LEADS_ON):
                yield from tensors_by_path(child, (*path, name))


DEPTH = 16
_CONTAINERS = (dict, list, tuple, Opaque)
_LEADS_ON = (TensorSpec, *_CONTAINERS)


def _members(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        # An OrderedDict may have attributes, such as torch's `_metadata`. Either all keys are tensors or none is.
        attributes = getattr(value, "__dict__", None)
        keys = value if isinstance(next(iter(value), None), TensorSpec) else ()
        return [*keys, *value.values(), *(attributes or {}).values()] if attributes or keys else value.values()
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
    """Return whether a value contains tensors, such as packed weights or an extra state."""
    return any(True for _ in tensors_in(entry))


def mappings_in(root: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts in a container, including the pairs or state of objects, breadth first, each once, up to about a
    thousand containers."""
    seen: set[int] = set()
    pending = deque([root])
    while pending and len(seen) < MANY:
        value = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Opaque):
            value = value.pairs or value.state
        if isinstance(value, dict):
            yield value
        members = value.values() if isinstance(value, dict) else _members(value)
        pending += islice((member for member in members if isinstance(member, _CONTAINERS)), MANY)


# A container with more members is a log or the state_dict itself, and does not contain an optimizer.
MANY = 1000
DEPTH = 4  # levels of nested containers in which to look for an optimizer


def is_flat_optimizer(root: Any) -> bool:
    """Return whether a container is an optimizer's state with flat keys, ``state.fc.weight.exp_avg`` and
    ``param_groups.fc.weight.lr``, as in ``torch.distributed.checkpoint`` and torchtitan."""
    ends = (next(iter(root)), next(reversed(root))) if isinstance(root, dict) and len(root) > 1 else ()
    return {str(key).partition(".")[0] for key in ends} == {"state", "param_groups"} and all("." in key for key in ends)


def has_optimizer(root: Any, depth: int = DEPTH) -> bool:
    """Return whether a container may contain the ``state_dict`` of an optimizer."""
    if isinstance(root, dict):
        return (
            "param_groups" in root
            or is_flat_optimizer(root)
            or (
                (len(root) <= MANY or depth == DEPTH)  # at the top it may be among many weights
                and depth > 0
                and any(
                    has_optimizer(member, depth - 1) for member in root.values() if isinstance(member, (dict, list))
                )
            )
        )
    return isinstance(root, list) and depth > 0 and any(has_optimizer(member, depth - 1) for member in root[:MANY])
