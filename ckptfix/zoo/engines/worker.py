"""A worker: a process that does one job after another, and may crash at any of them without harm to the others.

Jobs and answers are pickled, which is right only here: both ends are ours, and no byte of a file from elsewhere is ever
unpickled. What a file says travels inside as text and numbers."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NEW_OBJECTS = 5_000
"""Objects after which Python looks for garbage, 700 by default. A file has many, and its garbage can wait for a few
others."""

_EASY_PREY = b"600"
"""If memory runs out, the kernel should end a worker and not the driver, nor another program."""


def main() -> None:
    """Do jobs until the driver closes the pipe, or memory runs out."""
    driver, descriptor = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    faulthandler.enable()
    gc.set_threshold(_NEW_OBJECTS)
    _die_with(driver)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_EASY_PREY)
    from ckptfix.zoo.work.performing import perform  # only now: a worker without a driver ends at once

    while True:
        try:
            jobs, scratch = pipe.recv()
        except (EOFError, ConnectionError):
            return
        for job in jobs:
            if isinstance(job, str):
                pipe.send(_fault_of_model(job))
                continue
            done = perform(job, Path(scratch))
            pipe.send(done)
            if done.is_exhausted:
                return


def _fault_of_model(model: str) -> str | None:
    """Why a model line of a table names nothing; None if it names something."""
    from ckptfix.core.options import key_text
    from ckptfix.errors import CkptfixError
    from ckptfix.modules.factory import resolve

    try:
        resolve(model, 0)
    except CkptfixError as error:
        return error.worded(key_text)
    return None


def _die_with(driver: int) -> None:
    """End when the driver ends, in whatever way; and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        sys.exit(1)


if __name__ == "__main__":
    main()
