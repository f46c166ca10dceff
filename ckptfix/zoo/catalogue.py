"""The items of a run, each with what an earlier run made of it, in an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from ckptfix.zoo.books.manifest import Known
from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.index import Index, Row, packed, unpacked
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.places import Entry

_ITEM = "name BLOB, size INTEGER, stamp BLOB, kind TEXT, parts TEXT, fault BLOB, is_doubtful INTEGER"
_KNOWN = (
    "size INTEGER, stamp BLOB, settings BLOB, outcome TEXT, output BLOB, output_size INTEGER, parts TEXT, decision BLOB"
)
_SCHEMA = f"""
CREATE TABLE found ({_ITEM});
CREATE TABLE items (number INTEGER PRIMARY KEY, {_ITEM});
CREATE TABLE known (source BLOB PRIMARY KEY, {_KNOWN}) WITHOUT ROWID;
CREATE INDEX renamed ON known (output) WHERE output <> source;
"""
_COLUMNS = _ITEM.count(",") + 1


class Catalogue:
    """The items, numbered in the order in which they are done: what takes longest begins first, so that nothing is
    waited for at the end."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.nbytes = self._count = 0
        self._index = Index(_SCHEMA)
        self._index.run_many("INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?)", map(_row_of_item, self._counted(items)))
        self._index.run("INSERT INTO items SELECT NULL, * FROM found ORDER BY size DESC, name, rowid")
        self._index.run("DROP TABLE found")
        self._index.run("CREATE INDEX names ON items (name)")

    def _counted(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            self._count += 1
            self.nbytes += item.size
            yield item

    def __enter__(self) -> Catalogue:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        return (_item(row[1:]) for row in self._index.rows("SELECT * FROM items ORDER BY number"))

    def __contains__(self, name: object) -> bool:
        return self._index.one("SELECT 1 FROM items WHERE name = ?", packed(str(name))) is not None

    def learn(self, known: Iterable[tuple[str, Known]]) -> None:
        """Take in what an earlier run made of sources; the last of one source counts."""
        sql = "INSERT OR REPLACE INTO known VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._index.run_many(sql, (_row_of_known(source, each) for source, each in known))

    def known(self, source: str) -> Known | None:
        """What an earlier run made of a source."""
        return _known(self._index.one("SELECT * FROM known WHERE source = ?", packed(source)) or (None,))

    def is_shared(self, output: str, source: str) -> bool:
        """Whether an earlier run gave another source the same output: copies of one file, named by their hash."""
        where = "output = ? AND output <> source AND source <> ?"
        return self._index.one(f"SELECT 1 FROM known WHERE {where}", packed(output), packed(source)) is not None

    def known_beside(self) -> Iterator[Known]:
        """What an earlier run made of sources that are no items of this one."""
        where = "NOT EXISTS (SELECT 1 FROM items WHERE name = source)"
        for row in self._index.rows(f"SELECT * FROM known WHERE {where}"):
            if (known := _known(row)) is not None:
                yield known

    def known_again(self) -> Iterator[tuple[int, Item, Known]]:
        """The items that an earlier run had, too."""
        for number, item, known in self._pairs("JOIN", lambda number: True):
            if known is not None:
                yield number, item, known

    def all(self, is_wanted: Callable[[int], bool] = lambda number: True) -> Iterator[tuple[int, Item, Known | None]]:
        """The items by their numbers, those that are wanted, with what an earlier run made of them."""
        return self._pairs("LEFT JOIN", is_wanted)

    def _pairs(self, join: str, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, Item, Known | None]]:
        for row in self._index.rows(f"SELECT * FROM items {join} known ON source = name ORDER BY number"):
            if is_wanted(row[0]):
                yield row[0], _item(row[1 : _COLUMNS + 1]), _known(row[_COLUMNS + 1 :])


def _row_of_item(item: Item) -> Row:
    parts = json.dumps([(part.name, part.size, part.stamp) for part in item.parts]) if item.parts else None
    fault = None if item.fault is None else packed(item.fault)
    return packed(item.name), item.size, packed(item.stamp), item.kind.value, parts, fault, item.is_doubtful


def _item(row: Row) -> Item:
    name, size, stamp, kind, parts, fault, is_doubtful = row
    return Item(
        unpacked(name),
        size,
        unpacked(stamp),
        Kind(kind),
        () if parts is None else tuple(Entry(*part) for part in json.loads(parts)),
        None if fault is None else unpacked(fault),
        bool(is_doubtful),
    )


def _row_of_known(source: str, known: Known) -> Row:
    return (
        packed(source),
        known.size,
        packed(known.stamp),
        packed(known.settings),
        known.outcome.value,
        None if known.output is None else packed(known.output),
        known.output_size,
        json.dumps(known.parts) if known.parts else None,
        packed(known.decision),
    )


def _known(row: Row) -> Known | None:
    if row[0] is None:
        return None
    _, size, stamp, settings, outcome, output, output_size, parts, decision = row
    return Known(
        size,
        unpacked(stamp),
        unpacked(settings),
        Outcome(outcome),
        None if output is None else unpacked(output),
        output_size,
        () if parts is None else tuple(json.loads(parts)),
        unpacked(decision),
    )
