"""The state_dict of a pickled nn.Module, without its class.

torch.save(model) writes every module as the name of its class and its instance dict. ``Module.state_dict`` uses only
``_parameters``, ``_buffers`` and ``_modules`` of that dict (``torch/nn/modules/module.py``), so the weights can be read
without the class. Classes of torch that pickle in other ways, or add entries to their state_dict, are handled here and
in ``quantized_modules``. Entries that other classes add in their own code are not in the file."""

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
# Modules and tensors in a tree: each place of a shared one counts, and nested shared modules have 2^depth places.
PLACE_LIMIT = 200_000
# Repeated places of shared modules, which take almost no bytes in a file.
REPEAT_LIMIT = 20_000

# The class of a module after torch.compile, which pickles as a call with the wrapped module.
COMPILED = "torch._dynamo.eval_frame.OptimizedModule"

# The classes of a lazy module's weights before its first forward pass.
UNINITIALIZED = frozenset({"torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer"})

# The attributes with a module's weights and submodules, in this order.
PARTS = ("_parameters", "_buffers", "_modules")


def is_module(value: Any) -> bool:
    """Return whether an inert object was an ``nn.Module``."""
    return module_parts(value) is not None


def is_uninitialized(value: Any) -> bool:
    """Return whether a value is the parameter or buffer of a lazy module that never ran, which has no shape."""
    return isinstance(value, Opaque) and str(value.cls) in UNINITIALIZED


def module_state_dict(module: Opaque, path: str) -> OrderedDict[str, Any]:
    """Return the state_dict of an inert module in torch's order, without non-persistent buffers, with ``_metadata`` as
    an attribute.

    Most entries are ``TensorSpec``; those of quantised modules may be tuples, dtypes and opaque objects, as in torch.
    Submodules of unknown form are opaque objects under their own names."""
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
        return {"_parameters": {}, "_buffers": {}, "_modules": {}}  # a class that pickles itself as a tuple
    attributes = value.attributes
    return attributes if all(isinstance(attributes.get(name), dict) for name in PARTS) else None


class _Gatherer(Struct):
    """A walk over a tree of modules for its state_dict."""

    path: str
    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    metadata: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    looks: int = PLACE_LIMIT
    seen: set[int] = field(default_factory=set)
    repeats: int = 0

    def gather(self, module: Opaque, prefix: str, depth: int) -> None:
        """Add the entries of a module and its submodules."""
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
            is_kept = isinstance(value, TensorSpec) or is_uninitialized(value)
            # A subclass of Parameter that pickles as a call of its own is opaque.
            is_kept = is_kept or (isinstance(value, Opaque) and self._holds_tensors(value))
            if is_kept and name not in transient:
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
        persistent = module.attributes.get("_persistent")  # which states a metric of torchmetrics saves
        for name, is_saved in persistent.items() if isinstance(persistent, dict) else ():
            if is_saved is True and isinstance(value := module.attributes.get(name), TensorSpec):
                self.entries[f"{prefix}{name}"] = value

    def _holds_tensors(self, value: Any, depth: int = 0) -> bool:
        """Return whether an object that is not a module contains tensors, or may: the search is bounded."""
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
    """Return the row of a module in ``_metadata``. Versions are class attributes, which are not in the file.

    Only batch norms (since they count batches, torch 0.4.1) and some quantised modules have versions above 1. The hook
    of ``spectral_norm`` adds its own version."""
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
