"""Brings the items of a zoo to where they can be opened."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from ckptfix.errors import CkptfixError
from ckptfix.zoo.listing import Item
from ckptfix.zoo.places import Place

AHEAD = 8
"""Copies of items that are being fetched, or wait for their turn, at the same time."""


@contextmanager
def on_this_machine(place: Place, item: Item, folder: Path) -> Iterator[Path]:
    """The local path of an item: its own, or that of a copy in ``folder``, which is removed at the end.

    Raises ``CkptfixError`` if it cannot be fetched, or is no longer what was listed."""
    try:
        yield _fetched(place, item, folder)
    finally:
        if place.root is None:
            shutil.rmtree(folder, ignore_errors=True)


def each_on_this_machine(
    place: Place, items: Sequence[Item], folder: Path, room: float
) -> Iterator[Path | CkptfixError]:
    """Yield the local path of each item, in their order, or why it cannot be fetched.

    Remote items are fetched ahead, as long as their copies take no more than ``room`` bytes together, or there is only
    one. A copy is removed when the next item is asked for."""
    waiting, under_way, taken = deque(enumerate(items)), deque[tuple[int, Path, Future[Path]]](), 0
    while waiting or under_way:
        while waiting and len(under_way) < AHEAD and (not under_way or taken + waiting[0][1].size <= room):
            number, item = waiting.popleft()
            copy = folder / str(number)
            under_way.append((item.size, copy, _begun(place, item, copy)))
            taken += item.size
        size, copy, future = under_way.popleft()
        try:
            found: Path | CkptfixError = future.result()
        except CkptfixError as error:
            found = error
        yield found
        if place.root is None:
            shutil.rmtree(copy, ignore_errors=True)
        taken -= size


def _fetched(place: Place, item: Item, folder: Path) -> Path:
    if place.root is not None:
        return place.root / item.name
    for entry in item.entries:
        goal = folder / entry.name
        goal.parent.mkdir(parents=True, exist_ok=True)
        place.fetch(entry.name, goal, entry)
    return folder / item.name


def _begun(place: Place, item: Item, folder: Path) -> Future[Path]:
    """An item that is being fetched. Nothing waits for such a thread at the end: Ctrl-C must not take minutes."""
    future: Future[Path] = Future()

    def fetch() -> None:
        try:
            future.set_result(_fetched(place, item, folder))
        except BaseException as error:  # noqa: BLE001 - it is raised when the result is asked for
            future.set_exception(error)

    if place.root is not None:
        fetch()
    else:
        Thread(target=fetch, name=f"fetching {item.name}", daemon=True).start()
    return future
