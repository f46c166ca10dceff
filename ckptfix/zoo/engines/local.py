"""The engine of one machine: worker processes that are kept alive over many jobs.

A worker that dies takes one job with it: the one it was doing. That is tried again when no other runs, in case it
lacked the memory that its neighbours had, and fails for good if the worker dies again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from ckptfix.errors import UsageError
from ckptfix.zoo.engines import TICK, patience
from ckptfix.zoo.resources import Budget, Cost, cost_of, memory_of
from ckptfix.zoo.work.job import Done, Job, Workplace, failed
from ckptfix.zoo.workspace import temporary_folder

_AHEAD = 64
"""Jobs that are considered if the next does not fit beside those that run."""

_SMALL, _BATCH = 1 << 20, 16
"""Files up to this size are sent to a worker in batches of up to so many, so that it does not wait for the driver."""

_TAIL = 4096


@dataclass
class Batch:
    """Jobs for one worker, which does one after the other."""

    jobs: deque[Job]
    cost: Cost


class Worker:
    """A worker process, as its driver sees it."""

    def __init__(self, scratch: Path, number: int) -> None:
        self.batch: Batch | None = None
        self.began = 0.0
        self._scratch = scratch
        self._log = scratch / f"worker-{number}.log"
        self.answers, theirs = Pipe()
        with self._log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckptfix.zoo.engines.worker", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,  # what the user's own code prints, or a crash
                stderr=log,
                pass_fds=[theirs.fileno()],
                # What it leaves when it is killed, such as the folder of a forward test, goes with the scratch folder.
                env={**os.environ, "TMPDIR": str(scratch.resolve())},
                start_new_session=True,
            )

    def give(self, batch: Batch) -> None:
        """Send jobs to a worker that has none: it reads, so that the driver never waits for it."""
        self.batch, self.began = batch, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which shows when its answer is read
            self.answers.send((list(batch.jobs), str(self._scratch)))

    def take(self) -> Done | None:
        """Return the next answer, when it comes; None if the worker has died."""
        try:
            done: Done = self.answers.recv()
        except (EOFError, OSError):
            return None
        assert self.batch is not None, "an answer without a question"
        self.batch.jobs.popleft()
        self.began = time.monotonic()
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
            name = signal.Signals(-code).name if -code in {known.value for known in signal.Signals} else str(-code)
            return f"the process that worked on it crashed with {name}"
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
        worker.answers.send((list(places), str(scratch)))
        try:
            faults = [worker.answers.recv() for _ in places]
        except (EOFError, OSError) as error:
            raise UsageError(f"{', '.join(places)}: {worker.cause_of_death()}") from error
        finally:
            worker.end()
    found = [
        f"{place}: {fault}" if place else fault for place, fault in zip(places.values(), faults, strict=True) if fault
    ]
    if found:
        raise UsageError("; ".join(found))


@dataclass
class LocalEngine:
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
            busy = {worker.answers: worker for worker in self._workers if worker.batch}
            if not busy:
                return
            for answers in wait(busy, TICK):
                assert isinstance(answers, Connection)
                self._collect(busy[answers], queue, on_done)
            if (now := time.monotonic()) - last >= TICK:
                last = now
                self._end_endless(queue, on_done)
                self._end_greedy(queue, on_done)
                on_wait(sum(1 for worker in self._workers if worker.batch))

    def _hand_out(self, queue: _Queue, count: int) -> None:
        """Give jobs to workers that have none."""
        while sum(1 for worker in self._workers if worker.batch) < count:
            batch = queue.next_that_fits(self.budget)
            if batch is None:
                return
            idle = next((worker for worker in self._workers if not worker.batch), None)
            if idle is None:
                self._started += 1
                idle = Worker(self.scratch, self._started)
                self._workers.append(idle)
            self.budget.take(batch.cost)
            idle.give(batch)

    def _collect(self, worker: Worker, queue: _Queue, on_done: Callable[[Done], None]) -> None:
        done = worker.take()
        if done is None:
            self._bury(worker, worker.cause_of_death(), queue, on_done)
            return
        if done.is_exhausted:
            self._dismiss(worker, queue)
        elif worker.batch is not None and not worker.batch.jobs:
            self.budget.give_back(worker.batch.cost)
            worker.batch = None
        on_done(done)

    def _bury(
        self, worker: Worker, cause: str, queue: _Queue, on_done: Callable[[Done], None], again: bool = True
    ) -> None:
        """Replace a dead worker: what it was doing is tried once more, and the other jobs of its batch are put back."""
        assert worker.batch is not None, "only workers with jobs are watched"
        first = worker.batch.jobs.popleft()
        self._dismiss(worker, queue)
        Workplace(self.scratch, first.number).clear()
        if again and first.attempt == 1:
            self._again.append(first)
        else:
            on_done(failed(first, f"{first.item.name}: {cause}"))

    def _dismiss(self, worker: Worker, queue: _Queue) -> None:
        """End a worker. The jobs that it has are still to be done, by another one."""
        worker.kill()
        self._workers.remove(worker)
        if worker.batch is not None:
            self.budget.give_back(worker.batch.cost)
            for job in reversed(worker.batch.jobs):
                Workplace(self.scratch, job.number).clear()
                queue.put_back(job)

    def _end_endless(self, queue: _Queue, on_done: Callable[[Done], None]) -> None:
        for worker in [worker for worker in self._workers if worker.batch]:
            assert worker.batch is not None
            limit = self.patience(worker.batch.jobs[0])
            if time.monotonic() - worker.began > limit:
                self._bury(worker, f"it took longer than {limit:.0f} s", queue, on_done, again=False)

    def _end_greedy(self, queue: _Queue, on_done: Callable[[Done], None]) -> None:
        """End the largest worker if all together hold more than the budget: what was expected of it was too little."""
        busy = [(memory_of(worker.process.pid), worker) for worker in self._workers if worker.batch]
        taken, worker = max(busy, key=lambda pair: pair[0], default=(0, None))
        if worker is None or worker.batch is None:
            return
        if sum(nbytes for nbytes, _ in busy) > max(self.budget.memory, worker.batch.cost.memory):
            cause = (
                f"it took {taken >> 20} MiB of memory, and --memory allows less; run the same command again with more"
            )
            self._bury(worker, cause, queue, on_done, again=len(busy) > 1)


def _is_small(job: Job) -> bool:
    return job.item.size <= _SMALL and not job.runs_model and not job.fetches


def _cost(job: Job) -> Cost:
    return cost_of(job.item.size, job.runs_model, job.fetches)


class _Queue:
    """The jobs that no worker has yet, in their order; one of the next may be done before its turn."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._seen: deque[Job] = deque()
        self._passed_over = 0

    def next_that_fits(self, budget: Budget) -> Batch | None:
        """Take the first job that fits into the budget, and small ones after a small one; None if none fits."""
        for place in range(_AHEAD):
            job = self._at(place)
            if job is None:
                return None
            if budget.fits(_cost(job)):
                self._passed_over = self._passed_over + 1 if place else 0
                del self._seen[place]
                batch = Batch(deque([job]), _cost(job))
                while _is_small(job) and len(batch.jobs) < _BATCH and (job := self._at(place)) and _is_small(job):
                    batch.jobs.append(job)
                    del self._seen[place]
                return batch
            if self._passed_over >= _AHEAD:
                return None  # its turn has come: what runs has to end first
        return None

    def _at(self, place: int) -> Job | None:
        if place == len(self._seen) and (job := next(self._jobs, None)) is not None:
            self._seen.append(job)
        return self._seen[place] if place < len(self._seen) else None

    def put_back(self, job: Job) -> None:
        """Put a job before all others."""
        self._seen.appendleft(job)
