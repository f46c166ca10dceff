"""What a file, its name or its neighbours say of the architecture, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.objects import Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.weights.modules import is_module, module_parts
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.places import Place

ENTRIES = frozenset(
    "arch architecture architectures model model_name model_type model_class model_arch backbone backbone_name encoder"
    " encoder_name net network net_name net_type netG_name _name _target_ _class_name class_name arch_name".split()
)
"""Names under which trainers note what they train."""

WRAPPERS = (
    "torch.nn.parallel.",
    "torch._dynamo.",
    "torch.optim.swa_utils.",
    "torch.nn.modules.container.",
)
"""Classes that say nothing of the model in them."""

CLASS = "class"
"""The place of a hint that is the class of a whole model."""

CONFIGURATION = "config.json"
"""What libraries write beside the weights."""

_LOOKS = 4_000
_DEPTH = 5
_LONGEST = 80
_WORD = re.compile(r"[A-Za-z_][\w.:/+-]*")
_LARGEST = 256 << 10


@dataclass(frozen=True, order=True)
class Hint:
    """A word for the architecture, and where it stands."""

    place: str
    word: str

    @property
    def plain(self) -> str:
        """The word in the form that names of models have: ``ResNet-50`` is ``resnet_50``."""
        return plain_word(self.word.rpartition("/")[2])


def plain_word(text: str) -> str:
    """A name in lower case, with one underscore between its parts."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def hints_of(checkpoint: Checkpoint) -> tuple[Hint, ...]:
    """The hints in a file, around its weights."""
    return tuple(dict.fromkeys((*_entries(checkpoint.root), *_classes(checkpoint))))


def _entries(root: object) -> Iterator[Hint]:
    """Texts under the names that trainers use, wherever they stand around the weights."""
    pending: list[tuple[str, object, int]] = [("", root, 0)]
    seen: set[int] = set()
    while pending and len(seen) < _LOOKS:
        place, value, depth = pending.pop(0)
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        for name, child in _members(value):
            where = f"{place}.{name}" if place else name
            if name in ENTRIES:
                words = child if isinstance(child, list | tuple) else [child]
                yield from (Hint(where, word) for word in words[:4] if isinstance(word, str) and _is_word(word))
            if isinstance(child, Mapping | Opaque | list | tuple):
                pending.append((where, child, depth + 1))


def _is_word(text: str) -> bool:
    return len(text) <= _LONGEST and _WORD.fullmatch(text) is not None


def _members(value: object) -> Iterator[tuple[str, object]]:
    """The named members of a container that is no state_dict and no module."""
    if is_module(value):
        return
    members: Mapping[Any, Any] = {}
    if isinstance(value, Opaque):
        members = {**value.attributes, **value.pairs}
    elif isinstance(value, Mapping):
        members = value
    if any(isinstance(member, TensorSpec) for member in members.values()):
        return
    for name, member in members.items():
        if isinstance(name, str) and len(name) <= _LONGEST:
            yield name, member


def _classes(checkpoint: Checkpoint) -> Iterator[Hint]:
    """The class of a whole model."""
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
            return
        if not str(value.cls).startswith(WRAPPERS):
            yield Hint(CLASS, str(value.cls).removeprefix("__torch__."))
            return
        children = list(parts["_modules"].values())
        value = children[0] if len(children) == 1 else None


class Configurations:
    """The ``config.json`` beside a checkpoint, read once for each folder."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.known: dict[str, tuple[Hint, ...]] = {}

    def of(self, item: Item) -> tuple[Hint, ...]:
        """The hints of the folder that an item lies in, or is."""
        folder = item.name if item.kind is Kind.FOLDER and not item.name.endswith(".json") else None
        folder = item.name.rpartition("/")[0] if folder is None else folder
        if folder not in self.known:
            self.known[folder] = tuple(self._read(f"{folder}/{CONFIGURATION}" if folder else CONFIGURATION))
        return self.known[folder]

    def _read(self, name: str) -> Iterator[Hint]:
        entry = self.place.entry(name)
        if entry is None or entry.fault is not None or not 0 < entry.size <= _LARGEST:
            return
        try:
            data = json.loads(self.place.head(name, entry.size))
        except (ValueError, RecursionError):
            return  # a file of that name that is no JSON says nothing
        for key, value in data.items() if isinstance(data, dict) else ():
            words = value if isinstance(value, list) else [value]
            if key in ENTRIES:
                yield from (Hint(f"{CONFIGURATION} {key}", word) for word in words if isinstance(word, str) and word)
