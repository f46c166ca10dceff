"""Fourth of five steps for an optimizer: how its state follows the plan's edits.

Takes an ``Optimizer``, the ``Change`` of the parameters, and the names that ``position_names`` found for its positions.
Returns ``Followed``: the groups of the result, the source of each parameter's state, and the ``edits`` that
``engine.optimizers`` carries out. Nothing is guessed: a state that cannot be carried exactly starts anew."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.edits import Edit, Moments, Regroup
from ckptfix.core.parts import Part, Shape
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import bare
from ckptfix.maps.optimizer_states import BLOCKWISE, SCALARS, Optimizer, beginning, logical_shape, values_in
from ckptfix.maps.recipes import (
    NAMED,
    ORDERS_BY_NAME,
    Layout,
    Naming,
    Order,
    Recipe,
    named_by_itself,
    number_of,
    stored_names,
)
from ckptfix.rules.origins import Change
from ckptfix.rules.position_names import (
    ORDERS,
    OptimizerScope,
    are_listed_anew,
    by_live_groups,
    by_recipe,
    known_recipes,
    module_of,
    narrow_and_wide,
    tied_as_one,
)

STEP = "step"  # the step count in a row, a tensor of one element since torch 1.12


class StateStep(NamedTuple):
    """A parameter in a group of the result, and the id from which its state comes."""

    key: str
    source: Any = None
    shape: Shape = ()
    parts: tuple[Part, ...] = ()


class Followed(Struct, frozen=True):
    """An optimizer that matches the result: its ``groups``, each with the old group that it is like.

    ``anew`` are parameters of the result that start without a state although the optimizer had one for their sources;
    ``gone`` are parameters of the file that are in no group any more."""

    optimizer: Optimizer
    naming: Naming
    like: tuple[int, ...]
    groups: tuple[tuple[StateStep, ...], ...]
    anew: tuple[str, ...]
    added: tuple[str, ...]
    gone: tuple[str, ...]
    which: str = ""  # which parameters it has and in whose order, if there is a choice

    @property
    def source(self) -> str:
        """The source of its parameters' names."""
        return f"{self.naming.source} {self.which}".rstrip()

    @property
    def is_unchanged(self) -> bool:
        """Whether the state can stay as it is."""
        olds, has_state = self.optimizer.groups, bool(self.optimizer.state)
        if has_state and self.like != tuple(range(len(olds))):
            return False
        if [_settings(olds[place]) for place in self.like] != [_settings(old) for old in olds]:
            return False
        names = self.naming.names if self.naming.is_certain else stored_names(self.optimizer)
        for group, old in zip(self.groups, olds, strict=True):
            if len(group) != len(old["params"]):
                return False
            if has_state and any(step.shape or step.parts for step in group):
                return False
            ours = [(step.source, step.key) for step in group]
            theirs = [(number, number if names is None else names[number]) for number in old["params"]]
            # Names in place of numbers are the keys of the weights, or those of the model inside of a wrapper.
            named = str if names is not None and all(name == number for number, name in theirs) else bare
            found, wanted = (
                [(number if has_state else None, None if names is None else named(key)) for number, key in pairs]
                for pairs in (ours, theirs)
            )
            if set(found) != set(wanted) if self.optimizer.is_keyed else found != wanted:
                return False
        return True

    def edits(self, order: tuple[str, ...] = ()) -> tuple[Edit, ...]:
        """Return the edits that make the state match the result; ``order`` is that of the state_dict's keys."""
        where = self.optimizer.name
        moments = (
            Moments(where, number, step.key, None if step.source is None else str(step.source), step.shape, step.parts)
            for number, group in enumerate(self.groups)
            for step in group
        )
        order = () if self.optimizer.is_keyed else order
        return (Regroup(where, self.like, order, self.optimizer.layout), *moments)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """A key that is equal for two ways that lead to the same state."""
        if not self.optimizer.state:
            return self.like, tuple(map(len, self.groups))  # there is no state to assign wrongly
        if self.optimizer.is_keyed:
            return self.like, tuple(map(frozenset, self.groups))
        if stored_names(self.optimizer) is not None:
            return self.like, self.groups
        return self.like, tuple(tuple(step[1:] for step in group) for group in self.groups)


