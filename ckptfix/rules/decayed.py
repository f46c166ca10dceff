"""VAL201 decayed: a weight matrix has shrunk to next to nothing.

## What it finds
Floating matrices and kernels of 64 elements or more whose RMS is below a thousandth of what the layer starts with,
and below a hundredth of the median of its kind (convolution, linear, embedding) in the same file. The start is taken
from the model's own initialisation where there is a model, else from the fan-in: `1/sqrt(3 fan_in)`, torch's default.
Vectors that shrank in step (the norm after it, its bias) are listed too. Exact zeros are the business of VAL202.

A kernel before a batch norm is scale-invariant: it is left in peace while the `running_var` of that norm is above its
eps, for then the norm makes up for the scale. The matrices of weight_norm and spectral_norm are left in peace always,
and those whose name says that they start at zero (LoRA's B) as long as a millionth of the scale is left.

## Why it matters
Weight decay shrinks every weight that gets no gradient: 90 epochs of SGD with momentum leave an unused layer at 6e-8
of its start. The file loads, and the layer passes nothing on. It was not used in training (a frozen branch, a head
without a loss, a layer that only another configuration needs), so a model that uses it now gets nothing from it.

## Fix safety
There is no fix: the trained values never existed. Light decay (AdamW, short runs) cannot be told from the weights
alone and is not reported.

## Example
`layer4.0.weight`: RMS 5.7e-15, expected about 0.07; the optimizer in the file had `weight_decay` 0.01.

## Sources
torch/nn/init.py and torch/nn/modules/linear.py (the default start), https://arxiv.org/abs/1706.05350 (weight decay and
normalisation), https://github.com/deepinsight/insightface/issues/277 (tiny filters alone are no defect)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ckptfix.checkpoint import TensorSpec
from ckptfix.finding import Context, Finding, Level, Rule, rule
from ckptfix.values import Statistics, TensorStatistics
from ckptfix.values.optimizer import strongest_decay
from ckptfix.values.roles import Norm, is_matrix, is_scale_free, is_zero_by_design, kind, norm_after

if TYPE_CHECKING:
    import torch

SMALLEST = 64
"""Elements below which an RMS says little."""

OF_START = 1e-3
"""Share of the start's RMS below which a matrix counts as decayed."""

OF_KIND = 1e-2
"""Share of its kind's median RMS below which it does."""

NOTHING_LEFT = 1e-6
"""Share of the start's RMS below which no doubt is left: an error, even where there is nothing to compare with."""

BY_FAN_IN, BY_MODEL = "fan-in", "the model's initialisation"
"""Where the start's RMS comes from."""

EPS = 1e-5
"""The default eps of the norms; a running variance above it carries the scale."""


