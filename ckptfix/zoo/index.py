"""Tables that are as long as the zoo: in SQLite, so that memory holds the pages in use and no more.

The database has no name. What its cache has no room for goes to a temporary file in ``SQLITE_TMPDIR``, ``TMPDIR`` or
``/var/tmp``, which is gone when the process ends, however that is (https://www.sqlite.org/inmemorydb.html#temp_db). It
is an index and no book: each run makes it anew from the listing and the manifest."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ckptfix.errors import WriteError

BLOCK = 1000
"""Rows that are in memory at a time."""

_CACHE = 4096
"""KiB of pages that are kept in memory: a table of some ten thousand files never leaves it."""

Row = tuple[Any, ...]


class Index:
    """The tables of a schema. Several threads may use them."""

    def __init__(self, schema: str) -> None:
        self._lock = threading.RLock()
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        # Nothing is ever rolled back, and what is deleted is no secret.
        settings = f"journal_mode = OFF; PRAGMA secure_delete = OFF; PRAGMA cache_size = -{_CACHE}"
        self._database.executescript(f"PRAGMA {settings}; {schema}")

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            self._database.close()

    def run(self, sql: str, *values: object) -> int:
        """Carry a statement out; how many rows it changed."""
        with self._lock:
            return self._database.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Iterable[Row]) -> None:
        """Carry a statement out for each row of values, which may come as they are made."""
        with self._lock:
            self._database.execute("BEGIN")
            try:
                self._database.executemany(sql, rows)
            finally:
                if self._database.in_transaction:  # a full disk ends it
                    self._database.execute("COMMIT")

    def one(self, sql: str, *values: object) -> Row | None:
        """The first row of a query; None where there is none."""
        with self._lock:
            row: Row | None = self._database.execute(sql, values).fetchone()
        return row

    def rows(self, sql: str, *values: object) -> Iterator[Row]:
        """The rows of a query. Its tables are not to be changed meanwhile."""
        with self._lock:
            cursor = self._database.execute(sql, values)
        while True:
            with self._lock:
                block = cursor.fetchmany(BLOCK)
            if not block:
                return
            yield from block


def packed(text: str) -> bytes:
    """A text as a column holds it: any text, also the name of a file that is none, and in the order that Python has."""
    return str.encode(text, "utf-8", "surrogatepass")


def unpacked(raw: bytes) -> str:
    """The text that was packed."""
    return raw.decode("utf-8", "surrogatepass")


@contextmanager
def explaining() -> Iterator[None]:
    """Raise ``WriteError`` where the temporary file has no room."""
    try:
        yield
    except sqlite3.Error as error:
        raise WriteError(
            f"the index of the zoo, a temporary file, cannot be kept: {error}; name a folder with room in SQLITE_TMPDIR"
        ) from error
