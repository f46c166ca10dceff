"""VAL201 decayed: a weight matrix has shrunk almost to zero.

## What it finds
Float matrices and kernels with at least 64 elements whose RMS is below a thousandth of the layer's initial RMS, and
below a hundredth of the median of its kind (convolution, linear, embedding) in the same file. The initial RMS is that
of the model's own initialisation or, without a model, `1/sqrt(3 fan_in)`, torch's default. For a last layer by name
(`head`, `classifier`, `fc`) the limit is a ten-thousandth, for an embedding a hundred-thousandth. Vectors that shrank
with the matrix (its bias, the norm after it) are listed too. VAL202 finds exact zeros.

Not reported are

- a kernel before a batch norm with a `running_var` above its eps and small enough for this kernel: the norm compensates
  the scale; - matrices of weight_norm and spectral_norm, and those that start at zero by their name (LoRA's B), as long
  as a millionth of the scale is left; - a matrix whose largest value is more than 50 times its RMS: decay would keep
  the shape of the initial values, so some weights are alive. It is reported if less than a millionth is left, or if
  most values are subnormal; - matrices that were initialised small: their RMS or largest value is closer to a power of
  ten than by chance.

A last layer that a few steps moved from zero is a note: its rows point in few directions, unlike random initial ones.

An optimizer in the file whose moments fit the parameters gives more evidence: whether a gradient ever arrived, whether
the momentum is parallel to the weight (then only decay moves it), and what `weight_decay`, `lr` and the number of steps
predict. The message says whether they agree.

- A matrix without a gradient that is predicted to shrink to less than half is a note, even if its size is not unusual
  yet. It is a warning if less than a tenth is predicted, and no more than that is left. - A tiny matrix that got
  gradients, and whose size decay does not explain, started small: a note. - Without moments (plain SGD) or an
  optimizer, a tiny matrix is a note too if it is not called a weight or kernel (a hash grid, a gate), or if the
  optimizer had no weight decay.

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
torch/nn/init.py and torch/nn/modules/linear.py (the default start), https://arxiv.org/abs/1706.05350 (weight decay and
normalisation), https://github.com/deepinsight/insightface/issues/277 (tiny filters by themselves are not a defect)"""

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

SMALLEST = 64  # elements below which an RMS says little
OF_START = 1e-3  # share of the start's RMS below which a matrix counts as decayed
OF_HEAD = 1e-4  # the same for the last layer, which some models start at a thousandth: BEiT by its `init_scale`.

# Rows for each column from which on a matrix is a table: a classifier of 93,000 faces has 182.
ROWS = 256

# The same for embeddings and codebooks, which are looked up: some start at one over their number of rows.
OF_EMBEDDING = 1e-5
OF_KIND = 1e-2  # share of its kind's median RMS below which it does

# Share of the start's RMS below which no doubt is left: an error, even where there is nothing to compare with.
NOTHING_LEFT = 1e-6
PEAK = 50.0  # How often its RMS the largest value may be in what only shrank. A normal start of 10^9 values has 6.

# How many sampling errors the RMS of what an initialiser drew may be from the power of ten that it was given, and how
# likely that may be by chance for the matrices of one power together.
ERRORS, CHANCE = 4.0, 0.02

# The least power of ten that fewer than that many matrices are given: flows start at 1e-5, SAM as a whole at 1e-10.
LEAST_POWER, FEW = -5, 8

WIDEST = 1 << 18  # numbers of which the directions are looked at

# The mean square of a kernel's inputs that a norm's variance may speak of. Pixels of 0 … 255 have 2e4.
LARGEST_INPUT = 1e5

# A matrix whose largest value is a power of ten, down to this share of it, was drawn from within it, if that is not
# smaller than what anybody starts with.
ROUND, TINIEST = 0.999, 1e-6

BY_FAN_IN, BY_MODEL = "fan-in", "the model's initialisation"  # where the start's RMS comes from
EPS = 1e-5  # the default eps of the norms; a running variance above it carries the scale
LIGHT = 0.5  # share of the start below which a matrix is worth a look at its optimizer

# Share below which it is a warning that no gradient arrived and that the optimizer's figures predict as little.
PROVEN = 0.1


