"""What long work tells those who watch it: how far it is, and what it waits for.

The library prints nothing. The command line watches while a command runs; a program of its own may do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from msgspec import Struct, field

from ckptfix.errors import UsageError


class Watcher(Protocol):
    """Who watches long work. Both are called often: in every few megabytes of work."""

    def advanced(self, task: Task) -> None:
        """Some more of a task is done."""

    def waits(self, reason: str, seconds: float) -> None:
        """Nothing is done for some seconds."""


SMALL = 1_000_000  # bytes of a task that is done before anyone could read about it
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell the watcher of all work that is done meanwhile, in this thread."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Task(Struct):
    """A pass over bytes: what is done (``writing model.pth``), how many of how many are after it."""

    name: str
    total: int
    done: int = 0

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if (watcher := _watcher.get()) is not None:
            watcher.advanced(self)


class Bar(Protocol):
    """A progress bar, as tqdm has it."""

    def update(self, n: float) -> object: ...
    def close(self) -> object: ...


@contextmanager
def progress(bar: Callable[..., Bar] | None = None) -> Iterator[None]:
    """Show the long work that is done meanwhile, in this thread, as progress bars.

    ``bar`` makes one from ``total``, ``desc``, ``unit`` and ``unit_scale``; by default it is ``tqdm.auto.tqdm``, which
    draws in a notebook as in a terminal. Raises ``UsageError`` if that is not installed."""
    if bar is None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise UsageError("progress() draws with tqdm: pip install tqdm, or give it another bar") from error
        bar = tqdm
    bars = _Bars(bar)
    try:
        with watched_by(bars):
            yield
    finally:
        bars.close()


class _Bars(Struct):
    """Watches tasks, each with a bar of its own."""

    make: Callable[..., Bar]
    bars: dict[int, tuple[Task, Bar, int]] = field(default_factory=dict)

    def advanced(self, task: Task) -> None:
        if task.total < SMALL:
            return
        # The task is kept beside its bar, or its id could become that of another one.
        _, bar, shown = self.bars.get(id(task)) or (
            task,
            self.make(total=task.total, desc=task.name, unit="B", unit_scale=True),
            0,
        )
        done = min(task.done, task.total)  # a tensor may be read twice
        bar.update(done - shown)
        self.bars[id(task)] = (task, bar, done)

    def waits(self, reason: str, seconds: float) -> None:
        pass

    def close(self) -> None:
        for _, bar, _ in self.bars.values():
            bar.close()


def report_pause(reason: str, seconds: float) -> None:
    """Say that nothing is done for some seconds, and why."""
    if (watcher := _watcher.get()) is not None:
        watcher.waits(reason, seconds)