def ways(optimizer: Optimizer, change: Change) -> list[Followed]:
    """Return the ways in which an optimizer can follow: one if its names are certain or all recipes that fit agree."""
    if optimizer.is_joint and change.touches:
        return []
    change = tied_as_one(optimizer, change)
    found: dict[Hashable, Followed] = {}
    certain = named_by_itself(optimizer, change.before)
    for naming in certain:
        if len(certain) > 1 and any(cold.issuperset(naming.names.values()) for cold in change.cold):
            continue
        made = _as_named(optimizer, naming, change, module_of(optimizer, naming) if len(certain) > 1 else "")
        if made is None:
            return []
        found.setdefault(made.outcome, made)
    if found:
        return list(found.values())
    for own in by_live_groups(optimizer, change):
        if (made := follow(optimizer, own, change, OptimizerScope(Layout({}), lambda key: True))) is not None:
            found.setdefault(made.outcome, made)
    if found:
        return list(found.values())
    for one in narrow_and_wide(change):
        for scope, naming in by_recipe(optimizer, one):
            made = follow(optimizer, naming, one, scope)
            if made is None:
                return []
            found.setdefault(made.outcome, made)
    return list(found.values())


def rivals(optimizer: Optimizer, change: Change, way: Followed) -> list[str]:
    """Return the rare orders that fit as well as a way's recipe but give another state; none if names are certain."""
    if way.naming.is_certain:
        return []
    change = tied_as_one(optimizer, change)
    read = (
        (naming, follow(optimizer, naming, one, scope))
        for one in narrow_and_wide(change)
        for scope, naming in by_recipe(optimizer, one, True)
    )
    return list(dict.fromkeys(naming.source for naming, made in read if made is None or made.outcome != way.outcome))


def _as_named(optimizer: Optimizer, naming: Naming, change: Change, which: str) -> Followed | None:
    """Follow certain names, by the recipe of their groups if there is one."""
    known = replace(change, is_wide=True).parameters
    scope = OptimizerScope(Layout({}), lambda key: key not in change.frozen, which)
    made: list[Followed | None] = []
    recipes: list[Recipe] = []
    for order in [list(known)] if change.is_ordered else change.model_orders[:ORDERS]:
        layout = Layout({key: known[key].shape for key in order if key in known}, change.modules, change.layers)
        for recipe in known_recipes(optimizer, naming, layout):
            recipes.append(recipe)
            made.append(follow(optimizer, replace(naming, recipe=recipe), change, replace(scope, layout=layout)))
    found = {way.outcome: way for way in made if way is not None}
    if found and None in made and naming.source == NAMED:
        return None  # one recipe gives an order, another one does not
    if len(found) == 1:
        return next(iter(found.values()))
    # The recipes may differ only in groups that became empty, which a script may or may not create.
    agree = len({tuple(filter(None, way.groups)) for way in found.values()}) == 1
    is_free = not found and all(recipe.is_own for recipe in recipes) and not (recipes and change.reorders)
    return follow(optimizer, naming, change, scope) if agree or is_free else None


def follow(optimizer: Optimizer, naming: Naming, change: Change, scope: OptimizerScope) -> Followed | None:
    """Return the optimizer after the change; None if a group of the result matches none of its groups."""
    return _Following(optimizer, naming, change, scope).followed()


Grouped = tuple[Sequence[int], Sequence[Sequence[StateStep]]]
"""For each group of the result, the old one that it is like; and the groups."""


