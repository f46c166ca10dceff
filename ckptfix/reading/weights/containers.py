"""Finds the state_dict in a parsed file."""

from __future__ import annotations

import math
import re
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.limits import NAME_DIGITS, shown
from ckptfix.core.checkpoint import (
    IN_MEMORY,
    Candidate,
    Checkpoint,
    ContainerPath,
    PathPart,
    is_inside,
    path_name,
    value_at,
)
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import MIXED_RANKS, Fact, Kind, clause, clauses
from ckptfix.core.finding import counted
from ckptfix.core.lazy import torch
from ckptfix.core.objects import Opaque, is_native, tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.core.wrappers import COUNTER
from ckptfix.errors import (
    DamageWarning,
    Opt,
    UnreadableError,
    UsageError,
    WeightlessError,
    Words,
    damaged,
    hostile,
    one_line,
)
from ckptfix.reading.foreign.weightless import (
    MOMENTS,
    NAME_THEM,
    is_of_training,
    is_optimizer,
    is_random_state,
    why_weightless,
)
from ckptfix.reading.pickles.arrays import NumpyArray, arrays_in
from ckptfix.reading.pickles.payload import refusing_payload
from ckptfix.reading.weights.document import Document, doubtful_remarks, split_entries, without_torn
from ckptfix.reading.weights.listed_sets import listed_sets, names_in_order, parameters_of, with_listed
from ckptfix.reading.weights.loose_tensors import loose_remarks
from ckptfix.reading.weights.modules import is_module, is_uninitialized, module_state_dict
from ckptfix.reading.weights.prefixed_sets import keys_of_set, narrowed
from ckptfix.reading.weights.quantized_modules import SCRIPT_OBJECT, composed_class, is_script_object

SEARCH_DEPTH = 64  # levels of nested containers that are searched; `NODE_LIMIT` bounds their number
NODE_LIMIT = 1_000_000
LIST_LIMIT = 64  # longest list whose items are searched; longer ones have numbers or samples


