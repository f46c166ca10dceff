"""DeepSpeed's ZeRO 1, 2 and 3: model states with names and shapes, optimizer states with slices of the fp32 masters.

``<folder>/latest`` names the tag, a folder with ``*_model_states.pt`` and ``*_optim_states.pt`` of every rank. Trained
weights are taken from the masters, in fp32 (``zero_masters``); buffers and frozen parameters, which have no masters,
from the model states.

Each tensor-parallel rank has its own files (``mp_rank_01``), and the merged tensors of these ranks are joined by
``universal_checkpoint_info``, or else by Megatron's names. In a mixture of experts, every expert has a file in the
training's dtype (``layer_0_expert_3_mp_rank_00_model_states.pt``); the optimizers without ZeRO have no names
(``expp_rank_0_mp_rank_00_optim_states.pt``).

Sources: ``deepspeed/runtime/engine.py``, ``utils/zero_to_fp32.py``, ``checkpoint/ds_to_universal.py`` (0.9 to 0.19)."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import Content, is_torn
from ckptfix.core.facts import Fact, Kind, clauses, in_copy
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.parts import Shape
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import CkptfixError, UnreadableError, one_line
from ckptfix.reading.folders.chunks import Flat, Spread
from ckptfix.reading.folders.rank_shards import LIGHTNING_RELEASE
from ckptfix.reading.folders.ranks import megatron_layers
from ckptfix.reading.folders.ranks.files import (
    MOST_ABSENT,
    MOST_RANKS,
    RankFiles,
    are_varied,
    by_rank,
    note_copies,
    sums_of,
    tagged,
)
from ckptfix.reading.folders.ranks.names import LATEST, ZERO_EXPERT, ZERO_EXPERT_OPTIM, ZERO_MODEL, ZERO_OPTIM
from ckptfix.reading.folders.ranks.neox import Neox
from ckptfix.reading.folders.ranks.partition import Joining, SplitOf, emptied
from ckptfix.reading.folders.ranks.zero_experts import Experts, take_experts
from ckptfix.reading.folders.ranks.zero_masters import (
    STACK,
    Masters,
    absent_masters,
    completed,
    elements_of,
    is_flat,
    joined_masters,
    lost,
    restacked,
    stage_and_world,
)
from ckptfix.reading.folders.ranks.zero_numbered import EXPERT_KEY, merged_optimizer
from ckptfix.reading.folders.ranks.zero_splits import check_degree, kinds_of_splits, splits_of_ranks
from ckptfix.reading.formats import read_document
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.weights.document import Document

NAME = "zero"

_SPREAD = "zero_pp_rank"  # the start of the names of model states of stage 3
_FRAGMENTS = "frozen_param_fragments"

# Entries of model states that are only used to merge the ranks.
PARTITION = frozenset(
    "mp_world_size universal_checkpoint_info num_experts"
    " buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params optimizer"
    " checkpoint_parallel_dimensions ds_autoep_layers".split()
)

# The attribute that stage 3 sets on the empty parameters of model states.
_NUMBER_OF_PARAMETER = "ds_id"

# Entries of model states that are equal on all ranks of a run.
_SETTINGS = ("ds_config", "ds_version", "lr_scheduler", "dp_world_size", "global_samples", "skipped_steps")


def folder_of(file: Path) -> Path | None:
    """Return the folder of a rank's file if files of other ranks are beside it; None otherwise.

    Model states without a data-parallel rank in their name are a complete checkpoint if there are no others and no
    experts, and if they do not say that there should be."""
    if match := ZERO_OPTIM.fullmatch(file.name) or ZERO_MODEL.fullmatch(file.name):
        others = [by_rank(file.parent, names) for names in (ZERO_MODEL, ZERO_OPTIM)[: 1 if match[1] is None else 2]]
        is_one = any(len(ranks) > 1 for ranks in others) or bool(by_rank(file.parent, ZERO_EXPERT))
        is_one = is_one or (ZERO_MODEL.fullmatch(file.name) is not None and _is_part(file))
    else:
        is_one = any(names.fullmatch(file.name) for names in (ZERO_EXPERT, ZERO_EXPERT_OPTIM))
    return file.parent if is_one else None


def beside(path: Path) -> Path | None:
    """Return the folder of ranks beside weights that a trainer such as transformers wrote, or beside model states that
    are complete without them; None if there is none."""
    folder = path if path.is_dir() else path.parent
    with suppress(CkptfixError, OSError):
        if ZERO_MODEL.fullmatch(path.name):
            return folder if by_rank(folder, ZERO_OPTIM) and _is_whole(folder) else None
        found = find(folder) if path.exists() and (folder / LATEST).is_file() else None
        return found if found != folder else None
    return None


def lacks_masters(path: Path, root: Any) -> bool:
    """Return whether model states of ZeRO 1 or 2, or their folder, have no optimizer states beside them."""
    config = root.get("ds_config") if isinstance(root, dict) else None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2) or root.get("optimizer") is not None:
        return False
    return not by_rank(path if path.is_dir() else path.parent, ZERO_OPTIM)


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has every rank. Raises ``CkptfixError`` if it cannot be read without salvage."""
    files = RankFiles(folder, salvage=False)
    with files.merging():
        return not document(files).damage


