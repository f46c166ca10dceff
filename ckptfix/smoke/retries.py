"""A forward pass with second tries, for failures that say nothing of the checkpoint: memory, cuDNN, a dtype.

Each second try that helps leaves a note; where none does, the first failure stands.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.smoke.device import reduced_dtype
from ckptfix.smoke.diagnosis import is_cudnn_failure, is_dtype_mismatch, is_out_of_memory
from ckptfix.smoke.forward import Pass, Subject, forward
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import MODEL, Outcome
from ckptfix.smoke.outputs import dtype_name

if TYPE_CHECKING:
    import torch


def attempt(subject: Subject, arguments: Arguments, base: Outcome) -> Pass:
    """The forward pass, tried again where another way to run it may help."""
    run = forward(subject, arguments, base)
    if is_cudnn_failure(run.outcome.failure):
        run = _without_cudnn(subject, run, base)
    if is_dtype_mismatch(run.outcome.failure):
        run = _in_one_dtype(subject, run, base)
    if is_out_of_memory(run.outcome.failure):
        run = _with_less(subject, run, base)
    return run


def _without_cudnn(subject: Subject, failed: Pass, base: Outcome) -> Pass:
    import torch

    with torch.backends.cudnn.flags(enabled=False):
        run = forward(subject, failed.arguments, base)
    if is_cudnn_failure(run.outcome.failure):
        return failed.noting("it failed with cuDNN turned off too")
    return run.noting(f"cuDNN failed ({_error(failed)}), so it was turned off")


def _in_one_dtype(subject: Subject, failed: Pass, base: Outcome) -> Pass:
    """The whole model in the widest dtype that it holds, at least float32; that changes no value."""
    import torch

    held = {parameter.dtype for parameter in subject.model.parameters() if parameter.is_floating_point()}
    widest = torch.float64 if torch.float64 in held else torch.float32
    if held <= {widest}:
        return _blaming_the_code(failed, widest)
    subject.convert(widest)
    run = forward(subject, failed.arguments.to(subject.device, widest), base)
    if is_dtype_mismatch(run.outcome.failure):
        return run
    mixed = ", ".join(sorted(map(dtype_name, held)))
    return run.noting(
        f"the model's {mixed} parameters met another dtype, so all were converted to {dtype_name(widest)}"
    )


def _blaming_the_code(failed: Pass, dtype: torch.dtype) -> Pass:
    """Parameters and inputs are of one dtype, so the model's own code makes the other; integers may be the input's."""
    given = (*failed.arguments.args, *failed.arguments.kwargs.values())
    failure = failed.outcome.failure
    if failure is None or not all(tensor.is_floating_point() for tensor in given):
        return failed
    accused = replace(failed.outcome, failure=replace(failure, blame=MODEL))
    note = f"parameters and input are all {dtype_name(dtype)}: the other dtype comes from the model's code"
    return replace(failed, outcome=accused).noting(note)


def _with_less(subject: Subject, failed: Pass, base: Outcome) -> Pass:
    """The batch halved down to 1, then the whole model in reduced precision."""
    full = size = failed.arguments.batch
    run = failed
    while size > 1 and is_out_of_memory(run.outcome.failure):
        size //= 2
        _free(subject)
        run = forward(subject, failed.arguments.first(size), base)
    if not is_out_of_memory(run.outcome.failure):
        return run.noting(f"a batch of {full} did not fit into memory, so it was cut to {size}")
    before, reduced = subject.dtype, reduced_dtype(subject.dtype, subject.device)
    if reduced is not None:
        _free(subject)
        subject.convert(reduced)
        run = forward(subject, failed.arguments.first(1).to(subject.device, reduced), base)
        if run.outcome.failure is None:
            return run.noting(
                f"a batch of {full} did not fit into memory, so it was cut to 1 and {dtype_name(before)} reduced to"
                f" {dtype_name(reduced)}"
            )
    tried = f"a batch of 1 in {dtype_name(subject.dtype)} did not fit into memory either"
    return failed.noting(tried) if is_out_of_memory(run.outcome.failure) else failed


def _free(subject: Subject) -> None:
    import torch

    gc.collect()
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()


def _error(failed: Pass) -> str:
    return failed.outcome.failure.error if failed.outcome.failure is not None else ""
