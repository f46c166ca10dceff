"""Passes over many bytes, side by side, in portions that are worth handing to a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TypeVar

from ckptfix.bytes.copying import background

T = TypeVar("T")
Result = TypeVar("Result")

THREADS = 2
"""Two read nearly as fast as a machine with few cores can; the batch migration runs jobs of its own beside them."""


def side_by_side(work: Callable[[T], Result], batches: Sequence[T]) -> Iterator[Result]:
    """What comes of work on each batch, in their order. Threads do it, unless there is one batch or one processor."""
    if len(batches) < 2 or _processors() < 2:
        yield from map(work, batches)
        return
    with background(THREADS) as pool:
        yield from pool.map(work, batches)


@cache
def _processors() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batched(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Neighbours together as long as they have at most ``limit`` bytes: handing over each small one to a thread would
    take longer than the work on it."""
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
