"""The forward test in the parent: starts the child, and turns its answer or its death into a result and findings."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.finding import FILE, Finding, Level, Placeholder, Remedy, advise, counted
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import Comparison, SmokeResult
from ckptfix.core.wording import first_names
from ckptfix.engine.delivery import ForwardTest
from ckptfix.rules import VALUES, named
from ckptfix.smoke.exam import Exam
from ckptfix.smoke.inputs import parse_inputs
from ckptfix.smoke.launch import NO_ANSWER, Ending, death, launch
from ckptfix.smoke.outcome import (
    CHECKPOINT,
    ENVIRONMENT,
    INPUT,
    LATER_STAGES,
    MODEL,
    ExamOutcome,
    Failure,
    FaultOrigin,
    Gradients,
    blame_of_assert,
    is_out_of_memory,
    is_sticky,
)
from ckptfix.smoke.reference import Reference

_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_TRUE_LINE = f"run again with {_BLOCKING}=1 to get the true line"
_NOT_COMPARED = "the comparison with the CPU did not finish"
_NO_CONTRAST = "the output is not finite, even with the model's own initial weights"
_NOT_AGAIN = f"the CUDA error did not recur with {_BLOCKING}=1"


def run_smoke(
    file: str,
    factory: str,
    factory_args: object,
    settings: Settings,
    weights: str | None = None,
    reference: Reference | None = None,
) -> tuple[SmokeResult, list[Finding]]:
    """Load the file strictly into the factory's model and run it once, in a process of its own. Return the result and
    the findings, of the family RUN.

    ``weights`` selects one of several state_dicts in the file; ``reference`` is another checkpoint to compare outputs
    with. Raises ``UsageError`` for invalid settings; whatever the user's code does becomes a finding."""
    parse_inputs(settings.input)
    job = Exam(
        str(Path(file).absolute()),
        factory,
        factory_args,
        weights,
        settings.input,
        settings.device,
        settings.seed,
        settings.train_mode,
        settings.backward,
        reference and replace(reference, file=str(Path(reference.file).absolute())),
    )
    ending = launch(to_builtins(job), settings.timeout)
    if lost_the_gpu(ending) and os.environ.get(_BLOCKING) != "1":
        again = launch(to_builtins(job), settings.timeout, {_BLOCKING: "1"})
        # The second answer counts, or the first if the error did not recur.
        ending, note = (again, _TRUE_LINE) if lost_the_gpu(again) else (ending, _NOT_AGAIN)
        ending = replace(ending, outcome=replace(ending.outcome, notes=(*ending.outcome.notes, note)))
    return judge(ending, settings.timeout)


def lost_the_gpu(ending: Ending) -> bool:
    """Return whether a CUDA kernel failed, which is reported at some later line or kills the process."""
    parts = (ending.outcome, ending.outcome.training)
    if any(part is not None and part.failure is not None and is_sticky(part.failure.error) for part in parts):
        return True
    return not ending.answered and is_sticky(ending.printed)


def judge(ending: Ending, timeout: float) -> tuple[SmokeResult, list[Finding]]:
    """Return the result and the findings for the ending of the child. An answer counts even if the process crashed
    while exiting.

    Once there is a verdict, a crash or time-out of a later stage affects only that stage."""
    outcome = _with_assert(_complete(ending, timeout), ending.printed)
    findings = findings_of(outcome, ending.printed)
    note = "; ".join(outcome.notes)
    reason = outcome.undecided or (_NO_CONTRAST if outcome.shared else "")
    if reason:  # in two sentences: the state of the device is not the reason
        note = ". ".join(filter(None, (reason, note[:1].upper() + note[1:])))
    passed: bool | None = outcome.is_good or outcome.finite_in_float32 is True
    if outcome.undecided or (outcome.non_finite and outcome.shared):
        passed = None
    result = SmokeResult(
        passed=passed,
        device=outcome.device,
        note=note,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        seconds=outcome.seconds,
        checks=_checks(outcome),
        compared=outcome.compared,
    )
    return result, findings


def _complete(ending: Ending, timeout: float) -> ExamOutcome:
    outcome: ExamOutcome = ending.outcome
    if ending.answered:
        return outcome
    if ending.stage in LATER_STAGES:
        unfinished = (_NOT_COMPARED,) if ending.stage == "devices" else ()
        return replace(outcome, notes=(*outcome.notes, *unfinished))
    failure = death(ending, timeout)
    if ending.stage == "training":
        return replace(outcome, training=ExamOutcome(device=outcome.device, derived=outcome.derived, failure=failure))
    return replace(outcome, failure=failure)


