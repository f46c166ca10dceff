"""OPT106 impossible-moments: the optimizer's averages have values that no training produces.

## What it finds
- A warning: averages of squared gradients (`exp_avg_sq`, `square_avg`) that are negative.
- A note: an `exp_avg` of Adam that is larger than the `exp_avg_sq` of the same parameter allows. With the betas b1 and
  b2, its square is at most (1 - b1)² / ((1 - b2)(1 - b1² / b2)) times `exp_avg_sq`, by the Cauchy-Schwarz
  inequality. Only four times as much is reported, because betas may change during training.

Of each tensor, the extremes, the means and a sample are compared. Optimizers that compute the averages otherwise (SOAP,
LAMB, Adafactor), and averages in float16 or in quantised form, are left out of the second.

## Why it matters
The files of the two averages, or of different parameters or saves, were swapped. A load does not notice, because all
shapes fit. The root of a negative average is NaN, and an average that is too small makes the first steps too large.

## Fix safety
There is no fix, because the file does not show which average is right. Fetch the files again. `--drop-optimizer` drops
the whole optimizer, and `--keep-optimizer` keeps it unchanged.

## Example
In a universal checkpoint, `exp_avg.pt` and `exp_avg_sq.pt` of a parameter are swapped.

## Sources
`torch/optim/adam.py`; https://arxiv.org/abs/1412.6980, section 2.1."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.maps.optimizer_states import optimizers_of
from ckptfix.rules.opt101_stale_optimizer import KEEP, dropping
from ckptfix.rules.rule import Context, Rule

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
_ADAM = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_SLACK = 4.0  # factor of the squares: a schedule may have changed the betas, and bfloat16 rounds
_TINY = 1e-36  # squares below this may have underflowed


def impossible_moments(rule: Rule, context: Context) -> Iterator[Finding]:
    """Compare the two averages of each parameter."""
    if not context.settings.values or context.settings.format == "safetensors":
        return
    for optimizer in optimizers_of(context.checkpoint):
        rows = {number: optimizer.row(number) for number in optimizer.ids}
        figures = context.statistics_of(
            {
                f"{place} {name}": value
                for place, row in enumerate(rows.values())
                for name in ("exp_avg", *SQUARES)
                if isinstance(value := row.get(name), TensorSpec) and value.has_data
            }
        )
        limits = {number: _limit(group) for group in optimizer.groups for number in group["params"]}
        negative, large = [], []
        for place, (number, row) in enumerate(rows.items()):
            own = {name: found for name in row if (found := figures.get(f"{place} {name}")) is not None}
            if any(own[name].minimum < 0 for name in own.keys() & {*SQUARES}):
                negative.append(number)
            elif (limit := limits[number]) and _are_alike(row) and _exceeds(own["exp_avg"], own["exp_avg_sq"], limit):
                large.append(number)
        for level, bad, what in (
            (Level.WARNING, negative, "negative averages of squared gradients for {}, whose weights will become NaN"),
            (Level.NOTE, large, "a larger average of gradients for {} than the averages of their squares allow"),
        ):
            if bad:
                yield rule.finding(
                    level,
                    f"{optimizer.label} has {what.format(counted(len(bad), 'parameter'))}: its tensors were swapped, "
                    "or are from different saves",
                    evidence={"parameters": [str(number) for number in bad]},
                    remedies=(*advise("fetch its files again"), *dropping(context), KEEP),
                    is_accepted=context.settings.keep_optimizer,
                )


def _limit(group: Mapping[str, Any]) -> float | None:
    """Return the largest possible ratio of squared ``exp_avg`` to ``exp_avg_sq``; None if the group is not Adam's."""
    is_fused = "bias_correction" in group and not group.keys() & {"max_grad_norm", "grad_averaging"}
    betas = group.get("betas")
    if not ("amsgrad" in group or is_fused) or not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return None
    one, two = betas
    if not isinstance(one, float) or not isinstance(two, float) or not 0 <= one * one < two < 1:
        return None
    return _SLACK * (1 - one) * (1 - one) / ((1 - two) * (1 - one * one / two))


def _are_alike(row: Mapping[str, Any]) -> bool:
    """Return whether a row is Adam's, with averages that can be compared element by element."""
    one, two = row.get("exp_avg"), row.get("exp_avg_sq")
    if not isinstance(one, TensorSpec) or not isinstance(two, TensorSpec) or not row.keys() <= _ADAM:
        return False
    are_whole = one.has_data and two.has_data and one.is_contiguous and two.is_contiguous
    return are_whole and one.shape == two.shape and one.dtype == two.dtype and one.dtype in ("float32", "bfloat16")


def _exceeds(one: TensorStatistics, two: TensorStatistics, limit: float) -> bool:
    """Return whether a square of the first average (of the sample, mean or extremes) exceeds what the second allows."""
    pairs = [*zip(array("f", one.sample), array("f", two.sample), strict=False)]
    pairs += [(one.rms, two.mean), (max(-one.minimum, one.maximum), two.maximum)]
    return any(each * each > limit * (square + _TINY) for each, square in pairs)
