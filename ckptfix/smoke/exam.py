"""The work of the child: build the model, load the file strictly, run a forward pass, look at what comes out.

Everything here may be called in-process too; what needs a process of its own is that the user's code may crash or hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptfix.core.smoke_result import Comparison
from ckptfix.errors import UnreadableError
from ckptfix.smoke.control import Control, Guess, compare_non_finite, contrast, has_sound_weights, redraw
from ckptfix.smoke.derive import derive_inputs
from ckptfix.smoke.device import choose_device
from ckptfix.smoke.diagnosis import diagnose, holds_for_any_input, is_sticky
from ckptfix.smoke.forward import Pass, Setting, Subject
from ckptfix.smoke.inputs import ScaleCheck, parse_inputs
from ckptfix.smoke.outcome import AFTERTHOUGHTS, ENVIRONMENT, MODEL, Outcome
from ckptfix.smoke.proof import load_strictly
from ckptfix.smoke.reference import Reference, compare_with_cpu, compare_with_reference
from ckptfix.smoke.retries import attempt
from ckptfix.smoke.training import train

NO_GUESS = "no input could be derived from the model's layers"
NO_FIT = "no derived input suits the model"
_NOT_RUN = "the model did not run"

Tried = list[tuple[Guess, Pass]]


@dataclass(frozen=True)
class Job:
    """What is to be examined: the file, the factory that builds its model, and how to run it."""

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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """The job that ``dataclasses.asdict`` made plain."""
        reference = None if data["reference"] is None else Reference(**data["reference"])
        return cls(**{**data, "inputs": tuple(data["inputs"]), "reference": reference})


class Progress:
    """How far the test is: told to the caller as it goes, and kept for whoever asks after an error.

    ``stage`` is what is running, ``so_far`` the outcome up to there.
    """

    def __init__(self, tell: Callable[[str, Outcome], None]) -> None:
        self.stage = "start"
        self.so_far = Outcome()
        self._tell = tell

    def enter(self, stage: str) -> None:
        """Say that this stage begins."""
        self.stage = stage
        self._tell(stage, self.so_far)


def examine(job: Job, tell: Callable[[str, Outcome], None] = lambda stage, so_far: None) -> Outcome:
    """Run the whole test; an error of the user's code is part of the outcome and never raised."""
    progress = Progress(tell)
    try:
        return _examine(job, progress)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything, and that is the finding
        if progress.stage in AFTERTHOUGHTS:  # what the control does says nothing of the checkpoint
            return progress.so_far
        failure = diagnose(progress.stage, error)
        if progress.stage == "training":
            return replace(progress.so_far, training=Outcome(device=progress.so_far.device, failure=failure))
        return replace(progress.so_far, failure=failure)


def _examine(job: Job, progress: Progress) -> Outcome:
    import torch

    subject = _load(job, progress)
    control = Control(job.factory, job.factory_args, subject)
    progress.enter("input")
    guesses = [parse_inputs(job.inputs)] if job.inputs else derive_inputs(subject.model)
    with torch.no_grad():
        tried = _try_in_turn(subject, guesses, progress)
        run = _settling(tried) or redraw(subject, tried, progress.so_far)
        if run is not None and run.outcome.derived and run.outcome.non_finite:
            run = redraw(subject, tried[-1:], progress.so_far) or run
        if run is None:
            return _without_verdict(tried, subject, control, progress)
        ran = run if job.reference is None else run.detached()
        progress.so_far = recheck_in_float32(run, subject)
        _look_further(run, subject, job, progress)
        if _may_be_innocent(progress.so_far):
            progress.so_far = _after_control(run, subject, control, progress)
        if job.reference is not None and progress.so_far.failure is None:
            _compare(job, job.reference, ran, subject, progress)
        return progress.so_far


def _load(job: Job, progress: Progress) -> Subject:
    """The model with the values of the file, on its device, in eval mode."""
    from ckptfix.modules.factory import build_module

    progress.so_far = Outcome(device="" if job.device == "auto" else job.device, derived=not job.inputs)
    progress.enter("device")
    device, notes = choose_device(job.device)
    compared = None if job.reference is None else Comparison(job.reference.label, unlike=_NOT_RUN)
    progress.so_far = Outcome(device=str(device), notes=notes, derived=not job.inputs, compared=compared)
    progress.enter("build")
    model = build_module(job.factory, job.factory_args, job.seed)
    progress.enter("read")
    state_dict = read_state_dict(job.file, job.weights)
    progress.enter("load")
    load_strictly(model, state_dict)
    del state_dict
    progress.enter("move")
    subject, notes = Setting(device, job.seed).prepare(model)
    progress.so_far = replace(progress.so_far, notes=progress.so_far.notes + notes)
    return subject


def read_state_dict(file: str, weights: str | None = None) -> Mapping[str, Any]:
    """The state_dict of the file. A torch file must also be one that ``torch.load(weights_only=True)`` takes.

    Raises ``UnreadableError`` otherwise.
    """
    import pickle

    import torch

    from ckptfix.reading.opening import open_file
    from ckptfix.reading.torch_files import torch_legacy, torch_zip

    checkpoint = open_file(file, weights)
    if checkpoint.format in (torch_zip.NAME, torch_legacy.NAME):
        # mapped, it takes no second copy in memory; the legacy format cannot be
        try:
            torch.load(file, map_location="cpu", weights_only=True, mmap=checkpoint.format == torch_zip.NAME)
        except pickle.UnpicklingError as error:
            raise UnreadableError(f"torch.load(weights_only=True) refuses the file: {_refusal(error)}") from error
    return checkpoint.state_dict()