def _has_states(folder: Path) -> bool:
    models = []
    for name in list_folder(folder).names:
        if ZERO_OPTIM.fullmatch(name) or ZERO_EXPERT.fullmatch(name):
            return True
        models += [name] * (ZERO_MODEL.fullmatch(name) is not None)
    return len(models) > 1 or any(_is_part(folder / name) for name in models)


def _is_part(file: Path) -> bool:
    """Return whether model states say that other files have the rest of the weights: those of other tensor-parallel
    ranks, or of experts, or the only optimizer states of stage 3."""
    with suppress(CkptfixError):  # opening the file reports the error
        root = read_document(Content.of_file(str(file))).root
        if isinstance(root, dict) and isinstance(module := root.get("module"), dict):
            degree, counts = root.get("mp_world_size"), root.get("num_experts")
            has_experts = any(EXPERT_KEY.fullmatch(str(key)) or STACK.fullmatch(str(key)) for key in module)
            is_of_experts = isinstance(counts, list) and any(type(count) is int and count > 0 for count in counts)
            is_only = file.name.startswith(_SPREAD) and root.get("dp_world_size") == 1
            return (type(degree) is int and degree > 1) or (is_of_experts and not has_experts) or is_only
    return False


def find(folder: Path) -> Path | None:
    """Return the folder of a tag with states of several ranks; None if there is none."""
    return tagged(folder, LATEST, _has_states)


class _ModelStates(Struct):
    """The model states of all tensor-parallel ranks. Those without any that can be read have no ``states``."""

    ranks: Sequence[int]
    files: Mapping[int, Mapping[int, Path]]  # those of each rank, by data-parallel rank
    states: Sequence[Mapping[int, Any]]  # their content
    degree: int | None  # the number of ranks in them
    are_spread: bool  # whether each data-parallel rank has its own, as in stage 3

    @property
    def unknown(self) -> list[int]:
        """The ranks whose names and shapes are in no file."""
        return [rank for rank, found in zip(self.ranks, self.states, strict=True) if not found]


def document(files: RankFiles) -> Document:
    """Return the merged document: the container of the first model states with whole weights."""
    path, models = str(files.folder), _model_states(files)
    roots = _roots(files, models)
    plain = _trained(roots[0])
    experts = take_experts(files, roots, models.are_spread)
    for root, found in zip(roots, models.states, strict=True):
        root["module"] = restacked(root["module"], path)
        root["shared_params"] = _ties(root, found, models.are_spread, path)
    known = next((root for root, found in zip(roots, models.states, strict=True) if found), roots[0])
    joining, split_of = Joining(path), splits_of_ranks(known, known["module"])
    neox, modules = Neox(files.folder), [root["module"] for root in roots]
    masters = _merged(files, models, roots, joining, split_of, experts, neox.is_summed(modules))
    frozen = _frozen(files, models, roots, masters.world, joining, split_of) if masters and masters.stage == 3 else {}
    whole = OrderedDict(neox.join(joining, modules, split_of)) if len(modules) > 1 else modules[0]
    neox.note(files.remarks, len(modules), masters.tensors if masters else ())
    root, trained = {**roots[0], "module": whole}, masters.tensors if masters else {}
    weights = whole_module(root, trained, frozen, path)
    elsewhere = {id(spec) for spec in (*trained.values(), *frozen.values())}  # and counted there
    kept = {name: spec for name, spec in weights.items() if name in joining.lacking and id(spec) not in elsewhere}
    files.lacking.update({name: joining.lacking[name] for name, spec in kept.items() if is_torn(spec)})
    merged = _container(files, root, weights, masters, lambda: merged_optimizer(files, roots, plain, joining, split_of))
    files.remarks.pop(Fact(Kind.ATTRIBUTE_OF_TENSOR, _NUMBER_OF_PARAMETER), None)
    files.note_renamed()
    note_masters(files, whole, trained if _has_optim(files) else {})
    note_copies(files.remarks, joining.differing, megatron_layers.may_drift(root))
    made_by = masters.release if masters else f"DeepSpeed {root.get('ds_version', '')}".strip()
    world = f", {counted(masters.world, 'rank')}" if masters else ""
    producer = made_by + world + (f", TP {len(roots)}" if len(roots) > 1 else "")
    return files.document(NAME, merged, producer, copies_of(masters, whole, path) if masters else {})


