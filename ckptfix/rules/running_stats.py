"""VAL103 running-stats: the running mean or variance of a norm layer cannot be right.

## What it finds
Of batch and instance norms: a negative `running_var` (error), one that is zero in every channel (warning) or in some
(note), statistics that are still those of a fresh layer although batches were counted (warning), and layers that were
never updated: mean 0, variance 1, no batch counted (note). NaN and Inf are the business of VAL101.

## Why it matters
In eval mode the layer divides by `sqrt(running_var + eps)`. A negative variance makes that NaN although every number
in the file is finite; a variance of zero multiplies by 316; fresh statistics leave the input as it is, which the
network was not trained for.

## Fix safety
There is no fix: statistics come from data. Recalibrate them with a few batches of training data, or take them from
another copy of the file.

## Example
`bn1.running_var` goes down to -0.31: `model.eval()` returns NaN.

## Sources
torch/nn/modules/batchnorm.py; https://github.com/pytorch/pytorch/issues/110361
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfix.finding import Context, Finding, Level, Rule, rule
from ckptfix.values import Statistics, TensorStatistics

RECALIBRATE = "run some batches of training data through the model in train mode, or take these from another copy"


@rule("VAL103", "running-stats")
def running_stats(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose nothing; report the norms by what is wrong with them."""
    if context.statistics is None:
        return
    norms = [_RunningStatistics(key, context.statistics) for key in context.statistics if _names_variance(key)]
    for level, wrong, what in (
        (Level.ERROR, [norm for norm in norms if norm.is_negative], "negative running_var: NaN in eval mode"),
        (Level.WARNING, [norm for norm in norms if norm.is_zero], "running_var of zero in every channel"),
        (Level.NOTE, [norm for norm in norms if norm.is_partly_zero], "running_var of zero in some channels"),
        (Level.WARNING, [norm for norm in norms if norm.is_contradictory], "batches counted, but fresh statistics"),
        (Level.NOTE, [norm for norm in norms if norm.is_unused], "never updated: mean 0, variance 1, no batch counted"),
    ):
        if wrong:
            yield rule.finding(
                level,
                f"{len(wrong)} of {len(norms)} norms: {what}",
                keys=tuple(norm.variance_key for norm in wrong),
                evidence={"tensors": {norm.variance_key: norm.evidence for norm in wrong}},
                remedy="" if level is Level.NOTE else RECALIBRATE,
            )


def _names_variance(key: str) -> bool:
    return key.rpartition(".")[2] == "running_var"


@dataclass(frozen=True)
class _RunningStatistics:
    """The statistics of one norm."""

    variance_key: str
    statistics: Statistics

    @property
    def variance(self) -> TensorStatistics:
        return self.statistics[self.variance_key]

    @property
    def mean(self) -> TensorStatistics | None:
        return self._sibling("running_mean")

    @property
    def batches(self) -> int | None:
        """How many batches were counted; None where the file does not say (before torch 0.4.1)."""
        counter = self._sibling("num_batches_tracked")
        return None if counter is None or counter.numel != 1 else int(counter.maximum)

    @property
    def is_negative(self) -> bool:
        return self.variance.minimum < 0

    @property
    def is_zero(self) -> bool:
        return self.variance.all_zero

    @property
    def is_partly_zero(self) -> bool:
        return self.variance.zeros > 0 and not self.is_zero

    @property
    def is_fresh(self) -> bool:
        """Whether mean and variance are those of a layer that has seen nothing."""
        of_one = self.variance.numel > 0 and not self.variance.nonfinite
        of_one = of_one and self.variance.minimum == self.variance.maximum == 1.0
        return of_one and self.mean is not None and self.mean.all_zero

    @property
    def is_contradictory(self) -> bool:
        return self.is_fresh and bool(self.batches)

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

    def _sibling(self, name: str) -> TensorStatistics | None:
        return self.statistics.get(self.variance_key.removesuffix("running_var") + name)
