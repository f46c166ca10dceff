"""Optimizers that DeepSpeed saves without ZeRO, with their state by number, for each rank of experts or tensors.

With experts, ``expp_rank_0_mp_rank_00_optim_states.pt`` has the state of the parameters that all ranks have, and of
this rank's experts, in groups of their own. With tensor parallelism, each rank's model states have the state of its
parts. The merged state has the numbers of a process with all experts and whole tensors. Training in half precision adds
``fp32_groups``, a master for each number.

The sizes of groups and the shapes of moments show which parameter a number belongs to. If several orders of the
parameters fit, nothing is merged.

Sources: ``deepspeed/runtime/engine.py`` (``_save_moe_checkpoint``), ``runtime/fp16/unfused_optimizer.py``,
``moe/utils.py`` (0.12 to 0.19)."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Kind
from ckptfix.core.parts import Shape, Shapes
from ckptfix.core.spec import TensorSpec
from ckptfix.maps.optimizer_states import Optimizer, optimizer_of
from ckptfix.maps.recipes import Layout, namings, number_of
from ckptfix.reading.folders.ranks.files import RankFiles, by_rank
from ckptfix.reading.folders.ranks.names import ZERO_EXPERT_OPTIM
from ckptfix.reading.folders.ranks.partition import WHOLE, Joining, SplitOf, emptied

_INNER, _MASTERS, _FLAT = "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"
_DIVIDED = re.compile(r"ep_size_(\d{1,6})")  # the name of a group of experts that are divided over so many ranks
EXPERT_KEY = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..*)")  # what precedes the number, and follows it
_Names = list[list[str]]  # of each group, in the order of its numbers
_Fields = dict[str, dict[str, Any]]  # the values of each field of the state by name; the masters are a field


def merged_optimizer(
    files: RankFiles, roots: Sequence[Any], plain: Shapes, joining: Joining, split_of: SplitOf
) -> dict[str, Any] | None:
    """Return the optimizer that was saved without ZeRO; None if there is none, or if its ranks cannot be merged.

    ``plain`` has the shapes of the parameters that are not experts."""
    path = str(files.folder)
    saved = {(model, rank): file for (rank, model), file in by_rank(files.folder, ZERO_EXPERT_OPTIM).items()}
    holders = {place: files.root(file) for place, file in saved.items()} or {
        (model, 0): root for model, root in enumerate(roots)
    }
    found = {
        place: made
        for place, root in holders.items()
        if isinstance(root, dict) and (made := NumberedOptimizer.of(root.get("optimizer"))) is not None
    }
    if not found or (len(found) < len(holders) and not saved):
        return None
    count = next(iter(found.values())).ranks if saved else 1
    for model in range(len(roots) if saved and count else 0):
        own = {rank: file for (other, rank), file in saved.items() if other == model}
        if len(own) % count:  # more are copies, for another layer with experts over more ranks
            files.note_missing(count, own, f"expp_rank_{{}}_mp_rank_{model:02d}_optim_states.pt")
    if any(fact.kind is Kind.STATES_LACKING or not saved for fact in files.damage):
        return None
    names = {place: saved[place].name if saved else f"mp_rank_{place[0]:02d}_model_states.pt" for place in found}
    if files.of_another_save({place: made.save for place, made in found.items()}, names, "groups or step"):
        return None
    files.note_foreign({names[place]: {"param_groups": made.settings} for place, made in found.items()})
    files.note_repeated({names[place]: made.of_experts for place, made in found.items() if place[1] < count})
    ranks: list[list[NumberedOptimizer]] = []
    for model in range(len(roots)):
        held = {rank: made for (other, rank), made in found.items() if other == model and rank < count}
        like = next(iter(held.values()), None)  # ranks without a file have the groups and shapes of this one
        ranks.append([held.get(rank) or like.emptied(path) for rank in range(count)] if like else [])
    if not count or any(len(own) != count for own in ranks):
        return None
    module = roots[0]["module"]
    keys = ((key, EXPERT_KEY.fullmatch(key)) for key in module if saved and key not in plain)
    parameters = [(int(match[2]), match[1], match[3], module[key].shape) for key, match in keys if match is not None]
    return _merge(ranks, plain, ExpertShapes.of(parameters, count), joining, split_of, files.lacking)


class NumberedOptimizer(Struct):
    """The optimizer of a rank. ``root`` may have it in ``optimizer_state_dict``, next to masters."""

    root: Mapping[str, Any]
    optimizer: Optimizer

    @classmethod
    def of(cls, root: Any) -> "NumberedOptimizer | None":
        """Return the optimizer in a root; None if it is in another form, such as flat groups."""
        found = optimizer_of(root.get(_INNER, root), ()) if isinstance(root, dict) and _FLAT not in root else None
        return None if found is None or found.is_keyed or found.is_flat else cls(root, found)

    @property
    def experts(self) -> list[int]:
        """The indexes of the groups of experts."""
        return [at for at, group in enumerate(self.optimizer.groups) if group.get("moe")]

    @property
    def others(self) -> list[int]:
        return [at for at in range(len(self.optimizer.groups)) if at not in self.experts]

    @property
    def ranks(self) -> int:
        """The number of ranks over which experts are divided; 0 if unknown, or if it depends on the layer."""
        names = {str(self.optimizer.groups[at].get("name")) for at in self.experts}
        found = [_DIVIDED.fullmatch(name) for name in names]
        return int(found[0][1]) if len(found) == 1 and found[0] is not None else 0

    @property
    def save(self) -> tuple[object, ...]:
        """Facts that are equal on all ranks of a save."""
        rows = [self.optimizer.row(number) for number in self.optimizer.ids]
        first = next((row["step"] for row in rows if "step" in row), None)
        return self.optimizer.sizes, number_of(first), _MASTERS in self.root

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The options of the groups."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.groups]

    @property
    def of_experts(self) -> list[Any]:
        """The state that no other rank has."""
        return [dict(self.optimizer.row(number)) for number in self.among(self.experts).ids]

    def emptied(self, path: str) -> "NumberedOptimizer":
        """Return the optimizer of a rank whose file is lost: this one, with the bytes of experts marked as lost."""
        experts = {*self.among(self.experts).ids}
        inner = self.root.get(_INNER, self.root)
        rows = {number: emptied(row, path) if number in experts else row for number, row in inner["state"].items()}
        root: dict[str, Any] = {**inner, "state": rows}
        if _INNER in self.root:
            root = {**self.root, _INNER: root}
        if _MASTERS in root:
            held = [[*emptied(dict(enumerate(group)), path).values()] for group in root[_MASTERS]]
            root[_MASTERS] = [held[at] if at in self.experts else group for at, group in enumerate(root[_MASTERS])]
        return NumberedOptimizer.of(root) or self

    def among(self, groups: Sequence[int]) -> Optimizer:
        """Return the optimizer with only these groups."""
        return replace(self.optimizer, groups=tuple(self.optimizer.groups[at] for at in groups))

    def fields(self, groups: Sequence[int], names: _Names) -> _Fields:
        """Return the values of these groups by these names. Raises ``ValueError`` if there are more or fewer."""
        made: _Fields = {}
        for at, own in zip(groups, names, strict=True):
            numbers = self.optimizer.groups[at]["params"]
            masters = self.root[_MASTERS][at] if _MASTERS in self.root else [None] * len(numbers)
            for name, number, master in zip(own, numbers, masters, strict=True):
                held = {**self.optimizer.row(number), **({} if master is None else {_MASTERS: master})}
                for field, value in held.items():
                    made.setdefault(field, {})[name] = value
        return made

    def rebuilt(self, names: _Names, fields: _Fields) -> dict[str, Any]:
        """Return the root of an optimizer with the same groups, these names in them, and these values."""
        numbers = {name: number for number, name in enumerate(chain.from_iterable(names))}
        rows = {
            number: {field: values[name] for field, values in fields.items() if field != _MASTERS and name in values}
            for name, number in numbers.items()
        }
        inner = {
            **self.root.get(_INNER, self.root),
            "state": {number: row for number, row in rows.items() if row},
            "param_groups": [
                {**group, "params": [numbers[name] for name in own]}
                for group, own in zip(self.optimizer.groups, names, strict=True)
            ],
        }
        if _INNER not in self.root:
            return inner
        masters = [[fields[_MASTERS][name] for name in own] for own in names] if _MASTERS in self.root else None
        return {**self.root, _INNER: inner, **({} if masters is None else {_MASTERS: masters})}


class ExpertShapes(Struct):
    """The shapes of one rank's experts, numbered from 0, and of all experts; the keys are in the model's order."""

    own: Shapes
    whole: Shapes
    names: Sequence[Mapping[str, str]]  # for each rank, the keys among all experts by its own

    @classmethod
    def of(cls, experts: Sequence[tuple[int, str, str, Shape]], ranks: int) -> "ExpertShapes | None":
        """Return the shapes, given the parameters of all experts in order: the expert's number, what precedes it in the
        key, what follows it, and the shape. None if ``ranks`` do not divide the experts."""
        counts: dict[str, int] = {}
        for number, before, _, _ in experts:
            counts[before] = max(counts.get(before, 0), number + 1)
        if not ranks or any(count % ranks for count in counts.values()):
            return None
        own: dict[str, Shape] = {}
        whole: dict[str, Shape] = {}
        names: list[dict[str, str]] = [{} for _ in range(ranks)]
        for number, before, after, shape in experts:
            rank, local = divmod(number, counts[before] // ranks)
            key, whole[f"{before}{number}{after}"] = f"{before}{local}{after}", shape
            own[key] = shape
            names[rank][key] = f"{before}{number}{after}"
        is_even = all(each.keys() == own.keys() for each in names)
        return cls(own, whole, names) if is_even else None


def names_in(optimizer: Optimizer, own: Shapes, whole: Shapes) -> tuple[_Names, _Names] | None:
    """Return the names of an optimizer's groups among the parameters of its rank, and those of the same groups in a
    process that has all parameters. None if no order of the parameters fits, or if several do."""
    found: list[tuple[_Names, _Names]] = []
    for naming in namings(optimizer, Layout(own), Layout(whole)):
        if naming.recipe is not None:
            mine, every = ([keys for _, keys in naming.recipe.groups(Layout(each))] for each in (own, whole))
            if len(mine) == len(every) and (mine, every) not in found:
                found.append((mine, every))
    return found[0] if len(found) == 1 else None


def _merge(
    ranks: Sequence[Sequence[NumberedOptimizer]],
    shapes: Shapes,
    experts: ExpertShapes | None,
    joining: Joining,
    split_of: SplitOf,
    lacking: Counter[str],
) -> dict[str, Any] | None:
    """Return the root of the optimizer of all ranks; None if it is unknown which parameters its numbers belong to.
    Lost bytes are counted in ``lacking``.

    ``ranks`` has the ranks of experts for each tensor-parallel rank. ``shapes`` are those of the parameters that are
    not experts, on one rank, in the model's order."""
    first = ranks[0][0]
    plain, apart = first.others, first.experts
    if len(ranks) == 1:  # the names do not matter
        names = [[f"{at}.{number}" for number in first.optimizer.groups[at]["params"]] for at in plain]
    elif plain and (found := names_in(first.among(plain), shapes, shapes)) is not None:
        names = found[0]
    else:
        return None
    own: _Names = []
    every: _Names = []
    if apart:
        found = names_in(first.among(apart), experts.own, experts.whole) if experts is not None else None
        if found is None:
            return None
        own, every = found
    parts: list[_Fields] = []
    for tensor in ranks:
        copies = [rank.fields(plain, names) for rank in tensor]
        merged = {
            field: dict(joining.join([copy.get(field, {}) for copy in copies], lambda *_: WHOLE)) for field in copies[0]
        }
        for number, rank in enumerate(tensor if experts is not None else ()):
            renamed = experts.names[number] if experts is not None else {}
            for field, values in rank.fields(apart, own).items():
                merged.setdefault(field, {}).update({renamed[name]: value for name, value in values.items()})
        parts.append(merged)
    fields = parts[0]
    if len(parts) > 1:
        fields = {field: dict(joining.join([part.get(field, {}) for part in parts], split_of)) for field in fields}
    for field, values in fields.items():
        for name, value in values.items():
            if isinstance(value, TensorSpec) and is_torn(value):
                lacking[f"{'fp32' if field == _MASTERS else field} of {name}"] += value.nbytes
    order = [own_names for _, own_names in sorted([*zip(plain, names, strict=True), *zip(apart, every, strict=True)])]
    return first.rebuilt(order, fields)
