"""The engine of one machine: worker processes that are kept alive over many jobs.

A worker that dies takes one job with it: the one it was doing. That is tried again when no other runs, in case it
lacked the memory that its neighbours had, and fails for good if the worker dies again."""

from __future__ import annotations

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
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.options import key_text
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.smoke.launch import die_with, signal_name
from ckptfix.zoo.job import Done, Job, Workplace, failed
from ckptfix.zoo.resources import Budget, Cost, cost_of, memory_of
from ckptfix.zoo.workspace import temporary_folder

TICK = 0.25  # seconds between two calls of `on_wait`
_PATIENCE, _SLOWEST = 1800.0, 1e6


class Engine(Protocol):
    """Runs jobs, several at a time, and survives what becomes of any of them."""

    is_grouped: bool  # whether outputs come back staged, on this machine, for the driver to flush and rename in groups

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs, and call ``on_done`` in this thread for each, in the order in which they end.

        ``jobs`` come with the largest first, and are taken as they are needed. ``on_wait`` is called a few times a
        second with the number of jobs that are under way. Any exception, such as that of Ctrl-C, ends the jobs under
        way, and nothing of them is left."""


def patience(job: Job) -> float:
    """Return the seconds after which a job counts as endless: half an hour, and a second for each MB."""
    timeout: float = job.treatment.settings.get("timeout", 0)
    return _PATIENCE + job.item.size / _SLOWEST + 8 * timeout


_AHEAD = 64  # jobs that are considered if the next does not fit beside those that run
_TAIL = 4096


class Worker:
    """A worker process, as its driver sees it."""

    def __init__(self, scratch: Path, number: int) -> None:
        self.job: Job | None = None
        self.began = 0.0
        self._scratch = scratch
        self._log = scratch / f"worker-{number}.log"
        self.answers, theirs = Pipe()
        with self._log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckptfix.zoo.engine", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,  # what the user's own code prints, or a crash
                stderr=log,
                pass_fds=[theirs.fileno()],
                # What it leaves when it is killed, such as the folder of a forward test, goes with the scratch folder.
                env={**os.environ, "TMPDIR": str(scratch.resolve())},
                start_new_session=True,
            )

    def give(self, job: Job) -> None:
        """Send a job to a worker that has none: it reads, so that the driver never waits for it."""
        self.job, self.began = job, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which shows when its answer is read
            self.answers.send((job, str(self._scratch)))

    def take(self) -> Done | None:
        """Return the answer, when it comes; None if the worker has died."""
        try:
            done: Done = self.answers.recv()
        except (EOFError, OSError):
            return None
        return done

    def end(self) -> None:
        """Let it go when it has nothing more to do."""
        self.answers.close()
        self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.answers.close()

    def cause_of_death(self) -> str:
        """Say how it ended."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return (
                "the process that worked on it was killed (SIGKILL), also when no other ran, probably because memory"
                " ran out; run the same command again on a machine with more"
            )
        if code < 0:
            return f"the process that worked on it crashed with {signal_name(-code) or -code}"
        lines = self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
        last = f" ({lines[-1]})" if lines else ""
        return f"the process that worked on it ended by itself with exit status {code}{last}"


