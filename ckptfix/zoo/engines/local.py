"""The engine of one machine: worker processes that are kept alive over many jobs.

A worker that dies takes one job with it: the one it was doing. That is tried again when no other runs, in case that it
was the memory of its neighbours that it lacked, and fails for good if it dies again. One that lives on after memory ran
out is replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from selectors import EVENT_READ, PollSelector

from ckptfix.zoo.engines.budget import Budget, cost_of
from ckptfix.zoo.engines.child import Child, Order
from ckptfix.zoo.work.job import Done, Job, failed
from ckptfix.zoo.work.workplace import Workplace

_TICK = 0.25
"""Seconds between two calls of ``on_wait``."""

_AHEAD = 64
"""Jobs that are looked at for one that fits beside those that run, where the next does not."""

_SMALL = 1 << 20
"""Of files up to this size, several are sent to a worker at a time."""

_PATIENCE = 1800.0
_SLOWEST = 1e6
"""A job may take half an hour, and a second for each of so many bytes; its forward test has a clock of its own."""


def patience(job: Job) -> float:
    """Seconds after which a job is taken for one that never ends."""
    timeout: float = job.treatment.settings.get("timeout", 0)
    return _PATIENCE + job.item.size / _SLOWEST + 8 * timeout


@dataclass
class LocalEngine:
    """Runs jobs in ``workers`` processes at most, within a budget. ``scratch`` is a folder for temporary files."""

    workers: int
    budget: Budget
    scratch: Path
    patience: Callable[[Job], float] = patience
    is_grouped: bool = True
    _children: list[Child] = field(default_factory=list)
    _again: list[Job] = field(default_factory=list)
    _started: int = 0

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs; see ``Engine``."""
        self._again = []
        try:
            self._run(_Queue(iter(jobs)), self.workers, on_done, on_wait)
            self._run(_Queue(replace(job, attempt=2) for job in self._again), 1, on_done, on_wait)
            for child in self._children:
                child.end()
        except BaseException:
            for child in self._children:
                child.kill()
            raise
        finally:
            self._children = []

    def _run(
        self, queue: _Queue, workers: int, on_done: Callable[[Done], None], on_wait: Callable[[int], None]
    ) -> None:
        told = 0.0
        while True:
            self._hand_out(queue, workers)
            busy = [child for child in self._children if child.orders]
            if not busy:
                return
            for child in _ready(busy, _TICK):
                self._collect(child, queue, on_done)
            self._end_endless(busy, queue, on_done)
            if (now := time.monotonic()) - told >= _TICK:
                told = now
                on_wait(sum(len(child.orders) for child in busy))

    def _hand_out(self, queue: _Queue, workers: int) -> None:
        """Give jobs to workers that have nothing to do, and small ones ahead to the others."""
        while True:
            order = queue.next_that_fits(self.budget)
            if order is None:
                return
            child = self._child_for(order, workers)
            if child is None:
                queue.put_back(order)
                return
            self.budget.take(order.cost)
            child.give(order)

    def _child_for(self, order: Order, workers: int) -> Child | None:
        idle = next((child for child in self._children if not child.orders), None)
        if idle is not None and sum(1 for child in self._children if child.orders) < workers:
            return idle
        if idle is None and len(self._children) < workers:
            self._started += 1
            child = Child(self.scratch, self._started)
            self._children.append(child)
            return child
        if _is_small(order.job):
            open_ones = [
                child
                for child in self._children
                if child.orders and child.has_room() and all(_is_small(each.job) for each in child.orders)
            ]
            return min(open_ones, key=lambda child: len(child.orders), default=None)
        return None

    def _collect(self, child: Child, queue: _Queue, on_done: Callable[[Done], None]) -> None:
        answer = child.take()
        if answer is None:
            self._bury(child, child.cause_of_death(), queue, on_done)
            return
        order, done = answer
        self.budget.give_back(order.cost)
        if done.is_exhausted:
            self._dismiss(child, queue)
        on_done(done)

    def _bury(
        self, child: Child, cause: str, queue: _Queue, on_done: Callable[[Done], None], again: bool = True
    ) -> None:
        """A worker is dead: what it was doing is tried once more, and the jobs behind that as if nothing had been."""
        first = child.orders.popleft()
        self._dismiss(child, queue)
        self.budget.give_back(first.cost)
        Workplace(self.scratch, first.job.number).clear()
        if again and first.job.attempt == 1:
            self._again.append(first.job)
        else:
            on_done(failed(first.job, f"{first.job.item.name}: {cause}"))

    def _dismiss(self, child: Child, queue: _Queue) -> None:
        """End a worker. The jobs that it has are still to be done, by another one."""
        child.kill()
        self._children.remove(child)
        while child.orders:
            order = child.orders.pop()
            self.budget.give_back(order.cost)
            Workplace(self.scratch, order.job.number).clear()
            queue.put_back(order)

    def _end_endless(self, busy: list[Child], queue: _Queue, on_done: Callable[[Done], None]) -> None:
        for child in busy:
            if child in self._children and child.orders:
                first = child.orders[0]
                limit = self.patience(first.job)
                if time.monotonic() - first.begun > limit:
                    self._bury(child, f"it took longer than {limit:.0f} s", queue, on_done, again=False)


def _is_small(job: Job) -> bool:
    return job.item.size <= _SMALL and not job.runs_model and not job.fetches


def _ready(children: list[Child], timeout: float) -> list[Child]:
    with PollSelector() as selector:  # it has no descriptor, which would have to be made and closed each time
        for child in children:
            selector.register(child.answers, EVENT_READ, child)
        return [key.data for key, _ in selector.select(timeout)]


class _Queue:
    """The jobs that nobody has yet, in their order; of some of them one may be done before its turn."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._seen: deque[Order] = deque()
        self._passed_over = 0

    def next_that_fits(self, budget: Budget) -> Order | None:
        """Take the first job that fits into the budget; None where none of the next does, or there is none."""
        for place in range(_AHEAD):
            if place == len(self._seen):
                job = next(self._jobs, None)
                if job is None:
                    return None
                self._seen.append(Order(job, cost_of(job.item.size, job.runs_model, job.fetches)))
            if budget.fits(self._seen[place].cost):
                self._passed_over = self._passed_over + 1 if place else 0
                order = self._seen[place]
                del self._seen[place]
                return order
            if self._passed_over >= _AHEAD:
                return None  # its turn has come: what runs is to end first
        return None

    def put_back(self, order: Order) -> None:
        """Put a job in front of all others."""
        self._seen.appendleft(order)
