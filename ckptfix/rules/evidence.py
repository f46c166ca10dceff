"""Third of five steps for an optimizer: which names its positions have, as far as the file and the model show it.

In comes an ``Optimizer`` and the ``Change`` of the parameters. Out come the ``Naming``s that fit, each with the
``OptimizerScope``, the parameters that such an optimizer has. The names of the file count first (``named_by_itself``),
then the groups of a live optimizer (``as_live``), then the recipes (``by_recipe``). What follows is in ``following``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.wrappers import bare
from ckptfix.maps.optimizer_states import Optimizer, fits
from ckptfix.maps.positions import Naming, named_by_itself, namings, runs_of, stored_names
from ckptfix.maps.recipes import (
    ORDERS_BY_NAME,
    OUTER,
    RECIPES,
    Layout,
    Order,
    Recipe,
    have_lost_a_prefix,
    may_list,
    own_groups,
)
from ckptfix.rules.origins import Change, Shape


class OptimizerScope(Struct, frozen=True):
    """The parameters of the file that an optimizer may have, and which new ones belong to it."""

    layout: Layout
    takes: Callable[[str], bool]
    which: str = ""  # which they are if not all, and in whose order if that of the file and that of the model differ
    is_of_form: bool = False  # whether they are what Muon has, or leaves: of equal shapes, so that any order would fit


def scopes(change: Change) -> Iterator[OptimizerScope]:
    """Yield what optimizers are built of: all parameters, the trainable ones, or those of one part of a model."""
    parameters = change.parameters
    orders = [("the file's order", list(parameters))] if change.is_ordered else []
    orders += [("the model's order", order) for order in change.model_orders if not orders or order != orders[0][1]]
    known = change.modules
    for whose, order in orders:
        firsts = runs_of(order)
        chosen: list[tuple[list[str], Callable[[str], bool], str]] = [(order, lambda key: True, "")]
        forms: list[str] = []
        if change.kinds:  # what the model does not have may have been a buffer of another one
            chosen.append(([key for key in order if change.kinds.get(key)], lambda key: True, "of what the model has"))
        for cold in change.cold:
            keys = [key for key in order if key not in cold]
            chosen.append((keys, lambda key: key not in change.frozen, "of what learns"))
        for what, is_in in _MATRICES.items():
            for is_inside in (True, False):
                takes = _by_form(is_in, is_inside, change)
                keys = [key for key in order if is_in(key, parameters[key].shape) is is_inside]
                if 0 < len(keys) < len(order):
                    forms.append(f"{'of' if is_inside else 'outside'} the {what}")
                    chosen.append((keys, takes, forms[-1]))
        if 1 < len(firsts) <= 16:
            for name, is_inside in product(firsts, (True, False) if len(firsts) > 2 else (True,)):
                takes = _in_part(name, is_inside)
                chosen.append((list(filter(takes, order)), takes, f"{'of' if is_inside else 'outside'} {name}"))
        for keys, takes, what in chosen:
            which = " ".join(filter(None, (what, f"in {whose}" if len(dict(orders)) > 1 else "")))
            layout = Layout({key: parameters[key].shape for key in keys}, known, change.layers)
            yield OptimizerScope(layout, takes, which, what in forms)


# Muon is for matrices, and the rest has an optimizer of its own; so have tables and heads in most scripts.
_MATRICES: dict[str, Callable[[str, Shape], bool]] = {
    "matrices": lambda key, shape: len(shape) == 2,
    "hidden matrices": lambda key, shape: len(shape) == 2 and not OUTER.search(key),
    "kernels": lambda key, shape: len(shape) > 1,
    "hidden kernels": lambda key, shape: len(shape) > 1 and not OUTER.search(key),
}


def _by_form(is_in: Callable[[str, Shape], bool], is_inside: bool, change: Change) -> Callable[[str], bool]:
    return lambda key: is_in(key, change.after[key].shape) is is_inside


def _in_part(name: str, is_inside: bool) -> Callable[[str], bool]:
    return lambda key: (bare(key).partition(".")[0] == name) is is_inside


def counted(optimizer: Optimizer, change: Change) -> Change:
    """Return a change with copies of tied weights as one parameter if the optimizer has as many as the result."""
    is_tied = bool(change.aliases) and len(optimizer.ids) == len(change.result)
    return replace(change, is_tied=True) if is_tied else change


def widths(change: Change) -> list[Change]:
    """Return a change, and that with what is only named like a buffer as a parameter if that is another one."""
    wide = replace(change, is_wide=True)
    return [change, wide] if wide.parameters.keys() != change.parameters.keys() else [change]


def by_recipe(optimizer: Optimizer, change: Change, is_rare: bool = False) -> list[tuple[OptimizerScope, Naming]]:
    """Return the recipes that fit, only those of the trainer that has left a file of its own, if any. Groups of
    a script's own are not looked for in more orders of a sorted file than can agree. The orders of few scripts count if
    no recipe with the model's order fits, and the only ones if they are asked for (``is_rare``)."""
    new = change.of_model({key: spec.shape for key, spec in change.result.items()})
    known = [scope for scope in scopes(change) if len(scope.layout.shapes) == len(optimizer.ids)]

    def fitting(of_trainers: bool = False, is_rare: bool = False) -> list[tuple[OptimizerScope, Naming]]:
        return [
            (scope, naming)
            for scope in known
            for naming in namings(optimizer, scope.layout, new, of_trainers or scope.is_of_form, is_rare)
        ]

    if SIGNS.intersection(change.signs) or len(change.model_orders) > ORDERS:
        found = fitting(of_trainers=True)
        signed = [pair for pair in found if pair[1].recipe is not None and pair[1].recipe.sign in change.signs]
        if signed or len(change.model_orders) > ORDERS:
            return [] if is_rare else signed or found
    found = fitting(is_rare=is_rare)
    if is_rare or not found or any(naming.recipe is not None and naming.recipe.within is None for _, naming in found):
        return found
    return found + fitting(is_rare=True)


