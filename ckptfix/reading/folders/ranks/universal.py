"""DeepSpeed's universal checkpoints: a folder for each parameter with its whole fp32 master and moments.

``<tag>/zero/<name>/fp32.pt``, ``exp_avg.pt``, … have ``{"param": tensor, "cat_dim": 0}``, or from stage 3 the bare
tensor in one dimension. ``zero/optimizer_state.pt`` has the optimizer's groups, and ``*_model_states.pt`` has the names
in order, the buffers and the frozen parameters. ``latest_universal`` names the tag.

Sources: ``deepspeed/checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py`` (0.14 to 0.19)."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from operator import ne
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import TensorSpec, contiguous_strides, with_own_storage
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.chunks import gone
from ckptfix.reading.folders.ranks import zero
from ckptfix.reading.folders.ranks.files import RankFiles, sums_of, tagged
from ckptfix.reading.folders.ranks.names import LATEST_UNIVERSAL, ZERO_MODEL
from ckptfix.reading.folders.ranks.partition import WHOLE, joined
from ckptfix.reading.folders.ranks.zero_masters import lost
from ckptfix.reading.folders.ranks.zero_splits import splits_of_ranks
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.weights.document import Document

NAME = "universal"
PARAMETERS = "zero"
MASTER = "fp32"
_STATES, _STATES_OF_RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
GROUPS = "optimizer_state.pt"
# Names in model states that may have a folder without being trained.
_UNTRAINED = ("frozen_param_shapes", "shared_params", "buffer_names")
_ADAM = frozenset(("exp_avg", "exp_avg_sq"))
_STEP = "step"


def find(folder: Path) -> Path | None:
    """Return the folder of a tag with a folder for each parameter; None if there is none."""
    return _above(folder / MASTER) or tagged(folder, LATEST_UNIVERSAL, _masters)


def folder_of(file: Path) -> Path | None:
    """Return the folder of the checkpoint if the file has its model states or a part of it; None otherwise."""
    return file.parent if ZERO_MODEL.fullmatch(file.name) and _masters(file.parent) else _above(file)


def _above(file: Path) -> Path | None:
    """Return the folder of the checkpoint of which the file has a parameter or the optimizer's groups, if it has model
    states; None otherwise."""
    for place in (folder.parent for folder in file.parents[:2] if folder.name == PARAMETERS):
        if _masters(place) and any(map(ZERO_MODEL.fullmatch, list_folder(place).names)):
            return place
    return None


def _masters(folder: Path) -> bool:
    parameters = folder / PARAMETERS
    return parameters.is_dir() and any(
        (parameters / name / f"{MASTER}.pt").is_file() for name in list_folder(parameters).folders
    )


def document(files: RankFiles) -> Document:
    """Return the merged document: the container of the model states with whole weights."""
    # ckptfix writes them under two names, because the stages of ZeRO look for different ones.
    names = filter(None, map(ZERO_MODEL.fullmatch, sorted(list_folder(files.folder).names)))
    found = {int(match[1] or 0): files.folder / match[0] for match in names if int(match[2]) == 0}
    states = zero.states_of_ranks(files, found)
    if not states:
        return _without_states(files, bool(found))
    first = zero.first_of(states)
    root = states[first]
    if first:  # of stage 3, in which every rank has the names, and only rank 0 the ties
        root = {**root, "shared_params": {**zero.tied(root), **(root.get("shared_params") or {})}}
        files.remarks[Fact(Kind.STATES_OF, found[first].name)] = None
    is_spread = found[first].name != _STATES  # as in stage 3
    said = root.get("dp_world_size") if is_spread else 1
    world = max(max(found) + 1, said if type(said) is int else 1)
    if is_spread and (root.get("frozen_param_shapes") or 0 not in found):
        files.note_missing(world, found, _STATES_OF_RANK)
    shapes = {str(name): sizes(shape) for group in root["param_shapes"] for name, shape in group.items()}
    trained, moments, degree = {}, {}, root.get("mp_world_size")
    degree, known = degree if type(degree) is int else 1, (dict(files.remarks), len(files.damage))
    for name, shape in shapes.items():
        entries = dict(_entries(files, name, shape, degree))
        trained[name] = entries.pop(MASTER, None) or _lost_master(files, root, name, shape, entries, degree)
        moments[name] = entries
    absent, keys = _missing_masters(files.folder / PARAMETERS, shapes), len(files.lacking)
    lost_moments = _lost_moments(moments, [Path(place).name for place in absent])
    for name, fields in lost_moments.items():
        for field in fields & _ADAM:
            files.lacking[f"{field} of {name}"] += trained[name].nbytes
    places = (f"{PARAMETERS}/{name}/{field}.pt" for name, fields in lost_moments.items() for field in sorted(fields))
    if missing := (*absent, *(place for place in places if place.rpartition("/")[0] not in absent)):
        files.damage.append(Fact.of(Kind.SHARDS_MISSING, names=missing, keys=keys, nbytes=0, total=0))
    if degree == 1 and not root.get("num_experts") and any(map(is_torn, trained.values())):
        complete = zero.complete_copy(files.folder, [root])
        if complete is not None and files.named is not None and ZERO_MODEL.fullmatch(files.named.name):
            return _copy(files, root, *known)
        files.remarks.update({} if complete is None else {complete: None})
    folders = list_folder(files.folder / PARAMETERS).folders
    untrained = {str(name) for key in _UNTRAINED for name in root.get(key) or ()} & root["module"].keys()
    if extra := [name for name in folders if name not in shapes and name not in untrained]:
        raise UnreadableError(
            f"{files.folder}: the model states do not name {first_names(extra)}; put the files of one save together"
        )
    frozen = zero.frozen_parameters(root, states, world, files) if world > 1 else {}
    weights = zero.whole_module(root, trained, frozen, str(files.folder))
    optimizer = _optimizer(files, root["param_shapes"], moments)
    has_groups = (files.folder / PARAMETERS / GROUPS).is_file()
    why = "" if has_groups else f"fetch {PARAMETERS}/{GROUPS}, which has its groups"
    merged = zero.container(files, root, weights, optimizer, any(moments.values()), why)
    held = [(name, field, tensor) for name, found in moments.items() for field, tensor in found.items()]
    for is_highest in (False, True):  # AMSGrad's highest moments equal the moments as long as these grow
        chosen = ((name, field, tensor) for name, field, tensor in held if field.startswith("max_") is is_highest)
        files.note_repeated(
            {f"{PARAMETERS}/{name}/{field}.pt": [tensor] for name, field, tensor in chosen if field != _STEP}
        )
    zero.note_masters(files, root["module"], trained)
    # Those of stage 3 have no copy to compare with. Of tied weights, the optimizer has only one. Parameters that are
    # equal in a right save, such as those of two equal branches, have equal moments too.
    alone: dict[tuple[object, ...], str] = {}
    for name, row in moments.items():
        if row and not _is_copied(root["module"].get(name), trained[name]):
            alone.setdefault(sums_of([trained[name], *tensors_in(list(row.values()))]) or (name,), name)
    files.note_repeated({f"{PARAMETERS}/{name}/{MASTER}.pt": [trained[name]] for name in sorted(alone.values())})
    # Files of the optimizer: a master that cannot be read is an error.
    files.damage[:] = [
        replace(fact, kind=Kind.SHARD_UNREADABLE)
        if fact.kind is Kind.RANK_UNREADABLE and fact.place.startswith(f"{PARAMETERS}/")
        else fact
        for fact in files.damage
    ]
    halves = {name: entry for name, entry in root["module"].items() if isinstance(entry, TensorSpec)}
    copies = {
        name: halves[name] for name, spec in trained.items() if _is_copied(halves.get(name), spec)
    }  # none in stage 3, and none of tensor-parallel ranks
    return files.document(NAME, merged, _producer(root), copies)


def _is_copied(entry: Any, master: TensorSpec) -> bool:
    """Return whether an entry of the model states is the copy of a master; in stage 3 it is empty."""
    return isinstance(entry, TensorSpec) and entry.shape == master.shape


def _copy(files: RankFiles, root: Any, remarks: dict[Fact, None], damage: int) -> Document:
    """Return the document of the complete model states that were named, in place of lost masters; ``remarks`` and the
    first facts of the ``damage`` are about these states."""
    why = clauses(files.damage[damage:])
    del files.damage[damage:]
    files.lacking.clear()
    files.remarks = remarks
    files.is_by_name = True
    return files.document(NAME, zero.container(files, root, root["module"], None, True, why), _producer(root))


def _producer(root: Any) -> str:
    version = root.get("ds_version")
    return f"{f'DeepSpeed {version}' if isinstance(version, str) else 'DeepSpeed'}, universal"


def _without_states(files: RankFiles, are_unreadable: bool) -> Document:
    """Return the document of masters without model states: the folders have the names, and in stages 1 and 2 the files
    have the shapes. The order and the names of each group of the optimizer are lost.

    So are weights without moments, if others have them: DeepSpeed's converter casts buffers, frozen weights and tied
    ones from the model states, where tied ones differ from their masters."""
    parameters, held = files.folder / PARAMETERS, {}
    names = list_folder(parameters).folders
    for name in names:
        file = parameters / name / f"{MASTER}.pt"
        held[name] = files.root(file) if file.is_file() else None
    weights = OrderedDict(
        (name, spec)
        for name, root in held.items()
        if isinstance(spec := root.get("param") if isinstance(root, dict) else root, TensorSpec)
    )
    trained = {name for name in weights if len(list_folder(parameters / name).files) > 1}
    for name, spec in weights.items() if trained else ():
        weights[name] = spec if name in trained else gone(name, spec, str(files.folder))
    if not weights:
        raise damaged(files.folder, f"{clauses(files.damage)}; no master can be read")
    flat = tuple(name for name in weights if not isinstance(held[name], dict))
    states = _STATES_OF_RANK.format(0) if flat else _STATES
    if not are_unreadable:
        files.damage.append(Fact.of(Kind.STATES_LACKING, names=(states,)))
    files.remarks[Fact.of(Kind.UNNAMED_LOSS, lost=f"{states}, and the shapes of the others" if flat else states)] = None
    if flat:
        files.remarks[Fact.of(Kind.FLATTENED, keys=flat)] = None
    if missing := _missing_masters(parameters, names):
        files.damage.append(Fact.of(Kind.SHARDS_MISSING, names=missing, keys=len(missing), nbytes=0, total=0))
    files.note_repeated({f"{PARAMETERS}/{name}/{MASTER}.pt": [weights[name]] for name in sorted(trained)})
    why = "the model states have the names of its groups"
    return files.document(
        NAME, zero.container(files, {"module": weights}, weights, None, True, why), "DeepSpeed, universal"
    )


def _entries(files: RankFiles, name: str, shape: tuple[int, ...], degree: int) -> Iterator[tuple[str, Any]]:
    """Yield the master and the moments of a parameter by name, each in its whole shape; the step is a number.

    ``shape`` is that in the model states, which with ``degree`` tensor-parallel ranks is the shape of a part."""
    folder = files.folder / PARAMETERS / name
    if Path(name).name != name or not folder.is_dir():
        return
    for file in (folder / name for name in list_folder(folder).files if name.endswith(".pt")):
        value = root = files.root(file)
        value = value.get("param") if isinstance(value, dict) else value
        is_step = file.stem == _STEP
        is_number = value.numel == 1 if isinstance(value, TensorSpec) else type(value) in (int, float)
        if root is not None and not (is_number if is_step else isinstance(value, TensorSpec)):
            raise damaged(file, f"holds no {'number' if is_step else 'tensor'}")
        if isinstance(value, TensorSpec) and value.shape != shape and not is_step:
            flat = len(value.shape) == 1 and value.is_contiguous
            if flat and value.numel == math.prod(shape):
                value = replace(value, shape=shape, strides=contiguous_strides(shape))
            elif len(value.shape) != len(shape) or sum(map(ne, value.shape, shape)) > 1 or degree < 2:
                why = f"{file}: has the shape {list(value.shape)}, and the model states say {list(shape)}"
                if not files.salvage:
                    raise UnreadableError(f"{why}; its files are from different saves")
                files.damage.append(Fact.of(Kind.RANK_UNREADABLE, files.name(file), error=why))
                continue
        if value is not None:
            yield file.stem, value


def _lost_master(
    files: RankFiles, root: Any, name: str, shape: tuple[int, ...], moments: Mapping[str, Any], degree: int
) -> TensorSpec:
    """Return the master of a parameter whose file is missing or cannot be read, with its bytes marked as lost.

    Its shape is that of its moments, or else that in the model states, which with ``degree`` tensor-parallel ranks is
    the shape of a part."""
    path = str(files.folder)
    whole = next((kept.shape for field, kept in moments.items() if field in _ADAM), None)
    master = lost(name, whole or shape, path)
    if degree > 1 and whole is None:
        parts = [master] * degree
        split = splits_of_ranks(root, root["module"])(name, parts)
        master = joined(name, parts, split or WHOLE, path)
    files.lacking[name] += master.nbytes
    return master


def _missing_masters(parameters: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of masters that are missing, or the folders of their parameters if these are missing."""
    folders = set(list_folder(parameters).folders)
    files = (name if name not in folders else f"{name}/{MASTER}.pt" for name in names)
    return tuple(f"{PARAMETERS}/{name}" for name in files if not (parameters / name).exists())


