"""Whether what an earlier run wrote down still holds."""

from __future__ import annotations

from collections.abc import Iterable

from ckptfix.zoo.books.record import Record
from ckptfix.zoo.items.listing import Item
from ckptfix.zoo.places import Place
from ckptfix.zoo.work.hashing import sha256_of_file, sha256_of_files
from ckptfix.zoo.work.workplace import Workplace


def still_holds(known: Record, item: Item, source: Place, destination: Place, workplace: Workplace) -> bool:
    """Whether the source and the output have the digests of the record."""
    names = [part.name for part in item.parts] or [item.name]
    if known.sha256 is not None and known.sha256 != _digest(source, names, bool(item.parts), workplace):
        return False
    if known.output is None:
        return True
    written = known.output_parts or (known.output,)
    return known.output_sha256 == _digest(destination, written, bool(known.output_parts), workplace)


def _digest(place: Place, names: Iterable[str], is_folder: bool, workplace: Workplace) -> str | None:
    """The sha256 of files of a place; None where one is missing."""
    names = list(names)
    if any(place.entry(name) is None for name in names):
        return None
    root = place.root
    if root is None:
        root = workplace.folder("proof")
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            place.fetch(name, root / name)
    return sha256_of_files(root, names) if is_folder else sha256_of_file(root / names[0])