def _with_assert(outcome: ExamOutcome, printed: str) -> ExamOutcome:
    """Blame the input for a failed index assertion of a kernel; with a derived input, there is no verdict."""
    failure = outcome.failure
    if failure is None or not is_sticky(f"{failure.error} {printed}") or blame_of_assert(printed) != INPUT:
        return outcome
    if outcome.derived:
        return replace(
            outcome, failure=None, undecided=f"the derived input had an index out of range ({failure.error})"
        )
    return replace(outcome, failure=replace(failure, blame=INPUT))


def _checks(outcome: ExamOutcome) -> tuple[str, ...]:
    """Return a line for each check beyond the pass in eval mode."""
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
    """Return the function that runs the forward test of a file with these settings."""

    def test(file: Path, result: Checkpoint) -> tuple[SmokeResult | None, list[Finding]]:
        if settings.is_for_torch_before(COUNTED_SINCE) and _lacks_counters(result):
            note = f"the result is for torch {settings.for_torch}, not for this release"
            return SmokeResult(passed=None, device="", note=note), []
        reference = Reference.of(settings, result.path)
        return run_smoke(str(file), model, arguments, settings, path_name(result.container), reference)

    return test


def _lacks_counters(result: Checkpoint) -> bool:
    """Return whether this torch refuses the result, as a BatchNorm of ``_metadata`` version 2 lacks its counter."""
    for key in result.specs:
        path, name = split_key(key)
        version = (result.metadata or {}).get(path.removesuffix("."), {}).get("version")
        is_counted = isinstance(version, int) and version >= 2
        if is_counted and name == "running_var" and path + NUM_BATCHES_TRACKED not in result.specs:
            return True
    return False


_SAID = {
    ENVIRONMENT: "the environment is at fault, not the checkpoint",
    INPUT: "the input does not fit the model",
    MODEL: "the model's own code failed",
    CHECKPOINT: "the file is at fault",
}

_INPUT = Remedy.of("gives an input that the model accepts", input=Placeholder("SPEC"))
_ON_CPU = Remedy.of("runs it on the CPU", device="cpu")
_NO_TEST = Remedy.of("skips the forward test", smoke=False)

_REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    ENVIRONMENT: (Remedy.of("fix the environment and run the same command again"), _ON_CPU),
    INPUT: (_INPUT,),
    MODEL: (Remedy.of("run the model alone to see its error"), _NO_TEST),
    CHECKPOINT: advise("see the findings above for what is missing"),
}

_SCALE = Remedy.of("scale the input as in training, or give no input")

_STAGE = {
    "start": "while starting",
    "device": "in a trivial sum on the device",
    "build": "while the factory built the model",
    "read": "while the file was read",
    "load": "during the strict load",
    "move": "while the model was moved to the device",
    "input": "while creating the input",
    "forward": "in the forward pass",
    "training": "in training mode",
}


def findings_of(outcome: ExamOutcome, printed: str = "") -> list[Finding]:
    """Return the findings of a finished test; ``printed`` is the tail of what the model printed."""
    found = [named("forward-odd-input").finding(Level.NOTE, text, remedies=(_SCALE,)) for text in outcome.warnings]
    if outcome.undecided:  # only a warning: a failed guess says nothing about the file
        message = f"the forward test could not be run: {outcome.undecided}"
        device, remedies = {"device": outcome.device}, (_INPUT, _NO_TEST)
        found.append(named("forward-fails").finding(Level.WARNING, message, evidence=device, remedies=remedies))
        return [*found, *_incomparable(outcome)]
    if outcome.failure is not None:
        found.append(_failing(outcome.failure, outcome, printed))
    elif outcome.non_finite:
        found.append(_non_finite(outcome))
    if outcome.training is not None:
        found += _in_training(outcome.training, outcome.is_good)
    return [*found, *_differing(outcome), *_incomparable(outcome)]


