"""VAL201 decayed: a weight matrix has shrunk almost to zero.

## What it finds
Float matrices and kernels with at least 64 elements whose RMS is below a thousandth of the layer's initial RMS, and
below a hundredth of the median of its kind (convolution, linear, embedding) in the same file. The initial RMS is that
of the model's own initialisation or, without a model, `1/sqrt(3 fan_in)`, torch's default. For a last layer by name
(`head`, `classifier`, `fc`) the limit is a ten-thousandth, for an embedding a hundred-thousandth. Vectors that shrank
with the matrix (its bias, the norm after it) are listed too. VAL202 finds exact zeros.

Not reported are:

- a kernel before a batch norm with a `running_var` above its eps and small enough for this kernel: the norm compensates
  the scale;
- matrices of weight_norm and spectral_norm, and those that start at zero by their name (LoRA's B), as long as a
  millionth of the scale is left;
- a matrix whose largest value is more than 50 times its RMS: decay would keep the shape of the initial values, so some
  weights are alive. It is reported if less than a millionth is left, or if most values are subnormal;
- matrices that were initialised small: their RMS or largest value is closer to a power of ten than by chance.

A last layer that a few steps moved from zero is a note: its rows point in few directions, unlike random initial ones.

An optimizer in the file whose moments fit the parameters gives more evidence: whether a gradient ever arrived, whether
the momentum is parallel to the weight (then only decay moves it), and what `weight_decay`, `lr` and the number of steps
predict. The message says whether they agree.

- A matrix without a gradient that is predicted to shrink to less than half is a note, even if its size is not unusual
  yet. It is a warning if less than a tenth is predicted, and no more than that is left.
- A tiny matrix that got gradients, and whose size decay does not explain, started small: a note.
- Without moments (plain SGD) or an optimizer, a tiny matrix is a note too if it is not called a weight or kernel (a
  hash grid, a gate), or if the optimizer had no weight decay.

## Why it matters
Weight decay shrinks every weight that gets no gradient: 90 epochs of SGD with momentum leave an unused layer at 6e-8 of
its initial scale. The file loads, and the layer passes nothing on. It was not used in training (a frozen branch, a head
without a loss, a layer of another configuration), so a model that uses it now gets nothing from it.

## Fix safety
Unsafe, and only on request: the trained values never existed. `--replace VAL201` with `--fill FILE`, `twin` or `target`
replaces them. Light decay (AdamW, short runs) does not show in the weights, and is reported only with an optimizer.

## Example
`layer4.0.weight`: RMS 5.7e-15, expected about 0.07; weight_decay 0.01 at lr 0.1 over 30000 steps predicts 9e-14 of
the start, which agrees.

## Sources
torch/nn/init.py and torch/nn/modules/linear.py (the default initialisation), https://arxiv.org/abs/1706.05350 (weight
decay and normalisation), https://github.com/deepinsight/insightface/issues/277 (tiny filters by themselves are not a
defect)"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any

from msgspec import Struct

from ckptfix.core.buffers import NUM_BATCHES_TRACKED
from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.rules.replacing import from_elsewhere, replaced_apart
from ckptfix.rules.rule import Context, Rule, StatisticsByKey
from ckptfix.values.optimizer import Training, alignment, counted_steps, strongest_decay, trainings
from ckptfix.values.roles import (
    Norm,
    is_head,
    is_layers_own,
    is_scale_free,
    is_zero_by_design,
    kind,
    median,
    norms_after,
    usual_rms,
)
from ckptfix.values.scan import first_numbers

SMALLEST = 64  # elements; the RMS of a smaller matrix says little
OF_START = 1e-3  # share of the initial RMS below which a matrix counts as decayed
OF_HEAD = 1e-4  # the same for the last layer, which BEiT's `init_scale` initialises at a thousandth

# The same for embeddings and codebooks, some of which start at one over their number of rows.
OF_EMBEDDING = 1e-5
ROWS = 256  # least rows per column of a table, whatever its name: a classifier of 93,000 faces has 182
OF_KIND = 1e-2  # share of the median RMS of its kind below which a matrix counts as decayed

# Share of the initial RMS below which there is no doubt: an error, even if there is nothing to compare with.
NOTHING_LEFT = 1e-6
PEAK = 50.0  # largest ratio of the largest value to the RMS after mere decay. 10^9 normal initial values have 6.

# Standard errors by which an initialiser's RMS may miss the power of ten that it was given, and the largest probability
# that all matrices of one power are that close by chance.
ERRORS, CHANCE = 4.0, 0.02

# The least power of ten for fewer than this many matrices: flows start at 1e-5, all of SAM at 1e-10.
LEAST_POWER, FEW = -5, 8

WIDEST = 1 << 18  # numbers whose directions are examined

# The largest plausible mean square of a kernel's inputs. Pixels of 0 … 255 have 2e4.
LARGEST_INPUT = 1e5

# If the largest value is this share of a power of ten or more, the values were drawn from within that power; no
# initialisation is smaller than the second number.
ROUND, TINIEST = 0.999, 1e-6

BY_FAN_IN, BY_MODEL = "fan-in", "the model's initialisation"  # the source of the initial RMS
EPS = 1e-5  # the default eps of the norms; a running variance above it carries the scale
LIGHT = 0.5  # share of the initial RMS below which a matrix's optimizer state is examined
PROVEN = 0.1  # share below which it is a warning, if no gradient arrived and the optimizer predicts as little


def decayed(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the matrices that decayed, with the vectors that decayed too; replace them if asked to."""
    specs, record = context.checkpoint.specs, TrainingRecord(context)
    large = {key: each for key, each in context.matrices.items() if specs[key].numel >= SMALLEST and each.rms > 0}
    suspects = {matrix.key: matrix for matrix in _decayed_matrices(record, large)}
    grown = [matrix for key, matrix in suspects.items() if _started_so(matrix, specs[key])]
    light = list(_light_matrices(record, {key: each for key, each in large.items() if key not in suspects}))
    found = {key: matrix for key, matrix in suspects.items() if matrix not in grown}
    found |= {matrix.key: matrix for matrix in light if matrix.is_proven}
    yield from _noted(rule, grown, "a tiny scale from the start, as far as the file shows")
    for keys, fix in replaced_apart(rule, context, found, lambda key, figures: found[key].is_cured_by(figures)):
        some = [found[key] for key in keys]
        worst = min(some, key=lambda matrix: matrix.share)
        yield rule.finding(
            Level.ERROR if worst.share < NOTHING_LEFT else Level.WARNING,
            f"{_have(some)} decayed to {worst.share:.1g} of the expected scale{worst.decay.in_words}",
            keys=dict.fromkeys(key for matrix in some for key in (matrix.key, *matrix.companions)),
            evidence={
                "tensors": {matrix.key: matrix.evidence for matrix in some},
                "thresholds": {"of_start": OF_START, "of_kind": OF_KIND, "of_start_of_a_head": OF_HEAD},
                "optimizer": record.strongest,
            },
            fix=fix,
            remedies=from_elsewhere(rule),
        )
    only_decay = "seen no gradient, according to the optimizer's moments: only weight decay acted"
    yield from _noted(rule, [matrix for matrix in light if not matrix.is_proven], only_decay)


