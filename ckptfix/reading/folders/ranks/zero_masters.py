"""The fp32 masters of DeepSpeed's ZeRO and the moments of its optimizer, from the flat groups of all ranks.

In stages 1 and 2, each optimizer group is a flat run that is split into equal partitions, one per rank. In stage 3,
each parameter is split into equal shares, and a rank's shares follow one another, in sub-groups. ``param_shapes`` has
the names in the order of the run. The moments are laid out like the masters, and returned by name. In a mixture of
experts, a group of experts consists of several runs over fewer ranks, each with its own experts.

Sources: ``deepspeed/runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
``utils/zero_to_fp32.py``, ``checkpoint/ds_to_universal.py`` (0.9 to 0.19)."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.limits import shown
from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.core.parts import Shape, Shapes
from ckptfix.core.spec import TensorSpec, contiguous_strides, with_own_storage
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.chunks import Flat, Spread, gone
from ckptfix.reading.folders.ranks.files import (
    MALFORMED,
    RankFiles,
    by_rank,
)
from ckptfix.reading.folders.ranks.names import ZERO_MODEL, ZERO_OPTIM
from ckptfix.reading.folders.ranks.partition import Joining, Split, SplitOf, emptied, joined, lost_bytes
from ckptfix.reading.folders.ranks.zero_numbered import EXPERT_KEY
from ckptfix.reading.pickles.claims import sizes

# The padding of a flat group has fewer than this many elements per rank; DeepSpeed pads to a multiple of two for each
# (``nccl_start_alignment_factor``).
_PADDING, _ALIGNMENT = 16, 2
# AutoEP stacks the weights of all experts of a layer; a rank has some of them, and a file of an expert has one.
STACK = re.compile(r".*\.experts\.w[123]")
STACKED = re.compile(rf"({STACK.pattern})\.(\d{{1,6}})")


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
        held = [group.get("step") for group in self.state.values() if isinstance(group, dict)]
        is_lost = any(isinstance(step, TensorSpec) and is_torn(step) for step in held)
        return None if is_lost else [*map(_number, held)]

    @property
    def state(self) -> Mapping[Any, Any]:
        found = self.optimizer.get("state")
        return found if isinstance(found, dict) else {}

    @property
    def fields(self) -> list[str]:
        """The names of the moments and the other values of all groups."""
        return [field for held in self.state.values() if isinstance(held, dict) for field in held]

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
    unshaped: tuple[str, ...] = ()  # the names of weights in one dimension, whose shapes are in no file

    @property
    def release(self) -> str:
        """The program that wrote them."""
        return f"DeepSpeed {self.version}".strip() + f", ZeRO stage {self.stage or '1 or 2'}"


def joined_masters(
    files: RankFiles, models: Sequence[int], roots: Sequence[Any], joining: Joining, split_of: SplitOf
) -> Masters:
    """Merge the data-parallel ranks of each of these tensor-parallel ranks, and join the results."""
    merged: list[Masters | None] = []
    unread: list[Merging] = []
    for model, root in zip(models, roots, strict=True):
        merging = Merging(files, model, len(models))
        unread += [] if merging.states else [merging]
        merged.append(merging.masters(root) if merging.states else None)
    parts = [part for part in merged if part is not None]
    if not parts:
        raise unread[0].unreadable()
    if len(merged) == 1:
        return parts[0]
    for merging in unread:
        merging.note_absent(parts[0].world)
    optimizer = parts[0].optimizer
    if optimizer is not None and all(part.optimizer is not None for part in parts):
        states = [part.optimizer["state"] if part is not None and part.optimizer else None for part in merged]
        moments_of: dict[str, dict[str, Any]] = {name: {} for name in optimizer["state"]}
        every = [moments for state in states if state is not None for moments in state.values()]
        for field in dict.fromkeys(field for moments in every for field in moments):
            held = [
                None if state is None else {name: own[field] for name, own in state.items() if field in own}
                for state in states
            ]
            for name, moment in joining.join(completed(files, f"{field} of ", held, split_of), split_of):
                moments_of[name][field] = moment
        optimizer = {**optimizer, "state": moments_of}
    else:
        optimizer = None
    tensors = completed(files, "", [None if part is None else part.tensors for part in merged], split_of)
    return replace(parts[0], tensors=dict(joining.join(tensors, split_of)), optimizer=optimizer)


def completed(
    files: RankFiles, prefix: str, states: Sequence[Mapping[str, Any] | None], split_of: SplitOf
) -> list[Mapping[str, Any]]:
    """Return the tensors of tensor-parallel ranks. Those of a rank without any (None) are those of another one, with
    their bytes marked as lost, which are noted under the names with ``prefix``."""
    known = next((state for state in states if state is not None), {})
    made = [emptied(known, str(files.folder)) if state is None else state for state in states]
    are_lost = [state is None for state in states]
    for name in known if any(are_lost) else ():
        parts = [part for state in made if isinstance(part := state.get(name), TensorSpec)]
        if len(parts) == len(made):
            files.lacking[f"{prefix}{name}"] += lost_bytes(parts, split_of(name, parts), are_lost)
    return made


def absent_masters(
    files: RankFiles, models: Sequence[int], roots: Sequence[Any], joining: Joining, split_of: SplitOf
) -> Masters:
    """Return the masters of stage 3 if all optimizer states are missing: the names and shapes in the model states, with
    the bytes marked as lost."""
    known = next((root for root in roots if root.get("param_shapes")), roots[0])
    world, config = known.get("dp_world_size"), known.get("ds_config")
    if type(world) is not int:
        raise damaged(files.folder, "has no *_optim_states.pt, which have the weights")
    halves = [config.get(key) for key in ("bf16", "bfloat16")] if isinstance(config, dict) else []
    before = "bf16_" * any(isinstance(half, dict) and half.get("enabled") is True for half in halves)
    for model in models:
        pattern = f"{before}zero_pp_rank_{{}}_mp_rank_{model:02d}_optim_states.pt"
        files.note_missing(world, {}, pattern, len(models))
    shapes = {str(name): sizes(shape) for group in known.get("param_shapes") or () for name, shape in group.items()}
    parts = [{name: lost(name, shape, str(files.folder)) for name, shape in shapes.items()} for _ in models]
    tensors = dict(joining.whole(parts, split_of))
    # Each rank has some of the experts in a stack.
    files.lacking.update({name: spec.nbytes for name, spec in tensors.items() if not STACK.fullmatch(name)})
    version = known.get("ds_version")
    return Masters(tensors, None, 3, world, version if isinstance(version, str) else "")


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
        stacks = {name for name in shapes if sets > 1 and STACK.fullmatch(name)}
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


def stage_and_world(files: RankFiles, model_rank: int) -> tuple[int, int]:
    """Return the stage and the number of data-parallel ranks that the first optimizer states of a tensor-parallel rank
    name. Raises ``UnreadableError`` if none can be read."""
    reading = RankFiles(files.folder, files.salvage)
    for (_, model), file in by_rank(files.folder, ZERO_OPTIM).items():
        if model == model_rank and (root := reading.root(file)) is not None:
            states = _states(root)
            return states.stage, states.world
    raise damaged(str(files.folder), f"{clauses(reading.damage)}; no rank can be read")


class Merging:
    """A merge of the optimizer states of ranks that share their parameters."""

    def __init__(self, files: RankFiles, model_rank: int, model_ranks: int = 1) -> None:
        self.files, self.path = files, str(files.folder)
        every = by_rank(files.folder, ZERO_OPTIM)
        found = {data: file for (data, model), file in every.items() if model == model_rank}
        states = {rank: made for rank, file in found.items() if (made := self._states(file)) is not None}
        before = next((file.name.partition("zero_pp_rank")[0] for file in every.values()), "")
        self._name = f"{before}zero_pp_rank_{{}}_mp_rank_{model_rank:02d}_optim_states.pt"
        models = (model for _, model in (*every, *by_rank(files.folder, ZERO_MODEL)))
        self._groups = max(model_ranks, 1 + max(models, default=0))
        steps = {rank: made.steps for rank, made in states.items()}
        known = next((own for own in steps.values() if own is not None), None)
        saves = {rank: (*made.save, known if steps[rank] is None else steps[rank]) for rank, made in states.items()}
        names = {rank: file.name for rank, file in found.items()}
        odd = files.of_another_save(saves, names, "stage, number of ranks, dtype or step")
        self.states = {rank: made for rank, made in states.items() if rank not in odd}
        self.present = {rank: found[rank] for rank in self.states}
        self._is_absent = not found

    @property
    def first(self) -> _States:
        """The states of the first rank. Raises ``UnreadableError`` if no rank can be read."""
        if not self.states:
            raise self.unreadable()
        return self.states[min(self.states)]

    def unreadable(self) -> UnreadableError:
        """Return the error that no rank can be read."""
        causes = f"has no {self._name.format('*')}" if self._is_absent else clauses(self.files.damage)
        return damaged(self.path, f"{causes}; no rank can be read")

    def note_absent(self, world: int) -> None:
        """Record as damage that all of the ranks are missing, ``world`` in number; unreadable ones are known."""
        if self._is_absent:
            self.files.note_missing(world, {}, self._name, self._groups)

    def masters(self, root: Any) -> Masters:
        """Return the merged data of the ranks; ``root`` are the model states, which have the names and shapes."""
        named = {self.present[rank].name: made for rank, made in self.states.items()}
        self.files.note_repeated({name: [made.masters, made.optimizer] for name, made in named.items()})
        settings = {name: made.settings for name, made in named.items()}
        self.files.note_foreign({**settings, "*_model_states.pt": {"ds_config": root.get("ds_config")}})
        self.files.note_missing(self.first.world, self.present, self._name, self._groups)
        if "param_shapes" not in root and not self.first.slices:
            what = f"{clauses(self.files.damage)}; no other file has the names of the weights"
            raise UnreadableError(f"{self.path}: {what}; fetch the model states")
        groups: list[dict[str, Shape]] = (
            [{str(name): sizes(shape) for name, shape in group.items()} for group in root["param_shapes"]]
            if "param_shapes" in root
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
                {STACKED.sub(r"\1", n): s for run in runs if index in run.groups for n, s in run.shapes.items()}
                for index in every
            ]
        for run in runs:
            said = [self.states[rank].ranks for rank in run.ranks if rank in self.states]
            if any([*run.ranks] != [*ranks[at]] for ranks in said if ranks for at in run.groups):
                raise ValueError(f"group {run.groups[0]} is not on the ranks {first_names(run.ranks)}")
            self._check_slices(run)
        place = partial(self._spread if self.first.stage == 3 else self._partitions, runs)
        tensors = place("", lambda made, index: made.masters[index])
        if tensors is None:
            raise UnreadableError(f"{self.path}: its slices of weights are not flat tensors, so it is damaged")
        unshaped = tuple(name for name in tensors if name not in root["module"]) if "param_shapes" not in root else ()
        first, optimizer = self.first, self._optimizer(place, groups)
        return Masters(tensors, optimizer, first.stage, first.world, first.version, unshaped)

    def _in_slices(self, module: Mapping[str, Any]) -> Iterator[dict[str, Shape]]:
        """Yield the names and shapes of each group, by the names of the ranks' slices, and the model states, which have
        no ``param_shapes`` for a model with experts in older releases. Names that they lack have one dimension.

        Raises ``UnreadableError`` if a rank is missing, ``ValueError`` if the slices do not add up."""
        for index, count in enumerate(self.first.counts):
            ranks = range(0, self.first.world, self.first.world // max(count, 1))
            if any(rank not in self.states for rank in ranks):
                raise damaged(self.path, f"{clauses(self.files.damage)}; only all ranks together name the weights")
            held: dict[str, int] = {}
            for name, numel in chain.from_iterable(self.states[rank].slices[index].items() for rank in ranks):
                held[name] = held.get(name, 0) + numel
            if odd := [name for name, numel in held.items() if name in module and module[name].numel != numel]:
                raise ValueError(f"slices of {first_names(odd)} that do not add up to their shapes")
            yield {name: module[name].shape if name in module else (numel,) for name, numel in held.items()}

    def _check_slices(self, run: _FlatRun) -> None:
        """Raise ``ValueError`` unless the slices that the ranks of stages 1 and 2 name add up to the parameters of the
        model states: the masters of others would be cut at the wrong places, or be under the wrong names.

        Only their sums are compared: with ``round_robin_gradients``, they are in another order than the masters."""
        held = [self.states[rank].slices for rank in run.ranks if rank in self.states]
        if len(held) < self.first.world or any(len(slices) <= run.groups[0] for slices in held):
            return  # a rank is missing, has other experts, or is of a release that does not name them
        added = Counter[str]()
        for slices in held:
            added.update(slices[run.groups[0]])
        named = {name: math.prod(shape) for name, shape in run.shapes.items()}
        if odd := [name for name in {**named, **added} if named.get(name, 0) != added[name]]:
            raise ValueError(f"the slices of {first_names(odd)} in the optimizer states do not add up to their shapes")

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
            if taken and all(value is None for value in taken.values()):
                continue  # a moment of other groups
            if not all(map(is_flat, taken.values())):
                return None
            if not taken:
                made.update({name: lost(name, shape, self.path) for name, shape in run.shapes.items()})
                continue
            paddings = paddings_of[group] if paddings_of else [0] * len(run.shapes)
            total = sum(map(math.prod, run.shapes.values())) + sum(paddings)
            length = _length({at: spec.numel for at, spec in taken.items()}, total, len(run.ranks))
            self._check_length(group, total, length, len(run.ranks))
            whole = Spread([Flat([(at * length, spec) for at, spec in taken.items()])])
            absent, start = [at for at in range(len(run.ranks)) if at not in taken], 0
            for (name, shape), padding in zip(run.shapes.items(), paddings, strict=True):
                made[name] = spec = whole.tensor(name, shape, start, self.path)
                if is_torn(spec):
                    held = whole.flats[0].count(start, start + spec.numel)
                    self.files.lacking[f"{prefix}{name}"] += (spec.numel - held) * spec.itemsize
                    for at in absent:
                        stop = min((at + 1) * length, start + spec.numel)
                        self._note_held(run.ranks[at], max(stop - max(at * length, start), 0) * spec.itemsize)
                start += spec.numel + padding
            self._note_short(
                {run.ranks[at]: (spec.numel, min(length, total - at * length)) for at, spec in taken.items()}
            )
        return restacked(made, self.path)

    def _note_held(self, rank: int, nbytes: int) -> None:
        """Count the bytes that the missing file of a rank had."""
        if nbytes:
            self.files.held_by[self._name.format(rank)] += nbytes

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
            if not all(is_flat(spec) for parts in taken.values() for spec in parts):
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
                for at in absent:
                    self._note_held(run.ranks[at], spec.itemsize * elements_of(shape, len(run.ranks), [at]))
            held = {self.present[rank].name: sum(part.numel for part in parts) for rank, parts in taken.items()}
            if odd := {name: count for name, count in held.items() if count != start}:
                raise UnreadableError(
                    f"{self.path}: each rank should hold {start} numbers, and {first_names(list(odd))} "
                    f"{'holds' if len(odd) == 1 else 'hold'} {first_names(sorted(set(odd.values())))}; "
                    "the files are from different saves or damaged"
                )
        return restacked(made, self.path)

    def _optimizer(
        self, place: Callable[[str, _Take], dict[str, TensorSpec] | None], groups: Sequence[Shapes]
    ) -> dict[str, Any] | None:
        """Return the optimizer's state by name; None, with a remark, if it is missing or not laid out like the masters,
        or if a rank lacks what others have."""
        first = self.first
        numbers, states = first.numbers, first.optimizer.get("state")
        if not isinstance(states, dict) or set(numbers) - states.keys():
            return self._left_out("its state is not in the files")
        if not len(set(numbers)) == len(numbers) == len(first.masters):
            return self._left_out("its groups are not those of the weights")
        made: dict[str, dict[str, Any]] = {name: {} for group in groups for name in group}
        for field in dict.fromkeys(field for each in self.states.values() for field in each.fields):
            held = [
                {rank: _moment(numbers, field, each, at) for rank, each in self.states.items()}
                for at in range(len(numbers))
            ]
            if not any(isinstance(value, TensorSpec) and value.shape for values in held for value in values.values()):
                for group, number in zip(groups, numbers, strict=True):
                    kept = states[number].get(field)
                    made.update({name: {**made[name], field: with_own_storage(kept)} for name in group})
                continue
            for values in held:
                odd = [self.present[rank].name for rank, value in values.items() if not is_flat(value)]
                if len(odd) == len(values) and any(value is not None for value in values.values()):
                    return self._left_out(f"its {field} is not divided like the weights")
                if 0 < len(odd) < len(values):
                    return self._left_out(
                        f"{first_names(odd)} lacks {field}, or has it in another form than the others"
                    )
            if (tensors := place(f"{field} of ", partial(_moment, numbers, field))) is None:
                return self._left_out(f"its {field} is not divided like the weights")
            for name, spec in tensors.items():
                made[name][field] = spec
        # Stage 3 has a dict of names for each of its sub-groups, as many as there are flat groups.
        if len(groups) != len(numbers):
            return self._left_out("its groups are not those of the weights")
        names = dict(zip(numbers, map(list, groups), strict=True))
        kept = [
            {**group, "params": [name for number in group["params"] for name in names[number]]}
            for group in first.optimizer["param_groups"]
        ]
        return {"state": made, "param_groups": kept}

    def _left_out(self, why: str) -> dict[str, Any] | None:
        """Remark why the optimizer is left out."""
        self.files.remarks[Fact.of(Kind.RANK_LEFT_OUT, "optimizer", why=why)] = None
        return None


def restacked(tensors: dict[str, Any], path: str) -> dict[str, Any]:
    """Return tensors with the parts of AutoEP's stacks of experts joined."""
    found = {key: match for key in tensors if (match := STACKED.fullmatch(key))}
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


_Take = Callable[[_States, int], Any]  # returns the slice of a flat group from the states of a rank


def _moment(numbers: Sequence[int], field: str, states: _States, index: int) -> Any:
    held = states.state.get(numbers[index])
    return held.get(field) if isinstance(held, dict) else None


def is_flat(value: Any) -> bool:
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
    if not isinstance(masters, list) or not masters or not all(map(is_flat, masters)):
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
            {
                str(name): place.attributes["numel"]
                for name, place in sorted(group.items(), key=lambda entry: entry[1].attributes["start"])
            }
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