class LazyTensors:
    """The ``TensorReader`` of every opened checkpoint. The modules that build tensors are imported on first use."""

    def tensor(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Read one tensor, with a ``DamageWarning`` if its storage fails its checksum, or if files of ranks have the
        data of others."""
        from ckptfix.bytes.checksums import warning
        from ckptfix.reading.tensors import build_tensor

        if mixed := _mixed_ranks(checkpoint):
            warnings.warn(one_line(mixed), DamageWarning, stacklevel=3)
        return build_tensor(checkpoint.specs[key], checkpoint.path, warning(checkpoint))

    def state_dict(self, checkpoint: Checkpoint, mapped: Collection[str]) -> dict[str, Any]:
        """Build the whole state_dict. Raises ``UnreadableError`` if bytes fail their checksum, or if files of ranks
        have the data of others."""
        from ckptfix.reading.tensors import build_state_dict

        if mixed := _mixed_ranks(checkpoint):
            raise UnreadableError(f"{mixed}; fetch the files of these ranks again")
        return build_state_dict(checkpoint, mapped)


def _mixed_ranks(checkpoint: Checkpoint) -> str:
    """Return in words which files of ranks have the data of others; empty if there are none."""
    found = [f"{fact.place} {clause(fact)}" for fact in checkpoint.remarked(*MIXED_RANKS)]
    return f"{checkpoint.path}: {first_names(found)}, so the merged weights are wrong" if found else ""


def open_document(
    document: Document, weights: str | None = None, *, salvage: bool = False, narrow: bool = True
) -> Checkpoint:
    """Return the checkpoint of a document, with the state_dict that ``weights`` names, or else the best one found.

    If ``weights`` is the prefix of some keys, only these are taken, or without ``narrow``, listed in
    ``Checkpoint.picked``. Raises ``UnreadableError`` if the file has no weights, or is damaged and not to be salvaged;
    ``UsageError`` if it has no weights of that name."""
    payload = {f"{fact.data['name']}()" for fact in document.remarks if fact.kind is Kind.PAYLOAD}
    with refusing_payload(document.path, payload):
        checkpoint = _open(document, weights, salvage, narrow)
    return narrowed(checkpoint) if narrow else checkpoint


def _open(document: Document, weights: str | None, salvage: bool, narrow: bool) -> Checkpoint:
    found = dict(_search(document))
    if _holds_figures(document.root, found):
        found = {}
    candidates = []
    for place, mapping in _believable(found).items():
        numel = sum([tensor.numel for tensor in mapping.values() if isinstance(tensor, TensorSpec)])
        numel += sum([math.prod(array.shape) for array in mapping.values() if isinstance(array, NumpyArray)])
        candidates.append(Candidate(place, _count_tensors(mapping), numel))

    def last(candidate: Candidate) -> tuple[bool, ...]:
        keys = found[candidate.path]
        # AveragedModel adds a key: it would be the larger set
        return (_are_samples(keys), _is_tiny(candidate, candidates), COUNTER in keys)

    ranked = sorted(candidates, key=lambda candidate: (*last(candidate), *rank(candidate)))
    ranked = [each for each in ranked if each is ranked[0] or not _are_samples(found[each.path])]
    if weights is not None:
        path, value, picked = _pick(document, found, [candidate.path for candidate in ranked], weights, narrow)
    elif ranked:
        path = ranked[0].path
        value, picked = found[path], None
    else:
        if document.damage:
            raise damaged(document.path, clauses(document.damage))
        raise WeightlessError(why_weightless(document), *_named_by_model(document.root))
    entries, remarks = _entries(document, value, path)
    if any(len(key) > NAME_DIGITS and re.search(rf"\d{{{NAME_DIGITS}}}", key) for key in entries):
        raise hostile(document.path, f"a name in it has a number of {NAME_DIGITS} digits or more")
    has_arrays = any(isinstance(entry, NumpyArray) for entry in entries.values())
    if has_arrays and not any(True for _ in tensors_in(list(entries.values()))):
        raise damaged(
            document.path,
            "no array in it can be read as a tensor: their dtypes are not numbers, or the file is damaged",
        )
    entries, lost = split_entries(document, entries, salvage)
    root, left_out = without_torn(document.root, path, not lost) if document.damage else (document.root, {})
    metadata = getattr(found.get(path, value), "__dict__", {}).get("_metadata")
    specs = [spec for spec in entries.values() if isinstance(spec, TensorSpec)]
    if specs and not any(spec.has_data for spec in specs):
        raise UnreadableError(
            f"{document.path}: its {len(specs)} tensors were saved from the meta device: names and shapes, but no "
            "value was ever saved;"
            " save the model again after its weights are loaded"
        )
    everything = list(tensors_in(document.root))
    may_be_unread = (
        weights is None and len(everything) > 2 * len(value) and not is_module(value_at(document.root, path))
    )
    is_folder = document.format != IN_MEMORY and Path(document.path).is_dir()
    checkpoint = Checkpoint(
        path=document.path,
        format=document.format,
        entries=entries,
        metadata=_clean_metadata(document.metadata if metadata is None else metadata, remarks),
        container=path,
        root=root,
        devices=tuple(sorted({spec.storage.device for spec in everything if spec.storage is not None} - {"cpu"})),
        producer=document.producer,
        candidates=tuple(
            one
            for one in plausible(ranked)
            if not any(one.path[: len(gone)] == gone for gone, states in left_out.items() if not states)
        ),
        remarks=(
            *document.remarks,
            *remarks,
            *doubtful_remarks(document, entries),
            *loose_remarks(document.root, path, entries),
            *(beside(ranked, found, path) if weights is None else ()),
            *(_unread(document.root, path, ranked, found) if may_be_unread else ()),
            *(_averages_in_lists(document.root, path, value) if weights is None else ()),
        ),
        damage=(*document.damage, *(_lost_at(*each) for each in left_out.items())),
        lost=lost,
        copies=document.copies,
        folder=document.folder or (document.path if is_folder else ""),
        reader=LazyTensors(),
    )
    if picked is None:
        return checkpoint
    return replace(checkpoint, picked={key: name for key, name in picked.items() if key in entries})


def _lost_at(path: ContainerPath, states: tuple[str, ...]) -> Fact:
    place = path_name(path)
    return Fact.of(Kind.STATES_LOST, place, keys=states) if states else Fact(Kind.EXTRAS_LOST, place)


def _holds_figures(root: Any, found: Mapping[ContainerPath, Mapping[Any, Any]]) -> bool:
    """Return whether an object has only arrays, and none with the name of a layer, as a ``VecNormalize`` has."""
    if not isinstance(root, Opaque) or is_module(root):
        return False
    keys = [key for mapping in found.values() for key, value in mapping.items() if isinstance(value, NumpyArray)]
    is_arrays_only = not any(isinstance(value, TensorSpec) for mapping in found.values() for value in mapping.values())
    return is_arrays_only and not any(isinstance(key, str) and ("." in key or _is_of_layer(key)) for key in keys)


def _clean_metadata(metadata: Any, remarks: list[Fact]) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the rows of ``_metadata``, with any values other than numbers and text replaced by text."""
    if not isinstance(metadata, dict):
        return None
    cleaned: dict[str, dict[str, Any]] = {}
    for module, row in metadata.items():
        if isinstance(module, str) and isinstance(row, dict):
            cleaned[module] = {}
            for name, value in row.items():
                if isinstance(name, str) and _is_plain(value):
                    cleaned[module][name] = dict(value) if isinstance(value, dict) else value
                else:
                    cleaned[module][str(name)] = shown(value)
                    remarks.append(Fact.of(Kind.ODD_METADATA, "_metadata", name=shown(value)))
    return cleaned


def _is_plain(value: Any, levels: int = 2) -> bool:
    """Return whether a value of ``_metadata`` may stay: the hook of spectral_norm stores a dict of versions, tensordict
    a ``torch.Size`` and a device."""
    if isinstance(value, Opaque):
        return is_native(value) and _is_plain(value.args, levels)
    if isinstance(value, dict):
        return bool(levels and value) and all(isinstance(key, str) and _is_plain(value[key], 0) for key in value)
    if isinstance(value, (list, tuple)):
        return bool(levels) and all(_is_plain(item, levels - 1) for item in value)
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _mapping(value: Any) -> dict[Any, Any] | None:
    """Return the pairs of a dict, or of an object of a dict's subclass; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Opaque) and value.pairs and not is_module(value):
        return value.pairs
    return None


def _search(document: Document) -> Iterator[tuple[ContainerPath, dict[Any, Any]]]:
    """Yield every mapping with tensors and every module's state_dict with its path, each object once."""
    seen: set[int] = set()
    pending: deque[tuple[ContainerPath, Any]] = deque([((), document.root)])
    while pending:
        path, value = pending.popleft()
        if id(value) in seen or len(path) > SEARCH_DEPTH:
            continue
        seen.add(id(value))
        if len(seen) > NODE_LIMIT:
            raise hostile(document.path, f"more than {NODE_LIMIT} objects are around the weights")
        mapping = module_state_dict(value, document.path) if is_module(value) else _mapping(value)
        if mapping is not None and is_optimizer(mapping):
            continue
        if mapping and _count_tensors(mapping):
            yield path, mapping
            if is_module(value) or _is_state_dict(mapping):
                continue
        pending.extend(((*path, name), child) for name, child in _children(value, mapping))


def _children(value: Any, mapping: Mapping[Any, Any] | None) -> Iterator[tuple[PathPart, Any]]:
    """Yield the members of a value in which a state_dict may be nested."""
    members: Iterable[tuple[Any, Any]] = ()
    if mapping is not None and not is_module(value):
        members = mapping.items()
    elif isinstance(value, (list, tuple)) and len(value) <= LIST_LIMIT:
        members = enumerate(value)
    elif isinstance(value, Opaque):
        members = value.attributes.items()
    for name, child in members:
        if isinstance(name, (str, int)) and _holds_more(child):
            yield name, child


def _holds_more(value: Any) -> bool:
    """Return whether a value may contain a tensor. Rows of plain numbers, of which a log may have a million, do not."""
    if isinstance(value, Opaque):  # a generator, or a graph of a dataset
        return not value.cls.module.startswith(("numpy.random", "torch_geometric.data"))
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(member, (TensorSpec, NumpyArray, dict, list, tuple, Opaque)) for member in members)


