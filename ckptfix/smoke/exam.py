"""The work of the child: builds the model, loads the file strictly, runs a forward pass, and examines the output.

It runs in a process of its own only because the user's code may crash or hang; it can be called in-process too."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.lazy import nn, torch
from ckptfix.core.smoke_result import Comparison
from ckptfix.errors import TargetError, UnreadableError
from ckptfix.modules.factory import build_module
from ckptfix.reading.opening import open_file
from ckptfix.smoke.derive import Guess, derive_inputs
from ckptfix.smoke.forward import (
    LoadedModel,
    Pass,
    Setting,
    attempt,
    choose_device,
    forward,
    load_strictly,
    synchronize,
)
from ckptfix.smoke.inputs import Arguments, Draw, RandomInput, parse_inputs, scale_check
from ckptfix.smoke.outcome import (
    CHECKPOINT,
    ENVIRONMENT,
    LATER_STAGES,
    MODEL,
    ExamOutcome,
    Gradients,
    diagnose,
    figures_of,
    holds_for_any_input,
    is_sticky,
    user_line,
    values_of,
)
from ckptfix.smoke.reference import Reference, compare_with_cpu, compare_with_reference

NO_GUESS = "no input could be derived from the model's layers"
NO_FIT = "no derived input works for the model"
_NOT_RUN = "the model did not run"

Tried = list[tuple[Guess, Pass]]
Anatomy = Mapping[str, tuple[int, ...] | None]


class Exam(Struct, frozen=True):
    """What to examine: the file, the factory that builds its model, and how to run it."""

    file: str
    factory: str
    factory_args: Any = ()
    weights: str | None = None
    inputs: tuple[str, ...] = ()
    device: str = "auto"
    seed: int = 0
    train_mode: bool = False
    backward: bool = False
    reference: Reference | None = None


def examine(job: Exam, tell: Callable[[str, ExamOutcome], None] = lambda stage, so_far: None) -> ExamOutcome:
    """Run the whole test. ``tell`` gets each stage as it begins, with the outcome so far. Never raises an error of the
    user's code, which is part of the outcome."""
    examination = _Examination(job, tell)
    try:
        examination.run()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything, and that is the finding
        examination.fail(error)
    return examination.so_far


