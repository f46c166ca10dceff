"""A worker: a process that does one job after another, and may crash at any of them without harm to the others.

Jobs come through stdin and go back through stdout as frames. What the user's own code prints, or a crash, goes to
stderr, where the driver keeps it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
from pathlib import Path

from ckptfix.zoo.engines.frames import framed, read_frame

_PR_SET_PDEATHSIG = 1
_NEW_OBJECTS = 5_000
"""Objects after which Python looks for garbage among them, 700 by default. A file has many, and its garbage
waits no longer than for a few others."""

_EASY_PREY = b"600"
"""Where memory runs out, the kernel is to end a worker and not the driver, nor somebody else's work."""


def main() -> None:
    """Do jobs until the driver closes the pipe, or memory runs out."""
    driver = int(sys.argv[1])
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - its descriptor is all that is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable()
    gc.set_threshold(_NEW_OBJECTS)
    _die_with(driver)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_EASY_PREY)
    from ckptfix.zoo.work.performing import perform  # only now: a driver that is gone is not to wait for it

    while True:
        try:
            job, scratch = read_frame(jobs)
        except EOFError:
            return
        done = perform(job, Path(scratch))
        answers.write(framed(done))
        answers.flush()
        if done.is_exhausted:
            return


def _die_with(driver: int) -> None:
    """End when the driver ends, however it ends; and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        sys.exit(1)


if __name__ == "__main__":
    main()