def _model_states(files: RankFiles) -> _ModelStates:
    """Read the model states of each tensor-parallel rank, and record as damage those that are missing."""
    optim, models = by_rank(files.folder, ZERO_OPTIM), by_rank(files.folder, ZERO_MODEL)
    named = sorted({numbers[-1] for numbers in (*optim, *models, *by_rank(files.folder, ZERO_EXPERT))})
    present = {rank: {data: file for (data, model), file in models.items() if model == rank} for rank in named}
    held = {rank: own for rank, files_of in present.items() if (own := states_of_ranks(files, files_of))}
    ranks, degree = _tensor_ranks(files, named, held)
    found = _ModelStates(
        ranks,
        {rank: present.get(rank, {}) for rank in ranks},
        [held.get(rank, {}) for rank in ranks],
        degree,
        any(file.name.startswith(_SPREAD) for file in models.values()),
    )
    absent = [rank for rank in found.unknown if not found.files[rank]]
    if names := tuple(chain.from_iterable(_names_of_states(files, rank, found.are_spread) for rank in absent)):
        files.damage.append(Fact.of(Kind.STATES_LACKING, names=names))
    return found


def _roots(files: RankFiles, models: _ModelStates) -> list[dict[str, Any]]:
    """Return the model states of each tensor-parallel rank. Unknown ones are those of another rank, with the bytes
    marked as lost; without any, the names come from the optimizer states.

    Raises ``UnreadableError`` if these cannot tell them, or if the ranks do not divide weights alike."""
    path = str(files.folder)
    lacking = [_names_of_states(files, rank, models.are_spread)[0] for rank in models.unknown]
    roots = [dict(found[first_of(found)]) if found else {} for found in models.states]
    if len(roots) > len(lacking):
        like = next(filter(None, roots))
        # Their names come from the slices of the ranks, and the shapes from another tensor-parallel rank.
        shared = {"shared_params": {**tied(like), **(like.get("shared_params") or {})}}
        nameless = {key: value for key, value in like.items() if key != "param_shapes"} | (shared if lacking else {})
        roots = [root or {**nameless, "module": OrderedDict(emptied(like["module"], path))} for root in roots]
    elif len(roots) == 1:
        roots = [{"module": OrderedDict(), "shared_params": None}]
        lost = f"{lacking[0]}, and the shapes of the others" if _has_optim(files) else lacking[0]
        files.remarks[Fact.of(Kind.UNNAMED_LOSS, lost=lost)] = None
    else:
        what = f"{clauses(files.damage)}; no other file has the names and shapes of the weights"
        raise UnreadableError(f"{path}: {what}; fetch {first_names(lacking)}")
    kinds = [kinds_of_splits(root) for root, found in zip(roots, models.states, strict=True) if found]
    if any(kind != kinds[0] for kind in kinds):
        raise UnreadableError(
            f"{path}: its tensor-parallel ranks do not say the same about how they divide weights; they are damaged or"
            " from different saves"
        )
    if models.degree is None and len(roots) > 1:
        check_degree(path, roots[0]["module"], len(roots))
    return roots


def _ties(root: Any, found: Mapping[int, Any], are_spread: bool, path: str) -> dict[str, str]:
    """Return the names of tied parameters of a tensor-parallel rank with the names that have the values."""
    listed = root["shared_params"] if "shared_params" in root else _copied(root["module"])
    listed = tied(root) if found and (first_of(found) or (are_spread and not listed)) else listed
    return {**_routers(root, path), **(listed or {})}