def _failing(failure: Failure, outcome: ExamOutcome, printed: str) -> Finding:
    evidence: dict[str, Any] = {
        "blame": failure.blame,
        "stage": failure.stage,
        "error": failure.error,
        "module": failure.module,
        "class": failure.kind,
        "where": failure.where,
        "device": outcome.device,
        "inputs": list(outcome.inputs),
        "traceback": failure.traceback,
        "printed": printed,
    }
    why = _why(failure)
    if failure.origin is not None:
        evidence |= _origin(failure.origin)
        why += f" ({failure.origin.name} had made {_kinds(failure.origin)} before)"
    message = f"the forward test failed {_STAGE[failure.stage]}, {why}: {failure.error}{failure.place}"
    figures = {name: value for name, value in evidence.items() if value not in (None, "", [])}
    return named("forward-fails").finding(
        Level.ERROR, message, keys=failure.keys, evidence=figures, remedies=_remedies(failure, outcome.device)
    )


def _why(failure: Failure) -> str:
    """Return in words what is at fault. A model that did not finish in time may just be slow."""
    is_slow = failure.blame == MODEL and failure.error.startswith(NO_ANSWER)
    return "the model is slow here or waiting for something" if is_slow else _SAID[failure.blame]


def _remedies(failure: Failure, device: str) -> tuple[Remedy, ...]:
    smaller = Remedy(_INPUT.options, "gives a smaller input")
    if is_out_of_memory(failure):
        return (smaller, Remedy.of("run it on a machine with more memory") if device == "cpu" else _ON_CPU)
    if failure.error.startswith(NO_ANSWER):
        return (Remedy.of("gives the model more time", timeout=Placeholder("SECONDS")), smaller)
    return _REMEDIES[failure.blame]


def _non_finite(outcome: ExamOutcome) -> Finding:
    evidence: dict[str, Any] = {
        "outputs": [str(figures) for figures in outcome.non_finite],
        "inputs": list(outcome.inputs),
        "device": outcome.device,
    }
    keys: tuple[str, ...] = ()
    cause = ""
    if outcome.origin is not None:
        evidence |= _origin(outcome.origin)
        keys = outcome.origin.broken
        cause = f"; {_culprit(outcome.origin)}"
    level = Level.ERROR
    remedies = advise("check the named module's values in the file")
    if not keys:  # otherwise no input gives finite numbers
        remedies += (_INPUT,)
    if outcome.finite_in_float32 is not None:
        evidence["finite_in_float32"] = outcome.finite_in_float32
    if outcome.finite_in_float32:
        level = Level.WARNING
        remedies = advise("run the model in float32 or bfloat16; the file can stay as it is")
        cause += "; in float32 the same pass is finite: the dtype is at fault, not the weights"
    elif outcome.finite_in_float32 is False:
        cause += "; in float32 it is not finite either, so the dtype is not the cause"
    if outcome.shared:
        level, remedies = Level.WARNING, (_INPUT,)
        cause += (
            "; the same happens with the model's own initial weights: the input or the code is at fault, not the file"
        )
    if outcome.training is not None and outcome.training.is_good:
        cause += "; in training mode, with batch statistics, it is finite: the running statistics are at fault"
        if not keys and outcome.origin is not None:
            tensors = (figures.tensor for figures in outcome.origin.weights)
            keys = tuple(outcome.origin.key(name) for name in tensors if name in ("running_mean", "running_var"))
        remedies = (
            Remedy.of("measures the running statistics again", recalibrate=Placeholder("data.npy")),
            Remedy.of("takes them from another copy", replace=VALUES, fill=FILE),
        )
    return named("forward-non-finite").finding(
        level,
        f"the model runs, but its output is not finite: {first_names(outcome.non_finite, 3)}{cause}",
        keys=keys,
        evidence=evidence,
        remedies=remedies,
    )


def _culprit(origin: FaultOrigin) -> str:
    culprit = f"the first to turn finite values into {_kinds(origin)} is {origin.name}"
    if not origin.weights:
        return culprit
    negative = [figures.tensor for figures in origin.weights if figures.is_negative_variance]
    broken = [figures.tensor for figures in origin.weights if figures.is_broken]
    defects = (
        (broken, "is not finite itself", "are not finite themselves"),
        (negative, "is negative", "are negative"),
    )
    states = [f"{' and '.join(names)} {one if len(names) == 1 else many}" for names, one, many in defects if names]
    return f"{culprit}, whose {' and '.join(states) or 'own weights are finite'}"


