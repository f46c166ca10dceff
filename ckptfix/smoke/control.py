"""The control: the same model with its own initial weights, on the same input.

Where it fails as the loaded model does, the file is not to blame. Where it does not, that is a hint and no proof: a
trained model may reject what an untrained one swallows, random noise above all.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptfix.errors import TargetError
from ckptfix.smoke.diagnosis import holds_for_any_input
from ckptfix.smoke.forward import Pass, Setting, Subject, forward
from ckptfix.smoke.inputs import Draw, Input, RandomInput
from ckptfix.smoke.outcome import CHECKPOINT, MODEL, Outcome
from ckptfix.smoke.retries import attempt

if TYPE_CHECKING:
    from torch import nn

CONTRAST = "with its own initial weights the model runs on the same input: a trained one may reject noise"

_DRAWS: Mapping[Draw, str] = {
    "uniform": "numbers from 0 to 1",
    "ones": "ones, or the highest integers",
    "zeros": "zeros, or the lowest integers",
}
_MOST_REDRAWN = 2  # guesses that a model rejects in its own words, and not for their shape

Guess = tuple[Input, ...]
Anatomy = Mapping[str, tuple[int, ...] | None]


def redraw(subject: Subject, tried: list[tuple[Guess, Pass]], base: Outcome) -> Pass | None:
    """The first pass that is good once other numbers stand in an input of the same shape; None without one.

    Random noise is no image: its negative values make NaN in a root or a logarithm, and a detector finds nothing in it.
    """
    worth = [(guess, run) for guess, run in tried if _may_be_the_numbers(run.outcome)]
    for guess, run in worth[:_MOST_REDRAWN]:
        for draw, words in _DRAWS.items():
            if draw != "uniform" and _has_made_nan(run.outcome):
                break  # zeros would hide an overflow
            other = attempt(subject, subject.arguments(_drawn(guess, draw)), base)
            if other.outcome.is_good:
                return other.noting(f"normal random numbers {_went_wrong(run.outcome)}; {words} ran")
    return None


def _has_made_nan(outcome: Outcome) -> bool:
    return bool(outcome.non_finite) or (outcome.failure is not None and outcome.failure.origin is not None)


def _may_be_the_numbers(outcome: Outcome) -> bool:
    if outcome.failure is not None:
        return outcome.failure.blame == MODEL and not holds_for_any_input(outcome.failure)
    return bool(outcome.non_finite) and has_sound_weights(outcome)


def has_sound_weights(outcome: Outcome) -> bool:
    """Whether the module that made the first value that is not finite has weights that can be right, as far as is
    known.
    """
    return outcome.origin is None or not outcome.origin.broken


def _drawn(guess: Guess, draw: Draw) -> Iterator[Input]:
    yield from (replace(given, draw=draw) if isinstance(given, RandomInput) else given for given in guess)


def _went_wrong(outcome: Outcome) -> str:
    return f"failed ({outcome.failure.error})" if outcome.failure is not None else "gave values that are not finite"


class Control:
    """A second model of the factory. It is built when first asked for, once the first is gone: two large models need
    not be in memory at once.
    """

    def __init__(self, factory: str, factory_args: Any, first: Subject) -> None:
        self._factory = factory, factory_args
        self._first = weakref.ref(first.model)
        self._anatomy = _anatomy(first.model)
        self._seed = first.seed

    def build(self, setting: Setting) -> Subject | None:
        """The control, to run as the first model did; None where the factory gives the first model again, or one of
        other shapes (lazy layers take any input), or does not run twice: then nothing can be compared.
        """
        from ckptfix.modules.factory import build_module

        gc.collect()
        try:
            model = build_module(*self._factory, self._seed)
        except TargetError:
            return None
        if model is self._first() or _anatomy(model) != self._anatomy:
            return None
        subject, _ = setting.prepare(model)
        return subject


def contrast(control: Subject, tried: list[tuple[Guess, Pass]], base: Outcome) -> str:
    """What to add to a test without a verdict: that the control takes an input on which the loaded model failed."""
    runs = any(forward(control, control.arguments(guess), base).outcome.failure is None for guess, _ in tried)
    return CONTRAST if runs else ""


def compare_non_finite(control: Subject, run: Pass, base: Outcome) -> Outcome:
    """The outcome of a pass that made values that are not finite, after the control has run on the same input.

    Where the control makes none, the file is at fault after all. -Inf alone, in both, is the model's own way to say
    "never", and no defect.
    """
    other, ours, failure = forward(control, run.arguments, base).outcome, run.outcome, run.outcome.failure
    if failure is not None:  # the model raised at what it had made
        return replace(ours, failure=replace(failure, blame=CHECKPOINT)) if other.is_good else ours
    if not other.non_finite:
        return ours
    if not (ours.is_masked and other.is_masked):
        return replace(ours, shared=True)
    note = "-Inf in the output is the model's own: with its initial weights it gives it too"
    training = ours.training
    if training is not None and training.is_masked:
        training = replace(training, non_finite=(), origin=None)
    return replace(ours, non_finite=(), origin=None, notes=(*ours.notes, note), training=training)


def _anatomy(model: nn.Module) -> Anatomy:
    """The shapes of the model's tensors; a lazy one has none yet."""
    from torch.nn.parameter import is_lazy

    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors}