def _noted(rule: Rule, matrices: Sequence[_Matrix], what: str) -> Iterator[Finding]:
    if matrices:
        yield rule.finding(
            Level.NOTE,
            f"{_have(matrices)} {what}",
            keys=[matrix.key for matrix in matrices],
            evidence={"tensors": {matrix.key: matrix.evidence for matrix in matrices}},
        )


def _have(found: Sized) -> str:
    """Return the subject and verb of a message: ``2 weight matrices have``."""
    return f"{counted(len(found), 'weight matrix')} {'has' if len(found) == 1 else 'have'}"


def _started_so(matrix: _Matrix, spec: TensorSpec) -> bool:
    """Return whether a matrix may have started this small: gradients arrived, and decay does not explain it.

    Without moments: it is not a layer's own weight (hash grids, gates), or there was no weight decay."""
    decay = matrix.decay
    if decay.saw_no_gradient is not None or decay.alignment is not None:
        return not decay.is_untouched and not decay.agrees
    if matrix.reference == BY_MODEL or not is_layers_own(matrix.key):
        return matrix.reference == BY_FAN_IN
    return matrix.share >= NOTHING_LEFT and (decay.weight_decay == 0 or _has_left_zero(matrix.key, spec))


def _has_left_zero(key: str, spec: TensorSpec) -> bool:
    """Return whether a last layer holds only a few gradients: one direction has a far larger share of the squares than
    in a random matrix."""
    columns = math.prod(spec.shape[1:])
    rows = min(spec.shape[0], WIDEST // columns)
    if not is_head(key) or not spec.is_contiguous or min(rows, columns) < 2:
        return False
    numbers = first_numbers(spec, rows * columns).reshape(rows, columns)
    share_of_random = (rows**0.5 + columns**0.5) ** 2 / (rows * columns)
    return bool(np.linalg.norm(numbers, 2) > share_of_random**0.25 * np.linalg.norm(numbers))


class _Matrix(Struct, frozen=True, eq=False, dict=True):
    """A matrix with a suspicious scale. ``start`` is the expected RMS, ``peers`` the median RMS of its kind, and
    ``least`` the share of ``start`` that replacements must have."""

    key: str
    record: TrainingRecord
    start: float
    reference: str = BY_FAN_IN
    peers: float | None = None
    norm: Norm | None = None
    is_embedding: bool = False
    least: float = OF_START

    @cached_property
    def decay(self) -> DecayEvidence:
        """What the file's optimizer says about it."""
        return self.record.evidence_of(self.key, self.share)

    @property
    def figures(self) -> TensorStatistics:
        return self.record.context.statistics[self.key]

    @property
    def share(self) -> float:
        return self.figures.rms / self.start

    @property
    def is_proven(self) -> bool:
        """Whether the optimizer's figures predict as little as is left."""
        return max(self.share, self.decay.predicted or 1.0) < PROVEN and bool(self.decay.agrees)

    def is_cured_by(self, figures: TensorStatistics) -> bool:
        """Return whether other values would be large enough."""
        return figures.rms >= max(self.least * self.start, OF_KIND * (self.peers or 0.0))

    @property
    def companions(self) -> Iterator[str]:
        """The vectors that decayed with it: its bias, and the weight and bias of the norm after it."""
        statistics = self.record.context.statistics
        bias = self.key.removesuffix("weight") + "bias"
        if bias != self.key and bias in statistics and 0 < statistics[bias].rms < OF_START * self.start:
            yield bias
        scale = self.norm.figures("weight", statistics) if self.norm else None
        if self.norm and scale and scale.rms < OF_START:
            yield from (key for key in self.norm.vectors if statistics[key].rms < OF_START)

    @property
    def evidence(self) -> dict[str, Any]:
        statistics = self.record.context.statistics
        batches = self.norm.figures("num_batches_tracked", statistics) if self.norm else None
        return {
            "rms": self.figures.rms,
            "expected_rms": self.start,
            "expected_from": self.reference,
            "median_rms_of_kind": self.peers,
            "peak_to_rms": self.figures.absmax / self.figures.rms,
            **({"batches_seen_by_its_norm": int(batches.maximum)} if batches else {}),
            **self.decay.evidence,
        }


def _decayed_matrices(record: TrainingRecord, matrices: Mapping[str, TensorStatistics]) -> Iterator[_Matrix]:
    context = record.context
    specs = context.checkpoint.specs
    suspects = {
        key
        for key, figures in matrices.items()
        if figures.rms < OF_START * usual_rms(specs[key]) and _is_shrunk(figures) and not is_scale_free(key)
        if not _is_drawn_tiny(figures)
    }
    suspects -= _started_tiny({key: matrices[key] for key in suspects})
    if not suspects:
        return
    healthy = {key: figures.rms for key, figures in matrices.items() if key not in suspects}
    of_kind: dict[str, list[float]] = {}
    for key, rms in healthy.items():
        of_kind.setdefault(kind(key, specs[key]), []).append(rms)
    medians = {name: median(same) for name, same in of_kind.items()}
    overall = median(healthy.values()) if healthy else None
    norms = norms_after(context.checkpoint, suspects)
    for key in matrices:
        if key not in suspects:
            continue
        peers = medians.get(kind(key, specs[key]), overall)
        start, reference = usual_rms(specs[key]), BY_FAN_IN
        if (own := context.start(key)) is not None:
            start, reference = own.rms, BY_MODEL
        shape = specs[key].shape  # with so many rows per column, it is a table, whatever its name
        is_looked_up = kind(key, specs[key]) == "embedding" or (len(shape) == 2 and shape[0] >= ROWS * shape[1])
        is_table = reference == BY_FAN_IN and is_looked_up
        matrix = _Matrix(key, record, start, reference, peers, norms.get(key), is_table)
        if _is_decayed(matrix) and not _norm_carries_scale(matrix, specs[key], context.statistics):
            yield matrix


def _started_tiny(matrices: Mapping[str, TensorStatistics]) -> set[str]:
    """Return the matrices that started this small: their RMS is too close to a power of ten for chance."""
    of_power: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for key, figures in matrices.items():
        power = round(math.log10(figures.rms))
        error = ERRORS / math.sqrt(2 * figures.numel)
        if abs(figures.rms / 10.0**power - 1) < error:
            of_power[power].append((key, min(2 * error / math.log(10), 1.0)))
    return {
        key
        for power, alike in of_power.items()
        if power >= LEAST_POWER or len(alike) >= FEW
        if math.prod(chance for _, chance in alike) < CHANCE
        for key, _ in alike
    }


def _is_shrunk(figures: TensorStatistics) -> bool:
    """Return whether a matrix is small throughout: hardly any exact zeros, or only zeros and subnormal values."""
    return not figures.nonfinite and (
        figures.zeros < 0.01 * figures.numel or figures.zeros + figures.subnormals == figures.numel
    )


def _is_drawn_tiny(figures: TensorStatistics) -> bool:
    """Return whether the largest value is a power of ten: hash tables of radiance fields start within 1e-4 of zero."""
    power = 10.0 ** round(math.log10(figures.absmax))
    is_round = power >= TINIEST and ROUND * power < figures.absmax <= power * (1 + 1e-6)
    return is_round and figures.absmax < 2 * figures.rms


def _is_decayed(matrix: _Matrix) -> bool:
    """Return whether a matrix is below both thresholds. If it starts at zero or this small, that is by design."""
    may_start_small = matrix.reference == BY_FAN_IN and is_head(matrix.key)
    least = OF_HEAD if may_start_small else OF_EMBEDDING if matrix.is_embedding else OF_START
    if matrix.start == 0 or matrix.share >= least:
        return False
    if matrix.share < NOTHING_LEFT:
        return matrix.peers is None or matrix.figures.rms < OF_KIND * matrix.peers
    if matrix.peers is None or (matrix.reference == BY_FAN_IN and is_zero_by_design(matrix.key)):
        return False  # nothing to compare with, or it may have started at zero
    lives_on = (
        matrix.figures.absmax >= PEAK * matrix.figures.rms and 2 * matrix.figures.subnormals < matrix.figures.numel
    )
    return matrix.figures.rms < OF_KIND * matrix.peers and not lives_on


def _norm_carries_scale(matrix: _Matrix, spec: TensorSpec, statistics: StatisticsByKey) -> bool:
    """Return whether the norm after a matrix was updated and divides by the matrix's scale, not just by its eps."""
    variance = matrix.norm.figures("running_var", statistics) if matrix.norm else None
    batches = matrix.norm.figures("num_batches_tracked", statistics) if matrix.norm else None
    if variance is None or (batches is not None and batches.maximum == 0):
        return False
    fresh = variance.minimum == variance.maximum == 1.0
    # If the matrix shrank later, or was replaced, the statistics are not those of its outputs. By the Cauchy-Schwarz
    # inequality, the mean square of the outputs is at most the row's sum of squares times that of the inputs.
    fan_in = math.prod(spec.shape[1:])
    is_its_own = variance.mean < LARGEST_INPUT * (matrix.figures.rms * fan_in) ** 2
    return not fresh and variance.rms > EPS and is_its_own


PARALLEL = 0.99  # least cosine of a momentum that is parallel to its weight
AGREES = (0.5, 2.0)  # range of the ratio of two shares' logarithms that agree


class DecayEvidence(Struct, frozen=True):
    """What the file shows about one matrix; None or an empty text if it does not show it.

    ``predicted`` is the share of the initial RMS that decay without gradients leaves, ``observed`` the actual one."""

    observed: float
    predicted: float | None = None
    saw_no_gradient: bool | None = None
    alignment: float | None = None
    terms: str = ""
    weight_decay: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether prediction and observation are of the same order; None without a prediction."""
        if self.predicted is None:
            return None
        if self.predicted <= 0 or self.observed <= 0:
            return self.observed < 1e-6
        ratio = math.log(self.predicted) / min(math.log(self.observed), -1e-9)
        return AGREES[0] <= ratio <= AGREES[1]

    @property
    def is_untouched(self) -> bool:
        """Whether the moments show that only decay moved the matrix."""
        return bool(self.saw_no_gradient) or (self.alignment is not None and self.alignment > PARALLEL)

    @property
    def evidence(self) -> dict[str, Any]:
        """The known figures."""
        figures = {
            "predicted_share": self.predicted,
            "prediction_agrees": self.agrees,
            "saw_no_gradient": self.saw_no_gradient,
            "cosine_of_momentum": self.alignment,
        }
        return {name: figure for name, figure in figures.items() if figure is not None}

    @property
    def in_words(self) -> str:
        """The rest of the message."""
        if self.weight_decay is None:
            return ""
        if self.weight_decay == 0:
            return ", though the optimizer in this file had no weight_decay"
        parts = []
        if self.saw_no_gradient is not None:
            parts.append("no gradient arrived" if self.saw_no_gradient else "though gradients arrived")
        if self.alignment is not None and self.alignment > PARALLEL:
            parts.append("only decay moved it, because its momentum is parallel to it")
        if self.predicted is not None:
            verdict = "which agrees" if self.agrees else "which disagrees"
            parts.append(f"{self.terms} predicts {self.predicted:.1g} of the start, {verdict}")
        else:
            parts.append(f"the optimizer in this file had {self.terms}")
        return "; " + "; ".join(parts)


class TrainingRecord(Struct, frozen=True, dict=True):
    """The optimizer and the counters of a file."""

    context: Context

    @cached_property
    def strongest(self) -> dict[str, float] | None:
        """The hyperparameters of the group with the most decay; None without an optimizer."""
        return strongest_decay(self.context.checkpoint.root)

    @cached_property
    def trainings(self) -> Mapping[str, Training]:
        """The training of each parameter, from an optimizer whose moments fit."""
        if self.strongest is None:
            return {}  # no optimizer: skip the parameters, of which there may be many
        return trainings(self.context.checkpoint, self.context.target)

    @cached_property
    def _steps(self) -> int | None:
        """The steps of the whole run: the trainer's count, or the most batches that a norm counted."""
        statistics = self.context.statistics
        counters = [key for key in statistics if key.rpartition(".")[2] == NUM_BATCHES_TRACKED]
        batches = max((int(statistics[key].maximum) for key in counters if statistics[key].numel == 1), default=0)
        return counted_steps(self.context.checkpoint.root) or batches or None

    def evidence_of(self, key: str, share: float) -> DecayEvidence:
        """Return what the file shows about a matrix of which this share of the initial RMS is left."""
        training = self.trainings.get(key)
        if training is None:
            decay = (self.strongest or {}).get("weight_decay")
            return DecayEvidence(share, terms=f"weight_decay {decay:g}" if decay else "", weight_decay=decay)
        steps = training.steps or self._steps
        momentum = training.momentum
        cosine = None if momentum is None else alignment(self.context.checkpoint.specs[key], momentum)
        rms, saw_none = self.context.statistics[key].rms, training.saw_no_gradient
        if saw_none is False:
            saw_none = training.saw_decay_only(rms, rms / share)
        terms = f"weight_decay {training.weight_decay:g} at lr {training.initial_lr or training.lr:g}"
        terms += f" over {steps} steps" if steps else ""
        return DecayEvidence(
            share,
            predicted=training.predicted_share(steps),
            saw_no_gradient=saw_none,
            alignment=cosine,
            terms=terms,
            weight_decay=training.weight_decay,
        )


def _light_matrices(record: TrainingRecord, matrices: Mapping[str, TensorStatistics]) -> Iterator[_Matrix]:
    """Yield the matrices that only decay moved according to the optimizer, and that are as small as it predicts."""
    specs = record.context.checkpoint.specs
    for key, figures in matrices.items() if record.trainings else ():
        matrix = _Matrix(key, record, usual_rms(specs[key]), least=PROVEN)
        is_small = matrix.share < LIGHT and not figures.nonfinite
        if is_small and matrix.decay.is_untouched and (matrix.decay.predicted or 1.0) < LIGHT:
            yield matrix
