"""A worker process, as its driver sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from ckptfix.zoo.engines.budget import Cost
from ckptfix.zoo.engines.frames import framed, read_frame, write_frame
from ckptfix.zoo.work.job import Done, Job

PIPE = 16 << 10
"""Bytes of frames that are sent ahead: a pipe of Linux holds four times as many, so that nobody ever waits for it."""

_TAIL = 4096


@dataclass
class Order:
    """A job that a worker has, or is to get."""

    job: Job
    cost: Cost
    frame: bytes = b""
    begun: float = 0.0


@dataclass
class Child:
    """A worker and the orders that it has: it does the first of them."""

    scratch: Path
    number: int
    orders: deque[Order] = field(default_factory=deque)
    ended: str = ""

    def __post_init__(self) -> None:
        self._log = self.scratch / f"worker-{self.number}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckptfix.zoo.engines.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # or an answer could lie in a buffer where no selector sees it
                # What it leaves when it is killed, a folder of a forward test, goes with the scratch folder.
                env={**os.environ, "TMPDIR": str(self.scratch.resolve())},
                start_new_session=True,
            )
        self._jobs = cast(BinaryIO, self.process.stdin)
        self.answers = cast(BinaryIO, self.process.stdout)

    def give(self, order: Order) -> None:
        """Send a job."""
        order.frame = framed((order.job, str(self.scratch)))
        if not self.orders:
            order.begun = time.monotonic()
        self.orders.append(order)
        with contextlib.suppress(BrokenPipeError):  # it has died; who reads its answers finds out
            write_frame(self._jobs, order.frame)

    def has_room(self) -> bool:
        """Whether another small job can be sent ahead, so that the worker never waits for the driver."""
        return sum(len(order.frame) for order in self.orders) < PIPE

    def take(self) -> tuple[Order, Done] | None:
        """The next answer and its order; None where the worker has died. Waits for the answer."""
        try:
            done: Done = read_frame(self.answers)
        except EOFError:
            return None
        order = self.orders.popleft()
        if self.orders:
            self.orders[0].begun = time.monotonic()
        return order, done

    def end(self) -> None:
        """Let it go when it has nothing to do any more."""
        self._jobs.close()
        self.process.wait()
        self.answers.close()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.answers.close()
        self._jobs.close()

    def cause_of_death(self) -> str:
        """How it ended, in words."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return (
                "the process that worked on it was killed (SIGKILL), also when no other ran, probably because memory"
                " ran out; run the same command again where there is more"
            )
        if code < 0:
            name = signal.Signals(-code).name if -code in {known.value for known in signal.Signals} else str(-code)
            return f"the process that worked on it crashed with {name}"
        said = self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
        return (
            f"the process that worked on it ended by itself with exit status {code}{f' ({said[-1]})' if said else ''}"
        )