def _merged(
    files: RankFiles,
    models: _ModelStates,
    roots: Sequence[Any],
    joining: Joining,
    split_of: SplitOf,
    experts: Experts,
    is_summed: bool,
) -> Masters | None:
    """Return the masters; None if there are none, or if the complete copy in the model states is taken instead.

    If stage 3 has no optimizer states, they are those that are lost. ``is_summed`` is whether the weights are sums over
    the ranks, which masters are not."""
    has_optim, masters = _has_optim(files), None
    complete = None
    if has_optim and not is_summed:
        is_whole = not (experts.absent or experts.damaged)
        complete = complete_copy(files.folder, roots) if is_whole else None
        merge = partial(joined_masters, files, models.ranks, roots, joining, split_of)
        masters = _masters(files, merge, complete)
    elif models.are_spread and not has_optim:
        masters = absent_masters(files, models.ranks, roots, joining, split_of)
    if masters is None:
        joining.differing.clear()
    experts.note(files, masters.tensors if masters else None)
    if complete is not None and masters is not None and files.damage:
        files.remarks[complete] = None
    return masters


def _frozen(
    files: RankFiles, models: _ModelStates, roots: Sequence[Any], world: int, joining: Joining, split_of: SplitOf
) -> Mapping[str, Any]:
    """Return the frozen parameters of stage 3, and record as damage the ranks without model states."""
    pairs = [*zip(roots, models.states, strict=True)]
    shares = [frozen_parameters(root, found, world, files) if found else None for root, found in pairs]
    parts = completed(files, "", shares, split_of)
    for rank, (root, found) in zip(models.ranks, pairs, strict=True):
        present = models.files[rank]
        if present and (root.get("frozen_param_shapes") or 0 not in present):
            files.note_missing(world, present, f"{_SPREAD}_{{}}_mp_rank_{rank:02d}_model_states.pt", len(roots))
        if first := first_of(found):
            files.remarks[Fact.of(Kind.STATES_OF, present[first].name)] = None
    return joining.whole(parts, split_of)


def _container(
    files: RankFiles,
    root: Any,
    weights: Mapping[str, Any],
    masters: Masters | None,
    numbered: Callable[[], dict[str, Any] | None],
) -> dict[str, Any]:
    """Return the container with whole weights and the optimizer by name. ``numbered`` merges the one in the model
    states of runs without ZeRO."""
    has_optim = _has_optim(files)
    if flat := tuple(name for name in weights if masters is not None and name in masters.unshaped):
        files.remarks[Fact.of(Kind.FLATTENED, keys=flat)] = None
        files.remarks[Fact.of(Kind.RANK_LEFT_OUT, "optimizer", why="its moments are flat")] = None
    if masters is not None or has_optim:
        optimizer = masters and masters.optimizer if not flat else None
    else:
        optimizer = numbered()
    has_optimizer = bool(has_optim or root.get("optimizer"))
    is_numbered = optimizer is None and has_optimizer and not has_optim
    if is_numbered and {each.kind for each in files.damage} - {Kind.EXPERTS_LACKING}:
        files.damage.append(Fact(Kind.EXTRAS_LOST, "optimizer"))
        has_optimizer = False
    merged = container(files, root, weights, optimizer, has_optimizer)
    if "args" in merged:
        merged["args"] = megatron_layers.whole_arguments(merged["args"])
    return _of_lightning(merged) if LIGHTNING_RELEASE in merged else merged


def _has_optim(files: RankFiles) -> bool:
    return bool(by_rank(files.folder, ZERO_OPTIM))


