"""What the manifest of an earlier run says: which files need not be done again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ckptfix.errors import UsageError
from ckptfix.zoo.books.journal import Journal
from ckptfix.zoo.books.record import Outcome, check_version
from ckptfix.zoo.index import Index, packed
from ckptfix.zoo.items.listing import Kind
from ckptfix.zoo.places import Place, walk_if_there
from ckptfix.zoo.work.job import Job

MANIFEST, WEIGHTS, RENAMES = "manifest.jsonl", "weights.jsonl", "renames.json"
OWN_NAMES = (MANIFEST, WEIGHTS, RENAMES)
"""The files that a migration writes beside its outputs."""


_MOST = 2**63 - 1
"""The largest number of a file system, and of the index."""


def free_name(name: str) -> str:
    """The name in the destination of a file that keeps its own: only one that the migration itself writes is taken."""
    if name not in OWN_NAMES:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}.old{dot}{suffix}"


class Standing(IntEnum):
    """What an earlier run means for an item. Numbers, since a byte each is kept for a million of them."""

    NEW = 0
    """It is to be done."""
    DONE = 1
    DECIDED = 2
    """Somebody put an output in its place by hand."""


@dataclass(frozen=True)
class Known:
    """What counts of a record when an item comes again."""

    size: int
    stamp: str
    settings: str
    outcome: Outcome
    """FAILED also for what was there and could not be fetched or opened: that a right was given changes no stamp."""
    output: str | None
    output_size: int | None
    parts: tuple[str, ...] = ()
    decision: str = ""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Known:
        """From a line of the manifest."""
        check_version(line)
        _check(line, str, ("source", "stamp", "settings"))
        _check(line, int, ("size",))
        _check(line, (str, type(None)), ("output",))
        _check(line, (int, type(None)), ("output_size",))
        _check(line, list, ("output_parts",))
        for part in line["output_parts"]:
            _check({"output_parts": part}, str, ("output_parts",))
        _check({"decision": line.get("decision")}, (dict, type(None)), ("decision",))
        outcome = Outcome(line["outcome"])
        is_unseen = outcome is Outcome.UNREADABLE and line["sha256"] is None and bool(line["stamp"])
        return cls(
            line["size"],
            line["stamp"],
            line["settings"],
            Outcome.FAILED if is_unseen else outcome,
            line["output"],
            line["output_size"],
            tuple(line["output_parts"]),
            text_of(line.get("decision")),
        )


def _check(line: Mapping[str, Any], kind: type | tuple[type, ...], names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(value := line[name], kind) or (isinstance(value, int) and abs(value) > _MOST):
            raise TypeError(f"its {name} is {value!r:.60}")


def text_of(decision: Mapping[str, Any] | None) -> str:
    """A decision as a text that is equal where the decision is; empty for none."""
    return json.dumps(decision, sort_keys=True) if decision else ""


def read_manifest(journal: Journal) -> Iterator[tuple[str, Known]]:
    """What is known of each source; the last that is said of one counts. Raises ``UsageError`` where a line is none of
    a manifest."""
    for line in journal.load():
        try:
            yield line["source"], Known.of(line)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{journal.path}: a line is none of a migration ({error}); migrate into a new folder"
            ) from error


@contextmanager
def sizes_at(destination: Place) -> Iterator[Callable[[str], int | None]]:
    """What tells the size of a file of the destination, None of one that is not there.

    A store far away is listed once, which takes a request for a thousand files and not one for each."""
    if destination.root is not None:
        yield lambda name: None if (entry := destination.entry(name)) is None else entry.size
        return
    with Index("CREATE TABLE sizes (name BLOB PRIMARY KEY, size INTEGER) WITHOUT ROWID") as index:
        listed = ((packed(entry.name), entry.size) for entry in walk_if_there(destination))
        index.run_many("INSERT OR REPLACE INTO sizes VALUES (?, ?)", listed)

        def size_of(name: str) -> int | None:
            row = index.one("SELECT size FROM sizes WHERE name = ?", packed(name))
            return None if row is None else int(row[0])

        yield size_of


def standing(known: Known | None, job: Job, size_of: Callable[[str], int | None]) -> Standing:
    """Whether an item is done: the source is unchanged by size and stamp, the settings are the same, and the output is
    there in its size. What failed is tried again.

    A decision of an earlier run holds until there is another. A file that came to the place of an output which could
    not be written is a decision too.
    """
    if known is None or (known.size, known.stamp, known.settings) != (job.item.size, job.item.stamp, job.settings):
        return Standing.NEW
    if job.decision and text_of(job.decision) != known.decision:
        return Standing.NEW
    if known.outcome is Outcome.FAILED:
        return Standing.NEW
    names = known.parts or ((known.output,) if known.output is not None and known.output_size is not None else ())
    sizes = [size_of(name) for name in names]
    is_there = None not in sizes and (not names or sum(size or 0 for size in sizes) == known.output_size)
    if known.outcome not in (Outcome.DECISION, Outcome.UNREADABLE) or job.item.kind is Kind.OTHER:
        return Standing.DONE if is_there else Standing.NEW
    if not names:
        is_free = job.written_name not in job.taken  # what lies there else is the output of another source
        return Standing.DECIDED if is_free and size_of(job.written_name) is not None else Standing.DONE
    if is_there:
        return Standing.DONE
    return Standing.DECIDED if len(sizes) == 1 and sizes[0] is not None else Standing.NEW
