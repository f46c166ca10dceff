"""Surveys the files of a zoo for a draft of ``zoo.toml``: the layout of keys in each, groups of equal layout, and the
shortest patterns that match only the files of a group.

No tensor is read, and no code of a file runs."""

import glob
import hashlib
import math
import re
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

from msgspec import Struct

from ckptfix.core.checkpoint import Checkpoint, value_at
from ckptfix.core.facts import Kind
from ckptfix.core.objects import Opaque
from ckptfix.core.options import key_text
from ckptfix.core.parts import Shapes
from ckptfix.core.progress import Task
from ckptfix.core.wrappers import bare, colliding, segments_in
from ckptfix.errors import CkptfixError, HostileError
from ckptfix.known.recognition import modern_name
from ckptfix.known.table import is_passing
from ckptfix.reading.opening import open_file
from ckptfix.reading.weights.modules import module_parts
from ckptfix.zoo.items import Item, ItemKind, fetch_item
from ckptfix.zoo.naming import compile_patterns
from ckptfix.zoo.places import Place
from ckptfix.zoo.resources import room_at
from ckptfix.zoo.workspace import temporary_folder

AHEAD = 8  # items that are fetched, or wait to be used, at the same time

# Attributes in which trainers keep the model: if all keys start with one, the rest are the model's names.
HOLDERS = frozenset(
    "model net network backbone encoder state_dict _model student teacher online_network learner".split()
)

# Classes that wrap a model.
WRAPPERS = ("torch.nn.parallel.", "torch._dynamo.", "torch.optim.swa_utils.", "torch.nn.modules.container.")


class ItemLayout(Struct, frozen=True, dict=True):
    """Names and shapes without prefixes of wrappers and without buffers that differ between releases."""

    shapes: Shapes

    @cached_property
    def digest(self) -> str:
        """The digest of names and shapes."""
        lines = sorted(f"{key} {shape}" for key, shape in self.shapes.items())
        return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


class ItemSummary(Struct, frozen=True):
    """What the survey found in one checkpoint. Without a layout, it could not be read, and ``fault`` says why."""

    name: str
    layout: ItemLayout | None = None
    prefix: str = ""  # what was removed from the keys
    dtypes: tuple[str, ...] = ()
    weights: str = "."  # the state_dict that is used by default
    candidates: tuple[str, ...] = ()  # all state_dicts, if there are several
    whole_model: str = ""  # the class of a pickled model
    is_damaged: bool = False
    counters: bool = True  # whether each running mean has num_batches_tracked, as since torch 0.4.1
    fault: str = ""
    is_hostile: bool = False
    whole: int = 0  # the tensors that a decision could save from a file without a layout


def survey(place: Place, items: Sequence[Item], room: float | None = None) -> list[ItemSummary]:
    """Return the summary of each item that is a checkpoint, in order. Equal layouts are one object.

    ``room`` is the bytes that copies of remote files may take on this machine, by default most of the free space."""
    layouts: dict[str, ItemLayout] = {}
    items = [item for item in items if item.kind is not ItemKind.OTHER]
    summaries = []
    task = Task(f"examining {place.name}", sum(item.size for item in items))
    with temporary_folder() as scratch:
        readable = [item for item in items if item.fault is None]
        found = each_on_this_machine(place, readable, scratch, room_at(scratch) if room is None else room)
        for item in items:
            path = next(found) if item.fault is None else CkptfixError(item.fault)
            if (summary := _summary_of(item, path, layouts)) is not None:
                summaries.append(summary)
            task.advance(item.size)
    return summaries


