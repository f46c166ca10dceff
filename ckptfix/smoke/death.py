"""A child that gave no answer: what its exit status, its last stage and its stack say."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from ckptfix.smoke.diagnosis import is_user_file
from ckptfix.smoke.launch import Ending
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, MODEL, Failure

NO_ANSWER = "no answer"

_BLAME = {"build": MODEL, "read": CHECKPOINT, "load": CHECKPOINT, "forward": MODEL, "training": MODEL}


def death(ending: Ending, timeout: float) -> Failure:
    """The failure of a child that gave no answer, from how it ended."""
    blame = _BLAME.get(ending.stage, ENVIRONMENT)
    name = _signal_name(-ending.returncode)
    if ending.timed_out:
        blame = ENVIRONMENT if blame == CHECKPOINT else blame  # a slow disk, or a large file: no fault of its content
        error = f"{NO_ANSWER} within {timeout:g} s"
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
