"""The state_dict of a pickled nn.Module whose class stays closed.

torch.save(model) writes every module as its class's name and its instance dict. ``_parameters``, ``_buffers`` and
``_modules`` in there are what ``Module.state_dict`` looks at (``torch/nn/modules/module.py``), so the weights come
out without the class. Classes of torch that pickle otherwise, or add to their state_dict, are known here and in
``quantized_modules``; what a class from elsewhere adds in code of its own is not in the file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from ckptfix.core.objects import Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import HostileError
from ckptfix.reading.weights.quantized_modules import (
    is_script_object,
    packed_attributes,
    packed_entries,
    quantized_version,
)

DEPTH_LIMIT = 200
# Modules and tensors in one tree: each place of a shared one counts, and nested shared ones have 2^depth places.
PLACE_LIMIT = 200_000
# Modules met again, which cost a small file nothing.
REPEAT_LIMIT = 20_000

# What torch.compile makes of a module: it pickles as a call with the module that it wraps.
COMPILED = "torch._dynamo.eval_frame.OptimizedModule"

# What a lazy module has in place of weights before its first forward pass.
UNINITIALIZED = frozenset({"torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer"})

# What a module has of its weights and of the modules in it, in this order.
PARTS = ("_parameters", "_buffers", "_modules")


def is_module(value: Any) -> bool:
    """Return whether an inert object was an ``nn.Module``."""
    return module_parts(value) is not None


def is_uninitialized(value: Any) -> bool:
    """Return whether a value is the parameter or buffer of a lazy module that never ran, so that it has no shape."""
    return isinstance(value, Opaque) and str(value.cls) in UNINITIALIZED


def module_state_dict(module: Opaque, path: str) -> OrderedDict[str, Any]:
    """Return the state_dict of an inert module in torch's order, without its non-persistent buffers, with ``_metadata``
    as attribute.

    Most entries are ``TensorSpec``; those of quantised modules may be tuples, dtypes and closed objects, as in torch.
    A part that no rule here takes apart is under the module's own name, as the closed object that it is."""
    gatherer = _Gatherer(path)
    gatherer.gather(module, "", 0)
    gatherer.entries.__dict__["_metadata"] = gatherer.metadata
    return gatherer.entries


def module_parts(value: Any) -> Mapping[str, Any] | None:
    """Return the ``_parameters``, ``_buffers`` and ``_modules`` of a module; None if the value is not a module."""
    if not isinstance(value, Opaque):
        return None
    if str(value.cls) == COMPILED and not value.attributes and value.args and is_module(value.args[0]):
        return {"_parameters": {}, "_buffers": {}, "_modules": {"_orig_mod": value.args[0]}}
    if isinstance(value.state, tuple) and any(True for _ in packed_entries(value, {})):
        return {"_parameters": {}, "_buffers": {}, "_modules": {}}  # it packs itself
    attributes = value.attributes
    return attributes if all(isinstance(attributes.get(name), dict) for name in PARTS) else None


class _Gatherer(Struct):
    """One walk over a tree of modules."""

    path: str
    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    metadata: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    looks: int = PLACE_LIMIT
    seen: set[int] = field(default_factory=set)
    repeats: int = 0

    def gather(self, module: Opaque, prefix: str, depth: int) -> None:
        """Take up a module and what is below it."""
        self.repeats += id(module) in self.seen
        self.seen.add(id(module))
        too_many = len(self.metadata) + len(self.entries) > PLACE_LIMIT or self.repeats > REPEAT_LIMIT
        if depth > DEPTH_LIMIT or too_many or len(prefix) > 10_000:
            raise HostileError(
                f"{self.path}: modules nested deeper than {DEPTH_LIMIT}, or one inside of another over and over; do "
                "not use this file"
            )
        parts = module_parts(module) or {name: {} for name in PARTS}
        self.metadata[prefix.removesuffix(".")] = _row(module, parts)
        transient = parts.get("_non_persistent_buffers_set")
        if not isinstance(transient, (set, frozenset)):
            transient = frozenset()
        for name, value in (*parts["_parameters"].items(), *parts["_buffers"].items()):
            if (isinstance(value, TensorSpec) or is_uninitialized(value)) and name not in transient:
                self.entries[f"{prefix}{name}"] = value
        for name, value in packed_entries(module, parts["_modules"]):
            self.entries[f"{prefix}{name}"] = value
        for name, child in parts["_modules"].items():
            if is_module(child):
                self.gather(child, f"{prefix}{name}.", depth + 1)
            elif isinstance(child, Opaque):
                if not is_script_object(child):
                    self.metadata[f"{prefix}{name}"] = {"version": quantized_version(child) or 1}
                if self._holds_tensors(child):
                    self.entries.setdefault(f"{prefix}{name}", child)
        for name, value in packed_attributes(module):
            self.entries[f"{prefix}{name}"] = value

    def _holds_tensors(self, value: Any, depth: int = 0) -> bool:
        """Return whether an object other than a module has, or may have, weights close below: the search is bounded."""
        self.looks -= 1
        if isinstance(value, TensorSpec) or self.looks < 0:
            return True
        children: Iterable[Any] = ()
        if isinstance(value, Opaque):
            children = (value.args, value.state)
        elif isinstance(value, dict):
            children = value.values()
        elif isinstance(value, (list, tuple)):
            children = value
        return depth < 8 and any(self._holds_tensors(child, depth + 1) for child in children)


def _row(module: Opaque, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a module in ``_metadata``. Versions are class attributes and not in the file.

    Only the batch norms, when they got their count (0.4.1), and some modules for quantisation ever left version 1; the
    hook of ``spectral_norm`` adds its own."""
    version = 2 if "num_batches_tracked" in parts["_buffers"] else quantized_version(module) or 1
    row: dict[str, Any] = {"version": version}
    hooks = parts.get("_state_dict_hooks")
    for hook in hooks.values() if isinstance(hooks, dict) else ():
        if isinstance(hook, Opaque) and str(hook.cls) == "torch.nn.utils.spectral_norm.SpectralNormStateDictHook":
            norm = hook.attributes.get("fn")
            name = norm.attributes.get("name") if isinstance(norm, Opaque) else None
            if isinstance(name, str):
                row.setdefault("spectral_norm", {})[f"{name}.version"] = 1
    return row
