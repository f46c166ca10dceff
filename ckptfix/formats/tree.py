"""Walks over the object tree of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptfix.checkpoint import TensorSpec
from ckptfix.formats.machine import Opaque


def tensors_in(root: Any) -> Iterator[TensorSpec]:
    """Every strided tensor in a tree, in order, each object of the tree once."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorSpec):
            yield from value.strided_parts()
            continue
        if isinstance(value, dict):
            children = list(value.values())
        elif isinstance(value, (list, tuple)):
            children = list(value)
        elif isinstance(value, Opaque):
            children = [value.args, value.state, value.items, value.pairs]
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            pending.extend(reversed(children))