class _Following(Struct, dict=True):
    """An optimizer with one reading of its names, and how it follows a change."""

    optimizer: Optimizer
    naming: Naming
    change: Change
    scope: OptimizerScope
    steps: Sequence[StateStep] = ()

    @cached_property
    def ids(self) -> dict[str, Any]:
        """The id of each parameter of the file, under all names of its tensor."""
        before = self.change.before
        of_view = {before[key].view: number for number, key in self.naming.names.items()}
        tied = {key: of_view.get(spec.view) for key, spec in before.items() if spec.storage is not None and spec.numel}
        known = {key: number for key, number in tied.items() if number is not None}
        return known | {key: number for number, key in self.naming.names.items()}

    @cached_property
    def group_of(self) -> dict[str, int]:
        """The old group of each id, by the id's text."""
        groups = self.optimizer.groups
        return {str(number): place for place, group in enumerate(groups) for number in group["params"]}

    def sources(self, key: str) -> list[str]:
        """Return the parameters of the file with an id from which a key of the result is made."""
        return [source for source in self.change.origins[key].sources if source in self.ids]

    def places(self, steps: Iterable[StateStep]) -> list[int]:
        """Return the old groups of the sources of the given parameters."""
        return [self.group_of[str(self.ids[source])] for step in steps for source in self.sources(step.key)]

    def row(self, key: str) -> Mapping[str, Any]:
        """Return the state of a parameter of the file."""
        return self.optimizer.row(self.ids[key])

    def followed(self) -> Followed | None:
        """Return the optimizer after the change; None if a group of the result matches none of its groups."""
        change, live = self.change, self.change.live
        steps: list[StateStep] = []
        anew: list[str] = []
        added: list[str] = []
        carried: set[Any] = set()
        for key, spec in change.result.items():
            known = self.sources(key)
            if live is not None:
                is_wanted = any(key in group for group in live)
            else:
                is_wanted = bool(known) or (not change.origins[key].sources and self.scope.takes(key))
            if not is_wanted:
                continue
            step = self._carried(key, spec)
            if step.source is not None and step.source in carried:
                step = StateStep(key)  # a tie is undone: the state stays with the first name
            carried.add(step.source)
            steps.append(step)
            if step.source is None and not step.parts:
                (anew if known else added).append(key)
        self.steps = steps
        if live is not None:
            grouped: Grouped | None = self._as_in(live)
        else:
            recipe = self.naming.recipe
            grouped = self._in_own_groups() if recipe is None else self._by_recipe(recipe)
        if grouped is None:
            return None
        like, groups = grouped
        if live is None and self.naming.source == NAMED and self._may_be_sorted(groups):
            return None
        begun = [self._begun(*group) for group in zip(like, groups, strict=True)]
        whole = tuple(group for group in begun if group is not None)
        if len(whole) < len(begun):
            return None
        kept = {source for step in steps for source in change.origins[step.key].sources}
        gone = tuple(key for key in self.naming.names.values() if key not in kept)
        anew = [key for key in anew if any(map(self.row, change.origins[key].sources))]
        which = self.scope.which
        return Followed(self.optimizer, self.naming, tuple(like), whole, tuple(anew), tuple(added), gone, which)

    def _begun(self, like: int, steps: Sequence[StateStep]) -> tuple[StateStep, ...] | None:
        """Return a group whose new parameters have a shape if they need a state; None if it cannot be created."""
        optimizer = self.optimizer
        is_new = [step.source is None and not step.parts for step in steps]
        if not any(is_new):
            return tuple(steps)
        if beginning(optimizer, optimizer.groups[like]) is None:
            return None if optimizer.is_flat and optimizer.state else tuple(steps)
        pairs = zip(steps, is_new, strict=True)
        return tuple(step._replace(shape=self.change.after[step.key].shape) if new else step for step, new in pairs)

    def _carried(self, key: str, spec: TensorSpec) -> StateStep:
        """Return where a parameter's state comes from; from nowhere if it cannot be carried exactly."""
        origin, ids = self.change.origins[key], self.ids
        sources = origin.sources
        if not origin.is_trained or not all(source in ids for source in sources):
            return StateStep(key)
        shapes = [self.change.before[source].shape for source in sources]
        rows = [self.row(source) for source in sources]
        if origin.key and (shapes[0] == spec.shape or not rows[0]):
            return StateStep(key, ids[origin.key])
        if origin.key and spec.shape and _is_reshapable(rows[0], shapes[0]):
            return StateStep(key, ids[origin.key], spec.shape)
        if origin.key or not all(rows) or not spec.shape or not _are_elementwise(rows, shapes):
            return StateStep(key)
        if not all(map(self._is_of_elements, rows[0].keys() - SCALARS)):
            return StateStep(key)
        parts = tuple(Part(str(ids[part.source]), part.box, part.place, part.view, part.axes) for part in origin.parts)
        return StateStep(key, None, spec.shape, parts)

    def _is_of_elements(self, name: str) -> bool:
        """Return whether tensors of this name have their parameter's shape in all rows, not by chance as in Shampoo."""
        known = ((self.row(key).get(name), self.change.before[key].shape) for key in self.ids)
        return all(logical_shape(value) in (shape, (), (1,)) for value, shape in known)

    def _as_in(self, live: Sequence[Sequence[str]]) -> Grouped:
        """Group the parameters like a live optimizer; each group is like the old one of most of its parameters."""
        of_key = {step.key: step for step in self.steps}
        groups = [[of_key.get(key, StateStep(key)) for key in keys] for keys in live]
        like = []
        for group in groups:
            sources = [str(step.source) for step in group if step.source is not None]
            sources += [part.source for step in group for part in step.parts]
            places = Counter(self.group_of[source] for source in sources)
            like.append(places.most_common(1)[0][0] if places else 0)
        return like, groups

    def _by_recipe(self, recipe: Recipe) -> Grouped | None:
        """Group the parameters of the result as the trainer would; None if a group matches none of the old ones."""
        change, layout = self.change, self.scope.layout
        old = self._labels(recipe)
        of_key = {step.key: step for step in self.steps}
        is_open = recipe.rises is None and not recipe.is_mixed and not all(self.optimizer.sizes)
        if is_open and not all(change.origins[key].sources for key in of_key):
            return None  # the empty group may be for the new parameters
        if recipe.within is not None and are_listed_anew(change, layout.shapes, recipe.within):
            return None  # the sorted names may have had a prefix that is gone
        if recipe.is_own:  # parameters stay with their part of the model, whatever their new name
            sources = {key: source for key in of_key for source in self.sources(key)}
            own: Callable[[Layout, str], Any] = recipe.label

            def label_of(lay: Layout, key: str) -> Hashable:
                return (own(layout, sources[key])[0], own(lay, key)[1]) if key in sources else own(lay, key)

            recipe = replace(recipe, label=label_of)
        after = change.of_model({key: change.after[key].shape for key in of_key})
        groups = [(label, [of_key[key] for key in keys]) for label, keys in recipe.groups(after)]
        if recipe.is_own:
            groups = [(label, members) for label, members in groups if members or not self.optimizer.sizes[old[label]]]
            is_known = {label for label, _ in groups} <= old.keys() and not _has_emptied(old, dict(groups))
            met = [
                _met(of, recipe.listed(lay), lay, old, dict(groups)) for of, lay in ((own, layout), (label_of, after))
            ]
            if not is_known or met[0] != met[1]:
                return None  # unknown: where the script lists a group, and whether it keeps an empty one
        left = {places[0] for step in self.steps if (places := self.places([step]))}
        if sum(bool(members) for _, members in groups) < len(left):
            return None  # two groups with parameters would be merged, which the script may not do
        like: list[int] = []
        for label, members in groups:
            found = old.get(label)
            if found is None or not recipe.order:
                nearest = self._group_like(members)
                found = found if nearest is None else nearest
            if found is None:
                return None
            like.append(found)
        return like, [members for _, members in groups]

    def _labels(self, recipe: Recipe) -> dict[Hashable, int]:
        """Return the optimizer's group for each label of a recipe."""
        old = {label: place for place, (label, _) in enumerate(recipe.groups(Layout({})))}
        for place, group in enumerate(self.optimizer.groups):
            if group["params"]:
                old[recipe.label(self.scope.layout, self.naming.names[group["params"][0]])] = place
        return old

    def _group_like(self, members: Sequence[StateStep]) -> int | None:
        """Return the old group of some parameters, or of their kind, if all candidates have equal hyperparameters."""
        before, after = self.change.before, self.change.after

        def kind(step: StateStep) -> tuple[str, int]:
            return step.key.rpartition(".")[2], len(after[step.key].shape)

        def form(step: StateStep) -> tuple[str, bool]:
            return kind(step)[0], kind(step)[1] < 2

        def is_flat_as_before(step: StateStep) -> bool:
            sources = self.change.origins[step.key].sources
            return all((len(before[key].shape) < 2) == form(step)[1] for key in sources)

        def like(kind: Callable[[StateStep], Hashable]) -> list[int]:
            kinds = set(map(kind, members))
            return self.places(step for step in self.steps if kind(step) in kinds and is_flat_as_before(step))

        for found in (self.places(filter(is_flat_as_before, members)), like(kind), self.places(members), like(form)):
            if found and self._are_alike(found):
                return found[0]
        return None

    def _are_alike(self, places: Sequence[int]) -> bool:
        """Return whether old groups have equal hyperparameters."""
        settings = [_settings(self.optimizer.groups[place]) for place in places]
        return all(one == settings[0] for one in settings)

    def _in_own_order(self) -> Sequence[StateStep] | None:
        """Return the parameters in the model's order if the optimizer used it, else in its own; None if unknown."""
        optimizer, change, names = self.optimizer, self.change, self.naming.names
        if self.naming.source != NAMED:
            return self.steps
        place = {number: at for at, number in enumerate(optimizer.ids)}
        own = {step.key: [place[self.ids[one]] for one in self.sources(step.key)] for step in self.steps}
        if change.is_ordered:
            before = {key: at for at, key in enumerate(change.parameters)}
            kept = [[before.get(names[number], -1) for number in group["params"]] for group in optimizer.groups]
        else:
            starts = [0, *accumulate(optimizer.sizes)]
            kept = [[at for found in own.values() for at in found[:1] if a <= at < b] for a, b in pairwise(starts)]
        if all(group == sorted(group) for group in kept):
            return self.steps
        if not change.is_ordered or change.reorders or not all(own.values()):
            return None
        return sorted(self.steps, key=lambda step: min(own[step.key]))

    def _may_be_sorted(self, groups: Sequence[Sequence[StateStep]]) -> bool:
        """Return whether a script that sorts names or groups may list the result in another order."""
        names, change = self.naming.names, self.change
        lists = [[bare(names[number]) for number in group["params"]] for group in self.optimizer.groups]
        made = [[bare(step.key) for step in group] for group in groups]
        by_name = ORDERS_BY_NAME[:2]
        fitting = [within for within in by_name if all(within(keys) == keys for keys in lists)]
        if any(within(keys) != keys for within in fitting for keys in made):
            return True
        recipe = self.naming.recipe
        if (recipe is not None and not recipe.is_own) or len(lists) == 1 or not all(lists):
            return False
        orders = [(within, within) for within in fitting]
        if change.is_ordered:
            before, after = ({bare(key): n for n, key in enumerate(each)} for each in (change.before, change.result))
            orders.append((partial(sorted, key=before.__getitem__), partial(sorted, key=after.__getitem__)))
        for old, new in orders:
            first, then = _met_first(lists, old), _met_first(made, new)
            if (first == sorted(first) and then != sorted(then)) or (
                first == sorted(first, reverse=True) and then != sorted(then, reverse=True)
            ):
                return True
        return False

    def _in_own_groups(self) -> Grouped | None:
        """Keep each parameter in its group; a new one joins the group of its module, an enclosing one, or its kind."""
        steps, groups = self._in_own_order(), self.optimizer.groups
        if steps is None:
            return None
        old: dict[str, int] = {}
        for step in steps:
            found = sorted(set(self.places([step])))
            if not self._are_alike(found):
                return None
            if found:
                old[step.key] = found[0]
        places = dict(old)
        for step in steps:
            if step.key not in places:
                place = _kin(step.key, old, len(groups))
                place = self._group_like([step]) if place is None else place
                if place is None:
                    return None
                places[step.key] = place
        made = [[step for step in steps if places[step.key] == number] for number in range(len(groups))]
        kept = [number for number, group in enumerate(made) if group or not groups[number]["params"]]
        return kept, [made[number] for number in kept]


