"""OPT105 optimizer-positions: the parameter of each position of an optimizer, and how that is known.

## What it finds
With `--optimizer`, for each optimizer in the file or next to it: the name, group and state of each position. A note.

## Why it matters
An optimizer numbers its parameters. After you edit the model or upgrade the trainer, number 17 may be another layer,
and the load does not notice.

## Fix safety
There is nothing to fix. Names stored in the file are certain. Names from a recipe are confirmed by the sizes of the
groups and the shapes of the moments; parameters with equal shapes rely on their order. If several recipes fit and
differ, all are listed.

## Example
`ckptfix check last.ckpt --optimizer`

## Sources
`torch/optim/optimizer.py`; the recipes are in `ckptfix/maps/recipes.py`."""

from collections.abc import Iterator
from typing import Any

from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.plan import Plan
from ckptfix.maps.optimizer_states import Optimizer, logical_shape, optimizers_of, values_in
from ckptfix.maps.recipes import Naming
from ckptfix.rules.following import ways
from ckptfix.rules.origins import Change
from ckptfix.rules.rule import Context, Rule


def optimizer_positions(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name the positions of each optimizer if the user asks for that."""
    if not context.settings.optimizer_positions:
        return
    checkpoint = context.checkpoint
    change = Change.of(checkpoint, checkpoint, Plan(), context.target)
    for optimizer in optimizers_of(checkpoint):
        found = ways(optimizer, change)
        what = f"{optimizer.label} has {counted(len(optimizer.ids), 'parameter')} in "
        what += counted(len(optimizer.groups), "group")
        if len(found) != 1:
            recipes = [way.source for way in found]
            reason = f"several ways to identify them fit and differ ({', '.join(recipes)})"
            reason = reason if found else "nothing shows which is which"
            yield rule.finding(Level.NOTE, f"{what}, and {reason}", evidence={"recipes": recipes})
            continue
        naming = found[0].naming
        yield rule.finding(
            Level.NOTE,
            f"{what}, named by {found[0].source}: {_how_sure(naming)}",
            keys=naming.names.values(),
            evidence={"positions": _positions(optimizer, naming)},
        )


def _how_sure(naming: Naming) -> str:
    if naming.is_certain:
        return "certain"
    count = len(naming.names)
    if not naming.moments:
        return "no moment confirms it"
    return f"{naming.moments} of {count} have moments of the right shape, {naming.own_shapes} a unique shape"


def _positions(optimizer: Optimizer, naming: Naming) -> dict[str, dict[str, Any]]:
    return {
        naming.names[number]: {
            "id": number,
            "group": place,
            "state": {name: list(logical_shape(value)) for name, value in values_in(optimizer.row(number))},
        }
        for place, group in enumerate(optimizer.groups)
        for number in group["params"]
        if number in naming.names
    }
