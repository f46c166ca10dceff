"""Brings an item of a zoo to where it can be opened."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptfix.zoo.listing import Item
from ckptfix.zoo.places import Place


@contextmanager
def on_this_machine(place: Place, item: Item, folder: Path) -> Iterator[Path]:
    """The local path of an item: where it lies; or that of a copy in ``folder``, which is gone at the end.

    Raises ``CkptfixError`` where it cannot be fetched, or is no longer what was listed."""
    if place.root is not None:
        yield place.root / item.name
        return
    try:
        for entry in item.entries:
            goal = folder / entry.name
            goal.parent.mkdir(parents=True, exist_ok=True)
            place.fetch(entry.name, goal, entry)
        yield folder / item.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)
