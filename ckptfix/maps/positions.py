"""Finds out which parameter each position of an optimizer's state belongs to, for one order of parameters.

From an ``Optimizer`` and a ``Layout``, parameters in the order of ``named_parameters()``, it makes a ``Naming`` for
each way to name the positions: by the file itself (``param_names``, or names instead of numbers), or by a recipe
(``maps.recipes``), the way in which a trainer puts parameters into groups. A recipe fits if the sizes of the groups and
the shapes of the moments do. ``rules.position_names`` chooses the orders to try."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct

from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import bare
from ckptfix.maps.optimizer_states import Optimizer, fits, logical_shape, values_in
from ckptfix.maps.recipes import EACH, RECIPES, Layout, Recipe, own_recipes

NAMED, KEYED = "param_names", "names in the place of numbers"  # sources of certain names


class Naming(Struct, frozen=True):
    """The names of an optimizer's ids, and where they come from.

    ``recipe`` is None if the names are in the file itself. ``own_shapes`` counts the parameters with a unique shape;
    all others are only identified by their order."""

    names: Mapping[Any, str]
    source: str
    recipe: Recipe | None = None
    moments: int = 0
    own_shapes: int = 0

    @property
    def is_certain(self) -> bool:
        """Whether the file itself has the names."""
        return self.source in (NAMED, KEYED)


def stored_names(optimizer: Optimizer) -> dict[Any, str] | None:
    """Return the names of the ids that are in the state itself, None if it has none."""
    if optimizer.is_keyed:
        return {number: number for number in optimizer.ids}
    found: dict[Any, str] = {}
    for group in optimizer.groups:
        names = group.get("param_names")
        if not isinstance(names, list) or len(names) != len(group["params"]):
            return None
        found |= zip(group["params"], names, strict=True)
    return found if found and all(isinstance(name, str) for name in found.values()) else None


def named_by_itself(optimizer: Optimizer, keys: Mapping[str, TensorSpec]) -> list[Naming]:
    """Return the naming by the names in the state, as some of ``keys``; empty if it has no names, or one is not among
    the keys. There are several if the names may also be those inside a submodule, and the moments fit both."""
    names = stored_names(optimizer)
    if names is None:
        return []
    of_bare = {bare(key): key for key in keys}
    own = {number: bare(name) for number, name in names.items()}
    first = next(iter(own.values()))
    found: list[dict[Any, str]] = []
    for prefix in sorted(key.removesuffix(first) for key in of_bare if key == first or key.endswith(f".{first}")):
        known = {number: of_bare[prefix + name] for number, name in own.items() if prefix + name in of_bare}
        if len(set(known.values())) == len(names) and (not prefix or found):
            found.append(known)
    fitting = [
        known for known in found if all(fits(optimizer.row(number), keys[key].shape) for number, key in known.items())
    ]
    source = KEYED if isinstance(next(iter(names)), str) else NAMED
    moments = sum(bool(_moments(optimizer.row(number))) for number in names)
    return [Naming(known, source, moments=moments) for known in fitting or found[:1]]


def namings(
    optimizer: Optimizer, layout: Layout, new: Layout | None = None, of_trainers: bool = False, is_rare: bool = False
) -> Iterator[Naming]:
    """Yield a naming for each recipe under which the optimizer has exactly the parameters of the layout.

    Custom recipes that agree, also on the groups of ``new`` parameters, are yielded once, and not at all with
    ``of_trainers`` or if a trainer has signed the groups. ``is_rare`` yields only the recipes with rare orders."""
    sizes = optimizer.sizes
    if sum(sizes) != len(layout.shapes):
        return
    rows = [optimizer.row(number) for number in optimizer.ids]
    moments = sum(map(bool, map(_moments, rows)))
    counts = Counter(layout.shapes.values())
    unique = sum(counts[shape] == 1 for shape in layout.shapes.values())
    is_mixed = len({frozenset(row) for row in rows if row}) > 1

    def named(recipe: Recipe) -> Iterator[tuple[Hashable, Naming]]:
        if recipe.order and len(recipe.order) != len(sizes):
            return  # such a recipe has the same number of groups for every model, even if some are empty
        made = recipe.groups(layout)
        order = list(chain.from_iterable(keys for _, keys in made))
        is_like = [len(keys) for _, keys in made] == list(sizes)
        if not is_like or not recipe.agrees([label for label, _ in made], optimizer.groups):
            return
        if all(fits(row, layout.shapes[key]) for row, key in zip(rows, order, strict=True)):
            names = dict(zip(optimizer.ids, order, strict=True))
            # With one parameter per group, the place of a new group follows from the order of the parameters.
            places = recipe.name if recipe.label is EACH.label else recipe.place_of(new, dict(made))
            listed = tuple(recipe.listed(new)) if new is not None else ()
            yield (order, places, listed), Naming(names, recipe.name, recipe, moments, unique)

    found = list(chain.from_iterable(named(recipe) for recipe in RECIPES if is_mixed or not recipe.is_mixed))
    signed = [naming for _, naming in found if naming.recipe is not None and naming.recipe.signs(optimizer)]
    if not is_rare:
        yield from signed or (naming for _, naming in found)
    if signed or of_trainers or not moments:
        return  # without moments, nothing confirms custom groups
    outcomes = [outcome for outcome, _ in found]
    for recipe in own_recipes(layout, optimizer, new, is_rare):
        for outcome, naming in named(recipe):
            if outcome not in outcomes:
                outcomes.append(outcome)
                yield naming


def _moments(row: Mapping[str, Any]) -> list[Any]:
    return [value for _, value in values_in(row) if logical_shape(value)]


def runs_of(keys: Sequence[str]) -> Counter[str]:
    """Count the keys per first segment, as for parts of a model with separate optimizers."""
    return Counter(bare(key).partition(".")[0] for key in keys)