# Keys of statistics that normalise inputs, also with an underscore in front (rsl_rl). A norm of torch has
# `num_batches_tracked` too.
_FIGURES = frozenset(
    "mean var std count min max running_mean running_var running_variance current_count".split()  # the last two: skrl
)


def _is_set(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has more than single numbers, random states and statistics of inputs."""
    if all(isinstance(key, str) and key.removeprefix("_") in _FIGURES for key in mapping):
        return False
    held = [value for value in mapping.values() if isinstance(value, (TensorSpec, NumpyArray))]
    return not held or any(
        not is_random_state(value)
        and (isinstance(value, NumpyArray) or value.numel > 1 or value.dtype.startswith("float"))
        for value in held
    )


def _are_samples(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has columns of one length, one of them of integers (actions, an index), as a replay
    buffer has, and no name of a layer. The Gaussians of a splat are all floats, and weights."""
    held = [value for value in mapping.values() if isinstance(value, TensorSpec)]
    are_columns = len(held) > 2 and all(one.shape for one in held) and len({one.shape[0] for one in held}) == 1
    has_integers = any(not DTYPES[one.dtype].is_float for one in held)
    return are_columns and has_integers and not any("." in str(key) or _is_of_layer(key) for key in mapping)


def _is_state_dict(mapping: Mapping[Any, Any]) -> bool:
    """Return whether at least half of a mapping's values are torch tensors, and more than are nested in the others
    (unlike ``{"state_dict": …, "mean": …}`` and ``{"models": {"g": …, "d": …}, "step": …}``). Arrays do not count: they
    may be statistics beside the weights."""
    direct = sum(isinstance(value, TensorSpec) for value in mapping.values())
    if 2 * direct < len(mapping) or any(_count_tensors(_mapping(mapping.get(name)) or {}) for name in PREFERRED):
        return False
    rest = [value for value in mapping.values() if not isinstance(value, TensorSpec)]
    below = sum(1 for value in rest if not (_is_tensor(value) or _packs_several(value)) for _ in tensors_in(value))
    return below < direct or (below == direct and any("." in str(key) for key in mapping))


def _believable(found: Mapping[ContainerPath, dict[Any, Any]]) -> dict[ContainerPath, dict[Any, Any]]:
    """Return the found mappings that may be weights, without loose tensors around them and arrays beside tensors."""
    sets = {path: mapping for path, mapping in found.items() if _is_set(mapping)}
    if not sets:
        held = [*tensors_in([*found.values()]), *arrays_in([*found.values()])]
        return {} if held and all(map(is_random_state, held)) else dict(found)
    found = sets
    for test in (_is_state_dict, lambda mapping: 2 * _count_tensors(mapping) >= len(mapping)):
        chosen = {path: mapping for path, mapping in found.items() if test(mapping)}
        if chosen:
            return chosen
    return dict(found)


def _is_tensor(value: Any) -> bool:
    if isinstance(value, dict) and value.get("class") == SCRIPT_OBJECT:
        return True  # packed weights in the form that FIL102 writes
    return isinstance(value, (TensorSpec, NumpyArray)) or is_script_object(value) or bool(composed_class(value))


def _count_tensors(mapping: Mapping[Any, Any]) -> int:
    rest = [value for value in mapping.values() if not isinstance(value, TensorSpec)]
    return len(mapping) - len(rest) + sum(_is_tensor(value) or _packs_several(value) for value in rest)


def _packs_several(value: Any) -> bool:
    """Return whether a value is a tuple of packed parameters: tensors, or lists of them, as in quantised LSTMs."""
    return isinstance(value, tuple) and any(
        _is_tensor(item) or (isinstance(item, list) and any(map(_is_tensor, item[:LIST_LIMIT])))
        for item in value[:LIST_LIMIT]
        if not is_random_state(item)
    )


def _named_by_model(root: Any) -> tuple[Words, ...]:
    """Return the advice to name the tensors of the only list of floats in a file by a model's parameters; empty if
    there is no such list."""
    lists = [path for path, tensors in listed_sets(root) if all(DTYPES[each.dtype].is_float for each in tensors)]
    if len(lists) != 1 or not lists[0]:
        return ()
    return (
        "; or take the names of a model's parameters, with ",
        Opt("weights", path_name(lists[0])),
        " and ",
        Opt("model"),
    )


def _pick(
    document: Document,
    found: Mapping[ContainerPath, Any],
    ranked: list[ContainerPath],
    name: str,
    narrow: bool,
) -> tuple[ContainerPath, Any, dict[str, str] | None]:
    """Return the path of the state_dict that ``name`` means, the state_dict, and the picked keys with their new names.

    The name may be the path of a state_dict (then all of it is meant, and the third value is None), the prefix of some
    of its keys, or the path of a list of tensors that has its names; without ``narrow`` also a list without names,
    whose positions become keys. Raises ``UsageError`` if it is none of these."""
    for path, value in found.items():
        if name in (path_name(path), "/".join(map(str, path))):
            return path, value, None
    root = _mapping(document.root)
    if root is not None and name in root:
        chosen = root[name]
        inner = module_state_dict(chosen, document.path) if is_module(chosen) else _mapping(chosen)
        if inner is not None and _count_tensors(inner):
            return (name,), inner, None
    for path in ranked:
        for prefix in (name, name.removeprefix(f"{path_name(path)}.")):
            picked = keys_of_set([key for key in found[path] if isinstance(key, str)], prefix)
            if any(_is_tensor(found[path][key]) for key in picked):
                return path, found[path], picked
    for path in ranked:
        if (listed := with_listed(document.root, name, found[path])) is not None:
            return path, *listed
    unnamed = [(path, tensors) for path, tensors in listed_sets(document.root) if is_inside(path_name(path), name)]
    if len(unnamed) == 1 and not narrow:
        ((path, tensors),) = unnamed
        return path, {path_name((*path, number)): tensor for number, tensor in enumerate(tensors)}, None
    first = name.partition(".")[0]
    part = None if any(path[:1] == (first,) for path in found) else (root or {}).get(first)
    if not isinstance(part, TensorSpec) and (count := sum(spec.numel > 1 for spec in tensors_in(part))):
        held = f"under {name!r} are {counted(count, 'tensor')} in lists, which have no names"
        raise UsageError(f"{document.path}: {held}; {NAME_THEM}")
    names = ", ".join(path_name(path) for path in found) or "none"
    raise UsageError(
        f"{document.path}: it has no weights under {name!r}; found: {names}; give one of these with ", Opt("weights")
    )


def _entries(document: Document, value: Mapping[Any, Any], path: ContainerPath) -> tuple[dict[str, Any], list[Fact]]:
    """Return the state_dict with text keys, and arrays as tensors if it has no torch tensors; and remarks."""
    remarks: list[Fact] = []
    arrays_only = not any(isinstance(entry, TensorSpec) for entry in value.values())
    entries: dict[str, Any] = {}
    for number, (key, entry) in enumerate(value.items()):
        if is_of_training(entry):
            continue  # the state of an optimizer among the weights is not a part of them
        # Text of Python 2 has a class of its own; the text of a tensor would differ in every run.
        name = f"tensor{number}" if isinstance(key, TensorSpec) else str(key)
        if not isinstance(key, str):
            remarks.append(Fact.of(Kind.NON_STRING_KEY, path_name(path), key=name))
        if not isinstance(entry, TensorSpec) and is_uninitialized(entry):
            remarks.append(Fact.of(Kind.UNINITIALIZED, name, name=str(entry.cls)))
            continue
        if name in entries:
            raise UnreadableError(
                f"{document.path}: the state_dict has the key {name} twice, as text and as a number; keep one of them"
            )
        if arrays_only and isinstance(entry, NumpyArray):
            spec = entry.spec(document.path)
            entry = entry if spec is None else spec
        entries[name] = entry
    if arrays_only and any(isinstance(entry, TensorSpec) for entry in entries.values()):
        remarks.append(Fact(Kind.NUMPY_WEIGHTS, path_name(path)))
    return entries, remarks


# Names under which trainers store the weights to load, most explicit first.
PREFERRED = tuple(
    "state_dict model_state_dict model model_state module net network net_state_dict weights params_ema params blobs "
    "generator backbone".split()
)

# Parts of names that mark an averaged set of weights; `avgpool` is a layer.
_AVERAGED = re.compile(
    r"ema|averag|swa|shadow|teacher|polyak|momentum_(?:encoder|model|net)|(?<![a-z])avg(?![a-z])", re.IGNORECASE
)
FEW = 3  # number of tensors beside the weights that is not reported
SHARE = 20  # a set of at least one in this many of the elements of the weights may be weights too


def is_averaged(*names: PathPart) -> bool:
    """Return whether one of the names marks an averaged set of weights."""
    return any(_AVERAGED.search(str(name)) for name in names)


def rank(candidate: Candidate) -> tuple[bool, int, int, int]:
    """Return the sort key of a candidate: raw before averaged, preferred names, more tensors, less deep."""
    names = [str(part).lower() for part in candidate.path]
    known = [PREFERRED.index(name) for name in names if name in PREFERRED]
    return (is_averaged(*names), min(known, default=len(PREFERRED)), -candidate.tensors, len(names))


def _is_tiny(candidate: Candidate, candidates: list[Candidate]) -> bool:
    """Return whether a candidate is the state of a loss or a metric beside weights, unless it has a preferred name."""
    return not any(str(part).lower() in PREFERRED for part in candidate.path) and any(
        4 * candidate.tensors <= other.tensors and SHARE * candidate.numel < other.numel for other in candidates
    )


def plausible(ranked: list[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that may be meant: the best one, and others that are not random states and tables of means
    or losses beside weights."""
    largest = max((candidate.tensors for candidate in ranked), default=0)
    several = [candidate for candidate in ranked if candidate is ranked[0] or 4 * candidate.tensors >= largest]
    return tuple([candidate for candidate in several if candidate.numel > candidate.tensors] or several)


_FRAGMENTS = ("frozen_param_fragments",)  # copies of weights in DeepSpeed's model states


def beside(
    ranked: list[Candidate], found: Mapping[ContainerPath, Mapping[Any, Any]], taken: ContainerPath
) -> Iterator[Fact]:
    """Yield a fact for each candidate that was not taken and has too few tensors to be offered, but many elements and
    keys like those of layers: a part of a nested state_dict, or the smaller of two networks.

    ``found`` are the mappings of the candidates. Other candidates are batches, tables of words, or state of
    optimizers."""
    sets = {*plausible(ranked), *(candidate for candidate in ranked if candidate.path == taken)}
    for candidate in ranked:
        is_large = SHARE * candidate.numel >= ranked[0].numel and candidate.path[-1:] != _FRAGMENTS
        if candidate not in sets and is_large and any(map(_is_of_layer, found[candidate.path])):
            yield Fact.of(Kind.WEIGHTS_BESIDE, candidate.name, tensors=candidate.tensors, numel=candidate.numel)


def _unread(
    root: Any,
    taken: ContainerPath,
    ranked: list[Candidate],
    found: Mapping[ContainerPath, Mapping[Any, Any]],
) -> Iterator[Fact]:
    """Yield a fact if most tensors and elements are outside the state_dicts that are taken or offered, and outside
    optimizers."""
    sets = plausible(ranked)
    offered = [found[candidate.path] for candidate in sets] if len(sets) > 1 else []
    read, known = (
        _sizes([entry for entry in entries if not isinstance(entry, (dict, list))])
        for entries in (found[taken].values(), [entry for mapping in offered for entry in mapping.values()])
    )
    left = _sizes(root)
    for each in (*read, *known):
        left.pop(each, None)
    if len(left) > max(len(read), FEW) and sum(left.values()) > sum(read.values()):
        others = [candidate.name for candidate in ranked if candidate.path != taken]
        yield Fact.of(Kind.MOST_UNREAD, path_name(taken), unread=len(left), read=len(found[taken]), others=others[:1])


def _averages_in_lists(root: Any, path: ContainerPath, state_dict: Mapping[Any, Any]) -> Iterator[Fact]:
    """Yield a fact for each averaged set of a state_dict that is stored as a list of parameters."""
    for place, tensors in listed_sets(root):
        if is_averaged(*place) and names_in_order(tensors, parameters_of(state_dict)):
            yield Fact.of(Kind.LISTED_AVERAGE, path_name(place), names=path_name(path))


def _sizes(root: Any) -> dict[int, int]:
    """Return the number of elements of each tensor by its id, except for counters and the state of optimizers."""
    return {id(spec): spec.numel for spec in tensors_in(root, _is_apart) if spec.numel > 1}


def _is_apart(value: Any) -> bool:
    """Return whether a value is the state of an optimizer or of torch_ema, or a tensor composed of others."""
    if isinstance(value, Opaque) and value.cls.module.startswith("torch._"):
        return True
    mapping = _mapping(value) or {}
    return is_optimizer(mapping) or not {"shadow_params", *MOMENTS}.isdisjoint(mapping)


def _is_of_layer(key: Any) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] in ("weight", "bias")