def _is_reshapable(row: Mapping[str, Any], shape: Shape) -> bool:
    """Return whether a reshape of the parameter changes only the shape of its moments: none is factored or a tensor
    subclass, and no list has an item per axis. Blocks of 8-bit moments run over all elements."""
    if any(isinstance(value, (list, tuple)) for _, value in values_in(row)):
        return False
    moments = [value for name, value in values_in(row) if logical_shape(value) and not BLOCKWISE.fullmatch(name)]
    return all(
        isinstance(value, TensorSpec) and value.shape in (shape, (1,)) and _is_plain(value) and value.is_contiguous
        for value in moments
    )


def _is_plain(value: TensorSpec) -> bool:
    return not (value.parts or value.quantizer)


def _are_elementwise(rows: Sequence[Mapping[str, Any]], shapes: Sequence[Shape]) -> bool:
    """Return whether all tensors of some rows have one element per element of their parameter; the rest is equal."""
    if any(row.keys() != rows[0].keys() for row in rows) or () in shapes:
        return False
    for name in rows[0]:
        values = [row[name] for row in rows]
        moments = [value for value in values if isinstance(value, TensorSpec) and _is_plain(value)]
        is_moment = name != STEP and [value.shape for value in moments] == list(shapes)
        if is_moment and len({value.dtype for value in moments}) == 1:
            continue
        if any(isinstance(value, (Mapping, list, tuple)) or logical_shape(value) not in ((), (1,)) for value in values):
            return False
        if len(set(map(number_of, values))) > 1:
            return False
    return True


