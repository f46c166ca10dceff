"""Third of five steps for an optimizer: find the parameter names of its positions.

Takes an ``Optimizer`` and the ``Change`` of the parameters, and returns the ``Naming``s that fit, each with its
``OptimizerScope``: the parameters that such an optimizer has. Names in the file come first (``named_by_itself``), then
the groups of a live optimizer (``by_live_groups``), then recipes (``by_recipe``). The next step is ``following``.

``with_owners`` says which of several state_dicts each optimizer trains, by its name and by the names that fit it."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.parts import Shape
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import bare
from ckptfix.maps.optimizer_states import Optimizer, fits
from ckptfix.maps.recipes import (
    ORDERS_BY_NAME,
    OUTER,
    RECIPES,
    Layout,
    Naming,
    Order,
    Recipe,
    have_lost_a_prefix,
    may_list,
    named_by_itself,
    namings,
    own_groups,
    stored_names,
)
from ckptfix.reading.weights.containers import is_averaged
from ckptfix.rules.origins import Change, may_learn


class OptimizerScope(Struct, frozen=True):
    """The parameters of the file that an optimizer may have, and a test of which new ones belong to it."""

    layout: Layout
    takes: Callable[[str], bool]
    which: str = ""  # the subset if not all, and whose order if the file's and the model's differ
    is_of_form: bool = False  # whether shape selects them, as for Muon: many are equal, so that any order would fit


def scopes(change: Change) -> Iterator[OptimizerScope]:
    """Yield the sets that optimizers are built from: all parameters, the trainable ones, or those of one part."""
    parameters = change.parameters
    orders = [("the file's order", list(parameters))] if change.is_ordered else []
    orders += [("the model's order", order) for order in change.model_orders if not orders or order != orders[0][1]]
    known = change.modules
    for whose, order in orders:
        parts = dict.fromkeys(bare(key).partition(".")[0] for key in order)
        chosen: list[tuple[list[str], Callable[[str], bool], str]] = [(order, lambda key: True, "")]
        forms: list[str] = []
        if change.kinds:  # a tensor that the model lacks may have been a buffer
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
        if 1 < len(parts) <= 16:
            for name, is_inside in product(parts, (True, False) if len(parts) > 2 else (True,)):
                takes = _in_part(name, is_inside)
                chosen.append((list(filter(takes, order)), takes, f"{'of' if is_inside else 'outside'} {name}"))
        for keys, takes, what in chosen:
            which = " ".join(filter(None, (what, f"in {whose}" if len(dict(orders)) > 1 else "")))
            layout = Layout({key: parameters[key].shape for key in keys}, known, change.layers)
            yield OptimizerScope(layout, takes, which, what in forms)


# Muon takes the matrices, and another optimizer the rest: in most scripts also embeddings and heads.
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


def tied_as_one(optimizer: Optimizer, change: Change) -> Change:
    """Return the change with tied copies counted as one parameter if the optimizer has as many as the result."""
    is_tied = bool(change.aliases) and len(optimizer.ids) == len(change.result)
    return replace(change, is_tied=True) if is_tied else change


def narrow_and_wide(change: Change) -> list[Change]:
    """Return the change, and the one that also counts tensors named like buffers as parameters if that differs."""
    wide = replace(change, is_wide=True)
    return [change, wide] if wide.parameters.keys() != change.parameters.keys() else [change]


def by_recipe(optimizer: Optimizer, change: Change, is_rare: bool = False) -> list[tuple[OptimizerScope, Naming]]:
    """Return the recipes that fit; if a trainer left its own file next to the checkpoint, only that trainer's.

    A script's own groups are not tried if a sorted file allows more than ``ORDERS`` orders. Rare orders are added if
    recipes fit, but none with the model's order; ``is_rare`` returns only rare ones."""
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
    """Return whether a sort by name puts the parameters into another order under the names of the result."""
    old = _renamed(change, keys)
    return [old[key] for key in within(old)] != within(list(old.values()))


def _renamed(change: Change, keys: Iterable[str]) -> dict[str, str]:
    """Map parameters to their names in the result, both without wrapper segments."""
    names = {source: key for key in change.result for source in change.origins[key].sources}
    return {bare(key): bare(names[key]) for key in keys if key in names}


def is_listed_anew(optimizer: Optimizer, change: Change) -> bool:
    """Return whether a script that lists parameters by name may have made an optimizer, and would list them in another
    order under the names of the result. A trainer's sign in the state rules that out."""
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
ORDERS = 20  # most orders of a sorted file that are tried with a script's own groups or known names


