"""The work of the child: build the model, load the file strictly, run a forward pass, look at what comes out.

Everything here may be called in-process too; what needs a process of its own is that the user's code may crash or hang.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptfix.errors import TargetError, UnreadableError
from ckptfix.smoke.derive import derive_inputs
from ckptfix.smoke.device import choose_device, place
from ckptfix.smoke.diagnosis import diagnose, holds_for_any_input
from ckptfix.smoke.inputs import Arguments, Input, make_arguments, parse_inputs
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, Failure, Outcome
from ckptfix.smoke.outputs import describe, figures_of, tensors_in
from ckptfix.smoke.proof import load_strictly
from ckptfix.smoke.trace import Trace

if TYPE_CHECKING:
    import torch
    from torch import nn

NO_GUESS = "no input could be derived from the model's layers"
NO_FIT = "no derived input suits the model"
CONTRAST = "with its own initial weights the model runs on the same input"

Anatomy = Mapping[str, tuple[int, ...] | None]


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
        if progress.stage == "control":  # what the control does says nothing of the checkpoint
            return progress.so_far
        return replace(progress.so_far, failure=diagnose(progress.stage, error))


def _examine(job: Job, progress: Progress) -> Outcome:
    import torch

    from ckptfix.factory import build_module

    progress.enter("device")
    device, notes = choose_device(job.device)
    progress.so_far = Outcome(device=str(device), notes=notes, derived=not job.inputs)
    progress.enter("build")
    model = build_module(job.factory, job.factory_args, job.seed)
    progress.enter("read")
    state_dict = read_state_dict(job.file, job.weights)
    progress.enter("load")
    load_strictly(model, state_dict)
    del state_dict
    progress.enter("move")
    dtype, notes = place(model, device)
    progress.so_far = replace(progress.so_far, notes=progress.so_far.notes + notes)
    model.eval()
    progress.enter("input")
    guesses = [parse_inputs(job.inputs)] if job.inputs else derive_inputs(model)
    with torch.no_grad():
        tried = try_in_turn(model, guesses, dtype, device, job.seed, progress)
        settled = settling(tried)
        if settled is not None:
            return settled
        progress.so_far = replace(progress.so_far, undecided=_undecided(tried))
        if tried:
            progress.enter("control")
            first, anatomy = weakref.ref(model), _anatomy(model)
            del model
            gc.collect()  # two large models need not be in memory at once
            control = _control(job, first, anatomy)
            if control is not None:
                return _compare(control, guesses, tried, device, job.seed, progress.so_far)
        return progress.so_far


def read_state_dict(file: str, weights: str | None = None) -> Mapping[str, Any]:
    """The state_dict of the file. A torch file must also be one that ``torch.load(weights_only=True)`` takes.

    Raises ``UnreadableError`` otherwise.
    """
    import pickle

    import torch

    from ckptfix.formats import open_file, torch_legacy, torch_zip

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


def try_in_turn(
    model: nn.Module,
    guesses: list[tuple[Input, ...]],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    progress: Progress,
) -> list[Outcome]:
    """The outcomes of these inputs, up to the first that the model takes or that shows that no other can help."""
    tried: list[Outcome] = []
    for guess in guesses:
        progress.enter("input")
        arguments = make_arguments(guess, dtype, device, seed)
        progress.enter("forward")
        outcome = _forward(model, arguments, device, seed, progress.so_far)
        tried.append(outcome)
        if outcome.failure is None:
            break
        if holds_for_any_input(outcome.failure) and outcome.failure.blame != ENVIRONMENT:
            break  # a smaller guess may still find the memory, or an operator that exists
    return tried


def settling(tried: list[Outcome]) -> Outcome | None:
    """The outcome that counts: the model ran, or failed on the input that was given, or as it would on any input.

    None where all that failed are guesses.
    """
    if tried and (tried[-1].failure is None or not tried[-1].derived):
        return tried[-1]
    return next((outcome for outcome in tried if outcome.failure and holds_for_any_input(outcome.failure)), None)


def _undecided(failed: list[Outcome]) -> str:
    if not failed or failed[0].failure is None:
        return NO_GUESS
    return f"{NO_FIT} ({' and '.join(failed[0].inputs)} gave {failed[0].failure.error}{failed[0].failure.place})"


def _control(job: Job, first: weakref.ref[nn.Module], anatomy: Anatomy) -> nn.Module | None:
    """A second model of the factory, with its own initial weights.

    None where the factory gives the first again, or one of other shapes (lazy layers take any input), or does not run
    twice: then nothing can be compared.
    """
    from ckptfix.factory import build_module

    try:
        control = build_module(job.factory, job.factory_args, job.seed)
    except TargetError:
        return None
    return control if control is not first() and _anatomy(control) == anatomy else None


def _anatomy(model: nn.Module) -> Anatomy:
    """The shapes of the model's tensors; a lazy one has none yet."""
    from torch.nn.parameter import is_lazy

    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors}


def _compare(
    control: nn.Module,
    guesses: list[tuple[Input, ...]],
    tried: list[Outcome],
    device: torch.device,
    seed: int,
    undecided: Outcome,
) -> Outcome:
    """Convicts the checkpoint where the control takes an input on which the loaded model failed."""
    dtype, _ = place(control, device)
    control.eval()
    for guess, outcome in zip(guesses, tried, strict=True):
        runs = _forward(control, make_arguments(guess, dtype, device, seed), device, seed, undecided).failure is None
        if runs and outcome.failure is not None:
            return replace(outcome, failure=replace(outcome.failure, blame=CHECKPOINT, contrast=CONTRAST))
    return undecided


def _forward(model: nn.Module, arguments: Arguments, device: torch.device, seed: int, base: Outcome) -> Outcome:
    """One forward pass, followed through the modules."""
    import torch

    given = {**{f"[{index}]": value for index, value in enumerate(arguments.args)}, **arguments.kwargs}
    # a single positional input needs no name in the report
    names = {name: "" if len(given) == 1 and not arguments.kwargs else name for name in given}
    base = replace(
        base,
        inputs=tuple(describe(names[name], tensor) for name, tensor in given.items()),
        notes=base.notes + arguments.notes,
    )
    torch.manual_seed(seed)
    started = time.perf_counter()
    with Trace(model) as trace:
        try:
            output = model(*arguments.args, **arguments.kwargs)
            _synchronize(device)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything, and that is the finding
            return replace(base, failure=_failure(error, trace))
    seconds = time.perf_counter() - started
    tensors = list(tensors_in(output))
    bad = [
        figures for figures in (figures_of(name or "output", tensor) for name, tensor in tensors) if figures.non_finite
    ]
    return replace(
        base,
        outputs=tuple(describe(name, tensor) for name, tensor in tensors),
        seconds=seconds,
        notes=base.notes if tensors else (*base.notes, "the output holds no tensor to look at"),
        non_finite=tuple(bad),
        origin=trace.origin if bad else None,
    )


def _failure(error: BaseException, trace: Trace) -> Failure:
    return diagnose("forward", error, trace.running, trace.depth, trace.origin)


def _synchronize(device: torch.device) -> None:
    """Wait for the GPU, whose errors would otherwise surface at some later and innocent line."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
