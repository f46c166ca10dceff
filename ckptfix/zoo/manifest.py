"""What became of each file of a zoo: the lines of ``manifest.jsonl``, which ``docs/manifest.md`` describes."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from enum import Enum
from functools import lru_cache
from importlib import metadata
from typing import Any

from ckptfix.errors import UsageError
from ckptfix.zoo.journal import Journal, line_of

MANIFEST, WEIGHTS, RENAMES = "manifest.jsonl", "weights.jsonl", "renames.json"
OWN_NAMES = (MANIFEST, WEIGHTS, RENAMES)
"""The files that a migration writes beside its outputs."""

MANIFEST_VERSION = 1
"""Grows when a field changes its meaning or goes away; new fields do not count."""


class Outcome(str, Enum):
    """How a file ended."""

    REPAIRED = "repaired"
    FINE = "already fine"
    ACCEPTED = "accepted"
    """Written, with findings that the user accepted."""
    DECISION = "needs a decision"
    UNREADABLE = "unreadable"
    FAILED = "failed"
    OTHER = "other"
    """Not a checkpoint: copied or left out, as ``--others`` says."""


@dataclass(frozen=True, slots=True)
class Record:
    """One file, or one folder that is a checkpoint: a line of the manifest. ``docs/manifest.md`` has what each field
    means. Paths are relative to the two roots, with ``/`` between their parts."""

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
        """The files of the output, below the destination; empty if nothing was written."""
        return self.output_parts or ((self.output,) if self.output is not None and self.output_size is not None else ())

    @property
    def is_to_be_tried_again(self) -> bool:
        """Whether it failed, or could not even be fetched or opened: a permission that is given changes no stamp."""
        is_unseen = self.outcome is Outcome.UNREADABLE and self.sha256 is None and bool(self.stamp)
        return self.outcome is Outcome.FAILED or is_unseen

    def brief(self) -> Record:
        """The record without what is long, and of no use to a later run."""
        return replace(self, **_BRIEF)

    def line(self) -> bytes:
        """Return the line of the manifest."""
        return line_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the same as plain data."""
        given = {name: getattr(self, name) for name in _FIELDS}  # what is in them is plain data, and long
        return {"version": MANIFEST_VERSION, **given, "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Record:
        """Return the record of a line. Raises ``UsageError`` for one of another version, and for an invalid one."""
        if (version := line.get("version")) != MANIFEST_VERSION:
            raise UsageError(
                f"a line of the manifest has version {version!r}, not {MANIFEST_VERSION}; migrate into a new folder"
            )
        try:
            given = {name: line[name] for name in _FIELDS if name in line}
            for name, kinds in _KINDS.items():
                if not isinstance(given.get(name), kinds) or isinstance(given.get(name), bool):
                    raise TypeError(f"its {name} is {given.get(name)!r:.60}")
            if not all(isinstance(part, str) for part in given["output_parts"]):
                raise TypeError(f"its output_parts are {given['output_parts']!r:.60}")
            given |= {name: tuple(given.get(name) or ()) for name in _LISTS}
            return cls(**(given | {"outcome": Outcome(line["outcome"])}))
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"a line of the manifest is not valid ({error}); migrate into a new folder") from error


_FIELDS = tuple(field.name for field in fields(Record))
_LONG = "findings edits coverage smoke remarks error command decisions versions finished".split()
_BRIEF: Mapping[str, Any] = {field.name: field.default for field in fields(Record) if field.name in _LONG}
_LISTS = ("output_parts", "findings", "edits", "remarks", "decisions")
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("source", "stamp", "settings"), (str,)),
    **dict.fromkeys(("output", "sha256", "output_sha256"), (str, type(None))),
    "size": (int,),
    "output_size": (int, type(None)),
    "output_parts": (list, tuple),
    "decision": (dict, type(None)),
}
"""What a later run depends on. A manifest may have been edited."""


def read_manifest(journal: Journal) -> Iterator[Record]:
    """Yield what is known of each source, briefly; the last record of a source counts. Raises ``UsageError`` for an
    invalid line."""
    for line in journal.load():
        try:
            yield Record.from_json(line).brief()
        except UsageError as error:
            raise UsageError(f"{journal.path}: {error}") from error


def free_name(name: str) -> str:
    """Return the name in the destination of a file that keeps its own, unless the migration writes one of that name."""
    if name not in OWN_NAMES:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}.old{dot}{suffix}"


@lru_cache(maxsize=1)
def version() -> str:
    """Return the version of ckptfix."""
    return metadata.version("ckptfix")


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Return the versions that a result depends on."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "ckptfix": version(),
        "python": platform.python_version(),
        "torch": torch,
        "platform": platform.platform(terse=True),
    }


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