def _met(
    label: Callable[[Layout, str], Any], keys: Iterable[str], layout: Layout, *known: Collection[Any]
) -> list[Any]:
    """Return the known labels in the order of first appearance."""
    labels = dict.fromkeys(label(layout, key) for key in keys)
    return [label for label in labels if all(label in each for each in known)]


def _met_first(lists: Sequence[Sequence[str]], within: Order) -> list[int]:
    """Return the numbers of lists in the order of their first members."""
    place = {key: number for number, key in enumerate(within(list(chain(*lists))))}
    firsts = [min(map(place.__getitem__, keys)) for keys in lists if keys]
    return sorted(range(len(firsts)), key=firsts.__getitem__)


def _has_emptied(before: Collection[Any], after: Collection[Any]) -> bool:
    """Return whether a group became empty that a script may keep, rather than one of a part that is gone."""
    parts = {part for part, _ in after}
    return any(isinstance(part, bool) or part in parts for part, _ in set(before) - set(after))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    own = ("params", "param_names", "name")
    return {name: number_of(value) for name, value in group.items() if name not in own}


def _kin(key: str, places: Mapping[str, int], count: int) -> int | None:
    if count == 1:
        return 0
    module = key
    while module:
        module = module.rpartition(".")[0]
        found = {place for other, place in places.items() if other.startswith(f"{module}." if module else "")}
        if found:
            return found.pop() if len(found) == 1 else None
    return None
