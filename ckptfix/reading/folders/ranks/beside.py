"""What trainers save beside the ranks of a model: the optimizer, in ranks of its own or as a folder.

verl has ``optim_world_size_8_rank_0.pt``, whose DTensors have the numbers of the parameters, accelerate
``optimizer_0_rank0.bin`` and the folder ``optimizer_0``, whose tensors have their names. The shapes of these moments
are those of weights that ``LOCAL_STATE_DICT`` has flattened. Schedulers and random states are each rank's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.core.wording import clauses
from ckptfix.errors import UnreadableError
from ckptfix.reading.foreign.weightless import is_optimizer
from ckptfix.reading.weights.document import Document

OPTIMIZER = "optimizer"

# The name of files or of a folder beside those of the model, and what reads them: None if no tensor in them is divided.
Beside = tuple[str, Callable[[], Document | None]]


def with_beside(document: Document, others: Iterable[Beside]) -> Document:
    """Return the document of a model with the optimizer that is beside it, under ``optimizer``.

    What cannot be merged is noted, and the weights are read without it."""
    for name, read in others:
        why = ""
        found: Document | None = None
        try:
            found = read()
        except UnreadableError as error:
            why = str(error).removeprefix(f"{document.path}: ")
        optimizer, root = _optimizer(found.root) if found is not None else None, document.root
        if found is not None and found.damage:
            optimizer, why = None, clauses(found.damage)
        if found is None or optimizer is None or not isinstance(root, dict) or OPTIMIZER in root:
            document = replace(document, remarks=[*document.remarks, Fact.of(Kind.RANK_LEFT_OUT, name, why=why)])
            continue
        if any(isinstance(entry, TensorSpec) for entry in root.values()):
            root = {"model": root}
        document = replace(
            document,
            root={**root, OPTIMIZER: optimizer},
            names=document.names | found.names,
            remarks=list(dict.fromkeys([*document.remarks, *found.remarks])),
        )
        document = _shaped(document, optimizer["state"])
    return document


def _optimizer(root: Any) -> dict[str, Any] | None:
    """Return the state of an optimizer: what was saved, or in it under a name, as accelerate has it; None if none."""
    held = root.get(OPTIMIZER, root) if isinstance(root, dict) else None
    return held if isinstance(held, dict) and is_optimizer(held) and isinstance(held.get("state"), dict) else None


def _shaped(document: Document, state: Mapping[Any, Any]) -> Document:
    """Return a document whose flattened weights have the shapes of their moments."""
    flattened = next((fact for fact in document.remarks if fact.kind is Kind.FLATTENED), None)
    weights = document.root.get("model")
    if flattened is None or not isinstance(weights, dict):
        return document
    left = []
    for key in flattened.data["keys"]:
        spec, moments = weights.get(key), state.get(key)
        held = moments.values() if isinstance(moments, dict) else ()
        shapes = {moment.shape for moment in held if isinstance(moment, TensorSpec) and moment.shape}
        shape = shapes.pop() if len(shapes) == 1 else ()
        if isinstance(spec, TensorSpec) and shape and math.prod(shape) == spec.numel:
            weights[key] = replace(spec, shape=shape, strides=contiguous_strides(shape))
        else:
            left.append(key)
    remarks = [fact for fact in document.remarks if fact is not flattened]
    return replace(document, remarks=[*remarks, *([Fact.of(Kind.FLATTENED, keys=tuple(left))] if left else ())])
