"""Progress of long work, and pauses, reported to a watcher.

The library prints nothing. The command line installs a watcher while a command runs; other programs can do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from msgspec import Struct, field

from ckptfix.errors import UsageError


class Watcher(Protocol):
    """A receiver of progress. Its methods are called often, every few megabytes."""

    def advanced(self, task: Task) -> None:
        """Handle an increase of ``task.done``."""

    def waits(self, reason: str, seconds: float) -> None:
        """Handle a pause of some seconds."""


SMALL = 1_000_000  # bytes; smaller tasks are done too fast to show
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Report all work done in this context and thread to the watcher."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Task(Struct):
    """A pass over bytes: its name (``writing model.pth``), the total, and the bytes done."""

    name: str
    total: int
    done: int = 0

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if (watcher := _watcher.get()) is not None:
            watcher.advanced(self)


class Bar(Protocol):
    """A progress bar with the interface of tqdm."""

    def update(self, n: float) -> object: ...
    def close(self) -> object: ...


@contextmanager
def progress(bar: Callable[..., Bar] | None = None) -> Iterator[None]:
    """Show long work in this context and thread as progress bars.

    ``bar`` creates one from ``total``, ``desc``, ``unit`` and ``unit_scale``; the default is ``tqdm.auto.tqdm``, which
    works in notebooks and terminals. Raises ``UsageError`` if tqdm is not installed."""
    if bar is None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise UsageError("progress() needs tqdm: pip install tqdm, or pass another bar") from error
        bar = tqdm
    bars = _Bars(bar)
    try:
        with watched_by(bars):
            yield
    finally:
        bars.close()


class _Bars(Struct):
    """A watcher that shows one bar per task."""

    make: Callable[..., Bar]
    bars: dict[int, tuple[Task, Bar, int]] = field(default_factory=dict)

    def advanced(self, task: Task) -> None:
        if task.total < SMALL:
            return
        # The task is kept with its bar, so that its id is not reused.
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
    if (watcher := _watcher.get()) is not None:
        watcher.waits(reason, seconds)
