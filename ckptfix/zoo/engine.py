"""Runs jobs: the part common to all engines, and the engine of one machine, whose worker processes run many jobs each.

If a worker dies, only the job that it was running is affected."""

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.options import key_text
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.smoke.launch import die_with, signal_name
from ckptfix.zoo.job import Done, Job, JobFiles, failed
from ckptfix.zoo.resources import Budget, Cost, cost_of, memory_of
from ckptfix.zoo.workspace import temporary_folder

TICK = 0.25  # seconds between two calls of `on_wait`
_PATIENCE, _SLOWEST = 1800.0, 1e6


def patience(job: Job) -> float:
    """Return the seconds after which a job is ended: half an hour, one for each MB, and time for the forward tests."""
    timeout: float = job.treatment.settings.get("timeout", 0)
    return _PATIENCE + job.item.size / _SLOWEST + 8 * timeout


class Engine(Struct):
    """Runs jobs, several at a time, and survives their crashes: the part common to all engines.

    A job whose process dies is tried once more with no other job running, in case it lacked memory. ``scratch`` is a
    folder for temporary files."""

    scratch: Path
    patience: Callable[[Job], float] = patience
    # Whether outputs are staged on this machine for the driver to flush and rename in groups.
    is_grouped: ClassVar[bool] = False
    _under_way: dict[Any, tuple[Job, float]] = field(default_factory=dict)
    _again: list[Job] = field(default_factory=list)

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Run all jobs, and call ``on_done`` in this thread for each, in the order in which they end.

        ``jobs``, the largest first, are taken one by one as needed. ``on_wait`` is called a few times a second with the
        number of running jobs. Any exception, such as from Ctrl-C, ends the running jobs and removes their files."""
        with self._opened():
            self._run(iter(jobs), on_done, on_wait)
            while self._again:
                self._run(iter([self._again.pop(0)]), on_done, on_wait)

    def _opened(self) -> AbstractContextManager[None]:
        """Start whatever runs jobs, and stop it at the end."""
        raise NotImplementedError

    def _begin(self, jobs: Iterator[Job]) -> None:
        """Start as many jobs as fit. Enters each in ``_under_way`` by the handle that ``_wait`` returns."""
        raise NotImplementedError

    def _wait(self, seconds: float) -> Iterable[Any]:
        """Wait until a running job has ended, at most so many seconds, and return the handles of all that have."""
        raise NotImplementedError

    def _take(self, ended: Any, job: Job) -> Done | str | None:
        """Return the result of a job, or how its process died; None if it is started again."""
        raise NotImplementedError

    def _end(self, running: Any, job: Job) -> None:
        """Kill a running job."""
        raise NotImplementedError

    def _watch(self, on_done: Callable[[Done], None]) -> None:
        """Check the running jobs; called regularly. Ends those that take too long."""
        for running, (job, began) in list(self._under_way.items()):
            if time.monotonic() - began > (limit := self.patience(job)):
                self._give_up(running, f"it took longer than {limit:.0f} s", on_done, again=False)

    def _give_up(self, running: Any, cause: str, on_done: Callable[[Done], None], again: bool = True) -> None:
        """Kill a running job, and try it once more or let it fail."""
        job, _ = self._under_way.pop(running)
        self._end(running, job)
        self._fail(job, cause, on_done, again)

    def _fail(self, job: Job, cause: str, on_done: Callable[[Done], None], again: bool = True) -> None:
        JobFiles(self.scratch, job.number).clear()
        if again and job.attempt == 1:
            self._again.append(replace(job, attempt=2))
        else:
            on_done(failed(job, f"{job.item.name}: {cause}"))

    def _run(self, jobs: Iterator[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None]) -> None:
        last = 0.0
        while True:
            self._begin(jobs)
            if not self._under_way:
                return
            for ended in self._wait(TICK):
                job, _ = self._under_way.pop(ended)
                done = self._take(ended, job)
                if isinstance(done, str):
                    self._fail(job, done, on_done)
                elif done is not None:
                    on_done(done)
            if (now := time.monotonic()) - last >= TICK:
                last = now
                self._watch(on_done)
                on_wait(len(self._under_way))


_AHEAD = 64  # jobs considered if the next does not fit beside the running ones
_TAIL = 4096


class Worker:
    """A worker process, as its driver sees it."""

    def __init__(self, scratch: Path, number: int) -> None:
        self._scratch = scratch
        self._log = scratch / f"worker-{number}.log"
        self.answers, theirs = Pipe()
        with self._log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckptfix.zoo.engine", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,  # output of the user's code, or of a crash
                stderr=log,
                pass_fds=[theirs.fileno()],
                # What a killed worker leaves, such as the folder of a forward test, is removed with the scratch folder.
                env={**os.environ, "TMPDIR": str(scratch.resolve())},
                start_new_session=True,
            )

    def give(self, job: Job) -> None:
        """Send a job to an idle worker, which is reading, so that this never blocks."""
        with contextlib.suppress(OSError):  # it has died, which reading its answer will show
            self.answers.send((job, str(self._scratch)))

    def take(self) -> Done | None:
        """Wait for the answer and return it; None if the worker has died."""
        try:
            done: Done = self.answers.recv()
        except (EOFError, OSError):
            return None
        return done

    def end(self) -> None:
        """Let the worker exit, and wait for it."""
        self.answers.close()
        self.process.wait()

    def kill(self) -> None:
        """Kill the worker, and wait for it."""
        self.process.kill()
        self.process.wait()
        self.answers.close()

    def cause_of_death(self) -> str:
        """Return how the worker ended, as a clause with advice."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return (
                "its process was killed (SIGKILL) even with no other job running, probably because it ran out of "
                "memory; run the same command again on a machine with more"
            )
        if code < 0:
            return f"its process crashed with {signal_name(-code) or -code}"
        lines = self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
        last = f" ({lines[-1]})" if lines else ""
        return f"its process exited with status {code}{last}"


