"""A checkpoint that was opened: names, shapes, dtypes and where the bytes are, with no tensor in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

from msgspec import Struct, field

from ckptfix.core.display import Displayed
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.finding import counted
from ckptfix.core.lazy import torch
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import nearest
from ckptfix.errors import UnknownKeyError

IN_MEMORY = "memory"  # the format name of a state_dict that was not read from a file
PathPart = str | int  # one step into a container: a key of a dict, an attribute of an object, or an index of a list
ContainerPath = tuple[PathPart, ...]  # the steps from the top of a container


class Candidate(Struct, frozen=True):
    """A state_dict in a container: its path, and its numbers of tensors and elements.

    ``fits`` is whether a strict load into the target works, perhaps after renaming keys, or, if that holds for no
    candidate, whether this one has most of the target's parameters; None if untried."""

    path: ContainerPath
    tensors: int
    numel: int
    fits: bool | None = None

    @classmethod
    def of(cls, path: ContainerPath, specs: Collection[TensorSpec]) -> Candidate:
        """Return the candidate for a state_dict."""
        return cls(path, len(specs), sum(spec.numel for spec in specs))

    @property
    def name(self) -> str:
        """The name that ``--weights`` takes: ``state_dict``, ``model.ema``, ``[0]``; ``.`` for the top level."""
        return path_name(self.path)


def path_name(path: ContainerPath) -> str:
    """Return a container path as text: ``model[0]`` for ``("model", 0)``, ``.`` for the empty path."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return name.removeprefix(".") or "."


def value_at(root: Any, path: Iterable[PathPart]) -> Any:
    """Return what is at a path in a container."""
    value = root
    for step in path:
        if isinstance(value, Opaque):
            value = value.pairs.get(step, value.attributes.get(str(step)))
        elif isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, (list, tuple)):
            value = value[int(step)]
    return value


def is_inside(name: str, place: str) -> bool:
    """Return whether the place ``name`` is ``place`` or inside it; both are path names."""
    return name == place or name.startswith((f"{place}.", f"{place}["))


class TensorReader(Protocol):
    """Builds torch tensors from specs. Whatever opens a ``Checkpoint`` gives it one."""

    def tensor(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Return the tensor of a key."""
        ...

    def state_dict(self, checkpoint: Checkpoint, mapped: Collection[str]) -> dict[str, Any]:
        """Return the whole state_dict, with the tensors of the keys in ``mapped`` memory-mapped."""
        ...


