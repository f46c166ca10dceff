"""What a migration wants of the engine that runs its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ckptfix.zoo.work.job import Done, Job


class Engine(Protocol):
    """Runs jobs, several at a time, and survives whatever becomes of one of them."""

    is_grouped: bool
    """Whether outputs come back staged, on this machine, for the driver to flush and rename in groups."""

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs, and say of each in this thread what came of it, in whatever order they end.

        ``jobs`` come with the largest first, and are taken as they are needed. ``on_wait`` is called a few times a
        second with the number of jobs that are under way. Any exception, as that of Ctrl-C, ends the jobs under way,
        and nothing of them is left."""
