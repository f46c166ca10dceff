"""The forward test from the outside: start the child, and turn what it says, or how it dies, into a result and
findings.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.finding import Finding
from ckptfix.core.settings import Settings, SmokeSettings
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.engine.delivery import ForwardTest
from ckptfix.smoke.device import check_device_name
from ckptfix.smoke.diagnosis import blame_of_assert, is_sticky
from ckptfix.smoke.exam import Job
from ckptfix.smoke.findings import findings_of
from ckptfix.smoke.inputs import parse_inputs
from ckptfix.smoke.launch import Ending, death, launch
from ckptfix.smoke.outcome import AFTERTHOUGHTS, INPUT, Outcome
from ckptfix.smoke.reference import Reference

_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_TRUE_LINE = f"run again with {_BLOCKING}=1, so that the line is the true one"
_NOT_COMPARED = "the comparison with the CPU came to no end"
_NO_CONTRAST = "the output is not finite, nor is it with the model's own initial weights"
_NOT_AGAIN = f"the CUDA error did not come again with {_BLOCKING}=1"


def run_smoke(
    file: str,
    factory: str,
    factory_args: object,
    settings: SmokeSettings,
    weights: str | None = None,
    reference: Reference | None = None,
) -> tuple[SmokeResult, list[Finding]]:
    """Load the file strictly into the factory's model and run it once, in a process of its own; findings of the family
    RUN say what went wrong.

    ``weights`` picks one of several state_dicts in the file; ``reference`` is another checkpoint whose outputs are
    compared. Raises ``UsageError`` for settings that have no meaning; whatever the user's code does is a finding.
    """
    parse_inputs(settings.inputs)
    check_device_name(settings.device)
    job = Job(
        str(Path(file).absolute()),
        factory,
        factory_args,
        weights,
        settings.inputs,
        settings.device,
        settings.seed,
        settings.train_mode,
        settings.backward,
        reference and replace(reference, file=str(Path(reference.file).absolute())),
    )
    ending = launch(asdict(job), settings.timeout)
    if lost_the_gpu(ending) and os.environ.get(_BLOCKING) != "1":
        ending = _second(ending, launch(asdict(job), settings.timeout, {_BLOCKING: "1"}))
    return judge(ending, settings.timeout)


def lost_the_gpu(ending: Ending) -> bool:
    """Whether a kernel went wrong: CUDA then reports it at some later line, or kills the process."""
    parts = (ending.outcome, ending.outcome.training)
    if any(part is not None and part.failure is not None and is_sticky(part.failure.error) for part in parts):
        return True
    return not ending.answered and is_sticky(ending.printed)


def _second(first: Ending, second: Ending) -> Ending:
    """What counts after a second child: its answer, or the first where the error did not come again."""
    told, note = (second, _TRUE_LINE) if lost_the_gpu(second) else (first, _NOT_AGAIN)
    return replace(told, outcome=replace(told.outcome, notes=(*told.outcome.notes, note)))


def judge(ending: Ending, timeout: float) -> tuple[SmokeResult, list[Finding]]:
    """What the ending of the child comes to. An answer counts even where the process crashed on its way out.

    Once there is a verdict, a crash or a time-out of what comes after it changes nothing but what it was about.
    """
    outcome = _with_assert(_complete(ending, timeout), ending.printed)
    findings = findings_of(outcome, ending.printed)
    note = "; ".join(outcome.notes)
    reason = outcome.undecided or (_NO_CONTRAST if outcome.shared else "")
    if reason:  # in two sentences: the state of the device is not the reason
        note = ". ".join(filter(None, (reason, note[:1].upper() + note[1:])))
    result = SmokeResult(
        passed=_passed(outcome),
        device=outcome.device,
        note=note,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        seconds=outcome.seconds,
        checks=_checks(outcome),
        compared=outcome.compared,
    )
    return result, findings


def _complete(ending: Ending, timeout: float) -> Outcome:
    outcome = ending.outcome
    if ending.answered:
        return outcome
    if ending.stage in AFTERTHOUGHTS:
        unfinished = (_NOT_COMPARED,) if ending.stage == "devices" else ()
        return replace(outcome, notes=(*outcome.notes, *unfinished))
    failure = death(ending, timeout)
    if ending.stage == "training":
        return replace(outcome, training=Outcome(device=outcome.device, derived=outcome.derived, failure=failure))
    return replace(outcome, failure=failure)


def _with_assert(outcome: Outcome, printed: str) -> Outcome:
    """The outcome once it is known which assert a kernel printed. A derived input that was out of range proves
    nothing.
    """
    failure = outcome.failure
    if failure is None or not is_sticky(f"{failure.error} {printed}") or blame_of_assert(printed) != INPUT:
        return outcome
    if outcome.derived:
        return replace(
            outcome, failure=None, undecided=f"the derived input held an index out of range ({failure.error})"
        )
    return replace(outcome, failure=replace(failure, blame=INPUT))


def _passed(outcome: Outcome) -> bool | None:
    if outcome.undecided or (outcome.non_finite and outcome.shared):
        return None
    return outcome.is_good or outcome.finite_in_float32 is True


def _checks(outcome: Outcome) -> tuple[str, ...]:
    """What was looked at beyond the pass in eval mode, a line each."""
    checks = []
    if outcome.training is not None:
        said = "failed" if outcome.training.failure else "not finite" if outcome.training.non_finite else "finite"
        seconds = f", {outcome.training.seconds:.2g} s" if outcome.training.seconds else ""
        notes = f" ({'; '.join(outcome.training.notes)})" if outcome.training.notes else ""
        checks.append(f"training mode: {said}{notes}{seconds}")
        if outcome.training.gradients is not None:
            checks.append(str(outcome.training.gradients))
    if outcome.devices is not None:
        checks.append(f"{outcome.device} {outcome.devices}")
    if outcome.compared is not None:
        checks.append(f"outputs {outcome.compared}")
    return tuple(checks)


def forward_test(settings: Settings, model: str, arguments: Any) -> ForwardTest:
    """Return what runs the model of a factory on a file, as the settings ask."""

    def test(file: Path, result: Checkpoint) -> tuple[SmokeResult | None, list[Finding]]:
        if settings.is_for_torch_before(COUNTED_SINCE) and _lacks_counters(result):
            note = f"the result is for torch {settings.for_torch}, which is not this one"
            return SmokeResult(passed=None, device="", note=note), []
        reference = Reference.of(settings, result.path)
        return run_smoke(str(file), model, arguments, settings.smoke_settings, path_name(result.container), reference)

    return test


def _lacks_counters(result: Checkpoint) -> bool:
    """Whether this torch refuses it: a BatchNorm of ``_metadata`` version 2 has to have its counter."""
    for key in result.specs:
        path, name = split_key(key)
        version = (result.metadata or {}).get(path.removesuffix("."), {}).get("version")
        is_counted = isinstance(version, int) and version >= 2
        if is_counted and name == "running_var" and path + NUM_BATCHES_TRACKED not in result.specs:
            return True
    return False
