"""Adapting tensors of another shape: the edits that ``--adapt`` asks for, and the recipes to offer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from ckptfix.core.adaptations import HEAD, IN_CHANS, RECIPES, WINDOW_BIAS, Adaptation, chosen
from ckptfix.core.edits import PAD_TARGET, Adapt
from ckptfix.core.finding import Placeholder, Remedy
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.errors import Opt, UsageError
from ckptfix.rules.class_maps import class_rows
from ckptfix.rules.misfits import Case
from ckptfix.rules.position_tables import size, window

_SHOWN = 4  # recipes that a message names at most
_BY_HAND = "ROWSxCOLUMNS:ROWSxCOLUMNS"


def of_use(given: Sequence[Adaptation], known: Sequence[Case], done: Collection[str]) -> set[Adaptation]:
    """Return the adaptations that apply to some case, or were applied earlier (``done`` has their labels)."""
    picked = ((case, chosen(case.name, key, case.recipes, given)) for case in known for key in case.shapes)
    fitting = {asked for case, asked in picked if asked and (case.name == HEAD or asked.recipe in case.recipes)}
    return fitting | {asked for asked in given if asked.label in done}


def adapt_edits(
    case: Case, given: Sequence[Adaptation], specs: Mapping[str, TensorSpec], used: Collection[Adaptation]
) -> tuple[Adapt, ...]:
    """Return the edits for the tensors of a case that were asked for.

    Raises ``UsageError``, naming the right recipe, if one does not apply to a tensor and is not ``used`` for others."""
    edits = []
    for key, (old, new) in case.shapes.items():
        asked = chosen(case.name, key, case.recipes, given)
        if asked is None:
            continue
        if case.name == HEAD:
            rows = class_rows(asked, old[0], new[0], key)
            edits.append(Adapt(key, key, asked.label, specs[key].dtype, old, new, rows=rows))
            continue
        if asked.recipe not in case.recipes:
            if asked in used:
                continue
            if not case.recipes:
                raise UsageError(Opt("adapt", asked.text), f" is not for {key}: {case.words}")
            right = Opt("adapt", asked.with_recipe(case.recipes[0]))
            raise UsageError(Opt("adapt", asked.text), f" is not for {key}: {case.words}; give ", right)
        if case.unclear:
            shown = window if case.name == WINDOW_BIAS else tuple
            by_hand = ":".join(size(shown(grid)) for grid in case.grids) if case.grids else _BY_HAND
            right = Opt("adapt", asked.with_recipe(f"{asked.recipe}:{by_hand}"))
            if asked.old is not None and not case.grids:  # the user gave grids, and no better ones are known
                raise UsageError(Opt("adapt", asked.text), f" does not fit {key}: {case.unclear}")
            raise UsageError(f"{key} cannot be adapted: {case.unclear}; give the file's and the model's grids: ", right)
        grids = (*case.grids[0], *case.grids[1]) if case.grids else ()
        # One past the file's last row means a new row.
        rows = (*range(min(old[0], new[0]) - 1), *[old[0]] * (new[0] - old[0]), old[0] - 1) if case.keeps_last else ()
        edits.append(Adapt(key, key, asked.label, specs[key].dtype, old, new, grids, rows))
    return tuple(edits)


def narrowed(case: Case) -> str:
    """Return the advice that precedes the recipes if the file has more input channels than the model, else nothing.

    No library has a formula that removes channels, except to one, or to a third if neighbouring pixels were merged."""
    for old, new in case.shapes.values() if case.name == IN_CHANS else ():
        if old[1] > new[1] > 1 and old[1] != 3 * new[1]:
            return (
                f"name the model that the file belongs to: it has {old[1]} input channels (inpainting models have 9), "
                f"and all but {new[1]} would be lost"
            )
    return ""


def _effect(text: str) -> str:
    """Return what a recipe such as ``pos_embed=timm`` does."""
    name, _, recipe = text.partition("=")
    return RECIPES[name][recipe]


def recipes_of(case: Case, target: Target, untrained: Mapping[str, int]) -> Iterator[Remedy]:
    """Yield the recipes for a case, that of the model's own library first; a placeholder if the grids are unknown.

    ``untrained`` maps the target's parameters that the file lacks in their shape to their numel."""
    if case.name == HEAD:
        yield Remedy.of("keeps the classes that both have, with one row per line", adapt=Placeholder("head=MAP.txt"))
        return
    if not case.recipes:
        return
    if said := narrowed(case):
        yield Remedy.of(said)
    texts = [f"{case.name}={recipe}" for recipe in case.recipes]
    first, *others = (text for text in texts[:_SHOWN] if text != PAD_TARGET or target.initial is not None)
    if case.unclear:
        yield Remedy.of("resamples the file's grid to the model's", adapt=Placeholder(f"{first}:{_BY_HAND}"))
    elif case.library:
        also = f"; {' and '.join(others)} {'fit' if len(others) > 1 else 'fits'} too" if others else ""
        yield Remedy.of(f"{_effect(first)}, and the model is one of {case.library}{also}", adapt=(first,))
    else:
        price = tuple(
            (key, untrained[key] - math.prod(old)) for key, (old, _) in case.shapes.items() if key in untrained
        )
        for text in (first, *others):
            yield replace(Remedy.of(_effect(text), adapt=(text,)), untrained=price * (text == PAD_TARGET))
