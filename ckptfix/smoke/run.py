"""The forward test from the outside: start the child, and turn what it says, or how it dies, into a result and
findings.
"""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptfix.finding import Finding, Level
from ckptfix.rules.forward_fails import forward_fails
from ckptfix.rules.forward_non_finite import forward_non_finite
from ckptfix.settings import SmokeSettings
from ckptfix.smoke.device import check_device_name
from ckptfix.smoke.diagnosis import OUT_OF_MEMORY, is_user_file
from ckptfix.smoke.exam import Job
from ckptfix.smoke.inputs import parse_inputs
from ckptfix.smoke.launch import Ending, launch
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, INPUT, MODEL, Failure, Origin, Outcome
from ckptfix.smoke.result import SmokeResult

_SAID = {
    ENVIRONMENT: "the environment is at fault, not the checkpoint",
    INPUT: "the input does not suit the model",
    MODEL: "the model's own code gave way",
    CHECKPOINT: "the file is at fault",
}

_REMEDY = {
    ENVIRONMENT: "try --device cpu, or mend the environment and run again",
    INPUT: "give the input that the model takes with --input",
    MODEL: "run the model by itself to see its error; --no-smoke leaves the forward test out",
    CHECKPOINT: "see the findings above for what the file lacks; --fill supplies missing values",
}

_REMEDY_OF_CONTRAST = "look at the values that the named line reads from the file, or try a real input with --input"
_REMEDY_OF_UNDECIDED = "give an input that the model takes with --input, or leave the test out with --no-smoke"

_NO_ANSWER = "no answer"

_STAGE = {
    "start": "while it started",
    "device": "at a trivial sum on the device",
    "build": "while the factory built the model",
    "read": "while the file was read",
    "load": "during the strict load",
    "move": "while the model was moved to the device",
    "input": "while the input was made",
    "forward": "in the forward pass",
}


def run_smoke(
    file: str, factory: str, factory_args: object, settings: SmokeSettings, weights: str | None = None
) -> tuple[SmokeResult, list[Finding]]:
    """Load the file strictly into the factory's model and run it once, in a process of its own; RUN101 or RUN102 say
    what went wrong.

    ``weights`` picks one of several state_dicts in the file. Raises ``UsageError`` for settings that have no meaning;
    whatever the user's code does is a finding.
    """
    parse_inputs(settings.inputs)
    check_device_name(settings.device)
    job = Job(file, factory, factory_args, weights, settings.inputs, settings.device, settings.seed)
    return judge(launch(asdict(job) | {"file": str(Path(file).absolute())}, settings.timeout), settings.timeout)


def judge(ending: Ending, timeout: float) -> tuple[SmokeResult, list[Finding]]:
    """What the ending of the child comes to. An answer counts even where the process crashed on its way out.

    A control that crashed or took too long leaves the test undecided, as it was before.
    """
    is_told = ending.answered or ending.stage == "control"
    outcome = ending.outcome if is_told else replace(ending.outcome, failure=_death(ending, timeout))
    findings = _findings(outcome, ending.printed)
    note = "; ".join(outcome.notes)
    if outcome.undecided:  # in two sentences: the state of the device is not the reason
        note = ". ".join(filter(None, (outcome.undecided, note[:1].upper() + note[1:])))
    result = SmokeResult(
        passed=None if outcome.undecided else not findings,
        device=outcome.device,
        note=note,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        seconds=outcome.seconds,
    )
    return result, findings


def _findings(outcome: Outcome, printed: str) -> list[Finding]:
    if outcome.undecided:
        return [_not_run(outcome)]
    if outcome.failure is not None:
        return [_failing(outcome.failure, outcome, printed)]
    return [_non_finite(outcome)] if outcome.non_finite else []