class _Examination:
    """One run of the test, with its current ``stage`` and the outcome ``so_far``."""

    subject: LoadedModel
    _anatomy: Anatomy

    def __init__(self, job: Exam, tell: Callable[[str, ExamOutcome], None]) -> None:
        self.job, self._tell, self.stage = job, tell, "start"
        self.so_far = ExamOutcome(device="" if job.device == "auto" else job.device, derived=not job.inputs)

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self._tell(stage, self.so_far)

    def _learn(self, **facts: Any) -> None:
        self.so_far = replace(self.so_far, **facts)

    def fail(self, error: BaseException) -> None:
        """Add an error to the outcome."""
        if self.stage in LATER_STAGES:  # these say nothing about the checkpoint
            return
        failure = diagnose(self.stage, error)
        if self.stage == "training":
            self._learn(training=ExamOutcome(device=self.so_far.device, failure=failure))
        else:
            self._learn(failure=failure)

    def run(self) -> None:
        job, subject = self.job, self._load()
        self._enter("input")
        guesses = [parse_inputs(job.inputs)] if job.inputs else derive_inputs(subject.model)
        with torch.no_grad():
            tried = self._try_in_turn(guesses)
            run = _deciding(tried) or redraw(subject, tried, self.so_far)
            if run is not None and run.outcome.derived and run.outcome.non_finite:
                run = redraw(subject, tried[-1:], self.so_far) or run
            if run is None:
                self._end_without_verdict(tried)
                return
            ran = run if job.reference is None else run.detached()
            self.so_far = recheck_in_float32(run, subject)
            self._look_further(run)
            if _may_be_innocent(self.so_far) and (other := self._control(run.setting)) is not None:
                self.so_far = compare_non_finite(other, replace(run, outcome=self.so_far), self.so_far)
            if job.reference is not None and self.so_far.failure is None:
                self._compare(job.reference, ran)

    def _load(self) -> LoadedModel:
        """Return the model loaded from the file, on its device, in eval mode."""
        job = self.job
        self._enter("device")
        device, notes = choose_device(job.device)
        compared = None if job.reference is None else Comparison(job.reference.label, unlike=_NOT_RUN)
        self._learn(device=str(device), notes=notes, compared=compared)
        self._enter("build")
        model = self._build()
        self._enter("read")
        state_dict = read_state_dict(job.file, job.weights)
        self._enter("load")
        load_strictly(model, state_dict)
        del state_dict
        self._enter("move")
        self.subject, more = Setting(device, job.seed).prepare(model)
        self._learn(notes=notes + more)
        self._anatomy = _anatomy(model)
        return self.subject

    def _build(self) -> nn.Module:
        return build_module(self.job.factory, self.job.factory_args, self.job.seed)

    def _try_in_turn(self, guesses: list[Guess]) -> Tried:
        """Try these inputs until one runs, or fails in a way that another input cannot help."""
        tried: Tried = []
        for guess in guesses:
            self._enter("input")
            arguments = self.subject.arguments(guess)
            given = next(iter((*arguments.args, *arguments.kwargs.values())), None)
            self._enter("forward")
            with scale_check(self.subject.model, None if self.so_far.derived else given) as warned:
                run = attempt(self.subject, arguments, self.so_far)
            run = replace(run, outcome=replace(run.outcome, warnings=(*run.outcome.warnings, *warned)))
            tried.append((guess, run))
            failure = run.outcome.failure
            if failure is None or is_sticky(failure.error):
                break
            if holds_for_any_input(failure) and failure.blame != ENVIRONMENT:
                break  # for the environment, a smaller guess may still fit into memory, or find an operator
        return tried

    def _look_further(self, run: Pass) -> None:
        """Run in training mode if requested, and on the CPU if the model ran elsewhere."""
        job, failure = self.job, run.outcome.failure
        if (job.train_mode or job.backward) and (failure is None or failure.origin is not None):
            self._enter("training")
            self._learn(training=train(self.subject, run.arguments, job.backward, self.so_far))
        if run.outcome.is_good and self.subject.device.type != "cpu":
            self._enter("devices")
            self._learn(devices=compare_with_cpu(self.subject, run, self.so_far))

    def _control(self, setting: Setting) -> LoadedModel | None:
        """Return a second model with its initial weights, set up like the first, which is dropped to save memory.

        None if there is nothing to compare with: the factory fails the second time, or returns the first model again,
        or one with other shapes, such as lazy ones."""
        self._enter("control")
        first = weakref.ref(self.subject.model)
        self.subject.release()
        gc.collect()
        try:
            second = self._build()
        except TargetError:
            return None
        return None if second is first() or _anatomy(second) != self._anatomy else setting.prepare(second)[0]

    def _compare(self, reference: Reference, run: Pass) -> None:
        """Run the same pass with the weights of another file. Until it is done, the outcome says that it crashed."""
        if not self.so_far.is_good:
            self._learn(compared=Comparison(reference.label, unlike="the output is not finite"))
            return
        self._learn(compared=Comparison(reference.label, unlike="the model crashed or hung with its weights"))
        self._enter("compare")
        self.subject.release()
        tested = open_file(self.job.file, self.job.weights)
        self._learn(compared=compare_with_reference(reference, tested, self._build, run, self.so_far))

    def _end_without_verdict(self, tried: Tried) -> None:
        """Record that no input runs, and whether the model would run with its initial weights."""
        failed = tried[0][1].outcome if tried else self.so_far
        undecided = NO_GUESS
        if failed.failure is not None:
            undecided = f"{NO_FIT} ({' and '.join(failed.inputs)} gave {failed.failure.error}{failed.failure.place})"
        self._learn(undecided=undecided, notes=failed.notes)
        if tried and (other := self._control(tried[-1][1].setting)) is not None:
            passes = (forward(other, other.arguments(guess), self.so_far) for guess, _ in tried)
            if any(run.outcome.failure is None for run in passes):
                self._learn(undecided=f"{undecided}; {CONTRAST}")


def read_state_dict(file: str, weights: str | None = None) -> Mapping[str, Any]:
    """Return the state_dict of the file. Raises ``UnreadableError`` for a torch file that
    ``torch.load(weights_only=True)`` refuses."""
    import pickle

    from ckptfix.reading.torch_files import torch_legacy, torch_zip
    from ckptfix.reading.weights.quantized_modules import is_low_bit_moment

    checkpoint = open_file(file, weights)
    if checkpoint.format in (torch_zip.NAME, torch_legacy.NAME):
        # mapping avoids a second copy in memory; the legacy format cannot be mapped
        try:
            torch.load(file, map_location="cpu", weights_only=True, mmap=checkpoint.format == torch_zip.NAME)
        except pickle.UnpicklingError as error:
            # Only the cause from torch's message, whose first lines advise to disable weights_only.
            cause = str(error).rpartition("WeightsUnpickler error: ")[2]
            refusal = cause.strip().partition("\n")[0].partition(" was not an allowed global")[0]
            # torch accepts these after torchao is imported, as OPT102 says.
            if not is_low_bit_moment(refusal.rpartition("GLOBAL ")[2]):
                raise UnreadableError(f"torch.load(weights_only=True) refuses the file: {refusal}") from error
    return checkpoint.state_dict()


