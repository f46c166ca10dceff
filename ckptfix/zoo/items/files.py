"""The files of a zoo while it is listed: an index of them, with what is found out about each.

What is asked about many of them is asked in blocks, so that answers can be noted meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import count

from ckptfix.reading.folders.shard_index import Numbering
from ckptfix.zoo.index import BLOCK, Index, Row, packed, unpacked
from ckptfix.zoo.items.sniffing import Looks, by_name
from ckptfix.zoo.places import Entry

_SCHEMA = """
CREATE TABLE files (
    name BLOB PRIMARY KEY,
    size INTEGER NOT NULL,
    stamp BLOB NOT NULL,
    fault BLOB,               -- why it cannot be read
    special INTEGER NOT NULL,
    folder BLOB,              -- all from here on is NULL for what belongs to no folder: it has a fault, or is kept out
    role INTEGER,             -- what its name makes of it in a folder that is one checkpoint
    whole BLOB,               -- of a numbered shard: the name that the whole would have
    looks INTEGER,            -- NULL as long as that is not known
    taken INTEGER NOT NULL DEFAULT 0  -- how it became a part of a group
) WITHOUT ROWID;
CREATE INDEX in_roles ON files (folder, role) WHERE role > 0;
CREATE INDEX shards ON files (folder, whole) WHERE whole IS NOT NULL;
CREATE INDEX parts ON files (folder) WHERE taken > 0;
"""
_ADD = "INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"


class Role(IntEnum):
    """What the name of a file can make of it in a folder that is one checkpoint."""

    CHUNK = 1
    """Of torch.distributed.checkpoint."""
    METADATA = 2
    """Of the same."""
    PICKLE = 3
    """Of an unpacked torch file."""
    RANK = 4
    """Of the shards of ranks."""


class Taken(IntEnum):
    """How a file became a part of a group."""

    BY_FOLDER = 1
    BY_INDEX = 2
    BY_NUMBER = 3


_ROLE = re.compile(
    r"(?P<CHUNK>.*\.distcp)|(?P<METADATA>\.metadata|__\d{1,9}\.metadata)|(?P<PICKLE>data\.pkl)"
    r"|(?P<RANK>shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors)",
    re.DOTALL,
)
_LOOKS = dict(zip(count(), Looks, strict=False))
_NUMBERS = {looks: number for number, looks in _LOOKS.items()}


class Files:
    """The files of a zoo by their names and their folders."""

    def __init__(self) -> None:
        self._index = Index(_SCHEMA)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()

    def fill(self, entries: Iterable[Entry], is_kept_out: Callable[[str], bool]) -> None:
        """Take in what is in the zoo."""
        self._index.run_many(
            _ADD, (_row(entry, entry.fault is None and not is_kept_out(entry.name)) for entry in entries)
        )

    def keep_out(self, folder: str) -> None:
        """Let what lies in a folder belong to none."""
        unknown = "folder = NULL, role = NULL, whole = NULL, looks = NULL"
        self._index.run(f"UPDATE files SET {unknown} WHERE name >= ? AND name < ? AND folder = ?", *_inside(folder))

    def take(self, parts: Iterable[Entry], how: Taken) -> None:
        """Note that files are the parts of a group."""
        rows = ((how, packed(part.name)) for part in parts)
        self._index.run_many("UPDATE files SET taken = ? WHERE name = ? AND taken = 0", rows)

    def note(self, seen: Iterable[tuple[Entry, Looks | str]]) -> None:
        """Note what files look like, or why that cannot be told."""
        rows = (
            (None, packed(looks), packed(entry.name))
            if isinstance(looks, str)
            else (_NUMBERS[looks], None, packed(entry.name))
            for entry, looks in seen
        )
        self._index.run_many("UPDATE files SET looks = ?, fault = ? WHERE name = ?", rows)

    def get(self, name: str) -> Entry | None:
        """The file of a name, where it belongs to a folder."""
        return next(iter(self._entries("name = ? AND folder IS NOT NULL", packed(name))), None)

    def has_folder(self, folder: str) -> bool:
        """Whether there are files in a folder."""
        where = "name >= ? AND name < ? AND folder = ?"
        return self._index.one(f"SELECT 1 FROM files WHERE {where}", *_inside(folder)) is not None

    def below(self, folder: str) -> list[Entry]:
        """The files of a folder and of all folders in it."""
        return self._entries("name >= ? AND name < ? AND folder IS NOT NULL", *_inside(folder)[:2])

    def in_role(self, folder: str, role: Role) -> list[Entry]:
        """The files of a folder that have a role in it."""
        return self._entries("folder = ? AND role = ? AND role > 0", packed(folder), role)

    def shards_of(self, folder: str, whole: str) -> list[Entry]:
        """The numbered shards in a folder of what would be called so."""
        return self._entries("folder = ? AND whole = ?", packed(folder), packed(whole))

    def shards_in(self, folder: str) -> list[Entry]:
        """The numbered shards in a folder that look like checkpoints: data sets are numbered in the same way."""
        where = "folder = ? AND whole IS NOT NULL AND looks = ?"
        return self._entries(where, packed(folder), _NUMBERS[Looks.CHECKPOINT])

    def _entries(self, where: str, *values: object) -> list[Entry]:
        return [*map(_entry, self._index.rows(f"SELECT name, size, stamp FROM files WHERE {where}", *values))]

    def has_parts(self, folder: str) -> bool:
        """Whether some of the files in a folder are the parts of a group."""
        return self._index.one("SELECT 1 FROM files WHERE folder = ? AND taken > 0", packed(folder)) is not None

    def folders_with_roles(self) -> Iterator[str]:
        """The folders with files that have a role in it, in order."""
        return self._folders("role > 0")

    def folders_with_shards(self) -> Iterator[str]:
        """The folders with numbered shards, in order."""
        return self._folders("whole IS NOT NULL")

    def _folders(self, where: str) -> Iterator[str]:
        rows = self._blocks(f"SELECT DISTINCT folder FROM files WHERE folder >= ? AND {where} ORDER BY folder")
        return (unpacked(folder) for (folder,) in rows)

    def indexes(self) -> Iterator[Entry]:
        """The files that look like an index of shards, and are no part of a folder that is taken whole."""
        where = f"looks = {_NUMBERS[Looks.INDEX]} AND taken <> {Taken.BY_FOLDER}"
        return map(
            _entry, self._blocks(f"SELECT name, size, stamp FROM files WHERE name >= ? AND {where} ORDER BY name")
        )

    def unclear(self) -> Iterator[tuple[Entry, bool]]:
        """The files of which only their bytes can tell what they are, and whether they are numbered like shards."""
        columns = "name, size, stamp, whole IS NOT NULL"
        where = "looks IS NULL AND fault IS NULL AND folder IS NOT NULL AND taken = 0 AND size > 0"
        for row in self._blocks(f"SELECT {columns} FROM files WHERE name >= ? AND {where} ORDER BY name"):
            yield _entry(row), bool(row[3])

    def single(self) -> Iterator[tuple[Entry, Looks | None]]:
        """The files that are no part of a group, in order."""
        columns = "name, size, stamp, fault, special, looks"
        for row in self._blocks(f"SELECT {columns} FROM files WHERE name >= ? AND taken = 0 ORDER BY name"):
            fault = None if row[3] is None else unpacked(row[3])
            yield Entry(unpacked(row[0]), row[1], unpacked(row[2]), fault, bool(row[4])), _LOOKS.get(row[5])

    def _blocks(self, sql: str) -> Iterator[Row]:
        """The rows of a query that begins with the value given, in the order of the first column: block by block."""
        first = b""
        while block := list(self._index.rows(f"{sql} LIMIT {BLOCK}", first)):
            yield from block
            first = block[-1][0] + b"\0"


def _row(entry: Entry, has_folder: bool) -> Row:
    name = packed(entry.name)
    fault = None if entry.fault is None else packed(entry.fault)
    common = (name, entry.size, packed(entry.stamp), fault, entry.special)
    if not has_folder:
        return (*common, None, None, None, None)
    last = entry.name.rpartition("/")[2]
    role, numbering, looks = _ROLE.fullmatch(last), Numbering.of(last), by_name(last)
    return (
        *common,
        name.rpartition(b"/")[0],
        None if role is None else Role[str(role.lastgroup)],
        None if numbering is None else packed(whole_of(numbering)),
        None if looks is None else _NUMBERS[looks],
    )


def whole_of(numbering: Numbering) -> str:
    """What the whole of numbered shards would be called."""
    return numbering.stem + numbering.suffix


def _entry(row: Row) -> Entry:
    return Entry(unpacked(row[0]), row[1], unpacked(row[2]))


def _inside(folder: str) -> tuple[bytes, bytes, bytes]:
    """Between which names those below a folder lie; and the folder."""
    raw = packed(folder)
    return (raw + b"/", raw + b"0", raw) if raw else (b"", b"\xff", raw)  # "0" comes next after "/"