def check_models(places: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if a model cannot be resolved, for all of them at once. ``places`` maps each model to the
    table that names it. This imports the user's code, so it is done in a worker: the driver stays small, and survives.
    """
    if not places:
        return
    with temporary_folder() as scratch:
        worker = Worker(scratch, 0)
        faults: list[str | None] = []
        try:
            for model in places:
                worker.answers.send((model, ""))
                faults.append(worker.answers.recv())
        except (EOFError, OSError) as error:
            raise UsageError(f"{', '.join(places)}: {worker.cause_of_death()}") from error
        finally:
            worker.end()
    found = [
        f"{place}: {fault}" if place else fault for place, fault in zip(places.values(), faults, strict=True) if fault
    ]
    if found:
        raise UsageError("; ".join(found))


class LocalEngine(Engine):
    """Runs jobs in at most ``count`` processes of this machine, within a budget."""

    count: int = 1
    budget: Budget = field(default_factory=lambda: Budget(0))
    is_grouped: ClassVar[bool] = True
    _workers: dict[Any, Worker] = field(default_factory=dict)  # by the pipe of their answers
    _seen: deque[Job] = field(default_factory=deque)  # jobs that were considered and not started yet
    _passed_over: int = 0
    _started: int = 0

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            yield
            for worker in self._workers.values():
                worker.end()
        except BaseException:
            for worker in self._workers.values():
                worker.kill()
            raise
        finally:
            self._workers = {}

    def _begin(self, jobs: Iterator[Job]) -> None:
        while len(self._under_way) < self.count:
            job = self._next_that_fits(jobs)
            if job is None:
                return
            idle = next((worker for answers, worker in self._workers.items() if answers not in self._under_way), None)
            if idle is None:
                self._started += 1
                idle = Worker(self.scratch, self._started)
                self._workers[idle.answers] = idle
            self.budget.take(_cost(job))
            self._under_way[idle.answers] = job, time.monotonic()
            idle.give(job)

    def _next_that_fits(self, jobs: Iterator[Job]) -> Job | None:
        """Take the first job that fits the budget; None if none fits, or if one passed over too often is next."""
        for place in range(_AHEAD if self._passed_over < _AHEAD else 1):
            if place == len(self._seen):
                self._seen.extend(islice(jobs, 1))
            if place == len(self._seen):
                return None
            if self.budget.fits(_cost(job := self._seen[place])):
                self._passed_over = self._passed_over + 1 if place else 0
                del self._seen[place]
                return job
        return None

    def _wait(self, seconds: float) -> Iterable[Any]:
        return wait(list(self._under_way), seconds)

    def _take(self, ended: Any, job: Job) -> Done | str | None:
        done = self._workers[ended].take()
        if done is not None and not done.is_exhausted:
            self.budget.give_back(_cost(job))
            return done
        cause = self._workers[ended].cause_of_death() if done is None else ""
        self._end(ended, job)
        return done or cause

    def _end(self, running: Any, job: Job) -> None:
        self.budget.give_back(_cost(job))
        self._workers.pop(running).kill()

    def _watch(self, on_done: Callable[[Done], None]) -> None:
        super()._watch(on_done)
        # If the workers together hold more than the budget, the largest needs more than estimated and is killed.
        busy = [(memory_of(self._workers[running].process.pid), running) for running in self._under_way]
        taken, largest = max(busy, key=lambda pair: pair[0], default=(0, None))
        if largest is None:
            return
        if sum(nbytes for nbytes, _ in busy) > max(self.budget.memory, _cost(self._under_way[largest][0]).memory):
            cause = (
                f"it took {taken >> 20} MiB of memory, more than --memory allows; run the same command again with more"
            )
            self._give_up(largest, cause, on_done, again=len(busy) > 1)


def _cost(job: Job) -> Cost:
    return cost_of(job.item.size, job.runs_model, job.fetches)


# Allocations between two garbage collections; Python's default is 700. A file takes many, and its garbage can wait for
# a few other files.
_GC_THRESHOLD = 5_000
_OOM_SCORE = b"600"  # if memory runs out, the kernel should kill a worker, not the driver or another program


def main() -> None:
    """Run jobs from the driver until it closes the pipe."""
    driver, descriptor = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    faulthandler.enable()
    gc.set_threshold(_GC_THRESHOLD)
    # Without this, Python collects garbage in all of torch at exit; see ``ckptfix.cli`` about Triton.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    die_with(driver)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_SCORE)
    from ckptfix.zoo.performing import perform  # imported late: a worker without a driver ends at once

    while True:
        try:
            job, scratch = pipe.recv()
        except (EOFError, ConnectionError):
            return
        pipe.send(_fault_of_model(job) if isinstance(job, str) else perform(job, Path(scratch)))


def _fault_of_model(model: str) -> str | None:
    """Return why a model of a table cannot be resolved; None if it can."""
    from ckptfix.modules.factory import resolve

    try:
        resolve(model, 0)
    except CkptfixError as error:
        return error.worded(key_text)
    return None


if __name__ == "__main__":
    main()