def check_models(places: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if models name nothing: once for all of them, before the first file. ``places`` says for
    each which table it is from. This imports the user's code, in a worker: the driver stays small, and survives it."""
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


class LocalEngine(Struct):
    """Runs jobs in ``count`` processes at most, within a budget. ``scratch`` is a folder for temporary files."""

    count: int
    budget: Budget
    scratch: Path
    patience: Callable[[Job], float] = patience
    is_grouped: bool = True
    _workers: list[Worker] = field(default_factory=list)
    _again: list[Job] = field(default_factory=list)
    _started: int = 0

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs; see ``Engine``."""
        self._again = []
        try:
            self._run(_Queue(iter(jobs)), self.count, on_done, on_wait)
            self._run(_Queue(replace(job, attempt=2) for job in self._again), 1, on_done, on_wait)
            for worker in self._workers:
                worker.end()
        except BaseException:
            for worker in self._workers:
                worker.kill()
            raise
        finally:
            self._workers = []

    def _run(self, queue: _Queue, count: int, on_done: Callable[[Done], None], on_wait: Callable[[int], None]) -> None:
        last = 0.0
        while True:
            self._hand_out(queue, count)
            busy = {worker.answers: worker for worker in self._workers if worker.job}
            if not busy:
                return
            for answers in wait(busy, TICK):
                assert isinstance(answers, Connection)
                self._collect(busy[answers], on_done)
            if (now := time.monotonic()) - last >= TICK:
                last = now
                for worker in [each for each in self._workers if each.job]:
                    assert worker.job is not None
                    if now - worker.began > (limit := self.patience(worker.job)):
                        self._bury(worker, f"it took longer than {limit:.0f} s", on_done, again=False)
                self._end_greedy(on_done)
                on_wait(sum(1 for worker in self._workers if worker.job))

    def _hand_out(self, queue: _Queue, count: int) -> None:
        while sum(1 for worker in self._workers if worker.job) < count:
            job = queue.next_that_fits(self.budget)
            if job is None:
                return
            idle = next((worker for worker in self._workers if not worker.job), None)
            if idle is None:
                self._started += 1
                idle = Worker(self.scratch, self._started)
                self._workers.append(idle)
            self.budget.take(_cost(job))
            idle.give(job)

    def _collect(self, worker: Worker, on_done: Callable[[Done], None]) -> None:
        done = worker.take()
        if done is None:
            self._bury(worker, worker.cause_of_death(), on_done)
        else:
            self._release(worker, is_fit=not done.is_exhausted)
            on_done(done)

    def _bury(self, worker: Worker, cause: str, on_done: Callable[[Done], None], again: bool = True) -> None:
        """Remove a worker that died or must end: what it was doing is tried once more, or has failed."""
        job = self._release(worker, is_fit=False)
        Workplace(self.scratch, job.number).clear()
        if again and job.attempt == 1:
            self._again.append(job)
        else:
            on_done(failed(job, f"{job.item.name}: {cause}"))

    def _release(self, worker: Worker, is_fit: bool) -> Job:
        """Take the job from a worker, and end the worker unless it is fit for another one."""
        job, worker.job = worker.job, None
        assert job is not None, "only workers with jobs are watched"
        self.budget.give_back(_cost(job))
        if not is_fit:
            worker.kill()
            self._workers.remove(worker)
        return job

    def _end_greedy(self, on_done: Callable[[Done], None]) -> None:
        """End the largest worker if all together hold more than the budget: what was expected of it was too little."""
        busy = [(memory_of(worker.process.pid), worker) for worker in self._workers if worker.job]
        taken, worker = max(busy, key=lambda pair: pair[0], default=(0, None))
        if worker is None or worker.job is None:
            return
        if sum(nbytes for nbytes, _ in busy) > max(self.budget.memory, _cost(worker.job).memory):
            cause = (
                f"it took {taken >> 20} MiB of memory, and --memory allows less; run the same command again with more"
            )
            self._bury(worker, cause, on_done, again=len(busy) > 1)


def _cost(job: Job) -> Cost:
    return cost_of(job.item.size, job.runs_model, job.fetches)


class _Queue:
    """The jobs that no worker has yet, in their order; one of the next may be done before its turn."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._seen: deque[Job] = deque()
        self._passed_over = 0

    def next_that_fits(self, budget: Budget) -> Job | None:
        """Take the first job that fits into the budget; None if none fits, or what was passed over has to be next."""
        for place in range(_AHEAD if self._passed_over < _AHEAD else 1):
            if place == len(self._seen):
                self._seen.extend(islice(self._jobs, 1))
            if place == len(self._seen):
                return None
            if budget.fits(_cost(job := self._seen[place])):
                self._passed_over = self._passed_over + 1 if place else 0
                del self._seen[place]
                return job
        return None


# Objects after which Python looks for garbage, 700 by default. A file has many, and its garbage can wait for a few
# others.
_NEW_OBJECTS = 5_000
_EASY_PREY = b"600"  # if memory runs out, the kernel should end a worker and not the driver, nor another program


def main() -> None:
    """Do jobs until the driver closes the pipe."""
    driver, descriptor = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    faulthandler.enable()
    gc.set_threshold(_NEW_OBJECTS)
    # Else Python goes through all of torch once more when it ends; see ``ckptfix.cli`` for Triton.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    die_with(driver)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_EASY_PREY)
    from ckptfix.zoo.performing import perform  # only now: a worker without a driver ends at once

    while True:
        try:
            job, scratch = pipe.recv()
        except (EOFError, ConnectionError):
            return
        pipe.send(_fault_of_model(job) if isinstance(job, str) else perform(job, Path(scratch)))


def _fault_of_model(model: str) -> str | None:
    """Return why a model line of a table names nothing; None if it names something."""
    from ckptfix.modules.factory import resolve

    try:
        resolve(model, 0)
    except CkptfixError as error:
        return error.worded(key_text)
    return None


if __name__ == "__main__":
    main()