def _deciding(tried: Tried) -> Pass | None:
    """Return the pass that decides: the model ran, or failed on the user's input, or in a way that holds for any input.

    None if only guesses failed."""
    if tried and (tried[-1][1].outcome.failure is None or not tried[-1][1].outcome.derived):
        return tried[-1][1]
    failures = ((run, run.outcome.failure) for _, run in tried)
    return next((run for run, failure in failures if failure is not None and holds_for_any_input(failure)), None)


def recheck_in_float32(run: Pass, subject: LoadedModel) -> ExamOutcome:
    """Return the outcome; if it is not finite in a narrow dtype, with whether the same pass in float32 is."""
    if not run.outcome.non_finite or subject.dtype.itemsize >= torch.float32.itemsize:
        return run.outcome
    subject.convert(torch.float32)
    wide = attempt(subject, run.arguments.to(subject.device, torch.float32), run.outcome)
    return replace(run.outcome, finite_in_float32=wide.outcome.is_good)


def _may_be_innocent(outcome: ExamOutcome) -> bool:
    """Return whether non-finite values may come from the model or the input, as no weight shows a defect."""
    if outcome.failure is not None:
        return outcome.failure.origin is not None and outcome.failure.blame == MODEL
    return bool(outcome.non_finite) and not outcome.finite_in_float32 and has_sound_weights(outcome)


CONTRAST = "the model runs on this input with its own initial weights: trained weights may reject noise"

_DRAWS: Mapping[Draw, str] = {
    "uniform": "numbers from 0 to 1",
    "ones": "ones, or the highest integers",
    "zeros": "zeros, or the lowest integers",
}
_MOST_REDRAWN = 2  # rejected guesses that are tried with other numbers


def redraw(subject: LoadedModel, tried: Tried, base: ExamOutcome) -> Pass | None:
    """Return the first good pass with other numbers in an input of the same shape; None without one.

    Normal random numbers are not an image: negative ones make NaN in a root or logarithm, and a detector finds nothing.
    """
    worth = [(guess, run) for guess, run in tried if _may_be_the_numbers(run.outcome)]
    for guess, run in worth[:_MOST_REDRAWN]:
        failure = run.outcome.failure
        for draw, words in _DRAWS.items():
            if draw != "uniform" and (failure is None or failure.origin is not None):
                break  # the pass has made a NaN, and zeros would hide an overflow
            drawn = (replace(given, draw=draw) if isinstance(given, RandomInput) else given for given in guess)
            other = attempt(subject, subject.arguments(drawn), base)
            if other.outcome.is_good:
                wrong = "gave non-finite values" if failure is None else f"failed ({failure.error})"
                return other.noting(f"normal random numbers {wrong}; {words} worked")
    return None


def _may_be_the_numbers(outcome: ExamOutcome) -> bool:
    if outcome.failure is not None:
        return outcome.failure.blame == MODEL and not holds_for_any_input(outcome.failure)
    return bool(outcome.non_finite) and has_sound_weights(outcome)


def has_sound_weights(outcome: ExamOutcome) -> bool:
    """Return whether the first module that made a non-finite value has no broken weights."""
    return outcome.origin is None or not outcome.origin.broken


def compare_non_finite(control: LoadedModel, run: Pass, base: ExamOutcome) -> ExamOutcome:
    """Return the outcome of a pass with non-finite values, after the control has run on the same input.

    If the control makes none, the file is at fault after all. If both make only -Inf, that is the model's own masking
    and no defect."""
    other, ours, failure = forward(control, run.arguments, base).outcome, run.outcome, run.outcome.failure
    if failure is not None:  # the model raised because of such values
        return replace(ours, failure=replace(failure, blame=CHECKPOINT)) if other.is_good else ours
    if not other.non_finite:
        return ours
    if not (ours.is_masked and other.is_masked):
        return replace(ours, shared=True)
    note = "the -Inf in the output comes from the model: its initial weights give it too"
    training = ours.training
    if training is not None and training.is_masked:
        training = replace(training, non_finite=(), origin=None)
    return replace(ours, non_finite=(), origin=None, notes=(*ours.notes, note), training=training)


