"""VAL103 running-stats: the running mean or variance of a norm layer cannot be right.

## What it finds
Of batch and instance norms: a negative `running_var` (error; the message says so where mean and variance look
swapped), one that is zero in every channel (warning, a note where the norm's own weight is zero too) or in some (note),
statistics that are still those of a fresh layer although batches were counted (warning), a mean that stayed 0 while the
variance moved, or the reverse (note), statistics that moved although no batch was counted while other norms of the file
counted some (note), and layers that were never updated: mean 0, variance 1, no batch counted (note). NaN and Inf are
the business of VAL101.

A count of 0 in every norm says nothing: files from before torch 0.4.1 had no count and got 0 later.

## Why it matters
In eval mode the layer divides by `sqrt(running_var + eps)`. A negative variance makes that NaN although every number
in the file is finite; a variance of zero multiplies by 316; fresh statistics leave the input as it is, which the
network was not trained for.

## Fix safety
Unsafe, and only on a flag: statistics come from data. `--recalibrate data.npy` with `--model` measures those of broken
norms anew, with all else in eval mode; `ckptfix.recalibrate(model, loader)` does it for a model that is loaded.
`--reset-running-stats` makes them those of a fresh layer, to be trained on. `--replace VAL103` with `--fill twin` or
`--fill FILE` takes them from another set of weights or another copy.

## Example
`bn1.running_var` goes down to -0.31: `model.eval()` returns NaN.

## Sources
torch/nn/modules/batchnorm.py; https://github.com/pytorch/pytorch/issues/110361"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from ckptfix.core.buffers import NUM_BATCHES_TRACKED
from ckptfix.core.edits import Edit
from ckptfix.core.finding import Finding, Level
from ckptfix.core.spec import TensorStatistics
from ckptfix.rules.replacing import Replacements, cured_apart, for_running_statistics, replaces, reset_edits
from ckptfix.rules.rule import Context, Figures, Rule, rule


@rule
def running_stats(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the norms by what is wrong with them; reset or replace their statistics where that was asked for."""
    norms = [
        _RunningStatistics(key, context.statistics)
        for key in context.statistics
        if key.rpartition(".")[2] == "running_var"
    ]
    counts_batches = any(norm.batches for norm in norms)
    defects: tuple[tuple[Level, Callable[[_RunningStatistics], bool], str], ...] = (
        (
            Level.ERROR,
            lambda norm: norm.is_swapped,
            "negative running_var, and no negative running_mean: the two look swapped",
        ),
        (
            Level.ERROR,
            lambda norm: norm.is_negative and not norm.is_swapped,
            "negative running_var: NaN in eval mode",
        ),
        (Level.WARNING, lambda norm: norm.is_zero and not norm.is_off, "running_var of zero in every channel"),
        (Level.NOTE, lambda norm: norm.is_zero and norm.is_off, "running_var and weight are zero"),
        (Level.NOTE, lambda norm: norm.is_partly_zero, "running_var of zero in some channels"),
        (Level.WARNING, lambda norm: norm.is_contradictory, "batches counted, but fresh statistics"),
        (Level.NOTE, lambda norm: norm.is_half_fresh, "only one of mean and variance ever moved"),
        (
            Level.NOTE,
            lambda norm: counts_batches and norm.moved_uncounted,
            "statistics moved, but no batch counted, as other norms of the file did",
        ),
        (Level.NOTE, lambda norm: norm.is_unused, "never updated: mean 0, variance 1, no batch counted"),
    )
    for level, is_defect, what in defects:
        if wrong := list(filter(is_defect, norms)):
            yield from _findings(rule, level, wrong, f"of {len(norms)} norms: {what}", context)


def _findings(
    rule: Rule, level: Level, wrong: list[_RunningStatistics], what: str, context: Context
) -> Iterator[Finding]:
    """Yield a finding for the norms that a flag cures, and one for the others. Notes are left alone."""
    replacements = Replacements(context)
    norms = {norm.variance_key: norm for norm in wrong}
    cures = {key: () if level is Level.NOTE else _cure(rule, norms[key], context, replacements) for key in norms}
    for keys, fix in cured_apart(norms, cures):
        yield rule.finding(
            level,
            f"{len(keys)} {what}",
            keys=tuple(keys),
            evidence={"tensors": {key: norms[key].evidence for key in keys}},
            fix=fix,
            remedies=() if level is Level.NOTE or fix else for_running_statistics(rule),
        )


