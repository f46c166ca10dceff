"""Walks over the object tree of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptfix.checkpoint import TensorSpec
from ckptfix.formats.objects import Opaque


def tensors_in(root: Any) -> Iterator[TensorSpec]:
    """Every strided tensor in a tree, in order, each object of the tree once."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorSpec):
            yield from value.strided_parts()
            continue
        if not isinstance(value, (dict, list, tuple, Opaque)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            # torch hangs `_metadata`, and others what they like, on an OrderedDict.
            children = [*value.values(), *getattr(value, "__dict__", {}).values()]
        elif isinstance(value, (list, tuple)):
            children = list(value)
        else:
            children = [value.args, value.state, value.items, value.pairs]
        pending.extend(reversed(children))
