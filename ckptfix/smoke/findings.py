"""The outcome of a forward test in words: the findings of the family RUN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.core.finding import FILE, Finding, Level, Placeholder, Remedy, advise, counted
from ckptfix.rules.forward_devices_differ import forward_devices_differ
from ckptfix.rules.forward_fails import forward_fails
from ckptfix.rules.forward_in_training import forward_in_training
from ckptfix.rules.forward_incomparable import forward_incomparable
from ckptfix.rules.forward_non_finite import forward_non_finite
from ckptfix.rules.forward_odd_input import forward_odd_input
from ckptfix.smoke.diagnosis import is_out_of_memory
from ckptfix.smoke.launch import NO_ANSWER
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, INPUT, MODEL, Failure, Figures, Gradients, Origin, Outcome

_SAID = {
    ENVIRONMENT: "the environment is at fault, not the checkpoint",
    INPUT: "the input does not suit the model",
    MODEL: "the model's own code gave way",
    CHECKPOINT: "the file is at fault",
}

_SLOW = "the model is slow here, or waits for something"

_INPUT = Remedy((("input", Placeholder("SPEC")),), "gives the input that the model takes")
_ON_CPU = Remedy((("device", "cpu"),), "runs it on the CPU")
_NO_TEST = Remedy((("smoke", False),), "leaves the forward test out")

_REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    ENVIRONMENT: (Remedy(text="fix the environment and run the same command again"), _ON_CPU),
    INPUT: (_INPUT,),
    MODEL: (Remedy(text="run the model by itself to see its error"), _NO_TEST),
    CHECKPOINT: advise("see the findings above for what the file lacks"),
}

_SCALE = Remedy(text="scale the input as in training, or give none")

_STAGE = {
    "start": "while it started",
    "device": "at a trivial sum on the device",
    "build": "while the factory built the model",
    "read": "while the file was read",
    "load": "during the strict load",
    "move": "while the model was moved to the device",
    "input": "while the input was made",
    "forward": "in the forward pass",
    "training": "in training mode",
}


def findings_of(outcome: Outcome, printed: str = "") -> list[Finding]:
    """What a finished test found; ``printed`` is the tail of what the model printed."""
    found = [forward_odd_input.finding(Level.NOTE, text, remedies=(_SCALE,)) for text in outcome.warnings]
    if outcome.undecided:
        return [*found, _not_run(outcome), *_incomparable(outcome)]
    if outcome.failure is not None:
        found.append(_failing(outcome.failure, outcome, printed))
    elif outcome.non_finite:
        found.append(_non_finite(outcome))
    if outcome.training is not None:
        found += _in_training(outcome.training, outcome.is_good)
    if outcome.devices is not None and not outcome.devices.unlike and not outcome.devices.is_close:
        found.append(_differing(outcome))
    return [*found, *_incomparable(outcome)]


def _not_run(outcome: Outcome) -> Finding:
    """A warning and no error: the strict load was proven, and a guess that fails says nothing against the file."""
    message = f"the forward test could not be run: {outcome.undecided}"
    return forward_fails.finding(
        Level.WARNING, message, evidence={"device": outcome.device}, remedies=(_INPUT, _NO_TEST)
    )


def _failing(failure: Failure, outcome: Outcome, printed: str) -> Finding:
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
    why = _SLOW if _is_slow(failure) else _SAID[failure.blame]
    if failure.origin is not None:
        evidence |= _origin(failure.origin)
        why += f" ({failure.origin.name} had made {_kinds(failure.origin)} before)"
    message = f"the forward test failed {_STAGE[failure.stage]}, {why}: {failure.error}{failure.place}"
    told = {name: value for name, value in evidence.items() if value not in (None, "", [])}
    return forward_fails.finding(
        Level.ERROR, message, keys=failure.keys, evidence=told, remedies=_remedies(failure, outcome.device)
    )


def _is_slow(failure: Failure) -> bool:
    """Whether the model had no end yet, which is no fault of its code as far as is known."""
    return failure.blame == MODEL and failure.error.startswith(NO_ANSWER)


def _remedies(failure: Failure, device: str) -> tuple[Remedy, ...]:
    smaller = Remedy(_INPUT.options, "gives a smaller input")
    if is_out_of_memory(failure):
        return (smaller, Remedy(text="run it on a machine with more memory") if device == "cpu" else _ON_CPU)
    if failure.error.startswith(NO_ANSWER):
        return (Remedy((("timeout", Placeholder("SECONDS")),), "gives the model more time"), smaller)
    return _REMEDIES[failure.blame]


def _non_finite(outcome: Outcome) -> Finding:
    what = _listed(outcome)
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
    remedies: tuple[Remedy, ...] = (Remedy(text="look at the named module's values in the file"), _INPUT)
    if outcome.finite_in_float32 is not None:
        evidence["finite_in_float32"] = outcome.finite_in_float32
    if outcome.finite_in_float32:
        level = Level.WARNING
        remedies = advise("run the model in float32 or bfloat16; the file can stay as it is")
        cause += "; in float32 the same pass is finite: a limit of the dtype, not of the weights"
    elif outcome.finite_in_float32 is False:
        cause += "; in float32 it is not finite either: no limit of the dtype"
    if outcome.shared:
        level, remedies = Level.WARNING, (_INPUT,)
        cause += "; with its own initial weights the model does so too: the input or its code is at fault, not the file"
    if outcome.training is not None and outcome.training.is_good:
        cause += (
            "; in training mode, with the statistics of the batch, it is finite: the running statistics are at fault"
        )
        keys = keys or _statistics(outcome.origin)
        remedies = (
            Remedy((("recalibrate", Placeholder("data.npy")),), "measures the running statistics again"),
            Remedy((("replace", ("VAL",)), ("fill", FILE)), "takes them from another copy"),
        )
    return forward_non_finite.finding(
        level,
        f"the model runs, but its output is not finite: {what}{cause}",
        keys=keys,
        evidence=evidence,
        remedies=remedies,
    )


def _listed(outcome: Outcome) -> str:
    what = ", ".join(str(figures) for figures in outcome.non_finite[:3])
    return what + (f" and {len(outcome.non_finite) - 3} more" if len(outcome.non_finite) > 3 else "")


def _culprit(origin: Origin) -> str:
    culprit = f"the first to make {_kinds(origin)} of finite values is {origin.name}"
    if not origin.weights:
        return culprit
    negative = [figures.tensor for figures in origin.weights if figures.is_negative_variance]
    broken = [figures.tensor for figures in origin.weights if figures.is_broken]
    states = [f"{' and '.join(broken)} is not finite itself"] if broken else []
    states += [f"{' and '.join(negative)} is negative"] if negative else []
    return f"{culprit}, whose {' and '.join(states) or 'own weights are finite'}"


def _statistics(origin: Origin | None) -> tuple[str, ...]:
    """The running statistics of the module, where it has any."""
    if origin is None:
        return ()
    names = (figures.tensor for figures in origin.weights if figures.tensor in ("running_mean", "running_var"))
    return tuple(origin.key(name) for name in names)


def _in_training(training: Outcome, is_good_in_eval: bool) -> list[Finding]:
    """Warnings: the pass in eval mode is what proves the file."""
    failure, gradients = training.failure, training.gradients
    if failure is not None:
        why = _SLOW if _is_slow(failure) else _SAID[failure.blame]
        message = f"the model fails in training mode, {why}: {failure.error}{failure.place}"
        evidence = {"blame": failure.blame, "inputs": list(training.inputs), "traceback": failure.traceback}
        told = {name: value for name, value in evidence.items() if value}
        return [
            forward_in_training.finding(
                Level.WARNING, message, evidence=told, remedies=_remedies(failure, training.device)
            )
        ]
    if training.non_finite and is_good_in_eval:
        cause = f"; {_culprit(training.origin)}" if training.origin is not None else ""
        message = f"fine in eval mode, but not finite in training mode: {_listed(training)}{cause}"
        evidence = _origin(training.origin) if training.origin is not None else {}
        remedy = Remedy(text="look at the named module: what differs are the statistics of the batch, and dropout")
        return [forward_in_training.finding(Level.WARNING, message, evidence=evidence, remedies=(remedy,))]
    return [] if gradients is None else list(_odd_gradients(gradients))


def _odd_gradients(gradients: Gradients) -> Iterator[Finding]:
    if gradients.non_finite:
        first = f"; the first to make one is {gradients.operator}" if gradients.operator else ""
        line = f", of {gradients.where}" if gradients.where else ""
        yield forward_in_training.finding(
            Level.WARNING,
            f"{counted(len(gradients.non_finite), 'parameter')} with a gradient that is not finite{first}{line}",
            keys=gradients.non_finite,
            remedies=advise(
                "training would destroy the weights in one step: look at the named line, and try a real input"
            ),
        )
    for names, what in ((gradients.zero, "a gradient of zeros"), (gradients.missing, "no gradient")):
        if names:
            is_all = not gradients.finite and not gradients.non_finite
            yield forward_in_training.finding(
                Level.WARNING if is_all else Level.NOTE,
                f"{counted(len(names), 'parameter')} with {what}: training would leave them as they are",
                keys=names,
                remedies=advise(
                    "a part that is not used, or comes after weights of zero, is not a defect; else try a real input"
                ),
            )


def _differing(outcome: Outcome) -> Finding:
    devices = outcome.devices
    assert devices is not None
    evidence = {"difference": devices.difference, "scale": devices.scale, "agreement": devices.agreement}
    return forward_devices_differ.finding(
        Level.WARNING,
        f"the outputs on {outcome.device} and on {devices.against} are further apart than rounding explains: {devices}",
        evidence=evidence,
        remedies=(
            Remedy(text="trust neither before you know which is wrong; update the driver and torch"),
            _ON_CPU,
        ),
    )


def _incomparable(outcome: Outcome) -> Iterator[Finding]:
    seen = outcome.compared
    if seen is None or outcome.failure is not None:
        return
    if seen.unlike:
        yield forward_incomparable.finding(
            Level.NOTE,
            f"the outputs are not compared with those of {seen.against}: {seen.unlike}",
            remedies=(Remedy((("compare", FILE),), "compares with a checkpoint of the very same model"),),
        )
    elif seen.differing == 0 and not seen.is_close:
        yield forward_incomparable.finding(
            Level.NOTE,
            f"the model is not repeatable: with the same weights its outputs differ, {seen}",
            evidence={"difference": seen.difference, "scale": seen.scale, "agreement": seen.agreement},
            remedies=advise(
                "look in the model's code for random numbers of numpy or the clock, and for a state that it keeps"
            ),
        )


def _origin(origin: Origin) -> dict[str, Any]:
    return {
        "first_module": origin.module,
        "first_class": origin.kind,
        "first_output": str(origin.output),
        "first_inputs": [str(figures) for figures in origin.inputs],
        "first_weights": [str(figures) for figures in sorted(origin.weights, key=_looks_sound)],
    }


def _looks_sound(figures: Figures) -> bool:
    return not (figures.is_broken or figures.is_negative_variance)


def _kinds(origin: Origin) -> str:
    counts = {"NaN": origin.output.nan, "Inf": origin.output.positive_inf + origin.output.negative_inf}
    return " and ".join(kind for kind, count in counts.items() if count)
