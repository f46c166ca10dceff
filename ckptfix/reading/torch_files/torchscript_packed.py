"""The quantised layers of TorchScript as a whole model has them, so that ``quantized_modules`` reads both.

A scripted layer has the name of its Python class behind ``__torch__.``, with a mark where two had one name. Its packed
weights are an object of one of torch's own classes, which is a ``torch.ScriptObject`` to Python. The lists in there
carry their types in calls, which are looked through: https://github.com/pytorch/pytorch/blob/main/torch/jit/_pickle.py
"""

from __future__ import annotations

import re
from typing import Any

from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import HostileError
from ckptfix.reading.weights.quantized_modules import SCRIPT_OBJECT

CLASSES = "__torch__.torch.classes."
"""How the names of torch's own classes begin; a user's are named after their Python modules."""

DEPTH_LIMIT = 100
_TYPED = "torch.jit._pickle."
_ROOT = re.compile(r"^__torch__\.|\.___torch_mangle_\d+")


def python_class(cls: Global) -> Global:
    """The Python class that was compiled: ``a.B`` where TorchScript says ``__torch__.a.___torch_mangle_3.B``."""
    return Global(_ROOT.sub("", cls.module), cls.name)


def python_module(module: Opaque, path: str) -> Opaque:
    """A module with the names that its pickle in Python has: its own class's, and that of the ScriptObjects in it."""
    state: Any = module.state
    if isinstance(state, dict):
        state = {name: unpacked(value, path) if is_packed(value) else value for name, value in state.items()}
    else:
        state = unpacked(state, path)
    return Opaque(python_class(module.cls), state=state)


def is_packed(value: Any) -> bool:
    """Whether a value is an object of a class of torch itself, with its state in a tuple."""
    return isinstance(value, Opaque) and str(value.cls).startswith(CLASSES)


def unpacked(value: Any, path: str) -> Any:
    """Plain tuples and lists, with every object in them as Python pickles it: a ``torch.ScriptObject`` whose state is
    ``(contents, class)``. Raises ``HostileError`` where they have no end.
    """
    return _Unpacking(path).plain(value, 0)


class _Unpacking:
    """One unpacking: what stands in two places is unpacked once, and stays one object."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.done: dict[int, Any] = {}

    def plain(self, value: Any, depth: int) -> Any:
        if depth > DEPTH_LIMIT:
            raise HostileError(f"{self.path}: packed parameters nested deeper than {DEPTH_LIMIT}; do not use this file")
        if not isinstance(value, (list, tuple, Opaque)):
            return value
        if id(value) not in self.done:
            self.done[id(value)] = self._plain(value, depth + 1)
        return self.done[id(value)]

    def _plain(self, value: list[Any] | tuple[Any, ...] | Opaque, depth: int) -> Any:
        if isinstance(value, list):
            return [self.plain(item, depth) for item in value]
        if isinstance(value, tuple):
            return tuple(self.plain(item, depth) for item in value)
        if str(value.cls).startswith(_TYPED) and value.args:
            return self.plain(value.args[0], depth)
        if not isinstance(value.state, tuple):
            return value
        module, _, name = SCRIPT_OBJECT.rpartition(".")
        return Opaque(Global(module, name), state=(self.plain(value.state, depth), str(value.cls)))
