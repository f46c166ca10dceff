"""What can be seen of a checkpoint without its weights: the layout of its keys, and the class of a whole model."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Kind as FactKind
from ckptfix.core.objects import Opaque
from ckptfix.core.progress import Task
from ckptfix.errors import CkptfixError, HostileError
from ckptfix.known.recognition import Shapes, modern_name
from ckptfix.known.table import is_passing
from ckptfix.reading.opening import open_file
from ckptfix.reading.weights.modules import is_module, module_parts
from ckptfix.rules.wrapper_segment import WRAPPER_SEGMENTS, bare, colliding, has_wrapper_segment
from ckptfix.zoo.items.grouping import Item, Kind
from ckptfix.zoo.places import Place
from ckptfix.zoo.resources import room_at
from ckptfix.zoo.work.fetching import each_on_this_machine
from ckptfix.zoo.workspace import temporary_folder

HOLDERS = frozenset(
    "model net network backbone encoder state_dict _model student teacher online_network learner".split()
)
"""Attributes under which trainers hold the model: if all keys begin with one, the model is what follows."""

WRAPPERS = ("torch.nn.parallel.", "torch._dynamo.", "torch.optim.swa_utils.", "torch.nn.modules.container.")
"""Classes that say nothing of the model in them."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes without the prefixes of wrappers, and without what comes and goes between releases."""

    shapes: Shapes

    @cached_property
    def digest(self) -> str:
        """A digest of names and shapes."""
        return _digest(f"{key} {shape}" for key, shape in self.shapes.items())

    @cached_property
    def names(self) -> str:
        """A digest of only the names: equal for models that differ in their head."""
        return _digest(self.shapes)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class Sight:
    """What was seen of one checkpoint. Without a layout it could not be read, and ``fault`` says why."""

    name: str
    layout: Layout | None = None
    prefix: str = ""
    """What was before the keys, as it was there."""
    dtypes: tuple[str, ...] = ()
    weights: str = "."
    """The state_dict that is taken by default."""
    candidates: tuple[str, ...] = ()
    """All state_dicts that could be meant, if there are several."""
    whole_model: str = ""
    """The class of a model that was saved whole."""
    is_damaged: bool = False
    counters: bool = True
    """Whether each running mean has its count: files from before torch 0.4.1 do not."""
    fault: str = ""
    is_hostile: bool = False
    whole: int = 0
    """Of a file without a layout: how many tensors a decision would give."""


def survey(place: Place, items: Sequence[Item], room: float | None = None) -> list[Sight]:
    """Return what is seen of each checkpoint, in the order of the items. Equal layouts are one object.

    ``room`` is the bytes that copies of remote files may take on this machine, by default most of what is free."""
    layouts: dict[str, Layout] = {}
    items = [item for item in items if item.kind is not Kind.OTHER]
    sights = []
    task = Task(f"looking at {place.name}", sum(item.size for item in items))
    with temporary_folder() as scratch:
        readable = [item for item in items if item.fault is None]
        found = each_on_this_machine(place, readable, scratch, room_at(scratch) if room is None else room)
        for item in items:
            if item.fault is None:
                sights.append(_seen(item, next(found), layouts))
            else:
                sights.append(Sight(item.name, fault=item.fault))
            task.advance(item.size)
    return sights


def _seen(item: Item, path: Path | CkptfixError, layouts: dict[str, Layout]) -> Sight:
    if isinstance(path, CkptfixError):  # it could not be fetched
        return Sight(item.name, fault=str(path))
    try:
        checkpoint = open_file(str(path))
    except CkptfixError as error:
        fault = str(error).replace(str(path), item.name).removeprefix(f"{item.name}: ")
        is_hostile = isinstance(error, HostileError)
        return Sight(item.name, fault=fault, is_hostile=is_hostile, whole=0 if is_hostile else _salvaged(path))
    if payload := [f"{fact.data['name']}()" for fact in checkpoint.remarks if fact.kind is FactKind.PAYLOAD]:
        fault = f"is built to run {', '.join(payload[:3])} when it is loaded"
        return Sight(item.name, fault=fault, is_hostile=True, whole=len(checkpoint.specs))
    shapes, prefix = plain_names({key: spec.shape for key, spec in checkpoint.specs.items()})
    layout = layout_of(shapes)
    layout = layouts.setdefault(layout.digest, layout)
    dtypes = Counter(spec.dtype for spec in checkpoint.specs.values() if spec.numel > 1)
    means = [key.removesuffix("running_mean") for key in checkpoint.specs if key.endswith("running_mean")]
    return Sight(
        item.name,
        layout,
        prefix,
        tuple(name for name, _ in dtypes.most_common()),
        next((each.name for each in checkpoint.candidates if each.path == checkpoint.container), "."),
        tuple(each.name for each in checkpoint.candidates) if len(checkpoint.candidates) > 1 else (),
        _class(checkpoint),
        bool(checkpoint.damage),
        all(f"{mean}num_batches_tracked" in checkpoint.specs for mean in means),
    )


def _salvaged(path: Path) -> int:
    """How many tensors of a file that cannot be opened as it is are complete."""
    try:
        return len(open_file(str(path), salvage=True).specs)
    except CkptfixError:
        return 0


def plain_names(shapes: Shapes) -> tuple[Shapes, str]:
    """Return names as the model itself has them, and the prefix that was removed."""
    new = {key: bare(key) for key in shapes}
    prefix = ""
    if segments := {part for key in shapes if has_wrapper_segment(key) for part in key.split(".")} & WRAPPER_SEGMENTS:
        prefix = ", ".join(sorted(segments))
    elif shapes and all(key.startswith("module.") for key in shapes):
        prefix = "module."
    if colliding(shapes, new) is not None:
        new, prefix = {key: key for key in shapes}, ""
    while (holder := _holder(new.values())) is not None:
        new = {key: name.removeprefix(f"{holder}.") for key, name in new.items()}
        prefix = f"{prefix}{holder}." if prefix.endswith(".") or not prefix else f"{prefix}, {holder}."
    return {modern_name(name): shapes[key] for key, name in new.items()}, prefix


def _holder(names: Iterable[str]) -> str | None:
    """The first segment of all names, if it is one that trainers use."""
    first = {name.partition(".")[0] for name in names if not is_passing(name, ())}
    only = next(iter(first)) if len(first) == 1 else None
    return only if only in HOLDERS and all("." in name for name in names) else None


def layout_of(shapes: Shapes) -> Layout:
    """Return the layout of names and shapes."""
    return Layout({key: shape for key, shape in shapes.items() if not is_passing(key, shape)})


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogatepass")).hexdigest()[:16]


def _class(checkpoint: Checkpoint) -> str:
    """The class of a model that was saved whole; empty if none was."""
    value = checkpoint.root
    for step in checkpoint.container:
        if isinstance(value, Opaque) and not is_module(value):
            value = {**value.attributes, **value.pairs}.get(step)
        elif isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
    for _ in range(4):
        parts = module_parts(value)
        if parts is None or not isinstance(value, Opaque):
            break
        if not str(value.cls).startswith(WRAPPERS):
            return str(value.cls).removeprefix("__torch__.")
        children = list(parts["_modules"].values())
        value = children[0] if len(children) == 1 else None
    return ""