def _refusal(error: Exception) -> str:
    """The cause out of torch's message, whose first lines advise to turn its safety off."""
    cause = str(error).rpartition("WeightsUnpickler error: ")[2]
    return cause.strip().partition("\n")[0].partition(" was not an allowed global")[0]


def _try_in_turn(subject: Subject, guesses: list[Guess], progress: Progress) -> Tried:
    """These inputs, up to the first that the model takes or that shows that no other can help."""
    tried: Tried = []
    for guess in guesses:
        progress.enter("input")
        arguments = subject.arguments(guess)
        given = next(iter((*arguments.args, *arguments.kwargs.values())), None)
        progress.enter("forward")
        with ScaleCheck(subject.model, None if progress.so_far.derived else given) as check:
            run = attempt(subject, arguments, progress.so_far)
        if check.warning:
            run = replace(run, outcome=replace(run.outcome, warnings=(*run.outcome.warnings, check.warning)))
        tried.append((guess, run))
        failure = run.outcome.failure
        if failure is None or is_sticky(failure.error):
            break
        if holds_for_any_input(failure) and failure.blame != ENVIRONMENT:
            break  # a smaller guess may still find the memory, or an operator that exists
    return tried


def _settling(tried: Tried) -> Pass | None:
    """The pass that counts: the model ran, or failed on the input that was given, or as it would on any input.

    None where all that failed are guesses.
    """
    if tried and (tried[-1][1].outcome.failure is None or not tried[-1][1].outcome.derived):
        return tried[-1][1]
    failures = ((run, run.outcome.failure) for _, run in tried)
    return next((run for run, failure in failures if failure is not None and holds_for_any_input(failure)), None)


def recheck_in_float32(run: Pass, subject: Subject) -> Outcome:
    """The outcome, and where it is not finite in a narrow dtype, what the same pass gives in float32."""
    import torch

    if not run.outcome.non_finite or subject.dtype.itemsize >= torch.float32.itemsize:
        return run.outcome
    subject.convert(torch.float32)
    wide = attempt(subject, run.arguments.to(subject.device, torch.float32), run.outcome)
    return replace(run.outcome, finite_in_float32=wide.outcome.is_good)


def _look_further(run: Pass, subject: Subject, job: Job, progress: Progress) -> None:
    """Training mode where it was asked for, and the CPU where the model ran elsewhere."""
    failure = run.outcome.failure
    if (job.train_mode or job.backward) and (failure is None or failure.origin is not None):
        progress.enter("training")
        training = train(subject, run.arguments, job.backward, progress.so_far)
        progress.so_far = replace(progress.so_far, training=training)
    if run.outcome.is_good and subject.device.type != "cpu":
        progress.enter("devices")
        progress.so_far = replace(progress.so_far, devices=compare_with_cpu(subject, run, progress.so_far))


def _may_be_innocent(outcome: Outcome) -> bool:
    """Whether values that are not finite may be the model's own, or the input's: no weight shows a defect."""
    if outcome.failure is not None:
        return outcome.failure.origin is not None and outcome.failure.blame == MODEL
    return bool(outcome.non_finite) and not outcome.finite_in_float32 and has_sound_weights(outcome)


def _after_control(run: Pass, subject: Subject, control: Control, progress: Progress) -> Outcome:
    progress.enter("control")
    subject.release()
    other = control.build(run.setting)
    if other is None:
        return progress.so_far
    return compare_non_finite(other, replace(run, outcome=progress.so_far), progress.so_far)


def _compare(job: Job, reference: Reference, run: Pass, subject: Subject, progress: Progress) -> None:
    """The same pass with the weights of another file. Until that is done, the outcome says that it is not."""
    from ckptfix.modules.factory import build_module
    from ckptfix.reading.opening import open_file

    if not progress.so_far.is_good:
        seen = Comparison(reference.label, unlike="the output is not finite")
        progress.so_far = replace(progress.so_far, compared=seen)
        return
    unfinished = Comparison(reference.label, unlike="the model crashed or hung with its weights")
    progress.so_far = replace(progress.so_far, compared=unfinished)
    progress.enter("compare")
    subject.release()
    seen = compare_with_reference(
        reference,
        open_file(job.file, job.weights),
        lambda: build_module(job.factory, job.factory_args, job.seed),
        run,
        progress.so_far,
    )
    progress.so_far = replace(progress.so_far, compared=seen)


def _without_verdict(tried: Tried, subject: Subject, control: Control, progress: Progress) -> Outcome:
    """No input runs; what is left to find out is whether the model runs without the file."""
    progress.so_far = replace(progress.so_far, undecided=_undecided(tried))
    if tried:
        progress.so_far = replace(progress.so_far, notes=tried[0][1].outcome.notes)
        progress.enter("control")
        subject.release()
        other = control.build(tried[-1][1].setting)
        told = contrast(other, tried, progress.so_far) if other is not None else ""
        if told:
            progress.so_far = replace(progress.so_far, undecided=f"{progress.so_far.undecided}; {told}")
    return progress.so_far


def _undecided(tried: Tried) -> str:
    failed = tried[0][1].outcome if tried else None
    if failed is None or failed.failure is None:
        return NO_GUESS
    return f"{NO_FIT} ({' and '.join(failed.inputs)} gave {failed.failure.error}{failed.failure.place})"