class Checkpoint(Displayed, Struct, frozen=True, eq=False, dict=True):
    """A state_dict and the container around it, read lazily.

    ``entries`` is the state_dict in its own order: a ``TensorSpec`` for every tensor and inert plain data for the rest
    (packed parameters, ``_extra_state``). ``metadata`` is torch's ``_metadata`` (module path → its version), None if
    the file has none. ``container`` is the path from ``root``, the whole parsed object, to the state_dict. ``devices``
    are the location tags of storages that a written file keeps; other storages are written as ``cpu``. ``producer`` is
    what wrote the file, if known. ``member`` is the name of the file inside the archive or compressed file at ``path``.
    ``remarks`` are facts that the FIL rules turn into findings. ``damage`` says what is wrong with a file that was
    opened for salvage, and ``lost`` has the keys whose bytes are gone, with their specs, or None if only the name is
    known. ``picked`` are the keys of the set that ``--weights`` names by its prefix in the state_dict, mapped to their
    names without it; None if the whole state_dict is meant. ``beside`` is what a trainer saved in separate files next
    to the checkpoint (optimizer, scheduler), by file name. ``copies`` are the tensors in the dtype of training whose
    fp32 master weights are the entries, by the key of the master. ``folder`` is the folder whose files are merged,
    empty for a single file; it is ``path``, unless only the name of one of the files leads to this checkpoint."""

    path: str
    format: str
    entries: Mapping[str, object]
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    container: ContainerPath = ()
    root: object = None
    devices: tuple[str, ...] = ()
    producer: str = ""
    candidates: tuple[Candidate, ...] = ()
    remarks: tuple[Fact, ...] = ()
    damage: tuple[Fact, ...] = ()
    lost: Mapping[str, TensorSpec | None] = field(default_factory=dict)
    member: str = ""
    picked: Mapping[str, str] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    copies: Mapping[str, TensorSpec] = field(default_factory=dict)
    folder: str = ""
    reader: TensorReader | None = None

    def __repr__(self) -> str:
        place = "" if not self.container else f", state_dict at {path_name(self.container)}"
        return f"<Checkpoint {self.path}: {self.format}{place}, {counted(len(self.specs), 'tensor')}>"

    @cached_property
    def derived(self) -> dict[str, Any]:
        """A cache for results that take a walk over the whole checkpoint, by the code that computes them."""
        return {}

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the state_dict, by key, in the file's order."""
        return {key: value for key, value in self.entries.items() if isinstance(value, TensorSpec)}

    @cached_property
    def rest(self) -> Mapping[str, list[TensorSpec]]:
        """The tensors of the container outside the state_dict that do not share its storages, by the place of the
        object that contains them."""
        known = set()
        pending = [spec.storage for spec in tensors_in([list(self.entries.values()), list(self.copies.values())])]
        while pending:
            storage = pending.pop()
            if storage is not None and id(storage) not in known:
                known.add(id(storage))
                if id(storage.parts) not in known:  # tensors spread over the same ranks share one tuple
                    known.add(id(storage.parts))
                    pending += storage.parts if isinstance(storage.parts, tuple) else ()  # others are new each time
        found: dict[str, list[TensorSpec]] = {}
        value: Any = self.root
        for depth, step in enumerate((*self.container, None)):
            members = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
            if isinstance(value, Opaque):
                members = value.pairs or value.attributes if step is not None else {}
            if not isinstance(members, Mapping):
                break
            for name, child in members.items():
                # A tensor in the state_dict that is not an entry was removed by an edit.
                if name != step and (step is not None or not (name in self.entries or isinstance(child, TensorSpec))):
                    specs = [spec for spec in tensors_in(child) if id(spec.storage) not in known and spec.has_data]
                    if specs:
                        place = name if isinstance(name, int) else str(name)
                        found[path_name((*self.container[:depth], place))] = specs
            value = members.get(step)
        return found

    def remarked(self, *kinds: Kind) -> list[Fact]:
        """Return the remarks of these kinds."""
        return [remark for remark in self.remarks if remark.kind in kinds]

    def members(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the entries of a candidate; empty if it is inside an object, or was assembled from nested ones."""
        value: Any = self.root
        for part in candidate.path:
            inside = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
            value = inside.get(part)
        return {str(key): entry for key, entry in value.items()} if isinstance(value, Mapping) else {}

    def keys(self) -> list[str]:
        """Return the keys of the tensors, in the file's order."""
        return list(self.specs)

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor of a key on the CPU, with the dtype, shape and strides in the file.

        Raises ``UnknownKeyError``, a ``KeyError``, for an unknown key and ``UnreadableError`` if the file lacks the
        bytes. Warns with ``DamageWarning`` if they fail their checksum, which is verified when a storage is first
        read."""
        if key not in self.specs:
            raise UnknownKeyError(self._no_tensor(key))
        assert self.reader is not None, "made without a reader"
        return self.reader.tensor(self, key)

    def state_dict(self, *, mmap: bool = False) -> dict[str, Any]:
        """Return the whole state_dict as torch objects: tensors share memory if they share a storage in the file.

        Entries that are not tensors are kept. torch's ``_metadata`` is set as an attribute if the file has it. With
        ``mmap``, as in ``torch.load``, tensors are memory-mapped if possible: writing to them never changes the file,
        which must not be overwritten or truncated in the meantime. Raises ``UnreadableError`` if bytes fail their
        checksum, or if files of ranks have the data of others."""
        assert self.reader is not None, "made without a reader"
        return self.reader.state_dict(self, tuple(self.entries) if mmap else ())

    def _no_tensor(self, key: str) -> str:
        if key in self.entries:
            return f"{self.path}: the entry {key!r} is not a tensor; take it from state_dict()"
        if key in self.lost:
            return f"{self.path}: the bytes of {key!r} are lost from the damaged file; see Checkpoint.lost"
        close = nearest(str(key), self.specs)
        return f"{self.path}: has no key {key!r}; {f'did you mean {close!r}?' if close else 'see keys()'}"