@rule("VAL201", "decayed")
def decayed(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose nothing; report the matrices that decayed, with the vectors that went with them."""
    if context.statistics is None:
        return
    found = list(_decayed_matrices(context, context.statistics))
    if not found:
        return
    optimizer = strongest_decay(context.checkpoint.root)
    keys = dict.fromkeys(key for matrix in found for key in (matrix.key, *matrix.companions(context.statistics)))
    worst = min(found, key=lambda matrix: matrix.share)
    yield rule.finding(
        Level.ERROR if worst.share < NOTHING_LEFT else Level.WARNING,
        f"{_count(found)} decayed to {worst.share:.1g} of the expected scale{_in_words(optimizer)}",
        keys=tuple(keys),
        evidence={
            "tensors": {matrix.key: matrix.evidence(context.statistics) for matrix in found},
            "thresholds": {"of_start": OF_START, "of_kind": OF_KIND},
            "optimizer": optimizer,
        },
        remedy="if the model uses these layers, take them from another checkpoint or train them again",
    )


@dataclass(frozen=True)
class _Matrix:
    """A matrix whose scale is suspicious. ``start`` is the RMS to expect, ``peers`` the median RMS of its kind."""

    key: str
    rms: float
    start: float
    reference: str
    peers: float | None
    norm: Norm | None

    @property
    def share(self) -> float:
        return self.rms / self.start

    def companions(self, statistics: Statistics) -> Iterator[str]:
        """The vectors that shrank with it: its bias, and the weight and bias of the norm after it."""
        bias = self.key.removesuffix("weight") + "bias"
        if bias != self.key and bias in statistics and 0 < statistics[bias].rms < OF_START * self.start:
            yield bias
        scale = self.norm.figures("weight", statistics) if self.norm else None
        if self.norm and scale and scale.rms < OF_START:
            yield from (key for key in self.norm.vectors if statistics[key].rms < OF_START)

    def evidence(self, statistics: Statistics) -> dict[str, Any]:
        batches = self.norm.figures("num_batches_tracked", statistics) if self.norm else None
        return {
            "rms": self.rms,
            "expected_rms": self.start,
            "expected_from": self.reference,
            "median_rms_of_kind": self.peers,
            **({"batches_seen_by_its_norm": int(batches.maximum)} if batches else {}),
        }


def _decayed_matrices(context: Context, statistics: Statistics) -> Iterator[_Matrix]:
    specs = context.checkpoint.specs
    matrices = {
        key: statistics[key]
        for key in statistics
        if specs[key].numel >= SMALLEST and is_matrix(key, specs[key], context.target) and statistics[key].rms > 0
    }
    suspects = {
        key
        for key, figures in matrices.items()
        if figures.rms < OF_START * _start(specs[key]) and _is_shrunk(figures) and not is_scale_free(key)
    }
    initial = context.target.initial() if suspects and context.target and context.target.initial else {}
    healthy = {key: figures.rms for key, figures in matrices.items() if key not in suspects}
    for key in matrices:
        if key not in suspects:
            continue
        same = [rms for other, rms in healthy.items() if kind(other, specs[other]) == kind(key, specs[key])]
        peers = median(same or healthy.values()) if healthy else None
        start, reference = _start(specs[key]), BY_FAN_IN
        if key in initial:
            start, reference = _rms(initial[key]), BY_MODEL
        matrix = _Matrix(key, matrices[key].rms, start, reference, peers, norm_after(context.checkpoint, key))
        if _is_decayed(matrix) and not _norm_carries_scale(matrix.norm, statistics):
            yield matrix


def _start(spec: TensorSpec) -> float:
    """The RMS that torch's default initialisation gives: uniform within 1/sqrt(fan_in)."""
    return 1 / math.sqrt(3 * math.prod(spec.shape[1:]))


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def _is_shrunk(figures: TensorStatistics) -> bool:
    """Whether the matrix is small throughout: hardly an exact zero, or nothing but the last subnormal steps to zero."""
    return not figures.nonfinite and (
        figures.zeros < 0.01 * figures.numel or figures.zeros + figures.subnormals == figures.numel
    )


def _is_decayed(matrix: _Matrix) -> bool:
    """Whether both thresholds are crossed. A start of zero, or as small as this, says that it is so by design."""
    if matrix.start == 0 or matrix.share >= OF_START:
        return False
    if matrix.peers is None or (matrix.reference == BY_FAN_IN and is_zero_by_design(matrix.key)):
        return matrix.share < NOTHING_LEFT  # nothing to compare with, or a matrix that may have hardly left zero
    return matrix.rms < OF_KIND * matrix.peers


def _norm_carries_scale(norm: Norm | None, statistics: Statistics) -> bool:
    """Whether the norm after the matrix was updated and divides by something that is not just its eps."""
    variance = norm.figures("running_var", statistics) if norm else None
    batches = norm.figures("num_batches_tracked", statistics) if norm else None
    if variance is None or (batches is not None and batches.maximum == 0):
        return False
    fresh = variance.minimum == variance.maximum == 1.0
    return not fresh and variance.rms > EPS


def _count(found: list[_Matrix]) -> str:
    return "1 weight matrix has" if len(found) == 1 else f"{len(found)} weight matrices have"


def _in_words(optimizer: Mapping[str, float] | None) -> str:
    decay = (optimizer or {}).get("weight_decay")
    if decay is None:
        return ""
    if decay == 0:
        return ", though the optimizer in this file had no weight_decay"
    return f"; the optimizer in this file had weight_decay {decay:g}, which shrinks what gets no gradient"
