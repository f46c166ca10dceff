"""The state_dict of a pickled nn.Module whose class stays closed.

torch.save(model) writes every module as its class's name and its instance dict. ``_parameters``, ``_buffers`` and
``_modules`` in there are all that ``Module.state_dict`` looks at (``torch/nn/modules/module.py``), so the weights come
out without the class."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ckptfix.checkpoint import TensorSpec
from ckptfix.errors import HostileError
from ckptfix.formats.objects import Opaque

DEPTH_LIMIT = 200
PLACE_LIMIT = 200_000
"""Modules and tensors in one tree: each place of a shared one counts, and nested shared ones have 2^depth places."""


def is_module(value: Any) -> bool:
    """Whether an inert object was an ``nn.Module``."""
    return isinstance(value, Opaque) and all(
        isinstance(value.attributes.get(name), dict) for name in ("_parameters", "_buffers", "_modules")
    )


def module_state_dict(module: Opaque, path: str) -> OrderedDict[str, Any]:
    """The state_dict of an inert module in torch's order, without its non-persistent buffers, with ``_metadata`` as
    attribute.
    """
    entries: OrderedDict[str, Any] = OrderedDict()
    metadata: OrderedDict[str, Any] = OrderedDict()
    _gather(module, "", path, 0, entries, metadata)
    entries.__dict__["_metadata"] = metadata
    return entries


def _gather(
    module: Opaque, prefix: str, path: str, depth: int, entries: dict[str, Any], metadata: dict[str, Any]
) -> None:
    if depth > DEPTH_LIMIT or len(metadata) + len(entries) > PLACE_LIMIT or len(prefix) > 10_000:
        raise HostileError(
            f"{path}: modules nested deeper than {DEPTH_LIMIT}, or one inside of another over and over; do not use "
            "this file"
        )
    attributes = module.attributes
    # Versions are class attributes and not in the file. Only the batch norms ever left version 1, when they got their
    # count (0.4.1).
    metadata[prefix.removesuffix(".")] = {"version": 2 if "num_batches_tracked" in attributes["_buffers"] else 1}
    transient = attributes.get("_non_persistent_buffers_set")
    if not isinstance(transient, (set, frozenset)):
        transient = frozenset()
    for name, value in (*attributes["_parameters"].items(), *attributes["_buffers"].items()):
        if isinstance(value, TensorSpec) and name not in transient:
            entries[f"{prefix}{name}"] = value
    for name, child in attributes["_modules"].items():
        if is_module(child):
            _gather(child, f"{prefix}{name}.", path, depth + 1, entries, metadata)