def _anatomy(model: nn.Module) -> Anatomy:
    """Return the shapes of the model's tensors, None for lazy ones."""
    from torch.nn.parameter import is_lazy

    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors}


_DOUBLED = "the batch of 1 was doubled, because BatchNorm cannot train on one value per channel"
_NOT_FINITE = re.compile(r"Function '(\w+)' returned nan values")


def train(subject: LoadedModel, arguments: Arguments, backward: bool, base: ExamOutcome) -> ExamOutcome:
    """Return the outcome of a pass in training mode, with gradients if ``backward``. Restores eval mode and buffers."""
    # The check in float32 may have converted the model since the pass in eval mode.
    arguments = replace(arguments, notes=(), warnings=()).to(subject.device, subject.dtype)
    base = ExamOutcome(device=base.device, derived=base.derived)
    buffers = {name: buffer.clone() for name, buffer in subject.model.named_buffers()}
    subject.model.train()
    # Anomaly detection has to cover the forward pass too, where it records the line of each operation.
    with torch.set_grad_enabled(backward), torch.autograd.set_detect_anomaly(backward):
        run = _forward(subject, arguments, base)
        can_go_back = run.outcome.is_good or run.outcome.is_masked
        outcome = _backward(subject, run) if backward and can_go_back else run.outcome
    subject.model.eval()
    with torch.no_grad():
        for name, buffer in subject.model.named_buffers():  # restore the running statistics
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
    return outcome


def _forward(subject: LoadedModel, arguments: Arguments, base: ExamOutcome) -> Pass:
    """Run the pass with a batch of at least two, unless the model only accepts one."""
    if arguments.batch > 1:
        return attempt(subject, arguments, base)
    run = attempt(subject, arguments.doubled(), replace(base, notes=(_DOUBLED,)))
    alone = run if run.outcome.is_good else attempt(subject, arguments, base)
    return alone if alone.outcome.is_good else run


def _backward(subject: LoadedModel, run: Pass) -> ExamOutcome:
    """Run the backward pass under anomaly detection; if that stops, again without it, for the gradients of the rest."""
    operator = where = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _backward_from(run.outputs, subject)
        except Exception as error:  # noqa: BLE001  the user's own backward may raise anything
            found = _NOT_FINITE.search(str(error))
            if found is None:
                return replace(run.outcome, failure=diagnose("training", error))
            operator = found[1]
            # The detection prints the innermost call last; take the innermost one in the user's code.
            printed = "".join(str(warning.message) for warning in caught)
            where = user_line(reversed(re.findall(r'File "(.+)", line (\d+), in (\S+)', printed)))
    if operator:
        subject.model.zero_grad(set_to_none=True)
        with torch.autograd.set_detect_anomaly(False):
            _backward_from(forward(subject, run.arguments, run.outcome).outputs, subject)
    return replace(run.outcome, gradients=replace(_look(subject), operator=operator, where=where))


def _backward_from(outputs: Iterable[tuple[str, torch.Tensor]], subject: LoadedModel) -> None:
    loss = _projection((tensor for _, tensor in outputs), subject.seed)
    if loss is not None:
        torch.autograd.backward(loss)
        synchronize(subject.device)


def _projection(tensors: Iterable[torch.Tensor], seed: int) -> torch.Tensor | None:
    """Return a random projection of all finite values of the outputs to a scalar; None if none requires a gradient.

    A plain sum would not do: its gradient is zero after a softmax or a norm."""
    generator = torch.Generator().manual_seed(seed)
    real = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors)
    given = (tensor for tensor in real if tensor.requires_grad and tensor.numel())
    finite = (tensor.where(tensor.isfinite(), 0) if figures_of("", tensor).non_finite else tensor for tensor in given)
    parts = [
        (tensor * torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)).sum() / tensor.numel()
        for tensor in finite
    ]
    return torch.stack([part.float() for part in parts]).sum() if parts else None


def _look(subject: LoadedModel) -> Gradients:
    finite = frozen = 0
    non_finite, zero, missing = [], [], []
    for name, parameter in subject.model.named_parameters():
        if not parameter.requires_grad:
            frozen += 1
        elif parameter.grad is None:
            missing.append(name)
        elif figures_of(name, parameter.grad).non_finite:
            non_finite.append(name)
        elif not values_of(parameter.grad).any():
            zero.append(name)
        else:
            finite += 1
    return Gradients(finite, tuple(non_finite), tuple(zero), tuple(missing), frozen)