def _in_training(training: ExamOutcome, is_good_in_eval: bool) -> list[Finding]:
    """Return the findings in training mode, at most warnings: the pass in eval mode is what proves the file."""
    failure, gradients = training.failure, training.gradients
    if failure is not None:
        message = f"the model fails in training mode, {_why(failure)}: {failure.error}{failure.place}"
        evidence = {"blame": failure.blame, "inputs": list(training.inputs), "traceback": failure.traceback}
        figures = {name: value for name, value in evidence.items() if value}
        remedies = _remedies(failure, training.device)
        return [named("forward-in-training").finding(Level.WARNING, message, evidence=figures, remedies=remedies)]
    if training.non_finite and is_good_in_eval:
        cause = f"; {_culprit(training.origin)}" if training.origin is not None else ""
        message = f"finite in eval mode but not in training mode: {first_names(training.non_finite, 3)}{cause}"
        evidence = _origin(training.origin) if training.origin is not None else {}
        remedy = Remedy.of("check the named module: training mode uses batch statistics and dropout")
        return [named("forward-in-training").finding(Level.WARNING, message, evidence=evidence, remedies=(remedy,))]
    return [] if gradients is None else list(_odd_gradients(gradients))


def _odd_gradients(gradients: Gradients) -> Iterator[Finding]:
    if gradients.non_finite:
        first = f"; the first operator to make one is {gradients.operator}" if gradients.operator else ""
        line = f", of {gradients.where}" if gradients.where else ""
        yield named("forward-in-training").finding(
            Level.WARNING,
            f"{counted(len(gradients.non_finite), 'parameter')} with a non-finite gradient{first}{line}",
            keys=gradients.non_finite,
            remedies=advise(
                "training would destroy the weights in one step: check the named line, and try a real input"
            ),
        )
    for names, what in ((gradients.zero, "a gradient of zeros"), (gradients.missing, "no gradient")):
        if names:
            is_all = not gradients.finite and not gradients.non_finite
            yield named("forward-in-training").finding(
                Level.WARNING if is_all else Level.NOTE,
                f"{counted(len(names), 'parameter')} with {what}: training would not change them",
                keys=names,
                remedies=advise(
                    "this is fine if the part is unused or follows zero weights; otherwise try a real input"
                ),
            )


def _differing(outcome: ExamOutcome) -> Iterator[Finding]:
    devices = outcome.devices
    if devices is not None and not devices.unlike and not devices.is_close:
        yield named("forward-devices-differ").finding(
            Level.WARNING,
            f"the outputs on {outcome.device} and on {devices.against} differ by more than rounding explains: "
            f"{devices}",
            evidence=_distance(devices),
            remedies=(*advise("trust neither until you know which is wrong; update the driver and torch"), _ON_CPU),
        )


def _incomparable(outcome: ExamOutcome) -> Iterator[Finding]:
    seen = outcome.compared
    if seen is None or outcome.failure is not None:
        return
    if seen.unlike:
        yield named("forward-incomparable").finding(
            Level.NOTE,
            f"the outputs were not compared with those of {seen.against}: {seen.unlike}",
            remedies=(Remedy.of("compares with a checkpoint of the same model", compare=FILE),),
        )
    elif seen.differing == 0 and not seen.is_close:
        yield named("forward-incomparable").finding(
            Level.NOTE,
            f"the model is not deterministic: with the same weights its outputs differ, {seen}",
            evidence=_distance(seen),
            remedies=advise("look in the model's code for numpy random numbers, the clock, and hidden state"),
        )


def _distance(seen: Comparison) -> dict[str, Any]:
    return {"difference": seen.difference, "scale": seen.scale, "agreement": seen.agreement}


def _origin(origin: FaultOrigin) -> dict[str, Any]:
    weights = sorted(origin.weights, key=lambda figures: not (figures.is_broken or figures.is_negative_variance))
    return {
        "first_module": origin.module,
        "first_class": origin.kind,
        "first_output": str(origin.output),
        "first_inputs": [str(figures) for figures in origin.inputs],
        "first_weights": [str(figures) for figures in weights],
    }


def _kinds(origin: FaultOrigin) -> str:
    counts = {"NaN": origin.output.nan, "Inf": origin.output.positive_inf + origin.output.negative_inf}
    return " and ".join(kind for kind, count in counts.items() if count)