def _lost_moments(moments: Mapping[str, Mapping[str, Any]], absent: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the moments that are missing, by parameter: of those with one of Adam's two, or without a folder
    (``absent``), if another parameter has both; and the step of those with both if most have one."""
    both = [held for held in moments.values() if held.keys() >= _ADAM]
    if not both:
        return {}
    needed = _ADAM | ({_STEP} if 2 * sum(_STEP in held for held in both) > len(both) else frozenset())
    without = {*absent}
    return {
        name: needed - held.keys()
        for name, held in moments.items()
        if (name in without or _ADAM & held.keys()) and not held.keys() >= needed
    }


def _optimizer(
    files: RankFiles, shapes: list[Mapping[str, Any]], moments: Mapping[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the optimizer's state by name; None if its groups are missing."""
    file = files.folder / PARAMETERS / GROUPS
    held = files.root(file) if file.is_file() else None
    held = held if isinstance(held, dict) else {}
    inner = held.get("optimizer_state_dict") or {}
    # In stage 3 they are one level deeper, with the only steps, and a group may consist of several flat ones.
    groups = held.get("param_groups") or inner.get("param_groups") or []
    if sorted(number for group in groups for number in group["params"]) != list(range(len(shapes))):
        return None
    steps = {number: state[_STEP] for number, state in (inner.get("state") or {}).items() if _STEP in state}
    have_some = any(moments.values())  # those without any are lost, or those of parameters that were not trained
    for number, names in enumerate(shapes):
        for name in names:
            if number in steps and (moments[str(name)] or not have_some):
                moments[str(name)].setdefault(_STEP, with_own_storage(steps[number]))
    named = [
        {**group, "params": [str(name) for number in group["params"] for name in shapes[number]]} for group in groups
    ]
    return {"state": moments, "param_groups": named}
