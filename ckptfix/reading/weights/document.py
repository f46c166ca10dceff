"""What a file says before anybody asks which state_dict in it is meant: the parsed root object, facts about the file,
and what of a damaged one is whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from ckptfix.bytes.sources import is_torn
from ckptfix.core.checkpoint import PathPart
from ckptfix.core.facts import ABSENT, Fact, Kind, clauses
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import ByteSource, TensorSpec
from ckptfix.errors import Opt, UnreadableError, damaged


class Document(Struct):
    """A parsed file.

    ``root`` is the inert object tree. ``metadata`` is torch's ``_metadata`` where the format carries it outside the
    tree. ``names`` holds the globals that the file's pickles name, and once more with ``()`` after it
    those that they call to do more than to construct a value; ``remarks`` what was noticed on the way.

    A reader goes on past damage as far as that is safe. ``damage`` then says what is wrong; tensors
    whose bytes are gone lie in ``TornBytes``; and ``lost`` has keys that the tree does not hold at all, with their
    specs, or None if only the name is known. ``producer`` says what wrote the file (``torch 2.1 to 2.6``).
    ``doubtful`` has the sources of storages that are not whole, with the reason to doubt what is there of them;
    ``copies`` are those of fp32 masters in the dtype of the training, by the key of the weight."""

    path: str
    format: str
    root: Any
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    names: set[str] = field(default_factory=set)
    remarks: list[Fact] = field(default_factory=list)
    damage: list[Fact] = field(default_factory=list)
    lost: dict[str, TensorSpec | None] = field(default_factory=dict)
    producer: str = ""
    doubtful: Mapping[ByteSource, Fact] = field(default_factory=dict)
    copies: Mapping[str, TensorSpec] = field(default_factory=dict)


def split_entries(
    document: Document, entries: Mapping[str, Any], salvage: bool
) -> tuple[dict[str, Any], dict[str, TensorSpec | None]]:
    """Return the whole entries of a state_dict and the lost ones.

    Raises ``UnreadableError`` for a damaged file that is not to be salvaged, and where no tensor of it is whole."""
    torn = {key: entry for key, entry in entries.items() if _has_torn(entry)}
    whole = {key: entry for key, entry in entries.items() if key not in torn}
    # Of packed parameters, which hold several tensors, only the name is left.
    lost = {key: entry if isinstance(entry, TensorSpec) else None for key, entry in torn.items()}
    lost.update({key: spec for key, spec in document.lost.items() if key not in whole})
    if not document.damage and not lost:
        return whole, lost
    tensors = sum(isinstance(entry, TensorSpec) for entry in whole.values())
    if not (salvage and tensors):
        causes = clauses(document.damage) or "is damaged"
        if not tensors:
            raise damaged(document.path, f"{causes}: no tensor in it is complete")
        back = f"all {counted(tensors, 'tensor')}"
        if lost:
            back = f"{tensors} of {counted(tensors + len(lost), 'tensor')}{share_text(whole, lost)}"
        again = "the missing files" if any(fact.kind in ABSENT for fact in document.damage) else "the file again"
        what = f"{document.path}: {causes}: fetch {again}, or take {back} with "
        raise UnreadableError(what, Opt("salvage", True))
    return whole, lost


def doubtful_remarks(document: Document, entries: Mapping[str, Any]) -> list[Fact]:
    """Return a remark for each whole tensor in a storage that is not whole."""
    return [
        Fact.of(Kind.DOUBTFUL_VALUES, key, cause=document.doubtful[storage.source])
        for key, entry in (entries.items() if document.doubtful else ())
        for spec in tensors_in(entry)
        for storage in dict.fromkeys(part for owner in spec.storages for part in (owner, *owner.parts))
        if storage.source in document.doubtful
    ]


def share_text(whole: Mapping[str, Any], lost: Mapping[str, TensorSpec | None]) -> str:
    """Return the share of the numbers that is whole, in brackets; nothing if not all sizes are known."""
    if any(spec is None for spec in lost.values()):
        return ""
    kept = sum(spec.numel for spec in whole.values() if isinstance(spec, TensorSpec))
    gone = sum(spec.numel for spec in lost.values() if spec is not None)
    return f" ({100 * kept / (kept + gone):.3g} % of the numbers)" if kept + gone else ""


def without_torn(root: Any, container: tuple[PathPart, ...]) -> tuple[Any, list[tuple[PathPart, ...]]]:
    """Return the container with everything left out that is beside the weights and holds a lost tensor, and its places.

    A dict loses the member, a list gets None in its place. The state_dict itself is not touched: its entries are the
    checkpoint's."""
    left_out: list[tuple[PathPart, ...]] = []

    def is_lost(child: Any, path: tuple[PathPart, ...]) -> bool:
        if is_torn_inside := _has_torn(child):
            left_out.append(path)
        return is_torn_inside

    def pruned(value: Any, path: tuple[PathPart, ...]) -> Any:
        if path == container or not isinstance(value, (dict, list, tuple)):
            return value
        step = container[len(path)]
        if isinstance(value, dict):
            pairs = [
                (key, pruned(child, (*path, step)) if key == step else child)
                for key, child in value.items()
                if key == step or not is_lost(child, (*path, key))
            ]
            return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
        return [
            pruned(child, (*path, step)) if at == step else None if is_lost(child, (*path, at)) else child
            for at, child in enumerate(value)
        ]

    return pruned(root, ()), left_out


def _has_torn(value: Any) -> bool:
    return is_torn(value) if isinstance(value, TensorSpec) else any(is_torn(spec) for spec in tensors_in(value))
