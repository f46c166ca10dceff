"""What runs the jobs of a migration: processes of this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ckptfix.zoo.work.job import Done, Job

TICK = 0.25
"""Seconds between two calls of ``on_wait``."""

_PATIENCE = 1800.0
_SLOWEST = 1e6


class Engine(Protocol):
    """Runs jobs, several at a time, and survives what becomes of any of them."""

    is_grouped: bool
    """Whether outputs come back staged, on this machine, for the driver to flush and rename in groups."""

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs, and call ``on_done`` in this thread for each, in the order in which they end.

        ``jobs`` come with the largest first, and are taken as they are needed. ``on_wait`` is called a few times a
        second with the number of jobs that are under way. Any exception, such as that of Ctrl-C, ends the jobs under
        way, and nothing of them is left."""


def patience(job: Job) -> float:
    """Return the seconds after which a job counts as endless: half an hour, and a second for each MB. Its forward test
    has its own limit."""
    timeout: float = job.treatment.settings.get("timeout", 0)
    return _PATIENCE + job.item.size / _SLOWEST + 8 * timeout