def _cure(rule: Rule, norm: _RunningStatistics, context: Context, replacements: Replacements) -> tuple[Edit, ...]:
    """Both statistics from elsewhere, or those of a fresh norm: a mean without its variance is of no use."""
    settings, key = context.settings, norm.variance_key
    if replaces(settings, rule.code, key):
        mean_key = norm.sibling_key("running_mean")
        variance = replacements.of(rule.code, key, _is_variance)
        if mean_key not in context.checkpoint.specs:
            return variance or reset_edits(key, context)
        # The mean goes with its variance, whether it was named or not.
        mean = replacements.beside(mean_key, _is_finite)
        if variance and mean:
            return (*variance, *mean)
    return reset_edits(key, context)


def _is_variance(figures: TensorStatistics) -> bool:
    return _is_finite(figures) and figures.minimum >= 0 and not figures.all_zero


def _is_finite(figures: TensorStatistics) -> bool:
    return not figures.nonfinite


class _RunningStatistics(Struct, frozen=True):
    """The statistics of one norm."""

    variance_key: str
    statistics: Figures

    @property
    def variance(self) -> TensorStatistics:
        return self.statistics[self.variance_key]

    @property
    def mean(self) -> TensorStatistics | None:
        return self._sibling("running_mean")

    @property
    def batches(self) -> int | None:
        """How many batches were counted; None if the file does not say (before torch 0.4.1)."""
        counter = self._sibling(NUM_BATCHES_TRACKED)
        return None if counter is None or counter.numel != 1 else int(counter.maximum)

    @property
    def is_negative(self) -> bool:
        return self.variance.minimum < 0

    @property
    def is_swapped(self) -> bool:
        """Whether the mean is what a variance has to be, in more channels than chance would give."""
        mean = self.mean
        return self.is_negative and mean is not None and mean.numel >= 8 and mean.minimum > 0

    @property
    def is_zero(self) -> bool:
        # The BatchNorm of nflows starts with a variance of zero; its weight has another name.
        return self.variance.all_zero and self.sibling_key("unconstrained_weight") not in self.statistics

    @property
    def is_off(self) -> bool:
        """Whether the norm itself lets nothing pass."""
        weight = self._sibling("weight")
        return weight is not None and weight.all_zero

    @property
    def is_partly_zero(self) -> bool:
        return self.variance.zeros > 0 and not self.is_zero

    @property
    def has_fresh_variance(self) -> bool:
        return (
            self.variance.numel > 0
            and not self.variance.nonfinite
            and (self.variance.minimum == self.variance.maximum == 1.0)
        )

    @property
    def is_fresh(self) -> bool:
        """Whether mean and variance are those of a layer that has seen nothing."""
        return self.has_fresh_variance and self.mean is not None and self.mean.all_zero

    @property
    def is_contradictory(self) -> bool:
        return self.is_fresh and bool(self.batches)

    @property
    def is_half_fresh(self) -> bool:
        """Whether one of the two moved and the other did not, though batches were counted."""
        mean = self.mean
        is_sound = mean is not None and not (mean.nonfinite or self.variance.nonfinite or self.is_zero)
        return is_sound and bool(self.batches) and mean is not None and mean.all_zero is not self.has_fresh_variance

    @property
    def moved_uncounted(self) -> bool:
        mean = self.mean
        return self.batches == 0 and mean is not None and not mean.all_zero and not self.has_fresh_variance

    @property
    def is_unused(self) -> bool:
        return self.is_fresh and not self.batches

    @property
    def evidence(self) -> dict[str, float | int | None]:
        return {
            "minimum": self.variance.minimum,
            "zeros": self.variance.zeros,
            "numel": self.variance.numel,
            "num_batches_tracked": self.batches,
        }

    def sibling_key(self, name: str) -> str:
        """Return the key of another tensor of the norm."""
        return self.variance_key.removesuffix("running_var") + name

    def _sibling(self, name: str) -> TensorStatistics | None:
        return self.statistics.get(self.sibling_key(name))
