"""What the rest of the file says about a matrix that looks as if it had decayed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptfix.core.buffers import NUM_BATCHES_TRACKED
from ckptfix.rules.rule import Context
from ckptfix.values.optimizer import Training, alignment, counted_steps, strongest_decay, trainings

PARALLEL = 0.99
"""Cosine from which on a momentum is parallel to its weight."""

AGREES = (0.5, 2.0)
"""Between these the logarithms of two shares are of one order."""


@dataclass(frozen=True)
class Corroboration:
    """What is known of one matrix. None, or an empty text, is what the file does not say.

    ``predicted`` is the share of the start that is left without any gradient, ``observed`` the one that was found.
    """

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
        """Whether the moments say that decay alone moved the matrix."""
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
            parts.append("decay alone moved it, as its momentum is parallel to it")
        if self.predicted is not None:
            verdict = "which agrees" if self.agrees else "which does not agree"
            parts.append(f"{self.terms} predicts {self.predicted:.1g} of the start, {verdict}")
        else:
            parts.append(f"the optimizer in this file had {self.terms}")
        return "; " + "; ".join(parts)


@dataclass(frozen=True)
class Witness:
    """The optimizer and the counters of a file."""

    context: Context

    @property
    def knows_parameters(self) -> bool:
        """Whether the file has an optimizer whose moments fit the parameters."""
        return bool(self._trainings)

    @cached_property
    def _trainings(self) -> Mapping[str, Training]:
        if strongest_decay(self.context.checkpoint.root) is None:
            return {}  # no optimizer knows any parameter, and there may be very many
        return trainings(self.context.checkpoint, self.context.target)

    @cached_property
    def _steps(self) -> int | None:
        """The steps of the whole run: what the trainer counted, else the most batches that a norm saw."""
        statistics = self.context.statistics
        if statistics is None:
            return counted_steps(self.context.checkpoint.root)
        counters = [key for key in statistics if key.rpartition(".")[2] == NUM_BATCHES_TRACKED]
        batches = max((int(statistics[key].maximum) for key in counters if statistics[key].numel == 1), default=0)
        return counted_steps(self.context.checkpoint.root) or batches or None

    def on(self, key: str, share: float) -> Corroboration:
        """What the file says of a matrix of which this share of its start is left."""
        training = self._trainings.get(key)
        if training is None:
            group = strongest_decay(self.context.checkpoint.root) or {}
            decay = group.get("weight_decay")
            return Corroboration(share, terms=f"weight_decay {decay:g}" if decay else "", weight_decay=decay)
        steps = training.steps or self._steps
        momentum = training.momentum
        cosine = None if momentum is None else alignment(self.context.checkpoint.specs[key], momentum)
        terms = f"weight_decay {training.weight_decay:g} at lr {training.initial_lr or training.lr:g}"
        terms += f" over {steps} steps" if steps else ""
        return Corroboration(
            share,
            predicted=training.predicted_share(steps),
            saw_no_gradient=training.saw_no_gradient,
            alignment=cosine,
            terms=terms,
            weight_decay=training.weight_decay,
        )