def readings(optimizer: Optimizer, change: Change) -> list[Naming]:
    """Return the names that an optimizer's positions may have had before the change."""
    return named_by_itself(optimizer, change.before) or [naming for _, naming in by_recipe(optimizer, change)]


def module_of(optimizer: Optimizer, naming: Naming) -> str:
    """Return, in words, the module to which the names in an optimizer's state are relative."""
    number, key = next(iter(naming.names.items()))
    prefix = bare(key).removesuffix(bare((stored_names(optimizer) or {})[number]))
    return f"of {prefix[:-1]}" if prefix else "of the whole model"


def by_live_groups(optimizer: Optimizer, change: Change) -> Iterator[Naming]:
    """Yield the names given by the groups of the live optimizer that is to load the state.

    If the model's order differs from the file's, a group may have been in the file's order."""
    groups = [[change.origins[key].sources for key in group if key in change.origins] for group in change.live or ()]
    if tuple(map(len, groups)) != optimizer.sizes or any(len(sources) != 1 for group in groups for sources in group):
        return
    order = {key: number for number, name in enumerate(change.result) for key in change.origins[name].sources}
    live = [key for group in groups for (key,) in group]
    if not change.parameters.keys() <= order.keys() or not order.keys() >= set(live):
        return  # the file's optimizer may have had parameters that the result lacks
    readings = [dict(zip(live, live, strict=True))]
    if change.reorders:  # the script may have listed them in the file's order, within each group or overall
        rank = {key: number for number, key in enumerate(change.before)}
        for parts in ([[key for (key,) in group] for group in groups], [live]):
            pairs = (zip(*(sorted(part, key=by.__getitem__) for by in (order, rank)), strict=True) for part in parts)
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
    """Return the recipes that give an optimizer's groups if names are certain: trainers', else a script's own."""
    if len(optimizer.groups) == 1 or optimizer.is_flat:
        return []
    named = set(naming.names.values())
    layout = replace(layout, shapes={key: shape for key, shape in layout.shapes.items() if key in named})
    want = [[naming.names[number] for number in group["params"]] for group in optimizer.groups]

    def fitting(recipes: Iterable[Recipe]) -> list[Recipe]:
        return [recipe for recipe in recipes if [keys for _, keys in recipe.groups(layout)] == want]

    return fitting(RECIPES) or fitting(own_groups(layout, optimizer))


def with_owners(checkpoint: Checkpoint, optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, list[str]]]:
    """Yield the optimizers, each with the sets that it fits equally well; without the repaired set if it belongs to
    another one. Optimizers of other sets are left out if the repaired set has its own."""
    sets = _other_sets(checkpoint)
    own = path_name(checkpoint.container)
    owners = {optimizer.name: _owners(optimizer.name, [own, *sets]) for optimizer in optimizers}
    has_own = [own] in owners.values()
    for optimizer in optimizers:
        fitting = [name for name, layout in sets.items() if any(namings(optimizer, layout))]
        named = owners[optimizer.name]
        is_doubtful = bool(fitting) and named != [own]
        if is_doubtful and named and own not in named:
            if not has_own:
                yield optimizer, named
        elif not (is_doubtful and has_own):
            yield optimizer, [own, *fitting] if is_doubtful else []


def _other_sets(checkpoint: Checkpoint) -> dict[str, Layout]:
    """Return the state_dicts besides the repaired one, except averages, which no optimizer trains."""
    found: dict[str, Layout] = {}
    for candidate in checkpoint.candidates:
        if candidate.path == checkpoint.container or is_averaged(candidate.name):
            continue
        members = checkpoint.members(candidate)
        specs = {key: spec for key, spec in members.items() if isinstance(spec, TensorSpec)}
        found[candidate.name] = Layout({key: spec.shape for key, spec in specs.items() if may_learn(key, spec, None)})
    return found


_COMMON = frozenset("opt optim optimizer optimizers optimiser state states dict model models net weights".split())


def _owners(name: str, sets: list[str]) -> list[str]:
    """Return the state_dicts that an optimizer's name refers to: ``optG`` to ``G``, ``d_optim`` to ``netD``."""
    words = _words(name)
    return [
        one
        for one in sets
        if words == (own := _words(one)) or any(a.startswith(b) or b.startswith(a) for a in words for b in own)
    ]


def _words(name: str) -> set[str]:
    """Return the words of a name, without those that any optimizer or model may have."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return {word.lower() for word in words} - _COMMON