def each_on_this_machine(
    place: Place, items: Sequence[Item], folder: Path, room: float
) -> Iterator[Path | CkptfixError]:
    """Yield the local path of each item, in order, or the error if it cannot be fetched.

    Remote items are fetched in advance while their copies take no more than ``room`` bytes together, but always one. A
    copy is removed when the next item is requested."""
    if place.root is not None:
        yield from (fetch_item(place, item, folder) for item in items)
        return
    waiting, under_way, taken = deque(enumerate(items)), deque[tuple[int, Path, AsyncResult[Path]]](), 0
    with ThreadPool(AHEAD) as pool:  # its threads are not joined at the end: Ctrl-C must not take minutes
        while waiting or under_way:
            while waiting and len(under_way) < AHEAD and (not under_way or taken + waiting[0][1].size <= room):
                number, item = waiting.popleft()
                copy = folder / str(number)
                under_way.append((item.size, copy, pool.apply_async(fetch_item, (place, item, copy))))
                taken += item.size
            size, copy, fetched = under_way.popleft()
            try:
                found: Path | CkptfixError = fetched.get()
            except CkptfixError as error:
                found = error
            yield found
            shutil.rmtree(copy, ignore_errors=True)
            taken -= size


def _summary_of(item: Item, path: Path | CkptfixError, layouts: dict[str, ItemLayout]) -> ItemSummary | None:
    if isinstance(path, CkptfixError):  # it cannot be fetched
        return ItemSummary(item.name, fault=path.worded(key_text))
    try:
        checkpoint = open_file(str(path))
    except CkptfixError as error:
        if item.tolerates and isinstance(error, item.tolerates):
            return None
        fault = error.worded(key_text).replace(str(path), item.name).removeprefix(f"{item.name}: ")
        whole = 0
        if not (is_hostile := isinstance(error, HostileError)):
            with suppress(CkptfixError):
                whole = len(open_file(str(path), salvage=True).specs)
        return ItemSummary(item.name, fault=fault, is_hostile=is_hostile, whole=whole)
    if payload := [f"{fact.data['name']}()" for fact in checkpoint.remarked(Kind.PAYLOAD)]:
        fault = f"is built to run {', '.join(payload[:3])} when it is loaded"
        return ItemSummary(item.name, fault=fault, is_hostile=True, whole=len(checkpoint.specs))
    shapes, prefix = plain_names({key: spec.shape for key, spec in checkpoint.specs.items()})
    layout = layout_of(shapes)
    layout = layouts.setdefault(layout.digest, layout)
    dtypes = Counter(spec.dtype for spec in checkpoint.specs.values() if spec.numel > 1)
    means = [key.removesuffix("running_mean") for key in checkpoint.specs if key.endswith("running_mean")]
    return ItemSummary(
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


def plain_names(shapes: Shapes) -> tuple[Shapes, str]:
    """Return the shapes by the model's own names, and the prefix that was removed."""
    new = {key: bare(key) for key in shapes}
    prefix = ""
    if segments := segments_in(shapes):
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
    """Return the first segment of all names if trainers keep models under it, else None."""
    first = {name.partition(".")[0] for name in names if not is_passing(name, ())}
    only = next(iter(first)) if len(first) == 1 else None
    return only if only in HOLDERS and all("." in name for name in names) else None


def layout_of(shapes: Shapes) -> ItemLayout:
    """Return the layout of names and shapes, without buffers that differ between releases."""
    return ItemLayout({key: shape for key, shape in shapes.items() if not is_passing(key, shape)})


def _class(checkpoint: Checkpoint) -> str:
    """Return the class of a pickled model, without wrappers; empty if there is none."""
    value = value_at(checkpoint.root, checkpoint.container)
    for _ in range(4):
        parts = module_parts(value)
        if parts is None or not isinstance(value, Opaque):
            break
        if not str(value.cls).startswith(WRAPPERS):
            return str(value.cls).removeprefix("__torch__.")
        children = list(parts["_modules"].values())
        value = children[0] if len(children) == 1 else None
    return ""


_ALIKE = 3  # the least number of files, with names that differ only in numbers, for one pattern

# The parts of a name that differ between the files of a run: hashes and numbers.
_MOVING = re.compile(r"(?<![0-9a-z])[0-9a-f]{8,64}(?![0-9a-z])|\d+(?:\.\d+)?", re.IGNORECASE)


class Group(Struct, frozen=True):
    """The checkpoints with one layout and the same choice of state_dicts."""

    layout: ItemLayout
    summaries: tuple[ItemSummary, ...]
    patterns: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(summary.name for summary in self.summaries)


def gather(summaries: Sequence[ItemSummary], others: Iterable[str]) -> list[Group]:
    """Return the groups of equal layout, the largest first. ``others`` are names that no pattern must match."""
    by_layout: dict[tuple[str, ...], list[ItemSummary]] = defaultdict(list)
    for summary in summaries:
        if summary.layout is not None:
            rivals = (summary.weights, *summary.candidates) if summary.candidates else ()
            key = (summary.layout.digest, *rivals)
            by_layout[key].append(summary)
    unread = [summary.name for summary in summaries if summary.layout is None]
    names = {key: {summary.name for summary in members} for key, members in by_layout.items()}
    known = _Names([*(name for members in names.values() for name in members), *unread, *others])
    groups = [
        Group(members[0].layout, tuple(members), tuple(known.patterns(names[key])))
        for key, members in by_layout.items()
        if members[0].layout is not None
    ]
    return sorted(groups, key=lambda group: (-len(group.summaries), group.names))


class _Names:
    """All names of a zoo, to find patterns that match only some of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.below: dict[str, set[str]] = defaultdict(set)
        self.beside: dict[str, set[str]] = defaultdict(set)
        self.own: Counter[str] = Counter()
        for name in set(names):
            parts = name.split("/")
            self.own[parts[-1]] += 1
            self.beside["/".join(parts[:-1])].add(name)
            for depth in range(1, len(parts)):
                self.below["/".join(parts[:depth])].add(name)
        self.folders = Counter(folder.rpartition("/")[2] for folder in self.below)

    def patterns(self, wanted: set[str]) -> Iterator[str]:
        """Yield patterns that match exactly these names: whole folders, then one name in several folders, then similar
        names, then single ones."""
        left = set(wanted)
        for folder in sorted({name.rpartition("/")[0] for name in wanted} - {""}):
            place = self._highest(folder, wanted)
            if place is not None and len(left & self.below[place]) > 1:
                left -= self.below[place]
                yield self._anchored(f"{glob.escape(place)}/", self.folders[place])
        by_own: dict[str, set[str]] = defaultdict(set)
        for name in left:
            by_own[name.rpartition("/")[2]].add(name)
        for own, same in sorted(by_own.items()):
            if 1 < len(same) == self.own[own]:
                left -= same
                yield glob.escape(own)
        for pattern, alike in sorted(_alike(left).items()):
            expression = compile_patterns([pattern])
            folder = next(iter(alike)).rpartition("/")[0]
            if len(alike) >= _ALIKE and {name for name in self.beside[folder] if expression.fullmatch(name)} == alike:
                left -= alike
                yield pattern
        yield from (self._anchored(glob.escape(name), self.own[name]) for name in sorted(left))

    def _highest(self, folder: str, wanted: set[str]) -> str | None:
        """Return the outermost of a folder and its parents whose files are all wanted, None if there is none."""
        parts = folder.split("/")
        places = ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return next((place for place in places if self.below[place] <= wanted), None)

    def _anchored(self, pattern: str, count: int) -> str:
        """Return the pattern, with a leading slash if it would otherwise match the same name elsewhere too."""
        return pattern if "/" in pattern.rstrip("/") or count == 1 else f"/{pattern}"


def _alike(names: set[str]) -> dict[str, set[str]]:
    """Return the names grouped by pattern, which has a star for each number or hash that differs between them."""
    forms: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(dict)
    for name in names:
        folder, _, own = name.rpartition("/")
        if moving := _MOVING.findall(own):
            form = (folder, *_MOVING.split(own))
            forms[form][name] = moving
    found: dict[str, set[str]] = {}
    for (folder, first, *others), members in forms.items():
        columns = zip(*members.values(), strict=True)
        stars = ["*" if len(set(column)) > 1 else glob.escape(column[0]) for column in columns]
        own = glob.escape(first) + "".join(star + glob.escape(part) for star, part in zip(stars, others, strict=True))
        found[f"{glob.escape(folder)}/{own.replace('**', '*')}"] = set(members)
    return found