def _not_run(outcome: Outcome) -> Finding:
    """A warning and no error: the strict load was proven, and a guess that fails says nothing against the file."""
    message = f"the forward test could not be run: {outcome.undecided}"
    return forward_fails.finding(
        Level.WARNING, message, evidence={"device": outcome.device}, remedy=_REMEDY_OF_UNDECIDED
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
    why = _SAID[failure.blame]
    if failure.origin is not None:
        evidence |= _origin(failure.origin)
        why += f" ({failure.origin.name} had made {_kinds(failure.origin)} before)"
    if failure.contrast:
        evidence["contrast"] = failure.contrast
        why += f" ({failure.contrast})"
    message = f"the forward test failed {_STAGE[failure.stage]}, {why}: {failure.error}{failure.place}"
    told = {name: value for name, value in evidence.items() if value not in (None, "", [])}
    return forward_fails.finding(Level.ERROR, message, keys=failure.keys, evidence=told, remedy=_remedy(failure))


def _remedy(failure: Failure) -> str:
    if OUT_OF_MEMORY.search(failure.error) or failure.error.startswith("MemoryError"):
        return "give a smaller input with --input, or run on the CPU with --device cpu"
    if failure.error.startswith(_NO_ANSWER):
        return "give the model more time with --timeout SECONDS, or a smaller input with --input"
    return _REMEDY_OF_CONTRAST if failure.contrast else _REMEDY[failure.blame]


def _non_finite(outcome: Outcome) -> Finding:
    what = ", ".join(str(figures) for figures in outcome.non_finite[:3])
    more = f" and {len(outcome.non_finite) - 3} more" if len(outcome.non_finite) > 3 else ""
    evidence: dict[str, Any] = {
        "outputs": [str(figures) for figures in outcome.non_finite],
        "inputs": list(outcome.inputs),
        "device": outcome.device,
    }
    keys: tuple[str, ...] = ()
    cause = ""
    if outcome.origin is not None:
        evidence |= _origin(outcome.origin)
        broken = [figures for figures in outcome.origin.weights if figures.non_finite]
        prefix = f"{outcome.origin.module}." if outcome.origin.module else ""
        keys = tuple(prefix + figures.tensor for figures in broken)
        state = f"whose {' and '.join(figures.tensor for figures in broken)} is not finite itself" if broken else ""
        cause = f"; the first to make {_kinds(outcome.origin)} of finite values is {outcome.origin.name}"
        cause += f", {state or 'whose own weights are finite'}" if outcome.origin.weights else ""
    return forward_non_finite.finding(
        Level.ERROR,
        f"the model runs, but its output is not finite: {what}{more}{cause}",
        keys=keys,
        evidence=evidence,
        remedy="look at the named module's values in the file, or try another input with --input",
    )


def _origin(origin: Origin) -> dict[str, Any]:
    return {
        "first_module": origin.module,
        "first_class": origin.kind,
        "first_output": str(origin.output),
        "first_inputs": [str(figures) for figures in origin.inputs],
        "first_weights": [str(figures) for figures in origin.weights],
    }


def _kinds(origin: Origin) -> str:
    counts = {"NaN": origin.output.nan, "Inf": origin.output.positive_inf + origin.output.negative_inf}
    return " and ".join(kind for kind, count in counts.items() if count)


def _death(ending: Ending, timeout: float) -> Failure:
    """The failure of a child that gave no answer, from how it ended."""
    blame = {"build": MODEL, "read": CHECKPOINT, "load": CHECKPOINT, "forward": MODEL}.get(ending.stage, ENVIRONMENT)
    name = _signal_name(-ending.returncode)
    if ending.timed_out:
        error = f"{_NO_ANSWER} within {timeout:g} s"
    elif name == "SIGKILL":
        blame, error = ENVIRONMENT, "the process was killed by SIGKILL, most likely because it ran out of memory"
    elif name:
        blame = ENVIRONMENT if name in ("SIGBUS", "SIGILL") else blame
        error = f"the process crashed with {name}"
    else:
        error = f"the process ended by itself with exit status {ending.returncode}{_last_line(ending.printed)}"
    return Failure(ending.stage, blame, error, where=_where(ending.stack))


def _last_line(printed: str) -> str:
    """The last of what was printed, in brackets: where Python itself gave up, that is its error."""
    return f" ({printed.splitlines()[-1].strip()})" if printed else ""


def _signal_name(number: int) -> str:
    """The name of a signal, empty for what is none (an exit status)."""
    return signal.Signals(number).name if number in {known.value for known in signal.Signals} else ""


def _where(stack: str) -> str:
    """The innermost line of the user's code on the stack that faulthandler wrote, innermost first: ``model.py:12 in
    forward``.
    """
    current = stack.rpartition("Current thread")[2]
    for file, line, function in re.findall(r'File "(.+)", line (\d+) in (\S+)', current):
        if is_user_file(file):
            return f"{Path(file).name}:{line} in {function}"
    return ""
