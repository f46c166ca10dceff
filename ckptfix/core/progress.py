"""What long work tells whoever watches it: how far it is, and what had to take a slower way.

The library prints nothing. The command line watches while a command runs; a program of its own may do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Watcher(Protocol):
    """Who is told. Both are called often: in every few megabytes of work."""

    def advanced(self, task: Task) -> None:
        """Some more of a task is done."""

    def slowed(self, reason: str, nbytes: int) -> None:
        """So many bytes took a slower way than the plain copy of a range of a file."""


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell the watcher of all work that is done meanwhile, in this thread."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@dataclass
class Task:
    """A pass over bytes: what is done (``writing model.pth``), how many of how many are behind it."""

    name: str
    total: int
    done: int = 0

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self.done += nbytes
        if (watcher := _watcher.get()) is not None:
            watcher.advanced(self)


def tell_slower(reason: str, nbytes: int) -> None:
    """Say that bytes take a slower way, and why: ``compressed``, ``cast``."""
    if nbytes and (watcher := _watcher.get()) is not None:
        watcher.slowed(reason, nbytes)
