"""What can be seen of a checkpoint without its weights: the layout of its keys, and what stands around them."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Kind as FactKind
from ckptfix.core.progress import Task
from ckptfix.core.wording import clause
from ckptfix.errors import CkptfixError, HostileError
from ckptfix.reading.opening import open_file
from ckptfix.rules.wrappers import WRAPPER_SEGMENTS, bare, colliding, has_wrapper_segment
from ckptfix.zoo.drafting.hints import Configurations, Hint, hints_of
from ckptfix.zoo.drafting.known import Shapes, is_counter
from ckptfix.zoo.engines.memory import room_at
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.places import Place
from ckptfix.zoo.work.fetching import each_on_this_machine

HOLDERS = frozenset(
    "model net network backbone encoder state_dict _model student teacher online_network learner".split()
)
"""Attributes under which trainers hold the model: where all keys begin with one, the model is what follows."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes without what wrappers put in front, and without what comes and goes between releases."""

    shapes: Shapes
    digest: str
    names: str
    """A digest of the names alone: equal for models that differ in their head."""

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        total = 0
        for shape in self.shapes.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True)
class Sight:
    """What was seen of one checkpoint. Without a layout it could not be read, and ``fault`` says why."""

    name: str
    layout: Layout | None = None
    prefix: str = ""
    """What stood in front of the keys, as it stood there."""
    dtypes: tuple[str, ...] = ()
    weights: str = "."
    """The state_dict that is taken where nobody says which."""
    candidates: tuple[str, ...] = ()
    """All state_dicts that could be meant, where there are several."""
    hints: tuple[Hint, ...] = ()
    damage: tuple[str, ...] = ()
    counters: bool = True
    """Whether each running mean has its count: files from before torch 0.4.1 do not."""
    fault: str = ""
    is_hostile: bool = False
    whole: int = 0
    """Of a file without a layout: how many tensors can be had by a decision."""


def survey(place: Place, items: Sequence[Item], room: float | None = None) -> list[Sight]:
    """What is seen of each checkpoint, in the order of the items. Equal layouts are one object.

    ``room`` is the bytes that copies of files far away may take on this machine, by default most of what is free."""
    layouts: dict[str, Layout] = {}
    beside = Configurations(place)
    sights = []
    task = Task(f"looking at {place.name}", sum(item.size for item in items))
    with tempfile.TemporaryDirectory(prefix="ckptfix-init-", ignore_cleanup_errors=True) as scratch:
        room = room_at(Path(scratch)) if room is None else room
        found = each_on_this_machine(place, [item for item in items if _is_readable(item)], Path(scratch), room)
        for item in items:
            if _is_readable(item):
                sights.append(_seen(item, next(found), beside, layouts))
            elif item.kind is not Kind.OTHER:
                sights.append(Sight(item.name, fault=item.fault or ""))
            task.advance(item.size)
    return sights


def _is_readable(item: Item) -> bool:
    return item.kind is not Kind.OTHER and item.fault is None


def _seen(item: Item, path: Path | CkptfixError, beside: Configurations, layouts: dict[str, Layout]) -> Sight:
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
    return _sight(item, checkpoint, beside, layouts)


def _salvaged(path: Path) -> int:
    """How many tensors of a file that cannot be opened as it is are whole."""
    try:
        return len(open_file(str(path), salvage=True).specs)
    except CkptfixError:
        return 0


def _sight(item: Item, checkpoint: Checkpoint, beside: Configurations, layouts: dict[str, Layout]) -> Sight:
    shapes, prefix = plain_names({key: spec.shape for key, spec in checkpoint.specs.items()})
    layout = layout_of(shapes)
    layout = layouts.setdefault(layout.digest, layout)
    dtypes = Counter(spec.dtype for spec in checkpoint.specs.values() if spec.numel > 1)
    keys = checkpoint.specs.keys()
    return Sight(
        item.name,
        layout,
        prefix,
        tuple(name for name, _ in dtypes.most_common()),
        next((each.name for each in checkpoint.candidates if each.path == checkpoint.container), "."),
        tuple(each.name for each in checkpoint.candidates) if len(checkpoint.candidates) > 1 else (),
        (*hints_of(checkpoint), *beside.of(item)),
        tuple(map(clause, checkpoint.damage)),
        all(
            f"{key[: -len('running_mean')]}num_batches_tracked" in keys for key in keys if key.endswith("running_mean")
        ),
    )


def plain_names(shapes: Shapes) -> tuple[Shapes, str]:
    """Names as the model itself has them, and what was taken off in front of them."""
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
    """The first segment of all names, where it is one that trainers use."""
    first = {name.partition(".")[0] for name in names if not is_counter(name)}
    alone = next(iter(first)) if len(first) == 1 else None
    return alone if alone in HOLDERS and all("." in name for name in names) else None


_DENSE = re.compile(r"(?<=\.)(norm|relu|conv)\.([12])(?=\.)")


def modern_name(name: str) -> str:
    """The name that newer releases give a tensor: of DenseNet's layers, and of BERT's LayerNorm."""
    if "denselayer" in name:
        name = _DENSE.sub(r"\1\2", name)
    if name.endswith(("LayerNorm.gamma", "LayerNorm.beta")):
        name = name.removesuffix("gamma").removesuffix("beta") + ("weight" if name.endswith("gamma") else "bias")
    return name


def layout_of(shapes: Shapes) -> Layout:
    """The layout of names and shapes."""
    counted = {key: shape for key, shape in shapes.items() if not is_counter(key)}
    lines = sorted(f"{key} {shape}" for key, shape in counted.items())
    return Layout(counted, _digest(lines), _digest(sorted(counted)))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]
