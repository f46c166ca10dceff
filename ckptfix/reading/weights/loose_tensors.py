"""Tensors in plain attributes of modules, which are not in the state_dict.

``self.stride = torch.tensor(…)``, ``self.anchors = [tensor, …]`` and modules in a plain list are pickled with a whole
model and with TorchScript, but ``Module.state_dict`` skips them. Tensors that are no loss are ignored: views of a named
storage (``_flat_weights`` of an LSTM), tensors that hooks compute from a parameter (``weight`` beside ``weight_g`` of
weight_norm, ``weight_orig`` of spectral_norm and pruning), caches, gradients, metrics and optimizers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptfix.core.buffers import is_transient
from ckptfix.core.checkpoint import PathPart, value_at
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.weights.modules import is_module, module_parts

# torch's own attributes with named tensors, or tensors computed from them.
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights"})

# Names of attributes with values of the last run, or of objects around the model.
_PASSING = (
    r"(^|_)(hooks?|grads?|gradients?|cached?|caches|example|dummy|config|hparams|optimi[sz]ers?|optim|trainer)(_|$)"
)

# Classes whose tensors are not part of a model.
_AROUND = r"torch\.(optim|utils\.data|Generator)|(pytorch_lightning|lightning|accelerate)\."


def loose_remarks(root: Any, container: Iterable[PathPart], entries: Mapping[str, Any]) -> list[Fact]:
    """Return remarks on the attributes of the module at path ``container``; none for a plain state_dict.

    ``entries`` is its state_dict."""
    module = value_at(root, container)
    return attribute_remarks(_ModuleWalk().gather(module), entries) if is_module(module) else []


def own_attributes(module: Any) -> list[str]:
    """Return the names of attributes that a user's class sets on a module besides parameters, buffers and modules:
    class names, strides, a configuration. torch's own classes have none that a model needs."""
    if not is_module(module) or str(module.cls).startswith("torch."):
        return []
    return [
        name for name in module.attributes if isinstance(name, str) and not name.startswith("_") and name != "training"
    ]


def attribute_remarks(attributes: Mapping[str, Any], entries: Mapping[str, Any]) -> list[Fact]:
    """Return a remark for each attribute with tensors of its own, and one if they are larger than the state_dict."""
    # A storage and a view of a part of it share bytes.
    named = {id(part) for spec in tensors_in(entries) if spec.storage for part in (spec.storage, *spec.storage.parts)}
    loose: dict[tuple[object, ...], int] = {}
    remarks = []
    for name, value in attributes.items():
        views = {
            spec.view: spec.numel
            for spec in tensors_in(value)
            if spec.storage is not None and spec.numel and not {id(spec.storage), *map(id, spec.storage.parts)} & named
        }
        if views:
            loose.update(views)
            remarks.append(Fact(Kind.TENSOR_ATTRIBUTE, name))
    unnamed, kept = sum(loose.values()), sum(spec.numel for spec in tensors_in(entries))
    if unnamed > kept:
        remarks.append(Fact.of(Kind.MOST_IN_ATTRIBUTES, unnamed=unnamed, named=kept))
    return remarks


class _ModuleWalk:
    """A walk over a tree of modules for the tensors in attributes, each object at its first place only."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        # Storages of parameters and buffers, including non-persistent ones, which are deliberately not saved.
        self.known: set[int] = set()

    def gather(self, root: Opaque) -> dict[str, list[TensorSpec]]:
        """Return the tensors of every attribute by its key (``model.24.stride``)."""
        modules = list(self._modules(root))
        for _, module in modules:
            parts = module_parts(module) or {}
            for spec in tensors_in([parts.get("_parameters"), parts.get("_buffers")]):
                self.known.add(id(spec.storage))
        found: dict[str, list[TensorSpec]] = {}
        for prefix, module in modules:
            for name, value in _attributes(module):
                if specs := list(self._tensors(value)):
                    found[f"{prefix}{name}"] = specs
        return found

    def _modules(self, root: Opaque) -> Iterator[tuple[str, Opaque]]:
        """Yield the modules that have a place in the state_dict, each once, in its order."""
        pending: list[tuple[str, Any]] = [("", root)]
        while pending:
            prefix, module = pending.pop()
            parts = module_parts(module)
            if parts is None or id(module) in self.seen:
                continue
            self.seen.add(id(module))
            yield prefix, module
            pending += [(f"{prefix}{name}.", child) for name, child in reversed([*parts["_modules"].items()])]

    def _tensors(self, value: Any) -> Iterator[TensorSpec]:
        """Yield the tensors in the value of an attribute, also in modules inside a plain list."""
        pending = [value]
        while pending:
            value = pending.pop()
            if isinstance(value, TensorSpec):
                if not self.known & {id(storage) for storage in value.storages}:
                    yield value
                continue
            if not isinstance(value, (dict, list, tuple, Opaque)) or id(value) in self.seen:
                continue
            self.seen.add(id(value))
            if isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, (list, tuple)):
                pending += value
            elif is_module(value):
                parts = module_parts(value) or {}
                pending += [parts["_parameters"], parts["_buffers"], parts["_modules"]]
                pending += [child for _, child in _attributes(value)]
            elif not re.match(_AROUND, str(value.cls)):
                pending += [value.args, value.items, value.pairs, None if value.attributes else value.state]
                pending += [
                    child for name, child in value.attributes.items() if not re.search(_PASSING, str(name).lower())
                ]


def _attributes(module: Opaque) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module whose tensors would be a loss."""
    attributes: dict[Any, Any] = module.attributes  # in a crafted file, names may not be text
    if "_defaults" in attributes and "_persistent" in attributes:
        return  # a metric of torchmetrics, which starts from zero
    parameters = attributes.get("_parameters")
    names = parameters if isinstance(parameters, dict) else {}
    for name, value in attributes.items():
        if not isinstance(name, str) or name in _OWN or re.search(_PASSING, name.lower()):
            continue
        if isinstance(value, TensorSpec):
            # Only some releases have `original_inv_freq`, like `inv_freq`; and hooks compute `weight` from the
            # parameter `weight_v` or `weight_orig`.
            sources = (other for key, other in names.items() if str(key).startswith(f"{name}_"))
            is_computed = any(isinstance(other, TensorSpec) and other.numel == value.numel for other in sources)
            if is_computed or any(is_transient(leaf, value.shape) for leaf in (name, name.partition("_")[2])):
                continue
        yield name, value