def decayed(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the matrices that decayed, with the vectors that went with them; replace them where that was asked for."""
    specs, witness = context.checkpoint.specs, Witness(context)
    large = {key: each for key, each in context.matrices.items() if specs[key].numel >= SMALLEST and each.rms > 0}
    suspects = {matrix.key: matrix for matrix in _decayed_matrices(witness, large)}
    grown = [matrix for key, matrix in suspects.items() if _started_so(matrix, specs[key])]
    light = list(_light_matrices(witness, {key: each for key, each in large.items() if key not in suspects}))
    found = {key: matrix for key, matrix in suspects.items() if matrix not in grown}
    found |= {matrix.key: matrix for matrix in light if matrix.is_proven}
    yield from _noted(rule, grown, "a tiny scale from the start, as far as the file shows")
    for keys, fix in replaced_apart(rule, context, found, lambda key, figures: found[key].is_cured_by(figures)):
        some = [found[key] for key in keys]
        worst = min(some, key=lambda matrix: matrix.share)
        yield rule.finding(
            Level.ERROR if worst.share < NOTHING_LEFT else Level.WARNING,
            f"{_have(some)} decayed to {worst.share:.1g} of the expected scale{worst.said.in_words}",
            keys=dict.fromkeys(key for matrix in some for key in (matrix.key, *matrix.companions)),
            evidence={
                "tensors": {matrix.key: matrix.evidence for matrix in some},
                "thresholds": {"of_start": OF_START, "of_kind": OF_KIND, "of_start_of_a_head": OF_HEAD},
                "optimizer": witness.strongest,
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
    """Return the subject of a message, with its verb: ``2 weight matrices have``."""
    return f"{counted(len(found), 'weight matrix')} {'has' if len(found) == 1 else 'have'}"


def _started_so(matrix: _Matrix, spec: TensorSpec) -> bool:
    """Return whether a matrix may have started as small as it is: gradients arrived and decay does not explain it. If
    no moments say whether any arrived: it is not a layer's own weight (hash grids, gates), or there was no decay."""
    said = matrix.said
    if said.saw_no_gradient is not None or said.alignment is not None:
        return not said.is_untouched and not said.agrees
    if matrix.reference == BY_MODEL or not is_layers_own(matrix.key):
        return matrix.reference == BY_FAN_IN
    return matrix.share >= NOTHING_LEFT and (said.weight_decay == 0 or _has_left_zero(matrix.key, spec))


def _has_left_zero(key: str, spec: TensorSpec) -> bool:
    """Return whether a last layer holds a few gradients and nothing else: one direction has far more of its squares
    than any has of random numbers."""
    columns = math.prod(spec.shape[1:])
    rows = min(spec.shape[0], WIDEST // columns)
    if not is_head(key) or not spec.is_contiguous or min(rows, columns) < 2:
        return False
    numbers = first_numbers(spec, rows * columns).reshape(rows, columns)
    share_of_random = (rows**0.5 + columns**0.5) ** 2 / (rows * columns)
    return bool(np.linalg.norm(numbers, 2) > share_of_random**0.25 * np.linalg.norm(numbers))


class _Matrix(Struct, frozen=True, eq=False, dict=True):
    """A matrix whose scale is suspicious. ``start`` is the RMS to expect, ``peers`` the median RMS of its kind, and
    ``least`` the share of the start that other values in its place have to have."""

    key: str
    witness: Witness
    start: float
    reference: str = BY_FAN_IN
    peers: float | None = None
    norm: Norm | None = None
    is_embedding: bool = False
    least: float = OF_START

    @cached_property
    def said(self) -> Corroboration:
        """What the file says of it."""
        return self.witness.on(self.key, self.share)

    @property
    def figures(self) -> TensorStatistics:
        return self.witness.context.statistics[self.key]

    @property
    def share(self) -> float:
        return self.figures.rms / self.start

    @property
    def is_proven(self) -> bool:
        """Whether the optimizer's figures predict that little, and no more is left."""
        return max(self.share, self.said.predicted or 1.0) < PROVEN and bool(self.said.agrees)

    def is_cured_by(self, figures: TensorStatistics) -> bool:
        """Return whether other values would be large enough."""
        return not figures.nonfinite and figures.rms >= max(self.least * self.start, OF_KIND * (self.peers or 0.0))

    @property
    def companions(self) -> Iterator[str]:
        """The vectors that shrank with it: its bias, and the weight and bias of the norm after it."""
        statistics = self.witness.context.statistics
        bias = self.key.removesuffix("weight") + "bias"
        if bias != self.key and bias in statistics and 0 < statistics[bias].rms < OF_START * self.start:
            yield bias
        scale = self.norm.figures("weight", statistics) if self.norm else None
        if self.norm and scale and scale.rms < OF_START:
            yield from (key for key in self.norm.vectors if statistics[key].rms < OF_START)

    @property
    def evidence(self) -> dict[str, Any]:
        statistics = self.witness.context.statistics
        batches = self.norm.figures("num_batches_tracked", statistics) if self.norm else None
        return {
            "rms": self.figures.rms,
            "expected_rms": self.start,
            "expected_from": self.reference,
            "median_rms_of_kind": self.peers,
            "peak_to_rms": self.figures.absmax / self.figures.rms,
            **({"batches_seen_by_its_norm": int(batches.maximum)} if batches else {}),
            **self.said.evidence,
        }


def _decayed_matrices(witness: Witness, matrices: Mapping[str, TensorStatistics]) -> Iterator[_Matrix]:
    context = witness.context
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
        shape = specs[key].shape  # with that many rows for so few columns, it is a table, whatever its name
        is_looked_up = kind(key, specs[key]) == "embedding" or (len(shape) == 2 and shape[0] >= ROWS * shape[1])
        is_table = reference == BY_FAN_IN and is_looked_up
        matrix = _Matrix(key, witness, start, reference, peers, norms.get(key), is_table)
        if _is_decayed(matrix) and not _norm_carries_scale(matrix, specs[key], context.statistics):
            yield matrix


def _started_tiny(matrices: Mapping[str, TensorStatistics]) -> set[str]:
    """Return the matrices that were never larger: their RMS is a power of ten, as an initialiser is given it, more
    closely than chance would have it."""
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
    """Return whether the matrix is small throughout: hardly an exact zero, or only the last subnormal steps."""
    return not figures.nonfinite and (
        figures.zeros < 0.01 * figures.numel or figures.zeros + figures.subnormals == figures.numel
    )


def _is_drawn_tiny(figures: TensorStatistics) -> bool:
    """Return whether the largest value is a power of ten: hash tables of radiance fields start within 1e-4 of zero."""
    power = 10.0 ** round(math.log10(figures.absmax))
    is_round = power >= TINIEST and ROUND * power < figures.absmax <= power * (1 + 1e-6)
    return is_round and figures.absmax < 2 * figures.rms


def _is_decayed(matrix: _Matrix) -> bool:
    """Return whether both thresholds are crossed. A start of zero, or as small as this, is by design."""
    may_start_small = matrix.reference == BY_FAN_IN and is_head(matrix.key)
    least = OF_HEAD if may_start_small else OF_EMBEDDING if matrix.is_embedding else OF_START
    if matrix.start == 0 or matrix.share >= least:
        return False
    if matrix.share < NOTHING_LEFT:
        return matrix.peers is None or matrix.figures.rms < OF_KIND * matrix.peers
    if matrix.peers is None or (matrix.reference == BY_FAN_IN and is_zero_by_design(matrix.key)):
        return False  # nothing to compare with, or a matrix that may have hardly left zero
    lives_on = (
        matrix.figures.absmax >= PEAK * matrix.figures.rms and 2 * matrix.figures.subnormals < matrix.figures.numel
    )
    return matrix.figures.rms < OF_KIND * matrix.peers and not lives_on


def _norm_carries_scale(matrix: _Matrix, spec: TensorSpec, statistics: StatisticsByKey) -> bool:
    """Return whether the norm after the matrix was updated and divides by the matrix's result, not just by its eps."""
    variance = matrix.norm.figures("running_var", statistics) if matrix.norm else None
    batches = matrix.norm.figures("num_batches_tracked", statistics) if matrix.norm else None
    if variance is None or (batches is not None and batches.maximum == 0):
        return False
    fresh = variance.minimum == variance.maximum == 1.0
    # The matrix may have shrunk since, or be another: such statistics are not of what it gives. By Cauchy and Schwarz,
    # the mean of the outputs' squares is at most the sum of a row's squares times that of the inputs'.
    fan_in = math.prod(spec.shape[1:])
    is_its_own = variance.mean < LARGEST_INPUT * (matrix.figures.rms * fan_in) ** 2
    return not fresh and variance.rms > EPS and is_its_own


PARALLEL = 0.99  # cosine from which on a momentum is parallel to its weight
AGREES = (0.5, 2.0)  # between these the logarithms of two shares are of one order


class Corroboration(Struct, frozen=True):
    """What is known of one matrix. None, or an empty text, is what the file does not say.

    ``predicted`` is the share of the start that is left without any gradient, ``observed`` the one that was found."""

    observed: float
    predicted: float | None = None
    saw_no_gradient: bool | None = None
    alignment: float | None = None
    terms: str = ""
    weight_decay: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether prediction and finding are of one order; None without a prediction."""
        if self.predicted is None:
            return None
        if self.predicted <= 0 or self.observed <= 0:
            return self.observed < 1e-6
        ratio = math.log(self.predicted) / min(math.log(self.observed), -1e-9)
        return AGREES[0] <= ratio <= AGREES[1]

    @property
    def is_untouched(self) -> bool:
        """Whether the moments say that only decay moved the matrix."""
        return bool(self.saw_no_gradient) or (self.alignment is not None and self.alignment > PARALLEL)

    @property
    def evidence(self) -> dict[str, Any]:
        """The figures, without those that the file does not have."""
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


class Witness(Struct, frozen=True, dict=True):
    """The optimizer and the counters of a file."""

    context: Context

    @cached_property
    def strongest(self) -> dict[str, float] | None:
        """The hyperparameters of the group with the most decay, if there is an optimizer."""
        return strongest_decay(self.context.checkpoint.root)

    @cached_property
    def trainings(self) -> Mapping[str, Training]:
        """What an optimizer whose moments fit the parameters says of each."""
        if self.strongest is None:
            return {}  # no optimizer knows any parameter, and there may be very many
        return trainings(self.context.checkpoint, self.context.target)

    @cached_property
    def _steps(self) -> int | None:
        """The steps of the whole run: what the trainer counted, else the most batches that a norm saw."""
        statistics = self.context.statistics
        counters = [key for key in statistics if key.rpartition(".")[2] == NUM_BATCHES_TRACKED]
        batches = max((int(statistics[key].maximum) for key in counters if statistics[key].numel == 1), default=0)
        return counted_steps(self.context.checkpoint.root) or batches or None

    def on(self, key: str, share: float) -> Corroboration:
        """Return what the file says of a matrix of which this share of its start is left."""
        training = self.trainings.get(key)
        if training is None:
            decay = (self.strongest or {}).get("weight_decay")
            return Corroboration(share, terms=f"weight_decay {decay:g}" if decay else "", weight_decay=decay)
        steps = training.steps or self._steps
        momentum = training.momentum
        cosine = None if momentum is None else alignment(self.context.checkpoint.specs[key], momentum)
        rms, saw_none = self.context.statistics[key].rms, training.saw_no_gradient
        if saw_none is False:
            saw_none = training.saw_decay_only(rms, rms / share)
        terms = f"weight_decay {training.weight_decay:g} at lr {training.initial_lr or training.lr:g}"
        terms += f" over {steps} steps" if steps else ""
        return Corroboration(
            share,
            predicted=training.predicted_share(steps),
            saw_no_gradient=saw_none,
            alignment=cosine,
            terms=terms,
            weight_decay=training.weight_decay,
        )


def _light_matrices(witness: Witness, matrices: Mapping[str, TensorStatistics]) -> Iterator[_Matrix]:
    """Yield those of which the optimizer says that only decay moved them, and that are no larger than that."""
    specs = witness.context.checkpoint.specs
    for key, figures in matrices.items() if witness.trainings else ():
        matrix = _Matrix(key, witness, usual_rms(specs[key]), least=PROVEN)
        is_small = matrix.share < LIGHT and not figures.nonfinite
        if is_small and matrix.said.is_untouched and (matrix.said.predicted or 1.0) < LIGHT:
            yield matrix
