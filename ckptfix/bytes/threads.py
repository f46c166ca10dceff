"""Passes over many bytes in threads. Reads, checksums, memcmp and flushes release Python's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

T = TypeVar("T")
Result = TypeVar("Result")
THREADS = 2  # two read nearly as fast as a machine with few cores can, and a migration runs several jobs
AHEAD = 2 * THREADS  # batches started before the first result is consumed
_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def background(threads: int = 1) -> Iterator[Executor]:
    """Provide a thread pool as a context; at its end, tasks that have not started are cancelled."""
    from concurrent.futures import ThreadPoolExecutor

    if _alone.get():
        yield _at_once()
        return
    # A thread of the pool uses no further threads: their buffers would only add up.
    pool = ThreadPoolExecutor(threads, initializer=_alone.set, initargs=(True,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def without_threads() -> Iterator[None]:
    """Run the tasks of ``background`` in the calling thread: for files so small that a thread costs more."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@cache
def _at_once() -> Executor:
    from concurrent.futures import Executor, Future

    class AtOnce(Executor):
        """An executor that runs each task inside ``submit``."""

        def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
            future: Future[T] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised by `Future.result`, as with a thread
                future.set_exception(error)
            return future

    return AtOnce()


def side_by_side(work: Callable[[T], Result], batches: Sequence[T]) -> Iterator[Result]:
    """Yield the results of ``work`` for each batch in order, computed in threads if that helps.

    At most ``AHEAD`` results wait to be consumed, so that large ones do not fill the memory."""
    if len(batches) < 2 or processors() < 2 or _alone.get():
        yield from map(work, batches)
        return
    with background(THREADS) as pool:
        waiting: deque[Future[Result]] = deque()
        for batch in batches:
            if len(waiting) == AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, batch))
        while waiting:
            yield waiting.popleft().result()


@cache
def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batched(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items into batches of at most ``limit`` bytes (a larger item is a batch of its own): passing
    each small item to a thread would take longer than the work on it."""
    batch: list[T] = []
    size = 0
    for item in items:
        count = nbytes(item)
        if batch and size + count > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += count
    if batch:
        yield batch