def are_listed_anew(change: Change, keys: Iterable[str], within: Order) -> bool:
    """Return whether what is left of some parameters comes in another order if it has the names of the result."""
    old = _renamed(change, keys)
    return [old[key] for key in within(old)] != within(list(old.values()))


def _renamed(change: Change, keys: Iterable[str]) -> dict[str, str]:
    """Return the names of the result for what is left of some parameters, without the segments of wrappers."""
    names = {source: key for key in change.result for source in change.origins[key].sources}
    return {bare(key): bare(names[key]) for key in keys if key in names}


def is_listed_anew(optimizer: Optimizer, change: Change) -> bool:
    """Return whether a script that lists parameters by name, in whatever groups, may have made an optimizer, and lists
    them in another order under the names of the result. What a trainer has signed is not such a script's."""
    if stored_names(optimizer) is not None or max(optimizer.sizes) == 1 or not any(map(optimizer.row, optimizer.ids)):
        return False
    layouts = [scope.layout for scope in scopes(change) if len(scope.layout.shapes) == len(optimizer.ids)]
    orders = [
        [layout.shapes[key] for key in within(layout.shapes)]
        for layout in layouts
        if not have_lost_a_prefix((names := _renamed(change, layout.shapes)), names.values())
        for within in ORDERS_BY_NAME
        if are_listed_anew(change, layout.shapes, within)
    ]
    if not any(may_list(optimizer, shapes) for shapes in orders):
        return False
    recipes = filter(None, (naming.recipe for naming in readings(optimizer, change)))
    return not any(recipe.sign in change.signs or recipe.signs(optimizer) for recipe in recipes)


SIGNS = {recipe.sign for recipe in RECIPES if recipe.sign}
ORDERS = 20  # of a sorted file's parameters, tried for groups of a script's own, or if the names are known


def readings(optimizer: Optimizer, change: Change) -> list[Naming]:
    """Return the names that its positions may have had before the change."""
    return named_by_itself(optimizer, change.before) or [naming for _, naming in by_recipe(optimizer, change)]


def inside(optimizer: Optimizer, naming: Naming) -> str:
    """Return of which module the names that a state has itself are."""
    number, key = next(iter(naming.names.items()))
    prefix = bare(key).removesuffix(bare((stored_names(optimizer) or {})[number]))
    return f"of {prefix[:-1]}" if prefix else "of the whole model"


def as_live(optimizer: Optimizer, change: Change) -> Iterator[Naming]:
    """Name the parameters as those of the optimizer that is to load the state, whose script has made both. If the model
    has its parameters in another order than the file, those of each group may have been in that of the file."""
    groups = [[change.origins[key].sources for key in group if key in change.origins] for group in change.live or ()]
    if tuple(map(len, groups)) != optimizer.sizes or any(len(sources) != 1 for group in groups for sources in group):
        return
    order = {key: number for number, name in enumerate(change.result) for key in change.origins[name].sources}
    live = [key for group in groups for (key,) in group]
    if not change.parameters.keys() <= order.keys() or not order.keys() >= set(live):
        return  # an optimizer of a model that had others may have had these
    readings = [dict(zip(live, live, strict=True))]
    if change.reorders:  # the script may have met them in the file's order: within its groups, or all in all
        rank = {key: number for number, key in enumerate(change.before)}
        for parts in ([[key for (key,) in group] for group in groups], [live]):
            pairs = (
                zip(sorted(part, key=order.__getitem__), sorted(part, key=rank.__getitem__), strict=True)
                for part in parts
            )
            readings.append(dict(chain.from_iterable(pairs)))
    rows = [optimizer.row(number) for number in optimizer.ids]
    for known in readings:
        keys = [known[key] for key in live]
        if all(fits(row, change.before[key].shape) for row, key in zip(rows, keys, strict=True)):
            names = dict(zip(optimizer.ids, keys, strict=True))
            yield Naming(names, "the groups of the given optimizer", moments=sum(map(bool, rows)))
        elif keys == live:
            return


def known_recipes(optimizer: Optimizer, naming: Naming, layout: Layout) -> list[Recipe]:
    """Return the recipes by which names that are certain are grouped: those of trainers, else of a script's own."""
    if len(optimizer.groups) == 1 or optimizer.is_flat:
        return []
    named = set(naming.names.values())
    layout = replace(layout, shapes={key: shape for key, shape in layout.shapes.items() if key in named})
    want = [[naming.names[number] for number in group["params"]] for group in optimizer.groups]

    def fitting(recipes: Iterable[Recipe]) -> list[Recipe]:
        return [recipe for recipe in recipes if [keys for _, keys in recipe.groups(layout)] == want]

    return fitting(RECIPES) or fitting(own_groups(layout, optimizer))
