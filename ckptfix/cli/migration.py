"""What a migration shows: how far it is, and at the end what came of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptfix.cli.console import Console, write_output
from ckptfix.cli.meter import bytes_text, time_text
from ckptfix.core.finding import counted
from ckptfix.report.style import Line, Span
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.summary import Summary

if TYPE_CHECKING:
    from ckptfix.zoo.migrating import Migration

_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""

_SHORT = {
    Outcome.REPAIRED: "repaired",
    Outcome.FINE: "fine",
    Outcome.DECISION: "to decide",
    Outcome.UNREADABLE: "unreadable",
    Outcome.FAILED: "failed",
    Outcome.OTHER: "other",
}
_ROLES = {
    Outcome.REPAIRED: "good",
    Outcome.FINE: "good",
    Outcome.DECISION: "warning",
    Outcome.UNREADABLE: "error",
    Outcome.FAILED: "error",
    Outcome.OTHER: "faint",
}
_TO_BE_READ = (Outcome.DECISION, Outcome.UNREADABLE, Outcome.FAILED)


@dataclass
class MigrationMeter:
    """Shows how far a migration is: on one line of the terminal, or on a new one every ten seconds."""

    console: Console
    dry_run: bool = False
    _told: float = field(default_factory=lambda: time.monotonic())
    _last: Summary | None = None

    def show(self, summary: Summary) -> None:
        """Show it, if it is time."""
        self._last = summary
        if sys.stderr.isatty():
            self.console.progress(progress_text(summary))
        elif time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            self.console.note(progress_text(summary))

    def how_to_go_on(self) -> str:
        """What to say after Ctrl-C."""
        if self.dry_run or self._last is None:
            return "nothing was written"
        return (
            f"{self._last.done_files} of {self._last.files} files are done, those under way were discarded; "
            "the same command goes on from there"
        )


def progress_text(summary: Summary) -> str:
    """``134 of 273 files, 2.1 GB of 3.1 GB, 120 MB/s, 12 s left: 100 repaired, 34 fine``."""
    parts = [
        f"{summary.done_files} of {summary.files} files",
        f"{bytes_text(summary.done_bytes)} of {bytes_text(summary.bytes)}",
    ]
    if (pace := summary.pace()) is not None:
        parts += [f"{bytes_text(pace.rate)}/s", f"{time_text(pace.seconds_left)} left"]
    counts = [f"{summary.outcomes[outcome]} {_SHORT[outcome]}" for outcome in Outcome if summary.outcomes[outcome]]
    return ", ".join(parts) + (f": {', '.join(counts)}" if counts else "")


def closing_lines(migration: Migration, limit: int | None, dry_run: bool) -> Iterator[Line]:
    """Yield the counts by outcome, and the files that need attention."""
    summary = migration.summary
    yield (Span(f"{'outcome':<18}{'files':>9}{'size':>11}", "faint"),)
    for outcome in Outcome:
        if count := summary.outcomes[outcome]:
            text = f"{count:>9}{bytes_text(summary.sizes[outcome]):>11}"
            yield (Span(f"{_name(outcome, dry_run):<18}", _ROLES[outcome]), text)
    yield (Span(f"{'all':<18}", "strong"), f"{summary.done_files:>9}{bytes_text(summary.done_bytes):>11}")
    yield ""
    new = summary.done_files - summary.earlier_files
    earlier = f", {summary.earlier_files} by an earlier run" if summary.earlier_files else ""
    rate = (summary.done_bytes - summary.earlier_bytes) / max(summary.seconds, 1e-9)
    speed = f" ({bytes_text(rate)}/s)" if rate >= 1 else ""
    verb = "looked at" if dry_run else "done"
    yield f"{verb}: {counted(new, 'file')} in {time_text(summary.seconds)}{speed}{earlier}"
    if dry_run:
        yield "written: nothing; the same command without --dry-run writes it"
    else:
        yield f"written: {bytes_text(summary.written)} in {migration.destination}; manifest.jsonl has a line for each"
    yield from _attention(migration, limit)


def _name(outcome: Outcome, dry_run: bool) -> str:
    return "to be repaired" if dry_run and outcome is Outcome.REPAIRED else outcome.value


def _attention(migration: Migration, limit: int | None) -> Iterator[Line]:
    if not any(migration.summary.outcomes[outcome] for outcome in _TO_BE_READ):
        return
    shown: dict[Outcome, list[Line]] = {outcome: [] for outcome in _TO_BE_READ}
    counts = dict.fromkeys(_TO_BE_READ, 0)
    for record in migration.chosen_records():
        outcome = Outcome(record["outcome"])
        if outcome in shown:
            counts[outcome] += 1
            if limit is None or counts[outcome] <= limit:
                shown[outcome] += _entry(record, outcome)
    for outcome, lines in shown.items():
        if lines:
            yield ""
            yield (Span(f"{outcome.value}:", _ROLES[outcome]),)
            yield from lines
            if limit is not None and counts[outcome] > limit:
                yield f"  … and {counts[outcome] - limit} more: -v lists them, --report FILE shows them"
            if outcome is Outcome.UNREADABLE:
                yield "  after replacing a file, run the same command again; exclude in zoo.toml leaves files out"


def _entry(record: dict[str, Any], outcome: Outcome) -> Iterator[Line]:
    yield ("  ", Span(record["source"], "strong"), f": {_reason(record)}")
    if record["command"]:
        yield f"    {record['command']}"


def _reason(record: dict[str, Any]) -> str:
    """Why a file is not simply repaired, in one line."""
    if record["error"] is not None:
        return str(record["error"]).removeprefix(f"{record['source']}: ")
    left = [finding for finding in record["findings"] if not finding["fixed"] and finding["level"] != "note"]
    text = "; ".join(dict.fromkeys(f"{finding['code']} {finding['message']}" for finding in left[:3]))
    if len(left) > 3:
        text += f"; and {len(left) - 3} more findings"
    if record["smoke"] is not None and record["smoke"]["passed"] is False:
        text = text or "the forward test failed"
    return "; ".join(part for part in (text, *record["remarks"][-1:]) if part)


def write_json(migration: Migration) -> None:
    """The whole account as one JSON document, line by line, so that a million files take no memory."""
    head = {"version": 1, "source": migration.source, "destination": migration.destination}
    summary = json.dumps({**head, **migration.summary.to_json()})
    write_output(f'{summary[:-1]}, "records": [\n')
    separator = ""
    for record in migration.chosen_records():
        write_output(f"{separator}{json.dumps(record, allow_nan=False)}")
        separator = ",\n"
    write_output("\n]}\n")


class PageOfZoo:
    """``--report FILE`` of a migration."""

    def __init__(self, file: str) -> None:
        from ckptfix.report.page import check_page_file

        check_page_file(file)  # now, and not after a night of work
        self._file = file

    def save(self, migration: Migration, command: str) -> None:
        """Write the page of the whole zoo, also of what earlier runs have done."""
        from ckptfix.cli.page import facts_of_run
        from ckptfix.report.page import save_page, write_page

        renames = {
            line["source"]: line["output"]
            for line in migration.records()
            if line["output"] not in (None, line["source"])
        }
        save_page(
            self._file,
            lambda out: write_page(
                out,
                migration.source,
                migration.records(),
                migration.weights(),
                facts={**facts_of_run(), "Command": command},
                renames=renames,
            ),
        )
