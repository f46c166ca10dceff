"""A file of JSON lines, one for each source, that survives whatever kills the process.

Lines are appended and flushed to the disk in groups. What a kill leaves of the last line is dropped when the journal
is opened again. A later line of a source stands for all before it; ``close`` leaves one line of each, sorted by source,
so that two migrations that did the same in another order leave the same file. Where each line lies is in an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from ckptfix.errors import UsageError, WriteError
from ckptfix.writing.output import temporary_beside
from ckptfix.zoo.index import BLOCK, Index, Row, packed

SOURCE = "source"
_BEGIN = b'{"source":"'
_DECODER = json.JSONDecoder()

_SCHEMA = "CREATE TABLE places (source BLOB PRIMARY KEY, place INTEGER NOT NULL) WITHOUT ROWID"
_PUT = "INSERT OR REPLACE INTO places VALUES (?, ?)"

T = TypeVar("T")


class Journal:
    """The lines of a file by their field ``source``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places = Index(_SCHEMA)
        self._is_tidy = True
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise _unwritten(path, error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._places.close()

    def __len__(self) -> int:
        (count,) = self._places.one("SELECT count(*) FROM places") or (0,)
        return int(count)

    def __contains__(self, source: object) -> bool:
        return self._place(str(source)) is not None

    def _place(self, source: str) -> int | None:
        row = self._places.one("SELECT place FROM places WHERE source = ?", packed(source))
        return None if row is None else row[0]

    def load(self) -> Iterator[dict[str, Any]]:
        """All lines in the order of the file, older ones of a source too. Drops the torn last line.

        Raises ``UsageError`` where another line is none of a journal."""
        return (line for _, line in self._load(_parse))

    def index(self) -> None:
        """The same without a look at what the lines say."""
        for _ in self._load(_source_of):
            pass

    def _load(self, parse: Callable[[bytes], tuple[str, T]]) -> Iterator[tuple[str, T]]:
        self._file.seek(0)
        start, last = 0, ""
        places: list[Row] = []
        for number, line in enumerate(self._file, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it is torn")
                source, entry = parse(line)
                places.append((packed(source), start))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if self._file.read(1):
                    raise UsageError(
                        f"{self.path}: line {number} is none of a migration ({error}); migrate into a new folder"
                    ) from error
                self._file.truncate(start)
                break
            self._is_tidy &= last < source
            start, last = start + len(line), source
            if len(places) == BLOCK:
                self._places.run_many(_PUT, places)
                places.clear()
            yield source, entry
        self._places.run_many(_PUT, places)
        self._file.seek(0, os.SEEK_END)

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Add lines, which are on the disk when this returns. Raises ``WriteError`` where it takes no more."""
        self.append_lines([(entry[SOURCE], line_of(entry)) for entry in entries])

    def append_lines(self, lines: Sequence[tuple[str, bytes]]) -> None:
        """The same for lines as ``line_of`` gives them, each with its source."""
        if not lines:
            return
        place = self._file.tell()
        try:
            self._file.write(b"".join([line for _, line in lines]))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritten(self.path, error) from error
        ends = accumulate((len(line) for _, line in lines), initial=place)
        self._places.run_many(_PUT, [(packed(source), start) for (source, _), start in zip(lines, ends, strict=False)])
        self._is_tidy = False

    def entry(self, source: str) -> dict[str, Any]:
        """The line that stands for a source."""
        if (place := self._place(source)) is None:
            raise KeyError(source)
        with self.path.open("rb") as file:
            file.seek(place)
            line: dict[str, Any] = json.loads(file.readline())
        return line

    def drop(self, source: str) -> None:
        """Leave a source out when the journal is tidied."""
        self._is_tidy &= not self._places.run("DELETE FROM places WHERE source = ?", packed(source))

    def lines(self) -> Iterator[dict[str, Any]]:
        """The line that stands for each source, sorted by source."""
        return map(json.loads, self.raw_lines())

    def raw_lines(self) -> Iterator[bytes]:
        """The same as they are in the file."""
        return (raw for _, raw in self._raw())

    def tidy(self) -> None:
        """Leave one line of each source, sorted, in a new file that takes the place of the old one."""
        if self._is_tidy:
            return
        places = Index(_SCHEMA)
        with temporary_beside(self.path, self.path) as temporary:
            try:
                with temporary.open("wb", buffering=1 << 20) as file:
                    places.run_many(_PUT, self._copied(file))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
                self._file.close()
                self._file = self.path.open("a+b")
            except OSError as error:
                raise _unwritten(self.path, error) from error
        self._places.close()
        self._places, self._is_tidy = places, True

    def _copied(self, file: BinaryIO) -> Iterator[Row]:
        """Where the lines lie that are written to another file, sorted by source."""
        for source, raw in self._raw():
            yield source, file.tell()
            file.write(raw)

    def _raw(self) -> Iterator[tuple[bytes, bytes]]:
        with self.path.open("rb", buffering=1 << 20) as file:
            for source, place in self._places.rows("SELECT source, place FROM places ORDER BY source"):
                if file.tell() != place:
                    file.seek(place)
                yield source, file.readline()


def line_of(entry: Mapping[str, Any]) -> bytes:
    """The line of plain data that has a ``source``."""
    text = json.dumps({SOURCE: entry[SOURCE], **entry}, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _parse(line: bytes) -> tuple[str, dict[str, Any]]:
    entry = json.loads(line)
    return entry[SOURCE], entry


def _source_of(line: bytes) -> tuple[str, None]:
    """The source of a line, which our lines begin with: they are long, and there may be a million."""
    if line.startswith(_BEGIN) and line.endswith(b"}\n"):
        return _DECODER.raw_decode(line.decode("ascii"), len(_BEGIN) - 1)[0], None
    return _parse(line)[0], None


def _unwritten(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path}: cannot be written: {error.strerror}; make room, and run the same command again")
