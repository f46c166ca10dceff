"""What became of one file of a zoo: a line of ``manifest.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from ckptfix.errors import UsageError

MANIFEST_VERSION = 1
"""Grows when a field changes its meaning or goes away; new fields do not count."""


class Outcome(str, Enum):
    """How a file ended."""

    REPAIRED = "repaired"
    FINE = "already fine"
    DECISION = "needs a decision"
    UNREADABLE = "unreadable"
    FAILED = "failed"
    OTHER = "other"
    """No checkpoint: copied or left, as ``--others`` says."""


@dataclass(frozen=True)
class Record:
    """One file, or one folder that is a checkpoint. Paths are relative to the two roots, with ``/`` between parts."""

    source: str
    """The file, or the folder, below the source root."""
    size: int
    """Bytes; of a folder, of all that is in it."""
    stamp: str
    """What tells a changed source from an unchanged one without reading it: mtime in ns, or an ETag."""
    settings: str
    """Digest of the settings that count for this file, and of the version of ckptfix."""
    outcome: Outcome
    sha256: str | None = None
    """Of the source; of a folder, of its files' names and digests in order. None where it could not be read whole."""
    output: str | None = None
    """The written file below the destination root; of a folder that was copied, and of shards, what is to be opened."""
    output_size: int | None = None
    """Bytes; of several files, of all of them."""
    output_sha256: str | None = None
    """Of several files, of their names and digests in order."""
    output_parts: tuple[str, ...] = ()
    """The files of the output below the destination root, where it is not one file."""
    format: str | None = None
    tensors: int | None = None
    numel: int | None = None
    target: str | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    """As in the JSON report of ``check``, without their fixes."""
    edits: tuple[Mapping[str, Any], ...] = ()
    coverage: Mapping[str, Any] | None = None
    smoke: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    error: str | None = None
    """Why it is unreadable or failed, in one line."""
    command: str | None = None
    """The command that carries out what is to be decided, or a way around what failed, as it is to be typed."""
    decision: Mapping[str, Any] | None = None
    """What was decided for this file alone, with ``migrate --only``: the flags by name. Later runs keep to it."""
    seconds: float = 0.0
    """Wall time of the file, waiting excluded."""
    peak_memory: int | None = None
    """Bytes: the most that the process which did it held for itself meanwhile."""
    attempts: int = 1
    finished: str = ""
    """UTC, ISO 8601."""
    versions: Mapping[str, str] | None = None
    """Of ckptfix, Python, torch, and the platform."""

    def to_json(self) -> dict[str, Any]:
        """The line of the manifest as plain data."""
        given = {name: getattr(self, name) for name in _FIELDS}  # what is in them is plain data, and long
        return {"version": MANIFEST_VERSION, **given, "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Record:
        """The record of a line. Raises ``UsageError`` for one of another version, or with fields missing."""
        check_version(line)
        try:
            given = {name: value for name, value in line.items() if name in _FIELDS}
            given |= {
                name: tuple(given[name]) for name in ("output_parts", "findings", "edits", "remarks") if name in given
            }
            return cls(**(given | {"outcome": Outcome(line["outcome"])}))
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"a line of the manifest is none ({error}); migrate into a new folder") from error


_FIELDS = tuple(field.name for field in fields(Record))


def check_version(line: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` where a line of the manifest is of another version than ours."""
    if (version := line.get("version")) != MANIFEST_VERSION:
        raise UsageError(
            f"a line of the manifest is of version {version!r}, this is {MANIFEST_VERSION}; migrate into a new folder"
        )
