"""DeepSpeed's ZeRO 1, 2 and 3: model states with names and shapes, optimizer states with slices of the fp32 masters.

``<folder>/latest`` names the tag, a folder with ``*_model_states.pt`` and ``*_optim_states.pt`` of every rank. In
stages 1 and 2, each optimizer group is a flat run that is split into equal partitions, one per rank. In stage 3, each
parameter is split into equal shares, and a rank's shares follow one another, in sub-groups. ``param_shapes`` has the
names in the order of the run. Trained weights are taken from the masters, in fp32; buffers and frozen parameters, which
have no masters, from the model states. The moments of the optimizer are laid out like the masters, and returned by
name.

Each tensor-parallel rank has its own files (``mp_rank_01``), and the merged tensors of these ranks are joined by
``universal_checkpoint_info``, or else by Megatron's names. In a mixture of experts, a group of experts consists of
several runs over fewer ranks, each with its own experts; in the training's dtype, every expert has a file
(``layer_0_expert_3_mp_rank_00_model_states.pt``); the optimizers without ZeRO have no names
(``expp_rank_0_mp_rank_00_optim_states.pt``).

Sources: ``deepspeed/runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/bf16_optimizer.py``, ``utils/zero_to_fp32.py``, ``checkpoint/ds_to_universal.py`` (0.9 to 0.19)."""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.limits import shown
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind, clauses, in_copy
from ckptfix.core.finding import counted
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.core.parts import Shape, Shapes
from ckptfix.core.spec import TensorSpec, contiguous_strides, with_own_storage
from ckptfix.core.wording import first_names
from ckptfix.errors import CkptfixError, UnreadableError, damaged
from ckptfix.reading.folders.chunks import Flat, Spread, gone
from ckptfix.reading.folders.ranks import megatron
from ckptfix.reading.folders.ranks.files import (
    MALFORMED,
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
from ckptfix.reading.folders.ranks.partition import Joining, Split, SplitOf, joined
from ckptfix.reading.folders.ranks.zero_numbered import EXPERT_KEY, merged_optimizer
from ckptfix.reading.folders.ranks.zero_splits import check_degree, splits_of_ranks
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.weights.document import Document

NAME = "zero"

_FRAGMENTS = "frozen_param_fragments"
# The padding of a flat group has fewer than this many elements per rank; DeepSpeed pads to a multiple of two for each
# (``nccl_start_alignment_factor``).
_PADDING, _ALIGNMENT = 16, 2

# AutoEP stacks the weights of all experts of a layer; a rank has some of them, and a file of an expert has one.
_STACK = re.compile(r".*\.experts\.w[123]")
_STACKED = re.compile(rf"({_STACK.pattern})\.(\d{{1,6}})")

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
    experts."""
    if match := ZERO_OPTIM.fullmatch(file.name) or ZERO_MODEL.fullmatch(file.name):
        others = by_rank(file.parent, ZERO_MODEL if match[1] is None else ZERO_OPTIM)
        is_one = len(others) > 1 or bool(by_rank(file.parent, ZERO_EXPERT))
    else:
        is_one = any(names.fullmatch(file.name) for names in (ZERO_EXPERT, ZERO_EXPERT_OPTIM))
    return file.parent if is_one else None


def beside(path: Path) -> Path | None:
    """Return the folder of ranks beside weights that a trainer such as transformers wrote, or beside model states that
    are complete without them; None if there is none."""
    folder = path if path.is_dir() else path.parent
    with suppress(CkptfixError, OSError):
        if ZERO_MODEL.fullmatch(path.name):
            return folder if by_rank(folder, ZERO_OPTIM) else None
        found = find(folder) if path.exists() and (folder / LATEST).is_file() else None
        return found if found != folder else None
    return None


def _has_states(folder: Path) -> bool:
    models = 0
    for name in list_folder(folder).names:
        if ZERO_OPTIM.fullmatch(name) or ZERO_EXPERT.fullmatch(name):
            return True
        models += ZERO_MODEL.fullmatch(name) is not None
    return models > 1


def find(folder: Path) -> Path | None:
    """Return the folder of a tag with states of several ranks; None if there is none."""
    return tagged(folder, LATEST, _has_states)


def document(files: RankFiles) -> Document:
    """Return the merged document: the container of the first model states with whole weights."""
    path, optim, models = str(files.folder), by_rank(files.folder, ZERO_OPTIM), by_rank(files.folder, ZERO_MODEL)
    tensor = sorted({model for _, model in (*optim, *models)})
    states = [
        model_states(files, {data: file for (data, model), file in models.items() if model == rank}) for rank in tensor
    ]
    roots = [found[0] for found in states]
    facts = {
        rank: (root.get("mp_world_size"), root.get("global_steps")) for rank, root in zip(tensor, roots, strict=True)
    }
    labels = {rank: f"*mp_rank_{rank:02d}_model_states.pt" for rank in tensor}
    if files.of_another_save(facts, labels, "number of tensor-parallel ranks or step"):
        raise UnreadableError(f"{path}: all of its tensor-parallel ranks are needed; fetch those of one save")
    degree = roots[0].get("mp_world_size")
    if tensor != list(range(degree if type(degree) is int and 0 < degree <= MOST_RANKS else len(tensor))):
        raise UnreadableError(f"{path}: has files of {len(tensor)} of {degree} tensor-parallel ranks; fetch the others")
    experts = by_rank(files.folder, ZERO_EXPERT)
    if type(degree) is not int and len(tensor) > 1:
        check_degree(path, roots[0]["module"], len(tensor))
    plain = _trained(roots[0])
    for (_, expert, rank), file in experts.items():
        roots[rank]["module"].update(_of_expert(files, file, expert))
    counts = roots[0].get("num_experts") if experts and not optim else None
    if isinstance(counts, list) and all(type(count) is int and count < MOST_RANKS for count in counts):
        wanted = {(layer, expert) for layer, count in enumerate(counts) for expert in range(count)}
        if absent := sorted(wanted - {numbers[:2] for numbers in experts}):
            names = [f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt" for layer, expert in absent]
            raise UnreadableError(f"{path}: lacks {first_names(names)}; fetch them")
    for root in roots:
        root["module"] = _restacked(root["module"], path)
        listed = root["shared_params"] if "shared_params" in root else _copied(root["module"])
        root["shared_params"] = {**_routers(root, path), **(listed or {})}
    joining, split_of = Joining(path), splits_of_ranks(roots[0], megatron.RULES, roots[0]["module"])
    neox, modules = Neox(files.folder), [root["module"] for root in roots]
    has_masters = bool(optim) and not neox.is_summed(modules)
    complete = complete_copy(roots[0], models) if has_masters and len(tensor) == 1 and not experts else None
    try:
        masters = joined_masters(files, tensor, roots, joining, split_of) if has_masters else None
    except UnreadableError as error:
        if complete is None or not files.damage:
            raise
        raise UnreadableError(f"{error}, or {in_copy(complete)}", data=error.data) from error
    if complete is not None and files.damage:
        files.remarks[complete] = None
    frozen: Mapping[str, Any] = {}
    if masters is not None and masters.stage == 3:
        pairs = zip(roots, states, strict=True)
        parts = [frozen_parameters(root, found, masters.world, files) for root, found in pairs]
        for rank, root in zip(tensor, roots, strict=True):
            if root.get("frozen_param_shapes"):
                present = {data: file for (data, model), file in models.items() if model == rank}
                files.note_missing(masters.world, present, f"zero_pp_rank_{{}}_mp_rank_{rank:02d}_model_states.pt")
        frozen = joining.whole(parts, split_of)
    whole = OrderedDict(neox.join(joining, modules, split_of)) if len(modules) > 1 else modules[0]
    neox.note(files.remarks, len(modules), masters.tensors if masters else ())
    root = {**roots[0], "module": whole}
    weights = whole_module(root, masters.tensors if masters else {}, frozen, path)
    if masters is not None or optim:
        optimizer = masters and masters.optimizer
    else:
        optimizer = merged_optimizer(files, roots, plain, joining, split_of)
    merged = container(files, root, weights, optimizer, bool(optim or root.get("optimizer")))
    if "args" in merged:
        merged["args"] = megatron.whole_arguments(merged["args"])
    files.remarks.pop(Fact(Kind.ATTRIBUTE_OF_TENSOR, _NUMBER_OF_PARAMETER), None)
    files.note_renamed()
    note_masters(files, root["module"], masters.tensors if masters else {})
    note_copies(files.remarks, joining.differing, megatron.may_drift(root))
    made_by = masters.release if masters else f"DeepSpeed {root.get('ds_version', '')}".strip()
    ranks = f", {counted(masters.world, 'rank')}" if masters else ""
    producer = made_by + ranks + (f", TP {len(tensor)}" if len(tensor) > 1 else "")
    return files.document(NAME, merged, producer, copies_of(masters, root["module"], path) if masters else {})


def complete_copy(root: Any, models: Mapping[tuple[int, ...], Path]) -> Fact | None:
    """Return the file with the model states if it has every weight in the training's dtype, as in stages 1 and 2; None
    if any is empty or incomplete."""
    file, module = models.get((0, 0)), root["module"]
    names = [str(name) for group in root.get("param_shapes") or () for name in group]
    held = [entry for entry in map(module.get, names) if isinstance(entry, TensorSpec)]
    is_whole = bool(names) and len(held) == len(names) and not any(map(is_torn, tensors_in(module)))
    shapes = [sizes(shape) for group in root.get("param_shapes") or () for shape in group.values()]
    if file is None or not is_whole or [spec.shape for spec in held] != shapes or folder_of(file) is not None:
        return None
    return Fact.of(Kind.COMPLETE_COPY, str(file), dtype=held[0].dtype)


def container(files: RankFiles, root: Any, weights: Any, optimizer: Any, has_optimizer: bool) -> dict[str, Any]:
    """Return model states with whole weights and the optimizer by name; if it is None, remark that it is left out."""
    merged = {key: weights if key == "module" else value for key, value in root.items() if key not in PARTITION}
    if optimizer is not None:
        merged["optimizer"] = optimizer
    elif has_optimizer:
        files.remarks[Fact(Kind.RANK_LEFT_OUT, "optimizer")] = None
    return merged


def _trained(root: Any) -> dict[str, Shape]:
    """Return the shapes of the parameters in model states, of tied ones only the first."""
    module, buffers = root["module"], root.get("buffer_names") or ()
    found = {spec.view: name for name, spec in reversed(module.items()) if isinstance(spec, TensorSpec)}
    return {name: module[name].shape for name in module if name in found.values() and name not in buffers}


def _of_expert(files: RankFiles, file: Path, expert: int) -> dict[str, Any]:
    """Return the weights in the file of an expert; those of AutoEP as a stack of one.

    Raises ``UnreadableError`` if they belong to another expert."""
    made = {}
    for key, spec in (files.root(file) or {}).items():
        stacked = _STACKED.fullmatch(str(key))
        match = stacked or EXPERT_KEY.fullmatch(str(key))
        if match is None or int(match[2]) != expert or not isinstance(spec, TensorSpec):
            raise damaged(file, f"holds {shown(key)}, which expert {expert} does not have")
        made[key] = replace(spec, shape=(1, *spec.shape), strides=(spec.numel, *spec.strides)) if stacked else spec
    return made


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


def _restacked(tensors: dict[str, Any], path: str) -> dict[str, Any]:
    """Return tensors with the parts of AutoEP's stacks of experts joined."""
    found = {key: match for key in tensors if (match := _STACKED.fullmatch(key))}
    parts: dict[str, dict[int, TensorSpec]] = {}
    for key, match in found.items():
        parts.setdefault(match[1], {})[int(match[2])] = tensors[key]
    if not parts:
        return tensors
    whole = {name: joined(name, [held[at] for at in sorted(held)], Split(0), path) for name, held in parts.items()}
    return OrderedDict({found[key][1] if key in found else key: None for key in tensors}) | {
        **{key: tensor for key, tensor in tensors.items() if key not in found},
        **whole,
    }


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


class _States(Struct):
    """The optimizer states of one rank, as inert data."""

    masters: list[TensorSpec]
    stage: int
    counts: list[int]  # number of ranks over which each group is split; fewer than all for a group of experts
    ranks: list[Any]  # these ranks, if the file lists them: with experts in stage 3
    paddings: Any
    # The state_dict of the inner optimizer: `state` by number of the flat group, and `param_groups`.
    optimizer: Mapping[str, Any]
    slices: list[dict[str, int]]  # numbers of each parameter in the partition of each group, by name
    version: str = ""
    settings: Any = None  # equal on all ranks

    @property
    def world(self) -> int:
        return max(self.counts)

    @property
    def save(self) -> tuple[object, ...]:
        """Facts that are equal on all ranks of a save."""
        dtypes = sorted({spec.dtype for spec in tensors_in([self.masters, self.optimizer])})
        return self.stage, self.counts, dtypes

    @property
    def steps(self) -> list[float | None] | None:
        """The step of every flat group, equal on all ranks of a save; None if the file is cut short before one."""
        found = self.optimizer.get("state")
        held = [
            group.get("step")
            for group in (found if isinstance(found, dict) else {}).values()
            if isinstance(group, dict)
        ]
        is_lost = any(isinstance(step, TensorSpec) and is_torn(step) for step in held)
        return None if is_lost else [*map(_number, held)]

    @property
    def numbers(self) -> list[int]:
        """The key in ``state`` of each flat group."""
        groups = self.optimizer.get("param_groups", ())
        return [number for group in groups for number in group.get("params", ()) if type(number) is int]


class Masters(Struct):
    """The merged data of data-parallel ranks: the fp32 masters, and the optimizer's state by name."""

    tensors: dict[str, TensorSpec]
    optimizer: dict[str, Any] | None
    stage: int
    world: int
    version: str

    @property
    def release(self) -> str:
        """The program that wrote them."""
        return f"DeepSpeed {self.version}".strip() + f", ZeRO stage {self.stage or '1 or 2'}"


def joined_masters(
    files: RankFiles, models: Sequence[int], roots: Sequence[Any], joining: Joining, split_of: SplitOf
) -> Masters:
    """Merge the data-parallel ranks of each of these tensor-parallel ranks, and join the results."""
    parts = [Merging(files, model).masters(root) for model, root in zip(models, roots, strict=True)]
    optimizers = [part.optimizer for part in parts]
    if len(parts) == 1:
        return parts[0]
    optimizer, states = optimizers[0], [part["state"] for part in optimizers if part is not None]
    if optimizer is not None and len(states) == len(parts):
        fields = dict.fromkeys(field for moments in states[0].values() for field in moments)
        moments_of: dict[str, dict[str, Any]] = {name: {} for name in states[0]}
        for field in fields:
            held = [{name: moments[field] for name, moments in state.items() if field in moments} for state in states]
            for name, moment in joining.join(held, split_of):
                moments_of[name][field] = moment
        optimizer = {**optimizer, "state": moments_of}
    else:
        optimizer = None
    return replace(
        parts[0], tensors=dict(joining.join([part.tensors for part in parts], split_of)), optimizer=optimizer
    )


class _FlatRun(Struct, frozen=True):
    """A flat run in one or several groups: the ranks over which it is split, and the names and shapes in order."""

    groups: Sequence[int]
    ranks: Sequence[int]
    shapes: Shapes


def _runs(groups: Sequence[Shapes], counts: Sequence[int]) -> Iterator[_FlatRun]:
    """Yield the runs of all groups; a group of experts has one for each set of ranks with its own experts.

    Each rank numbers its experts from 0. Raises ``ValueError`` if a group without experts is on some ranks only."""
    world = max(counts)
    for index, (shapes, count) in enumerate(zip(groups, counts, strict=True)):
        sets = world // count if count > 0 else 0
        found = {name: EXPERT_KEY.fullmatch(name) for name in shapes}
        stacks = {name for name in shapes if sets > 1 and _STACK.fullmatch(name)}
        if sets * count != world or (sets > 1 and {name for name, match in found.items() if not match} != stacks):
            raise ValueError(f"group {index} is cut over {count} of {world} ranks")
        local: dict[str, int] = {}
        for match in filter(None, found.values()):
            local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
        for part in range(sets):
            named = {
                f"{match[1]}{part * local[match[1]] + int(match[2])}{match[3]}" if match else name: shapes[name]
                for name, match in found.items()
            }
            named = {f"{name}.{part}" if name in stacks else name: shape for name, shape in named.items()}
            yield _FlatRun((index,), range(part, world, sets), named)


class Merging:
    """A merge of the optimizer states of ranks that share their parameters."""

    def __init__(self, files: RankFiles, model_rank: int) -> None:
        self.files, self.path = files, str(files.folder)
        found = {data: file for (data, model), file in by_rank(files.folder, ZERO_OPTIM).items() if model == model_rank}
        states = {rank: made for rank, file in found.items() if (made := self._states(file)) is not None}
        self._name = f"zero_pp_rank_{{}}_mp_rank_{model_rank:02d}_optim_states.pt"
        if not states:
            causes = clauses(self.files.damage) or f"has no {self._name.format('*')}"
            raise damaged(self.path, f"{causes}; no rank can be read")
        steps = {rank: made.steps for rank, made in states.items()}
        known = next((own for own in steps.values() if own is not None), None)
        saves = {rank: (*made.save, known if steps[rank] is None else steps[rank]) for rank, made in states.items()}
        names = {rank: file.name for rank, file in found.items()}
        odd = files.of_another_save(saves, names, "stage, number of ranks, dtype or step")
        self.states = {rank: made for rank, made in states.items() if rank not in odd}
        self.present = {rank: found[rank] for rank in self.states}
        self.first = self.states[min(self.states)]

    def masters(self, root: Any) -> Masters:
        """Return the merged data of the ranks; ``root`` are the model states, which have the names and shapes."""
        named = {self.present[rank].name: made for rank, made in self.states.items()}
        self.files.note_repeated({name: [made.masters, made.optimizer] for name, made in named.items()})
        settings = {name: made.settings for name, made in named.items()}
        self.files.note_foreign({**settings, "*_model_states.pt": {"ds_config": root.get("ds_config")}})
        prefix = next(iter(named)).partition("zero_pp_rank")[0]
        self.files.note_missing(self.first.world, self.present, prefix + self._name)
        groups: list[dict[str, Shape]] = (
            [{str(name): sizes(shape) for name, shape in group.items()} for group in root["param_shapes"]]
            if "param_shapes" in root or not self.first.slices
            else list(self._in_slices(root["module"]))
        )
        every, counts = range(len(self.first.masters)), self.first.counts
        if self.first.stage == 3 and len(set(counts)) == 1:
            runs = [_FlatRun(every, range(self.first.world), {name: group[name] for group in groups for name in group})]
        else:
            if len(groups) != len(every):
                raise ValueError(f"{len(every)} groups of weights and names of {len(groups)}")
            runs = list(_runs(groups, counts))
            groups = [
                {_STACKED.sub(r"\1", n): s for run in runs if index in run.groups for n, s in run.shapes.items()}
                for index in every
            ]
        for run in runs:
            said = [self.states[rank].ranks for rank in run.ranks if rank in self.states]
            if any([*run.ranks] != [*ranks[at]] for ranks in said if ranks for at in run.groups):
                raise ValueError(f"group {run.groups[0]} is not on the ranks {first_names(run.ranks)}")
        place = partial(self._spread if self.first.stage == 3 else self._partitions, runs)
        tensors = place("", lambda made, index: made.masters[index])
        if tensors is None:
            raise UnreadableError(f"{self.path}: its slices of weights are not flat tensors, so it is damaged")
        return Masters(tensors, self._optimizer(place, groups), self.first.stage, self.first.world, self.first.version)

    def _in_slices(self, module: Mapping[str, Any]) -> Iterator[dict[str, Shape]]:
        """Yield the names and shapes of each group, by the names of the ranks' slices, and the model states, which have
        no ``param_shapes`` for a model with experts in older releases.

        Raises ``UnreadableError`` if a rank is missing, ``ValueError`` if the slices do not add up."""
        for index, count in enumerate(self.first.counts):
            ranks = range(0, self.first.world, self.first.world // max(count, 1))
            if any(rank not in self.states for rank in ranks):
                raise damaged(self.path, f"{clauses(self.files.damage)}; only all ranks together name the weights")
            held: dict[str, int] = {}
            for name, numel in chain.from_iterable(self.states[rank].slices[index].items() for rank in ranks):
                held[name] = held.get(name, 0) + numel
            if odd := [name for name, numel in held.items() if module[name].numel != numel]:
                raise ValueError(f"slices of {first_names(odd)} that do not add up to its shape")
            yield {name: module[name].shape for name in held}

    def _states(self, file: Path) -> _States | None:
        root = self.files.root(file)
        if root is None:
            return None
        try:
            return _states(root)
        except MALFORMED as error:
            raise damaged(file, f"not optimizer states of ZeRO ({type(error).__name__}: {error})") from error

    def _partitions(self, runs: Sequence[_FlatRun], prefix: str, take: _Take) -> dict[str, TensorSpec] | None:
        """Return the tensors of stages 1 and 2: each run is split into equal partitions. None if these are not flat.

        What ranks lack is noted under the names with ``prefix``."""
        states, paddings_of = self.states, self.first.paddings
        made: dict[str, TensorSpec] = {}
        for run in runs:
            (group,) = run.groups
            taken = {at: take(states[rank], group) for at, rank in enumerate(run.ranks) if rank in states}
            if not all(map(_is_flat, taken.values())):
                return None
            if not taken:
                made.update({name: lost(name, shape, self.path) for name, shape in run.shapes.items()})
                continue
            paddings = paddings_of[group] if paddings_of else [0] * len(run.shapes)
            total = sum(map(math.prod, run.shapes.values())) + sum(paddings)
            length = _length({at: spec.numel for at, spec in taken.items()}, total, len(run.ranks))
            self._check_length(group, total, length, len(run.ranks))
            whole = Spread([Flat([(at * length, spec) for at, spec in taken.items()])])
            start = 0
            for (name, shape), padding in zip(run.shapes.items(), paddings, strict=True):
                made[name] = spec = whole.tensor(name, shape, start, self.path)
                if is_torn(spec):
                    held = whole.flats[0].count(start, start + spec.numel)
                    self.files.lacking[f"{prefix}{name}"] += (spec.numel - held) * spec.itemsize
                start += spec.numel + padding
            self._note_short(
                {run.ranks[at]: (spec.numel, min(length, total - at * length)) for at, spec in taken.items()}
            )
        return _restacked(made, self.path)

    def _check_length(self, index: int, wanted: int, length: int, world: int) -> None:
        """Raise ``UnreadableError`` unless a group's partitions have the size of its parameters and padding."""
        if not wanted <= length * world < wanted + _PADDING * world:
            raise UnreadableError(
                f"{self.path}: group {index} has names and shapes of {wanted} numbers, and its {world} partitions hold"
                f" {length} each; its files are from different saves or damaged"
            )

    def _note_short(self, held: Mapping[int, tuple[int, int]]) -> None:
        """Record as damage the ranks with fewer elements than their partition has."""
        for rank, (there, size) in held.items():
            fact = Fact.of(Kind.RANK_SHORT, self.present[rank].name, there=there, size=size)
            if there < size and fact not in self.files.damage:
                self.files.damage.append(fact)

    def _spread(self, runs: Sequence[_FlatRun], prefix: str, take: _Take) -> dict[str, TensorSpec] | None:
        """Return the tensors of stage 3: each is split into equal shares. None if the ranks' tensors are not flat."""
        made: dict[str, TensorSpec] = {}
        for run in runs:
            taken = {
                rank: [take(self.states[rank], at) for at in run.groups] for rank in run.ranks if rank in self.states
            }
            if not all(_is_flat(spec) for parts in taken.values() for spec in parts):
                return None
            if not taken:
                made.update({name: lost(name, shape, self.path) for name, shape in run.shapes.items()})
                continue
            absent = [at for at, rank in enumerate(run.ranks) if rank not in taken]
            spread, start = Spread([Flat.joined(taken.get(rank, ())) for rank in run.ranks]), 0
            for name, shape in run.shapes.items():
                made[name] = spec = spread.tensor(name, shape, start, self.path)
                start += spread.share(spec.numel)
                self.files.lacking[f"{prefix}{name}"] += spec.itemsize * elements_of(shape, len(run.ranks), absent)
            held = {self.present[rank].name: sum(part.numel for part in parts) for rank, parts in taken.items()}
            if odd := {name: count for name, count in held.items() if count != start}:
                raise UnreadableError(
                    f"{self.path}: each rank should hold {start} numbers, and {first_names(list(odd))} "
                    f"{'holds' if len(odd) == 1 else 'hold'} {first_names(sorted(set(odd.values())))}; "
                    "the files are from different saves or damaged"
                )
        return _restacked(made, self.path)

    def _optimizer(
        self, place: Callable[[str, _Take], dict[str, TensorSpec] | None], groups: Sequence[Shapes]
    ) -> dict[str, Any] | None:
        """Return the optimizer's state by name; None if it is missing, or not laid out like the masters."""
        first = self.first
        numbers, states = first.numbers, first.optimizer.get("state")
        if not isinstance(states, dict) or set(numbers) - states.keys():
            return None
        if not len(set(numbers)) == len(numbers) == len(first.masters):
            return None
        made: dict[str, dict[str, Any]] = {name: {} for group in groups for name in group}
        for field, value in states[numbers[0]].items():
            if not isinstance(value, TensorSpec) or not value.shape:
                for group, number in zip(groups, numbers, strict=True):
                    kept = states[number].get(field)
                    made.update({name: {**made[name], field: with_own_storage(kept)} for name in group})
                continue
            tensors = place(f"{field} of ", partial(_moment, numbers, field))
            if tensors is None:
                return None
            for name, spec in tensors.items():
                made[name][field] = spec
        # Stage 3 has a dict of names for each of its sub-groups, as many as there are flat groups.
        if len(groups) != len(numbers):
            return None
        names = dict(zip(numbers, map(list, groups), strict=True))
        kept = [
            {**group, "params": [name for number in group["params"] for name in names[number]]}
            for group in first.optimizer["param_groups"]
        ]
        return {"state": made, "param_groups": kept}


def model_states(files: RankFiles, found: Mapping[int, Path]) -> dict[int, Any]:
    """Return the model states of rank 0, and the shares of frozen parameters of the other ranks, if there are any.

    Raises ``UnreadableError`` if rank 0 has none, or if their steps differ."""
    roots: dict[int, Any] = {}
    steps, settings, fragments = {}, {}, {}
    for rank, file in found.items():
        if rank and not roots.get(0, {}).get("frozen_param_shapes"):
            break
        root = files.root(file)
        if isinstance(root, dict):
            steps[rank] = root.get("global_steps")
            settings[file.name], fragments[file.name] = {key: root.get(key) for key in _SETTINGS}, root.get(_FRAGMENTS)
            roots[rank] = root if rank == 0 else {_FRAGMENTS: root.get(_FRAGMENTS)}
    if not isinstance(roots.get(0, {}).get("module"), dict):
        if files.damage:
            raise damaged(files.folder, f"{clauses(files.damage)}; no rank can be read")
        raise UnreadableError(
            f"{files.folder}: has no model states of rank 0, which say the names and shapes of the weights; fetch them"
        )
    odd = files.of_another_save(steps, {rank: found[rank].name for rank in steps}, "step")
    if 0 in odd:
        raise UnreadableError(f"{found[0]}: is from a different save than most; put the files of one save together")
    files.note_foreign(settings)
    files.note_repeated(fragments)
    return {rank: root for rank, root in roots.items() if rank not in odd}


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
        if not all(map(_is_flat, parts.values())):
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


def _length(held: Mapping[int, int], total: int, count: int) -> int:
    """Return the length of the ``count`` partitions of a group with ``total`` elements: that of the longest one held.

    The last ones lack their padding. If only such are held, it is computed from the total, provided that each of them
    then ends where the group ends. ``held`` are numbers of elements by place."""
    longest = max(held.values())
    length = -(-total // (count * _ALIGNMENT)) * _ALIGNMENT
    is_exact = all(numel == total - at * length or at * length >= total for at, numel in held.items())
    return length if longest * count < total and is_exact else longest


def elements_of(shape: Shape, world: int, ranks: Sequence[int]) -> int:
    """Return how many elements these ranks have of a tensor that is spread evenly over ``world`` ranks."""
    numel = math.prod(shape)
    share = -(-numel // world)
    return sum(min(max(numel - rank * share, 0), share) for rank in ranks)


def lost(name: str, shape: tuple[int, ...], path: str) -> TensorSpec:
    return gone(name, TensorSpec("float32", shape, contiguous_strides(shape)), path)


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


_Take = Callable[[_States, int], Any]  # returns the slice of a flat group from the states of a rank


def _moment(numbers: Sequence[int], field: str, states: _States, index: int) -> Any:
    return states.optimizer["state"][numbers[index]].get(field)


def _is_flat(value: Any) -> bool:
    if not isinstance(value, TensorSpec) or len(value.shape) != 1 or value.storage is None:
        return False
    return value.is_contiguous and not value.math_bits


def _states(root: Any) -> _States:
    """Return the optimizer states in a file. Raises ``ValueError`` or another of ``MALFORMED`` for other files."""
    held = root["optimizer_state_dict"]
    spread = "fp32_flat_groups" in held
    masters = held["fp32_flat_groups" if spread else "single_partition_of_fp32_groups"]
    counts = held["partition_count"]
    inner = held.get("optimizer_state_dict" if spread else "base_optimizer_state")
    if isinstance(inner, list):  # elastic checkpoints: one dict for each group, without the padding
        inner = {"state": dict(enumerate(inner)), "param_groups": [{"params": [at]} for at in range(len(inner))]}
    if not isinstance(masters, list) or not masters or not all(map(_is_flat, masters)):
        raise ValueError(f"{shown(masters)} in the place of flat groups")
    counts = counts if isinstance(counts, list) else [counts] * len(masters)
    own = held.get("ds_zero_partition_groups") or []  # with experts in stage 3
    counts = [group["partition_count"] for group in own] or counts
    if any(type(count) is not int for count in counts):
        raise ValueError(f"groups on {first_names(counts)} ranks")
    paddings = held.get("param_alignment_paddings") or []
    if any(type(count) is not int or count < 0 for group in paddings for count in group):
        raise ValueError(f"{shown(paddings)} in the place of paddings")
    stage = held.get("zero_stage")  # not in states of bf16_optimizer
    stage = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
    version = root.get("ds_version") or held.get("ds_version")
    return _States(
        masters,
        3 if spread else stage if type(stage) is int else 0,
        counts,
        [group["partition_ranks"] for group in own],
        paddings,
        inner if isinstance(inner, dict) else {},
        [
            {str(name): place.attributes["numel"] for name, place in group.items()}
            for group in held.get("param_slice_mappings") or ()
        ],
        version if isinstance(version, str) else "",
        {
            "ds_config": root.get("ds_config"),
            "loss_scaler": held.get("loss_scaler"),
            "param_groups": inner.get("param_groups") if isinstance(inner, dict) else None,
        },
    )


def _number(value: Any) -> float | None:
    """Return a number, or the value of a tensor with one float32; None for anything else."""
    if isinstance(value, TensorSpec) and value.numel == 1 and value.dtype == "float32" and value.storage is not None:
        start, stop = value.extent
        return float(struct.unpack("<f", value.storage.source.read(start, stop))[0])
    return value if isinstance(value, (int, float)) else None
