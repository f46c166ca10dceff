"""What can be changed in a checkpoint, each kind of change as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptfix.core.parts import Part


@dataclass(frozen=True)
class Edit:
    """One change of a checkpoint, as data: it prints, goes to JSON and back, and never holds a callback."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The edit as a JSON object; ``edit`` names its kind."""
        return {"edit": self.kind, **vars(self)}  # texts and sizes: nothing in it would have to be copied


@dataclass(frozen=True)
class Rename(Edit):
    """Give an entry another key. ``_metadata`` of its modules follows."""

    kind: ClassVar[str] = "rename"
    key: str
    to: str


@dataclass(frozen=True)
class RenameModule(Edit):
    """Give a row of ``_metadata`` another module path, where the keys have the right names already."""

    kind: ClassVar[str] = "rename-module"
    module: str
    to: str


@dataclass(frozen=True)
class Drop(Edit):
    """Take an entry out."""

    kind: ClassVar[str] = "drop"
    key: str


@dataclass(frozen=True)
class Fill(Edit):
    """Put a tensor in that the file does not have.

    ``origin`` says where the values come from: ``zeros``, ``target`` (the model's own initialisation), or ``donor``
    (the file of ``--fill FILE``, under ``donor_key``)."""

    kind: ClassVar[str] = "fill"
    key: str
    dtype: str
    shape: tuple[int, ...]
    origin: str
    donor_key: str | None = None


@dataclass(frozen=True)
class Replace(Edit):
    """Put other values in the place of a tensor's. Its key, dtype and shape stay.

    ``origin`` says where they come from: ``zeros`` and ``ones`` (the statistics of a fresh norm), ``data`` (statistics
    measured on the file ``source``), ``target`` and ``donor`` as in a fill, or ``twin``: the key ``source`` of another
    set of weights of the same file, which ``place`` names; without a place, of the same state_dict."""

    kind: ClassVar[str] = "replace"
    key: str
    dtype: str
    shape: tuple[int, ...]
    origin: str
    source: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Zero(Edit):
    """Set numbers of a tensor to zero, all ``non-finite`` or all ``subnormal`` ones; the others stay as they are."""

    kind: ClassVar[str] = "zero"
    key: str
    dtype: str
    which: str


@dataclass(frozen=True)
class Tie(Edit):
    """Supply a key from another one of the same checkpoint; the two share their storage."""

    kind: ClassVar[str] = "tie"
    key: str
    to: str


@dataclass(frozen=True)
class Cast(Edit):
    """Convert a tensor to another dtype."""

    kind: ClassVar[str] = "cast"
    key: str
    before: str
    dtype: str


@dataclass(frozen=True)
class Reshape(Edit):
    """Give a contiguous tensor another shape of the same number of elements."""

    kind: ClassVar[str] = "reshape"
    key: str
    before: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Assemble(Edit):
    """Make a tensor of parts of others, which are used up: renamed, split, fused, stacked or transposed layers.

    The ``Assemble`` edits of a step use each element of the tensors that they name exactly once."""

    kind: ClassVar[str] = "assemble"
    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def to_json(self) -> dict[str, Any]:
        """The edit as a JSON object, its parts as objects."""
        return {**super().to_json(), "parts": [part.to_json() for part in self.parts]}


@dataclass(frozen=True)
class Plain(Edit):
    """Turn an object of a class into plain data that ``torch.load(weights_only=True)`` accepts.

    ``where`` is its place in the container (``args``), ``before`` its class, ``after`` what it becomes (``dict``,
    ``str``)."""

    kind: ClassVar[str] = "plain"
    where: str
    before: str
    after: str


@dataclass(frozen=True)
class Retag(Edit):
    """Write the tensors without the device that they were saved from (``cuda:3``), so that they load where it does not
    exist.
    """

    kind: ClassVar[str] = "retag"
    device: str
    to: str = "cpu"


@dataclass(frozen=True)
class Rewrite(Edit):
    """Write the file anew from what is whole of it. ``cause`` is what was wrong with it."""

    kind: ClassVar[str] = "rewrite"
    cause: str


@dataclass(frozen=True)
class Disarm(Edit):
    """Leave out everything but the tensors of the state_dict, so that nothing is left that could run."""

    kind: ClassVar[str] = "disarm"
    payload: str


EDITS: Mapping[str, type[Edit]] = {
    edit.kind: edit
    for edit in (
        Rename,
        RenameModule,
        Drop,
        Fill,
        Replace,
        Zero,
        Tie,
        Cast,
        Reshape,
        Assemble,
        Plain,
        Retag,
        Rewrite,
        Disarm,
    )
}
"""Every edit by its name in JSON."""


def renames(new: Mapping[str, str]) -> tuple[Edit, ...]:
    """Return the edits for a map of keys; keys that stay have none."""
    return tuple(Rename(key, name) for key, name in new.items() if key != name)
