"""Opens, reads, checks and repairs a possibly hostile file, and returns the outcome.

``python -m tests.attacks.outcomes BYTES FILE…`` only opens each file, with so many bytes of address space, and prints a
line for it.
"""

import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ckptfix
from ckptfix.errors import CkptfixError, HostileError, UnreadableError, WriteError

REFUSED = "refused"
LIMITS = {signal.ITIMER_PROF: 60, signal.ITIMER_REAL: 600}
"""Limits in seconds of CPU time, and of wall-clock time for endless waiting. Far above what any file takes: they only
detect endless loops."""

HEARD = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
"""The signals of these timers."""


class TooLongError(BaseException):
    """The block does not end. Not an ``Exception``, so that no code under test catches it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise ``TooLongError`` in a block that does not end."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TooLongError(f"still running when {signal.Signals(signum).name} came")

    before = {number: signal.signal(number, give_up) for number in HEARD.values()}
    for clock, seconds in LIMITS.items():
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for clock, number in HEARD.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])


def outcome(path: Path) -> str:
    """Return ``refused``, ``repaired``, or the errors of writers. Lets all but ``CkptfixError`` through."""
    with bounded():
        steps: list[Callable[[Path], Any]] = [
            lambda out: ckptfix.open_checkpoint(path).state_dict(),
            lambda out: ckptfix.check(path),
            lambda out: ckptfix.repair(path, output=out / "out.pth"),
            lambda out: ckptfix.repair(path, output=out / "out.safetensors"),
        ]
        errors: list[CkptfixError] = []
        for step in steps:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    step(Path(folder))
                    continue
                except CkptfixError as error:
                    errors.append(error)
                assert not list(Path(folder).iterdir()), "a refused repair left something behind"
        assert all(str(error).isprintable() and "please report" not in str(error) for error in errors), errors
        if len(errors) == len(steps):
            return REFUSED
        # A file that opens may contain what a format cannot store, but must not turn out unreadable later.
        assert all(isinstance(error, WriteError) for error in errors), errors
        return "; ".join(map(str, errors)) or "repaired"


def opening(path: Path) -> str:
    """Return the number of tensors, ``refused`` for a printable error that names the file, or another error's repr."""
    with bounded():
        try:
            return str(len(ckptfix.open_checkpoint(path).specs))
        except (HostileError, UnreadableError) as error:
            return REFUSED if str(path) in str(error) and str(error).isprintable() else repr(error)


if __name__ == "__main__":
    limit, *files = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    for file in files:
        print(opening(Path(file)))  # noqa: T201 - the answer of this child process