def _tensor_ranks(
    files: RankFiles, found: Sequence[int], states: Mapping[int, Mapping[int, Any]]
) -> tuple[list[int], int | None]:
    """Return all tensor-parallel ranks, those without any file too, and their number in the model states, if it is
    there.

    Raises ``UnreadableError`` if the model states differ in it, or if there are other ranks than these."""
    roots = {rank: own[first_of(own)] for rank, own in states.items()}
    facts = {rank: (root.get("mp_world_size"), root.get("global_steps")) for rank, root in roots.items()}
    labels = {rank: f"*mp_rank_{rank:02d}_model_states.pt" for rank in roots}
    if files.of_another_save(facts, labels, "number of tensor-parallel ranks or step"):
        raise UnreadableError(f"{files.folder}: all of its tensor-parallel ranks are needed; fetch those of one save")
    degree = next((said for said, _ in facts.values()), None)
    degree = degree if type(degree) is int and 0 < degree <= MOST_RANKS else None
    every = sorted({*found, *range(min(degree or 0, len(found) + MOST_ABSENT))})
    if every != list(range(degree or len(every))):
        raise UnreadableError(
            f"{files.folder}: has files of {len(found)} of {degree or every[-1] + 1} tensor-parallel ranks; fetch the"
            " others"
        )
    return every, degree


def complete_copy(folder: Path, roots: Sequence[Any]) -> Fact | None:
    """Return the first file of the model states if these, with the files of experts, have every weight in the
    training's dtype, as in stages 1 and 2; None if any is empty or incomplete."""
    dtypes: Counter[str] = Counter()
    for root in roots:
        module = root["module"]
        tensors = {name: entry for name, entry in module.items() if isinstance(entry, TensorSpec)}
        shapes = {str(name): sizes(shape) for group in root.get("param_shapes") or () for name, shape in group.items()}
        if "param_shapes" not in root and root.get("num_experts"):  # older releases do not list them with experts
            shapes = {name: spec.shape for name, spec in tensors.items() if spec.numel}
        if not shapes or shapes.keys() - tensors.keys() or any(map(is_torn, tensors_in(module))):
            return None
        if any(tensors[name].shape != shape for name, shape in shapes.items() if not STACK.fullmatch(name)):
            return None
        dtypes.update(tensors[name].dtype for name in shapes)
    file = folder / "mp_rank_00_model_states.pt"
    return Fact.of(Kind.COMPLETE_COPY, str(file), dtype=dtypes.most_common(1)[0][0]) if file.is_file() else None


def _masters(files: RankFiles, merge: Callable[[], Masters], complete: Fact | None) -> Masters | None:
    """Return the masters; None if these are not whole and a file of the complete model states was named.

    Otherwise, the error names that file."""
    takes_copy = complete is not None and files.named is not None and not ZERO_OPTIM.fullmatch(files.named.name)
    remarks, damage = dict(files.remarks), len(files.damage)
    try:
        masters = merge()
    except UnreadableError as error:
        if complete is None:
            raise
        if not takes_copy:
            raise UnreadableError(*error.args, f", or {in_copy(complete)}", data=error.data) from error
        why = clauses(files.damage[damage:]) or one_line(str(error.args[0]).removeprefix(f"{files.folder}: "))
    else:
        if not takes_copy or len(files.damage) == damage:
            return masters
        why = clauses(files.damage[damage:])
    files.is_by_name = True
    files.remarks = remarks
    files.lacking.clear()
    del files.damage[damage:]
    files.remarks[Fact.of(Kind.RANK_LEFT_OUT, "optimizer", why=why)] = None
    return None


def container(
    files: RankFiles, root: Any, weights: Any, optimizer: Any, has_optimizer: bool, why: str = ""
) -> dict[str, Any]:
    """Return model states with whole weights and the optimizer by name; if it is None, remark that it is left out, and
    ``why``."""
    merged = {key: weights if key == "module" else value for key, value in root.items() if key not in PARTITION}
    if optimizer is not None:
        merged["optimizer"] = optimizer
    elif has_optimizer and not any(
        (fact.kind, fact.place) == (Kind.RANK_LEFT_OUT, "optimizer") for fact in files.remarks
    ):
        files.remarks[Fact.of(Kind.RANK_LEFT_OUT, "optimizer", **({"why": why} if why else {}))] = None
    return merged


