"""A parsed file before a state_dict is chosen: the root object, facts about the file, and which parts are intact."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from ckptfix.bytes.sources import is_torn
from ckptfix.core.checkpoint import ContainerPath
from ckptfix.core.facts import Fact, Kind, clause, clauses, fact_to_json, in_copy, to_fetch
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import ByteSource, TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import Opt, UnreadableError


class Document(Struct):
    """A parsed file.

    ``root`` is the inert object tree. ``metadata`` is torch's ``_metadata`` if the format stores it outside the tree.
    ``names`` are the globals that the file's pickles name, and again with ``()`` appended those that they call to do
    more than construct a value. ``remarks`` are facts noticed while reading. ``producer`` is the program that wrote the
    file (``torch 2.1 to 2.6``).

    Readers continue after damage as far as that is safe. ``damage`` is what is wrong; the bytes of lost tensors are
    ``TornBytes``; ``lost`` has keys that are not in the tree, with their specs, or None if only the name is known.
    ``doubtful`` has the sources of incomplete storages, with the reason to doubt the bytes that exist. ``copies`` are
    copies of fp32 masters in the dtype of the training, by the key of the weight. ``folder`` is the folder of all its
    files if ``path`` is one of them, because the folder by itself is read as another checkpoint or as none."""

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
    folder: str = ""


def split_entries(
    document: Document, entries: Mapping[str, Any], salvage: bool
) -> tuple[dict[str, Any], dict[str, TensorSpec | None]]:
    """Return the intact entries of a state_dict, and the specs of the lost ones.

    Raises ``UnreadableError`` if the file is damaged and not to be salvaged, or if no tensor is intact."""
    torn = {key: entry for key, entry in entries.items() if _has_torn(entry)}
    whole = {key: entry for key, entry in entries.items() if key not in torn}
    # Packed parameters consist of several tensors, so only their name is given.
    lost = {key: entry if isinstance(entry, TensorSpec) else None for key, entry in torn.items()}
    lost.update({key: spec for key, spec in document.lost.items() if key not in whole})
    if not document.damage and not lost:
        return whole, lost
    tensors = sum(isinstance(entry, TensorSpec) for entry in whole.values())
    if not (salvage and tensors):
        causes = clauses(document.damage) or "is damaged"
        again = to_fetch(document.damage)
        if {fact.kind for fact in document.damage} == {Kind.RANKS_DIFFER}:
            again = "these files again"
        data = {
            "damage": [fact_to_json(fact) for fact in document.damage],
            "lost": {key: spec and [spec.dtype, list(spec.shape)] for key, spec in lost.items()},
        }
        copies = "".join(f", or {in_copy(fact)}" for fact in document.remarks if fact.kind is Kind.COMPLETE_COPY)
        if not tensors:
            what = f"{document.path}: {causes}: no tensor in it is complete; fetch {again}{copies}"
            raise UnreadableError(what, data=data)
        unnamed = [clause(remark) for remark in document.remarks if remark.kind is Kind.UNNAMED_LOSS]
        back = f"all {counted(tensors, 'tensor')}"
        if unnamed:
            causes = f"{causes}; tensors with unknown names are lost: those of {'; '.join(unnamed)}"
            back = f"the {counted(tensors, 'tensor')} of the others"
        if lost:
            back = f"{tensors} of {counted(tensors + len(lost), 'tensor')}{share_text(whole, lost)}"
            causes = f"{causes}; {first_names(list(lost))} {'is' if len(lost) == 1 else 'are'} lost"
        what = f"{document.path}: {causes}: fetch {again}, or take {back} with "
        is_flat = any(remark.kind is Kind.FLATTENED for remark in document.remarks)
        form = ", in one dimension unless a model or another whole checkpoint gives their shapes" if is_flat else ""
        raise UnreadableError(what, Opt("salvage", True), f"{form}{copies}", data=data)
    return whole, lost


def doubtful_remarks(document: Document, entries: Mapping[str, Any]) -> list[Fact]:
    """Return a remark for each intact tensor in an incomplete storage."""
    return [
        Fact.of(Kind.DOUBTFUL_VALUES, key, cause=document.doubtful[storage.source])
        for key, entry in (entries.items() if document.doubtful else ())
        for spec in tensors_in(entry)
        for storage in dict.fromkeys(part for owner in spec.storages for part in (owner, *owner.parts))
        if storage.source in document.doubtful
    ]


def share_text(whole: Mapping[str, Any], lost: Mapping[str, TensorSpec | None]) -> str:
    """Return the share of the elements that is intact, in parentheses; empty if not all sizes are known."""
    if any(spec is None for spec in lost.values()):
        return ""
    kept = sum(spec.numel for spec in whole.values() if isinstance(spec, TensorSpec))
    gone = sum(spec.numel for spec in lost.values() if spec is not None)
    return f" ({100 * kept / (kept + gone):.3g} % of the numbers)" if kept + gone else ""


def without_torn(
    root: Any, container: ContainerPath, keeps_states: bool
) -> tuple[Any, dict[ContainerPath, tuple[str, ...]]]:
    """Return the container without members beside the weights that contain lost tensors, and the paths of these.

    Members are removed from dicts and replaced by None in lists. If ``keeps_states``, an optimizer keeps the states of
    the parameters that have lost nothing; the others are listed with its path. The state_dict at path ``container`` is
    not changed."""
    left_out: dict[ContainerPath, tuple[str, ...]] = {}

    def kept(child: Any, path: ContainerPath) -> Any:
        if not _has_torn(child):
            return child
        rest, lost = _without_states(child) if keeps_states else (None, ())
        left_out[path] = lost if rest is not None else ()
        return _LOST if rest is None else rest

    def pruned(value: Any, path: ContainerPath) -> Any:
        if path == container or not isinstance(value, (dict, list, tuple)):
            return value
        step = container[len(path)]
        members = value.items() if isinstance(value, dict) else enumerate(value)
        made = {
            key: pruned(child, (*path, step)) if key == step else kept(child, (*path, key)) for key, child in members
        }
        if not isinstance(value, dict):
            return [None if child is _LOST else child for child in made.values()]
        whole = {key: child for key, child in made.items() if child is not _LOST}
        return OrderedDict(whole) if isinstance(value, OrderedDict) else whole

    return pruned(root, ()), left_out


_LOST = object()


def _without_states(optimizer: Any) -> tuple[Any, tuple[str, ...]]:
    """Return an optimizer's state_dict without the states that have lost tensors, and the names or numbers of their
    parameters; None if no state is whole. torch's optimizers begin such states anew."""
    states = optimizer.get("state") if isinstance(optimizer, dict) and "param_groups" in optimizer else None
    states = states if isinstance(states, dict) else {}
    whole = {key: state for key, state in states.items() if not _has_torn(state)}
    rest = {**optimizer, "state": whole} if whole else None
    if rest is None or _has_torn(rest):
        return None, ()
    return rest, tuple(key if isinstance(key, str) else f"parameter {key}" for key in states if key not in whole)


def _has_torn(value: Any) -> bool:
    return is_torn(value) if isinstance(value, TensorSpec) else any(is_torn(spec) for spec in tensors_in(value))
