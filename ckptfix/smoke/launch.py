"""Starts the child of a forward test, enforces its time limit, and collects its result even if it crashes."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from msgspec import Struct, convert

from ckptfix.errors import Opt, UsageError
from ckptfix.smoke.outcome import BLAME_OF_STAGE, CHECKPOINT, ENVIRONMENT, ExamOutcome, Failure, user_line
from ckptfix.writing.atomic import temporary_folder_beside

TAIL = 4096  # bytes kept from the end of what the model prints


DONE = "done"  # the stage that comes with the answer


class Ending(Struct, frozen=True):
    """How the child ended: its last ``stage``, and the ``outcome`` up to there.

    ``stack`` is the Python stack of a crash, ``printed`` the tail of what the model printed."""

    returncode: int
    timed_out: bool
    stage: str
    outcome: Any
    stack: str
    printed: str

    @property
    def answered(self) -> bool:
        """Whether the child finished; otherwise it crashed, was killed, or ran out of time."""
        return self.stage == DONE


def launch(
    job: Mapping[str, Any], timeout: float, variables: Mapping[str, str] | None = None, kind: type[Any] = ExamOutcome
) -> Ending:
    """Run the job in a new process and process group for at most ``timeout`` seconds, with ``variables`` added to the
    environment. ``kind`` is the class of the outcome.

    Raises ``UsageError`` if the arguments of the factory cannot be written as JSON."""
    with temporary_folder_beside(Path(tempfile.gettempdir(), "forward-test")) as folder:
        answer, stack, empty = Path(folder, "answer"), Path(folder, "stack"), Path(folder, "empty")
        empty.mkdir()
        order = {"job": job, "cwd": str(Path.cwd()), "answer": str(answer), "stack": str(stack), "timeout": timeout}
        order["parent"] = os.getpid()
        try:
            text = json.dumps(order).encode()
        except TypeError as error:
            raise UsageError(Opt("model_args"), f": {error}; the forward test takes only plain JSON") from error
        returncode, timed_out, printed = _run(text, timeout, empty, variables or {})
        # The last line may be incomplete.
        lines = [line for line in _text(answer).splitlines(keepends=True) if line.endswith("\n")]
        last: dict[str, Any] = json.loads(lines[-1]) if lines else {"stage": "start", "outcome": {}}
        outcome = convert(last["outcome"], kind)
        return Ending(returncode, timed_out, last["stage"], outcome, _text(stack), printed)


def _run(order: bytes, timeout: float, folder: Path, variables: Mapping[str, str]) -> tuple[int, bool, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfix.smoke.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**_environment(), **variables},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    printed = bytearray()
    reader = threading.Thread(target=_keep_tail, args=(process.stdout, printed), daemon=True)
    reader.start()
    timed_out = False
    try:
        with contextlib.suppress(BrokenPipeError):  # it died before reading; its exit status tells why
            process.stdin.write(order)
            process.stdin.close()
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.send_signal(signal.SIGABRT)  # the child then writes its stack
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all processes that the model left running
        process.wait()
        reader.join(1)  # a process outside the group may keep the pipe open for ever
    return process.returncode, timed_out, bytes(printed).decode(errors="replace").strip()


def _environment() -> dict[str, str]:
    """Return the child's environment: the parent's, with the same import path and unbuffered output, so that a crash
    loses nothing.

    The working directory is left out of the path. The child adds it after importing torch, which must not import, say,
    a ``random.py`` from it."""
    found = [Path(entry).absolute() for entry in sys.path]
    path = [str(entry) for entry in found if entry != Path.cwd()]
    home = str(Path(__file__).resolve().parents[2])  # of ckptfix, even if it is the working directory
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, home]), "PYTHONUNBUFFERED": "1"}


def _keep_tail(stream: IO[bytes], kept: bytearray) -> None:
    while chunk := os.read(stream.fileno(), 65536):
        kept += chunk
        del kept[:-TAIL]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


NO_ANSWER = "no answer"


def death(ending: Ending, timeout: float) -> Failure:
    """Return the failure of a child that ended without an answer."""
    blame = ENVIRONMENT if ending.stage == "input" else BLAME_OF_STAGE.get(ending.stage, ENVIRONMENT)
    name = signal_name(-ending.returncode)
    if ending.timed_out:
        blame = ENVIRONMENT if blame == CHECKPOINT else blame  # a slow disk or a large file, not its content
        error = f"{NO_ANSWER} within {timeout:g} s"
    elif name == "SIGKILL":
        blame, error = ENVIRONMENT, "the process was killed by SIGKILL, most likely because it ran out of memory"
    elif name:
        blame = ENVIRONMENT if name in ("SIGBUS", "SIGILL") else blame
        error = f"the process crashed with {name}"
    else:
        # If Python itself failed, the last line is its error.
        last = f" ({ending.printed.splitlines()[-1].strip()})" if ending.printed else ""
        error = f"the process exited with status {ending.returncode}{last}"
    # faulthandler writes the innermost call first; take the innermost one in the user's code.
    calls = re.findall(r'File "(.+)", line (\d+) in (\S+)', ending.stack.rpartition("Current thread")[2])
    return Failure(ending.stage, blame, error, where=user_line(calls))


def signal_name(number: int) -> str:
    """Return the name of a signal; empty if the number is not one, as for an exit status."""
    return signal.Signals(number).name if number in {known.value for known in signal.Signals} else ""


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make this process end when the parent does, if the system supports it; exit at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
