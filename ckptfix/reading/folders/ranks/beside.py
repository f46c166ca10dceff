"""The optimizer that a trainer saved beside the ranks of a model, in files of ranks or in a folder of its own.

verl has ``optim_world_size_8_rank_0.pt``, whose DTensors are keyed by the numbers of parameters, accelerate
``optimizer_0_rank0.bin`` and the folder ``optimizer_0``, whose tensors are keyed by name. Weights that
``LOCAL_STATE_DICT`` flattened get the shapes of their moments. Schedulers and random states differ between ranks, and
are not merged."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError, one_line
from ckptfix.reading.foreign.weightless import is_optimizer
from ckptfix.reading.weights.document import Document

OPTIMIZER = "optimizer"

# The name of files or of a folder beside the model, and a function that reads them (None if no tensor is sharded).
Beside = tuple[str, Callable[[], Document | None]]


def with_beside(document: Document, others: Iterator[Beside]) -> Document:
    """Return the document of a model with the optimizer beside it added under ``optimizer``.

    Files that cannot be merged are remarked and left out. If some are missing or damaged, the optimizer is lost, which
    is damage."""
    for name, read in others:
        why = ""
        found: Document | None = None
        try:
            found = read()
        except UnreadableError as error:
            why = one_line(str(error.args[0]).removeprefix(f"{document.path}: "))
        if found is not None and found.damage:
            lost = [*found.damage, Fact(Kind.EXTRAS_LOST, OPTIMIZER)]
            document = replace(document, damage=[*document.damage, *lost])
            continue
        optimizer, root = _optimizer(found.root) if found is not None else None, document.root
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


def sort_groups(root: Any) -> None:
    """Put the names in the groups of optimizers into the order of the weights, which is that of the model's parameters:
    plain torch goes by position, and FSDP 1 has an order of its own."""
    members = root.values() if isinstance(root, dict) else ()
    # Lightning has its optimizers in a list.
    parts = [part for member in members for part in (member if isinstance(member, list) else [member])]
    parts = [part for part in parts if isinstance(part, dict)]
    for group in chain.from_iterable(groups for part in parts if isinstance(groups := part.get("param_groups"), list)):
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            continue
        weights: Mapping[Any, Any] = next((part for part in parts if part.keys() >= {*names}), {})
        if weights:
            names.sort(key={name: place for place, name in enumerate(weights)}.__getitem__)


def _optimizer(root: Any) -> dict[str, Any] | None:
    """Return the state of an optimizer: the root, or its member ``optimizer`` (accelerate); None if it is neither."""
    held = root.get(OPTIMIZER, root) if isinstance(root, dict) else None
    return held if isinstance(held, dict) and is_optimizer(held) and isinstance(held.get("state"), dict) else None


def _shaped(document: Document, state: Mapping[Any, Any]) -> Document:
    """Return the document with its flattened weights in the shapes of their moments."""
    flattened = next((fact for fact in document.remarks if fact.kind is Kind.FLATTENED), None)
    weights = document.root.get("model")
    if flattened is None or not isinstance(weights, dict):
        return document
    shaped: dict[int, TensorSpec] = {}  # by the flat tensor, which is the same for tied weights
    for key in flattened.data["keys"]:
        spec, moments = weights.get(key), state.get(key)
        held = moments.values() if isinstance(moments, dict) else ()
        shapes = {moment.shape for moment in held if isinstance(moment, TensorSpec) and moment.shape}
        shape = shapes.pop() if len(shapes) == 1 else ()
        if isinstance(spec, TensorSpec) and shape and math.prod(shape) == spec.numel:
            shaped[id(spec)] = replace(spec, shape=shape, strides=contiguous_strides(shape))
    left = [key for key in flattened.data["keys"] if id(weights.get(key)) not in shaped]
    weights.update({key: shaped[id(spec)] for key, spec in weights.items() if id(spec) in shaped})
    remarks = [fact for fact in document.remarks if fact is not flattened]
    return replace(document, remarks=[*remarks, *([Fact.of(Kind.FLATTENED, keys=tuple(left))] if left else ())])