def _of_lightning(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return model states that Lightning saved with the names that its ``Trainer`` reads from a single file."""
    whole = {"state_dict" if key == "module" else key: value for key, value in root.items() if key != "optimizer"}
    return whole | ({"optimizer_states": [root["optimizer"]]} if "optimizer" in root else {})


def _trained(root: Any) -> dict[str, Shape]:
    """Return the shapes of the parameters in model states, of tied ones only the first."""
    module, buffers = root["module"], {*(root.get("buffer_names") or ())}
    found = {spec.view: name for name, spec in reversed(module.items()) if isinstance(spec, TensorSpec)}
    first = {*found.values()}
    return {name: module[name].shape for name in module if name in first and name not in buffers}


def _routers(root: Any, path: str) -> dict[str, str]:
    """Return the aliases of AutoEP's routers with their own names, which the ``shared_params`` of stage 3 lack.

    Raises ``UnreadableError`` if the experts of a layer are not in the order of the ranks."""
    found = {}
    for layer in root.get("ds_autoep_layers") or ():
        placed = [expert for rank in layer.get("expert_placement", {}).get("ranks", ()) for expert in rank["experts"]]
        if placed != sorted(placed):
            raise UnreadableError(f"{path}: its ranks have experts out of order")
        prefix = f"{layer['module_path']}."
        for key in root["module"]:
            own = f"{prefix}router.{key.removeprefix(prefix).partition('.')[2]}"
            if key.startswith(prefix) and own in root["module"]:
                found[key] = own
    return found


def _copied(module: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tensors that are copies of an earlier one, by their checksums: with experts, older releases
    neither list ties nor keep them."""
    first: dict[tuple[object, ...], str] = {}
    tensors = {name: spec for name, spec in module.items() if isinstance(spec, TensorSpec)}
    sums = {name: sums_of([spec]) for name, spec in tensors.items()}
    holders = {name: first.setdefault((tensors[name].dtype, *found), name) for name, found in sums.items() if found}
    return {name: holder for name, holder in holders.items() if holder != name and are_varied([tensors[name]])}


def copies_of(masters: Masters, module: Mapping[str, Any], path: str) -> dict[str, TensorSpec]:
    """Return the copies of the masters in the model states; in stage 3, there are none.

    Raises ``UnreadableError`` if their shapes differ."""
    found = {name: copy for name in masters.tensors if isinstance(copy := module.get(name), TensorSpec)}
    if masters.stage == 3:
        return {}
    if odd := [name for name, copy in found.items() if copy.shape != masters.tensors[name].shape]:
        raise UnreadableError(
            f"{path}: {first_names(odd)} differ in shape between the model states and the optimizer states; put the"
            " files of one save together"
        )
    return found


def states_of_ranks(files: RankFiles, found: Mapping[int, Path]) -> dict[int, Any]:
    """Return the model states of the first rank that has any, and the shares of frozen parameters of the others, if
    there are any. In stage 3, each rank has its own, with the same names, shapes and buffers.

    Raises ``UnreadableError`` if their steps differ."""
    roots: dict[int, Any] = {}
    steps, settings, fragments = {}, {}, {}
    first: int | None = None
    for rank, file in found.items():
        if first is not None and not roots[first].get("frozen_param_shapes"):
            break
        root = files.root(file)
        if isinstance(root, dict):
            steps[rank] = root.get("global_steps")
            settings[file.name], fragments[file.name] = {key: root.get(key) for key in _SETTINGS}, root.get(_FRAGMENTS)
            is_first = first is None and isinstance(root.get("module"), dict)
            roots[rank] = root if is_first else {_FRAGMENTS: root.get(_FRAGMENTS)}
            first = rank if is_first else first
    if first is None:
        return {}
    odd = files.of_another_save(steps, {rank: found[rank].name for rank in steps}, "step")
    if first in odd:
        return states_of_ranks(files, {rank: file for rank, file in found.items() if rank not in odd})
    files.note_foreign(settings)
    files.note_repeated(fragments)
    return {rank: root for rank, root in roots.items() if rank not in odd}


def first_of(states: Mapping[int, Any]) -> int:
    """Return the rank whose model states have the names and the buffers."""
    return next((rank for rank, root in states.items() if "module" in root), 0)


def _names_of_states(files: RankFiles, rank: int, are_spread: bool) -> tuple[str, ...]:
    """Return the names of the model states of a tensor-parallel rank: in stage 3, each data-parallel rank has some."""
    every = (*by_rank(files.folder, ZERO_OPTIM), *by_rank(files.folder, ZERO_MODEL))
    world = 1 + max((data for data, _ in every), default=0)
    if any(model == rank for _, model in by_rank(files.folder, ZERO_OPTIM)):
        stage, world = stage_and_world(files, rank)
        are_spread = are_spread or stage == 3
    before = (f"{_SPREAD}_{data}_" for data in range(min(world, MOST_ABSENT))) if are_spread else ("",)
    return tuple(f"{name}mp_rank_{rank:02d}_model_states.pt" for name in before)


def tied(root: Any) -> dict[str, str]:
    """Return the names of tied parameters of stage 3 with the names that have the values, by their empty tensors: only
    the file of rank 0 lists them."""
    listed = [str(name) for group in root.get("param_shapes") or () for name in group]
    listed += [str(name) for name in root.get("frozen_param_shapes") or ()]
    tensors = {name: entry for name, entry in root["module"].items() if isinstance(entry, TensorSpec)}
    holders: dict[object, list[str]] = {}
    for name in listed:
        if name in tensors:
            holders.setdefault(tensors[name].view, []).append(name)
    ties = {name: holders.get(spec.view, []) for name, spec in tensors.items() if name not in listed}
    return {name: held[0] for name, held in ties.items() if len(held) == 1}


def note_masters(files: RankFiles, module: Mapping[str, Any], masters: Mapping[str, TensorSpec]) -> None:
    """Remark the dtypes of the weights in the model states, if they have fp32 masters, and the names of those that
    training used in fp32. In stage 3, the trained ones are empty."""
    used = {name: spec.dtype for name, spec in module.items() if isinstance(spec, TensorSpec)}
    kept = tuple(name for name, dtype in used.items() if dtype == "float32")
    halves = {used.get(name, "float32") for name, master in masters.items() if master.dtype == "float32"}
    for half in sorted(halves - {"float32"}):
        files.remarks[Fact.of(Kind.MASTERS, dtype=half, kept=kept)] = None


def frozen_parameters(root: Any, roots: Mapping[int, Any], world: int, files: RankFiles) -> dict[str, TensorSpec]:
    """Return the frozen parameters of stage 3, merged from their shares in every rank's model states."""
    made, path = {}, str(files.folder)
    absent = [rank for rank in range(world) if rank not in roots]
    for name, size in (root.get("frozen_param_shapes") or {}).items():
        shape = sizes(size)
        parts: dict[int, Any] = {rank: (states.get(_FRAGMENTS) or {}).get(name) for rank, states in roots.items()}
        if not all(map(is_flat, parts.values())):
            made[name] = lost(name, shape, path)
            continue
        spread = Spread([Flat.joined([parts[rank]] if rank in parts else []) for rank in range(world)])
        share, held = spread.share(math.prod(shape)), sorted({part.numel for part in parts.values()})
        if held != [share]:
            raise UnreadableError(
                f"{path}: each rank should hold {share} numbers of {name}, by its shape {list(shape)}, and they hold "
                f"{first_names(held)}; the files are from different saves or damaged"
            )
        made[name] = spread.tensor(name, shape, 0, path)
        files.lacking[name] += made[name].itemsize * elements_of(shape, world, absent)
    return made


def whole_module(
    root: Any, trained: Mapping[str, TensorSpec], frozen: Mapping[str, TensorSpec], path: str
) -> OrderedDict[str, Any]:
    """Return the state_dict of model states with whole tensors, in the order of the model, with its ties.

    Tied parameters share a master. Raises ``UnreadableError`` if no rank has the values of a parameter."""
    module, shared = root["module"], root.get("shared_params") or {}
    views = {entry.view: name for name in trained if isinstance(entry := module.get(name), TensorSpec)}
    weights: OrderedDict[str, Any] = OrderedDict()
    whole, empty = {**frozen, **trained}, []
    for name, entry in module.items():
        if (holder := name if name in whole else shared.get(name)) in whole:
            weights[name] = whole[holder]
        elif isinstance(entry, TensorSpec) and entry.numel and entry.view in views:
            weights[name] = trained[views[entry.view]]  # older releases do not list ties
        else:
            if isinstance(entry, TensorSpec) and entry.shape == (0,) and name not in root.get("buffer_names", ()):
                empty.append(name)
            weights[name] = entry
    weights.update({name: spec for name, spec in whole.items() if name not in weights})
    weights.__dict__.update(getattr(module, "__dict__", {}))  # torch's _metadata
    if empty:
        raise UnreadableError(f"{path}: no rank holds the values of {first_names(empty)}; its files are damaged")
    return weights
