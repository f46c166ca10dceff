"""OPT103 non-finite-moments: the optimizer's state holds NaN or infinite values.

## What it finds
Non-finite moments or other floats in an optimizer's state, in the file or in the `optimizer.pt` next to it.

## Why it matters
The first step of resumed training turns every weight with such a moment into NaN, although the weights are fine.

## Fix safety
Unsafe: the state of these parameters is reset, as for a new parameter. The others keep theirs. `--drop-optimizer` drops
the whole optimizer, and `--keep-optimizer` keeps it unchanged.

## Example
`exp_avg_sq` of one layer is infinite after a loss spike, and the step that would have used it was never made.

## Sources
`torch/optim/adam.py`; https://github.com/pytorch/pytorch/issues/15345."""

from collections.abc import Container, Iterator
from typing import Any

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Moments, Regroup
from ckptfix.core.finding import Finding, Fix, Level, Remedy, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.maps.optimizer_states import (
    INITIAL,
    SCALARS,
    Optimizer,
    beginning,
    logical_shape,
    optimizers_of,
    values_in,
)
from ckptfix.maps.recipes import stored_names
from ckptfix.rules.opt101_stale_optimizer import KEEP, dropping
from ckptfix.rules.rule import Context, Rule


def non_finite_moments(rule: Rule, context: Context) -> Iterator[Finding]:
    """Read the moments of each optimizer, and reset the state of parameters with non-finite ones."""
    if not context.settings.values or context.settings.format == "safetensors":
        return
    for optimizer in optimizers_of(context.checkpoint):
        bad = _non_finite(optimizer, context)
        if not bad:
            continue
        fix = without(optimizer, bad)
        anew = (Remedy.of("resets these", unsafe_fixes=True),) if fix else ()
        yield rule.finding(
            Level.ERROR,
            f"{optimizer.label} has NaN or infinite state of {counted(len(bad), 'parameter')}, whose weights will "
            "become NaN at the next step",
            evidence={"parameters": {str(number): fields for number, fields in bad.items()}},
            fix=fix,
            remedies=(*anew, *dropping(context), KEEP),
            is_accepted=context.settings.keep_optimizer,
        )


def _non_finite(optimizer: Optimizer, context: Context) -> dict[object, dict[str, int]]:
    """Return the ids with non-finite state, and the number of such values in each field."""
    fields = {
        f"{place} {name}": (number, name, value)
        for place, number in enumerate(optimizer.ids)
        for name, value in values_in(optimizer.row(number))
        if isinstance(value, TensorSpec) and value.has_data and DTYPES[value.dtype].is_float
    }
    specs = {label: value for label, (_, _, value) in fields.items()}
    bad: dict[object, dict[str, int]] = {}
    for label, figures in context.statistics_of(specs).items():
        number, name, _ = fields[label]
        if figures.nonfinite:
            bad.setdefault(number, {})[name] = figures.nonfinite
    return bad


def without(optimizer: Optimizer, bad: Container[object]) -> Fix | None:
    """Return the fix that resets the state of some parameters; None if their initial state is unknown."""
    names = stored_names(optimizer) or {number: str(number) for number in optimizer.ids}
    for group in optimizer.groups:
        if (INITIAL in group or optimizer.is_flat) and beginning(optimizer, group) is None:
            return None

    def moments(place: int, number: Any) -> Moments:
        where = optimizer.name, place, names[number]
        if number not in bad:
            return Moments(*where, str(number))
        shapes = (logical_shape(value) for name, value in optimizer.row(number).items() if name not in SCALARS)
        return Moments(*where, None, next(filter(None, shapes), ()))

    of_groups = (moments(place, number) for place, group in enumerate(optimizer.groups) for number in group["params"])
    like = tuple(range(len(optimizer.groups)))
    return Fix.unsafe((Regroup(optimizer.name, like, layout=optimizer.layout), *of_groups))
