"""The manifest of a zoo, ``manifest.jsonl``, with a line for each file. ``docs/manifest.md`` describes it.

A ``Journal`` survives a kill at any point. Lines are appended and flushed to disk in groups. An incomplete last line is
dropped when the journal is read again. A later line replaces earlier ones with the same source; ``tidy`` leaves one
line for each, sorted by source, so that the order of the jobs does not show in the file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from functools import lru_cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, fields, replace

from ckptfix.errors import UsageError, WriteError
from ckptfix.reading.folders.ranks.universal import GROUPS, PARAMETERS

SOURCE = "source"
_BEGIN = b'{"source":"'
_DECODER = json.JSONDecoder()


class Journal:
    """A file of JSON lines, by their field ``source``. Only the position of each line is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, int] = {}
        self._is_tidy = True
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise _unwritten(path, error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a full disk: `append` has reported it
            self._file.close()

    def load(self) -> Iterator[dict[str, Any]]:
        """Yield all lines in the order of the file, including replaced ones. Drops an incomplete last line.

        Raises ``UsageError`` if another line is not valid."""
        for number, line in self._read():
            try:
                entry: dict[str, Any] = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._invalid(number, error) from error
            yield entry

    def index(self) -> None:
        """Read the position of each line, without parsing the lines."""
        for _ in self._read():
            pass

    def _read(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        start, last = 0, ""
        for number, line in enumerate(self._file, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it is incomplete")
                source = _source_of(line)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if self._file.read(1):
                    raise self._invalid(number, error) from error
                self._file.truncate(start)
                break
            self._places[source] = start
            self._is_tidy &= last < source
            start, last = start + len(line), source
            yield number, line
        self._file.seek(0, os.SEEK_END)

    def _invalid(self, number: int, error: Exception) -> UsageError:
        return UsageError(f"{self.path}: line {number} is not valid ({error}); migrate into a new folder")

    def append(self, lines: Sequence[tuple[str, bytes]]) -> None:
        """Append lines encoded by ``line_of``, each with its source, and flush them to disk.

        Raises ``WriteError`` if they cannot be written."""
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
        self._places.update((source, start) for (source, _), start in zip(lines, ends, strict=False))
        self._is_tidy = False

    def entry(self, source: str) -> dict[str, Any]:
        """Return the last line with this source. Raises ``KeyError`` if there is none."""
        with self.path.open("rb") as file:
            file.seek(self._places[source])
            line: dict[str, Any] = json.loads(file.readline())
        return line

    def drop(self, source: str) -> None:
        """Forget a source, so that ``tidy`` leaves it out."""
        self._is_tidy &= self._places.pop(source, None) is None

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the last line of each source, parsed, sorted by source."""
        return map(json.loads, self.raw_lines())

    def raw_lines(self) -> Iterator[bytes]:
        """Yield the last line of each source as bytes, sorted by source."""
        with self.path.open("rb", buffering=1 << 20) as file:
            for source in sorted(self._places):
                if file.tell() != (place := self._places[source]):
                    file.seek(place)
                yield file.readline()

    def tidy(self, scratch: Path) -> None:
        """Replace the file by one with a single line for each source, sorted.

        ``scratch`` is a folder on the same disk."""
        if self._is_tidy:
            return
        new, places, start = scratch / self.path.name, {}, 0
        try:
            with new.open("wb", buffering=1 << 20) as file:
                for source, raw in zip(sorted(self._places), self.raw_lines(), strict=True):
                    file.write(raw)
                    places[source] = start
                    start += len(raw)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
            self._file.close()
            self._file = self.path.open("a+b")
        except OSError as error:
            raise _unwritten(self.path, error) from error
        self._places, self._is_tidy = places, True


def line_of(entry: Mapping[str, Any]) -> bytes:
    """Encode JSON data that has a ``source`` as a line, with the source first."""
    text = json.dumps({SOURCE: entry[SOURCE], **entry}, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _source_of(line: bytes) -> str:
    """Return the source of a line, without parsing the rest if the line starts with it: parsing all takes seconds."""
    if line.startswith(_BEGIN) and line.endswith(b"}\n"):
        return str(_DECODER.raw_decode(line.decode("ascii"), len(_BEGIN) - 1)[0])
    source = json.loads(line)[SOURCE]
    if not isinstance(source, str):
        raise TypeError(f"its source is {source!r:.60}")
    return source


def _unwritten(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path}: cannot be written: {error.strerror}; make room, and run the same command again")


MANIFEST, WEIGHTS, RENAMES = "manifest.jsonl", "weights.jsonl", "renames.json"
OWN_NAMES = (MANIFEST, WEIGHTS, RENAMES)  # the files that a migration writes besides its outputs
MANIFEST_VERSION = 1  # raised when a field changes its meaning or goes away, not for a new field


class Outcome(str, Enum):
    """The result for one file."""

    REPAIRED = "repaired"
    FINE = "already fine"
    ACCEPTED = "accepted"  # written, with findings that the user accepted
    DECISION = "needs a decision"
    UNREADABLE = "unreadable"
    FAILED = "failed"
    OTHER = "other"  # not a checkpoint: copied or skipped, as `--others` says


class Record(Struct, frozen=True):
    """A line of the manifest: one file, or one folder that is a checkpoint. ``docs/manifest.md`` describes the fields.
    Paths are relative to the two roots, separated by ``/``."""

    source: str
    size: int
    stamp: str
    settings: str
    outcome: Outcome
    sha256: str | None = None
    output: str | None = None
    output_size: int | None = None
    output_sha256: str | None = None
    output_parts: tuple[str, ...] = ()
    format: str | None = None
    tensors: int | None = None
    numel: int | None = None
    target: str | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    edits: tuple[Mapping[str, Any], ...] = ()
    coverage: Mapping[str, Any] | None = None
    smoke: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    error: str | None = None
    command: str | None = None
    decisions: tuple[Mapping[str, Any], ...] = ()
    decision: Mapping[str, Any] | None = None
    seconds: float = 0.0
    peak_memory: int | None = None
    attempts: int = 1
    finished: str = ""
    versions: Mapping[str, str] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """The files of the output, relative to the destination; empty if nothing was written."""
        return self.output_parts or ((self.output,) if self.output is not None and self.output_size is not None else ())

    @property
    def is_tag(self) -> bool:
        """Whether the output is the folder of a tag with a universal checkpoint, which needs ``latest_universal`` next
        to it. One with that file in it is complete."""
        return f"{self.output}/{PARAMETERS}/{GROUPS}" in self.output_parts

    @property
    def is_to_be_tried_again(self) -> bool:
        """Whether it failed, or could not even be opened, which may have changed without a new stamp."""
        is_unseen = self.outcome is Outcome.UNREADABLE and self.sha256 is None and bool(self.stamp)
        return self.outcome is Outcome.FAILED or is_unseen

    def brief(self) -> Record:
        """Return the record without long fields that a later run does not need."""
        return replace(self, **_BRIEF)

    def line(self) -> bytes:
        return line_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data."""
        return {"version": MANIFEST_VERSION, **asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Record:
        """Return the record of a parsed line. Raises ``UsageError`` for another version or an invalid line."""
        if (version := line.get("version")) != MANIFEST_VERSION:
            raise UsageError(
                f"a line of the manifest has version {version!r}, not {MANIFEST_VERSION}; migrate into a new folder"
            )
        try:
            return convert(line, cls)  # validated, since a manifest may have been edited
        except ValidationError as error:
            raise UsageError(f"a line of the manifest is not valid ({error}); migrate into a new folder") from error


_LONG = "findings edits coverage smoke remarks error command decisions versions finished".split()
_BRIEF: Mapping[str, Any] = {field.name: field.default for field in fields(Record) if field.name in _LONG}


def read_manifest(journal: Journal) -> Iterator[Record]:
    """Yield the brief records of all lines. Raises ``UsageError`` for an invalid line."""
    for line in journal.load():
        try:
            yield Record.from_json(line).brief()
        except UsageError as error:
            raise UsageError(f"{journal.path}: {error}") from error


def free_name(name: str) -> str:
    """Return the name, or another one if the migration itself writes a file with this name."""
    if name not in OWN_NAMES:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}.old{dot}{suffix}"


@lru_cache(maxsize=1)
def version() -> str:
    return _installed("ckptfix") or "not installed"  # when it is imported from a source tree


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Return the versions that a result depends on, by name."""
    return {
        "ckptfix": version(),
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "platform": platform.platform(terse=True),
    }


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def now() -> str:
    """Return the time in UTC to the second, in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
