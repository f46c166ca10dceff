"""VAL103 running-stats: the running mean or variance of a norm layer cannot be right.

## What it finds
Of batch and instance norms:

- an error: a negative `running_var`; the message says so if mean and variance look swapped;
- a warning: a `running_var` of zero in every channel (a note if the norm's weight is zero too), or the statistics of a
  fresh layer although batches were counted;
- a note: a variance of zero in some channels; a mean that stayed 0 while the variance moved, or the reverse; statistics
  that moved although no batch was counted, while other norms of the file counted some; and layers that were never
  updated (mean 0, variance 1, no batch counted).

VAL101 finds NaN and infinities. A count of 0 in every norm means nothing: files from before torch 0.4.1 got it later.

## Why it matters
In eval mode the layer divides by `sqrt(running_var + eps)`. A negative variance makes that NaN although every number in
the file is finite; a variance of zero multiplies by 316; fresh statistics leave the input unchanged, which the network
was not trained for.

## Fix safety
Unsafe, and only on request, because statistics come from data. `--recalibrate data.npy` with `--model` measures those
of norms that are broken or that `--fill` made fresh, with everything else in eval mode;
`ckptfix.recalibrate(model, loader)` does the same for a loaded model. `--reset-running-stats` resets them to those of a
fresh layer, which needs training. `--replace VAL103` with `--fill twin` or `--fill FILE` takes them from another copy.

## Example
`bn1.running_var` goes down to -0.31: `model.eval()` returns NaN.

## Sources
torch/nn/modules/batchnorm.py; https://github.com/pytorch/pytorch/issues/110361"""

from collections.abc import Iterator

from ckptfix.core.buffers import NUM_BATCHES_TRACKED
from ckptfix.core.edits import Edit, Fill
from ckptfix.core.finding import Finding, Level
from ckptfix.core.spec import TensorStatistics
from ckptfix.rules.replacing import Replacements, cured_apart, for_running_statistics, replaces, reset_edits
from ckptfix.rules.rule import Context, Rule, StatisticsByKey

_VARIANCE = "running_var"

# The possible defects of a norm's statistics, in the order of the findings.
_SWAPPED = "negative running_var but no negative running_mean: they look swapped"
_NEGATIVE = "negative running_var: NaN in eval mode"
_ZERO = "running_var of zero in every channel"
_OFF = "running_var and weight are zero"
_PARTLY_ZERO = "running_var of zero in some channels"
_CONTRADICTORY = "batches counted, but fresh statistics"
_HALF_FRESH = "only one of mean and variance ever moved"
_UNCOUNTED = "statistics moved but no batch counted, unlike other norms in the file"
_UNUSED = "never updated: mean 0, variance 1, no batch counted"
_LEVELS = {
    **dict.fromkeys((_SWAPPED, _NEGATIVE), Level.ERROR),
    **{_ZERO: Level.WARNING, _OFF: Level.NOTE, _PARTLY_ZERO: Level.NOTE, _CONTRADICTORY: Level.WARNING},
    **dict.fromkeys((_HALF_FRESH, _UNCOUNTED, _UNUSED), Level.NOTE),
}


def running_stats(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the norms by defect; reset or replace their statistics if asked to."""
    statistics = context.statistics
    norms = [key for key in statistics if key.rpartition(".")[2] == _VARIANCE]
    counts_batches = any(_batches(key, statistics) for key in norms)
    defects = {key: set(_defects(key, statistics, counts_batches)) for key in norms}
    replacements = Replacements(context)
    fills = (edit.key for edit in context.plan.edits if isinstance(edit, Fill))
    filled = set(fills) if context.settings.recalibrate else set()
    for what, level in _LEVELS.items():
        wrong = [key for key in norms if what in defects[key]]
        is_note = level is Level.NOTE  # not cured, unless the plan itself added fresh statistics
        cures = {key: () if is_note and key not in filled else _cure(rule, key, context, replacements) for key in wrong}
        for keys, fix in cured_apart(wrong, cures):
            yield rule.finding(
                level,
                f"{len(keys)} of {len(norms)} norms: {what}",
                keys=keys,
                evidence={"tensors": {key: _evidence(key, statistics) for key in keys}},
                fix=fix,
                remedies=() if is_note or fix else for_running_statistics(rule),
            )


def _cure(rule: Rule, key: str, context: Context, replacements: Replacements) -> tuple[Edit, ...]:
    """Return edits that replace both statistics or make them fresh: a mean without its variance is of no use."""
    if replaces(context.settings, rule.code, key):
        mean_key = _beside(key, "running_mean")
        variance = replacements.of(rule.code, key, _is_variance)
        if mean_key not in context.checkpoint.specs:
            return variance or reset_edits(key, context)
        # Replace the mean along with its variance, whether it was named or not.
        mean = replacements.beside(mean_key)
        if variance and mean:
            return (*variance, *mean)
    return reset_edits(key, context)


def _is_variance(figures: TensorStatistics) -> bool:
    return figures.minimum >= 0 and not figures.all_zero


def _beside(key: str, name: str) -> str:
    """Return the key of another tensor of the norm with this ``running_var``."""
    return key.removesuffix(_VARIANCE) + name


def _batches(key: str, statistics: StatisticsByKey) -> int | None:
    """Return the number of batches that a norm counted; None if the file does not say (before torch 0.4.1)."""
    counter = statistics.get(_beside(key, NUM_BATCHES_TRACKED))
    return None if counter is None or counter.numel != 1 else int(counter.maximum)


def _evidence(key: str, statistics: StatisticsByKey) -> dict[str, float | int | None]:
    variance = statistics[key]
    figures = {"minimum": variance.minimum, "zeros": variance.zeros, "numel": variance.numel}
    return {**figures, "num_batches_tracked": _batches(key, statistics)}


def _defects(key: str, statistics: StatisticsByKey, counts_batches: bool) -> Iterator[str]:
    """Yield the defects of one norm's statistics; ``counts_batches`` is whether any norm of the file counted."""
    variance, mean = statistics[key], statistics.get(_beside(key, "running_mean"))
    batches = _batches(key, statistics)
    # The BatchNorm of nflows starts with a variance of zero; its weight has another name.
    is_zero = variance.all_zero and _beside(key, "unconstrained_weight") not in statistics
    is_one = variance.numel > 0 and not variance.nonfinite and variance.minimum == variance.maximum == 1.0
    if variance.minimum < 0:  # the mean is positive throughout, like a variance, in too many channels for chance
        yield _SWAPPED if mean is not None and mean.numel >= 8 and mean.minimum > 0 else _NEGATIVE
    if is_zero:
        weight = statistics.get(_beside(key, "weight"))
        yield _OFF if weight is not None and weight.all_zero else _ZERO
    elif variance.zeros:
        yield _PARTLY_ZERO
    if mean is None:
        return
    if is_one and mean.all_zero:
        yield _CONTRADICTORY if batches else _UNUSED
    if batches and mean.all_zero is not is_one and not (mean.nonfinite or variance.nonfinite or is_zero):
        yield _HALF_FRESH
    if counts_batches and batches == 0 and not mean.all_zero and not is_one:
        yield _UNCOUNTED
