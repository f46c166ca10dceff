"""What a migration prints: its progress, and a summary at the end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ckptfix.cli.console import Console, is_live, time_text, write_output
from ckptfix.core.finding import counted
from ckptfix.core.options import option_words
from ckptfix.core.wording import no_option, shell_join
from ckptfix.report.style import Line, Span, size
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.migrating import Summary

if TYPE_CHECKING:
    from ckptfix.writing.atomic import OwnFile
    from ckptfix.zoo.migrating import Migration

_EVERY = 10.0  # seconds between two lines if there is no terminal

# The short name and the style of each outcome.
_SHOWN: Mapping[Outcome, tuple[str, str]] = {
    Outcome.REPAIRED: ("repaired", "good"),
    Outcome.FINE: ("fine", "good"),
    Outcome.ACCEPTED: ("accepted", "good"),
    Outcome.DECISION: ("to decide", "warning"),
    Outcome.UNREADABLE: ("unreadable", "error"),
    Outcome.FAILED: ("failed", "error"),
    Outcome.OTHER: ("other", "faint"),
}

_TO_BE_READ = (Outcome.DECISION, Outcome.UNREADABLE, Outcome.FAILED)
_NAMED = 3  # files of a group that are named


class MigrationMeter(Struct):
    """Shows the progress of a migration: on one line of a terminal, otherwise on a new line every ten seconds."""

    console: Console
    dry_run: bool = False
    _shown_at: float = field(default_factory=lambda: time.monotonic())
    _last: Summary | None = None

    def show(self, summary: Summary) -> None:
        """Show the progress, if it is time to."""
        self._last = summary
        if is_live():
            self.console.progress(progress_text(summary))
        elif time.monotonic() - self._shown_at >= _EVERY:
            self._shown_at = time.monotonic()
            self.console.note(progress_text(summary))

    def how_to_go_on(self) -> str:
        """Return what to say after Ctrl-C."""
        if self.dry_run or self._last is None:
            return "nothing was written"
        return (
            f"{self._last.done_files} of {self._last.files} files are done, unfinished ones were discarded; run the "
            "same command to continue"
        )


def progress_text(summary: Summary) -> str:
    """Return ``134 of 273 files, 2.1 GB of 3.1 GB, 120 MB/s, 12 s left: 100 repaired, 34 fine``."""
    parts = [f"{summary.done_files} of {summary.files} files", f"{size(summary.done_bytes)} of {size(summary.bytes)}"]
    if (pace := summary.pace()) is not None:
        rate, seconds_left = pace
        parts += [f"{size(round(rate))}/s", f"{time_text(seconds_left)} left"]
    counts = [f"{summary.outcomes[outcome]} {_SHOWN[outcome][0]}" for outcome in Outcome if summary.outcomes[outcome]]
    return ", ".join(parts) + (f": {', '.join(counts)}" if counts else "")


def closing_lines(migration: Migration, limit: int | None, dry_run: bool) -> Iterator[Line]:
    """Yield the counts by outcome, and the files that need attention."""
    summary = migration.summary
    yield (Span(f"{'outcome':<18}{'files':>9}{'size':>11}", "faint"),)
    for outcome in Outcome:
        if count := summary.outcomes[outcome]:
            text = f"{count:>9}{size(summary.sizes[outcome]):>11}"
            name = "to be repaired" if dry_run and outcome is Outcome.REPAIRED else outcome.value
            yield (Span(f"{name:<18}", _SHOWN[outcome][1]), text)
    yield (Span(f"{'all':<18}", "strong"), f"{summary.done_files:>9}{size(summary.done_bytes):>11}")
    yield ""
    new = summary.done_files - summary.earlier_files
    earlier = f", {summary.earlier_files} by an earlier run" if summary.earlier_files else ""
    rate = (summary.done_bytes - summary.earlier_bytes) / max(summary.seconds, 1e-9)
    speed = f" ({size(round(rate))}/s)" if rate >= 1 else ""
    verb = "checked" if dry_run else "done"
    yield f"{verb}: {counted(new, 'file')} in {time_text(summary.seconds)}{speed}{earlier}"
    if dry_run:
        yield "nothing was written; run the same command without --dry-run to write"
    else:
        yield f"written: {size(summary.written)} in {migration.destination}; manifest.jsonl has a line for each"
    yield from _attention(migration, limit)


class _DecisionGroup(Struct):
    """Files that need the same decision."""

    record: dict[str, Any]
    names: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)


def _attention(migration: Migration, limit: int | None) -> Iterator[Line]:
    """Yield the files that need attention, grouped by the decision that they need."""
    if not any(migration.summary.outcomes[outcome] for outcome in _TO_BE_READ):
        return
    groups: dict[Outcome, dict[str, _DecisionGroup]] = {outcome: {} for outcome in _TO_BE_READ}
    in_folder: Counter[str] = Counter()
    for record in migration.records():
        in_folder.update(_folders(record["source"]))
        outcome = Outcome(record["outcome"])
        if outcome in groups and record["source"] in migration.chosen:
            reason = _reason(record)
            ways = [way["options"] for way in record.get("decisions") or ()]
            key = json.dumps([_codes(record), ways, record["decision"]] if record["error"] is None else reason)
            group = groups[outcome].setdefault(key, _DecisionGroup(record))
            group.names.append(record["source"])
            group.reasons.add(reason)
    for outcome, found in groups.items():
        if not found:
            continue
        yield ""
        yield (Span(f"{outcome.value}:", _SHOWN[outcome][1]),)
        for group in list(found.values())[:limit]:
            yield from _entry(group, in_folder, migration.again)
        if limit is not None and len(found) > limit:
            left = sum(len(group.names) for group in list(found.values())[limit:])
            yield f"  … and {left} more: -v lists them, --report FILE shows them"
        if outcome is Outcome.UNREADABLE:
            yield "  after replacing a file, run the same command again; use exclude in zoo.toml to skip files"


def _entry(group: _DecisionGroup, in_folder: Counter[str], again: Sequence[str]) -> Iterator[Line]:
    names = _short_names(group.names, in_folder)
    shown = ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")
    count = f" ({counted(len(group.names), 'file')})" if len(group.names) > 1 else ""
    reason = next(iter(group.reasons)) if len(group.reasons) == 1 else "; ".join(_codes(group.record))
    yield ("  ", Span(shown, "strong"), f"{count}: {reason}")
    only = [word for name in names for word in ("--only", no_option(name))]
    for way in group.record.get("decisions") or ():
        if way["command"] is not None:
            words = option_words({**(group.record["decision"] or {}), **way["options"]})
            yield f"    {shell_join((*again, *only, *words))}"
        elif way["options"]:
            yield f"    --only … {shell_join(option_words(way['options']))}: {way['text']}"
        else:
            yield f"    {way['text']}"
        if "price" in way:
            yield ("      ", Span(way["price"], "warning"))


def _folders(name: str) -> Iterator[str]:
    """Return the folders that contain a file, the outermost first."""
    return accumulate(name.split("/")[:-1], "{}/{}".format)


def _short_names(names: Sequence[str], in_folder: Counter[str]) -> list[str]:
    """Return the names of files, or the name of a folder if all its files are among them."""
    mine = Counter(folder for name in names for folder in _folders(name))
    whole = {folder for folder, count in mine.items() if count == in_folder[folder] > 1}
    return list(dict.fromkeys(next((each for each in _folders(name) if each in whole), name) for name in names))


def _codes(record: dict[str, Any]) -> list[str]:
    """Return the code and name of each remaining finding, without duplicates."""
    return list(dict.fromkeys(f"{finding['code']} {finding['name']}" for finding in _left(record)))


def _left(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in record["findings"] if not finding["fixed"] and finding["level"] != "note"]


def _reason(record: dict[str, Any]) -> str:
    """Return in one line why a file was not repaired."""
    if record["error"] is not None:
        return str(record["error"]).removeprefix(f"{record['source']}: ")
    left = _left(record)
    text = "; ".join(dict.fromkeys(f"{finding['code']} {finding['message']}" for finding in left[:3]))
    if len(left) > 3:
        text += f"; and {counted(len(left) - 3, 'more finding')}"
    if record["smoke"] is not None and record["smoke"]["passed"] is False:
        text = text or "the forward test failed"
    return "; ".join(part for part in (text, *record["remarks"][-1:]) if part)


def write_json(migration: Migration) -> None:
    """Write all records as one JSON document, one at a time, so that memory does not grow with their number."""
    head = {"version": 1, "source": migration.source, "destination": migration.destination}
    summary = json.dumps({**head, **migration.summary.to_json()})
    write_output(f'{summary[:-1]}, "records": [\n')
    separator = ""
    for record in migration.chosen_records():
        write_output(f"{separator}{json.dumps(record, allow_nan=False)}")
        separator = ",\n"
    write_output("\n]}\n")


def save_page(file: OwnFile, migration: Migration, command: str, dry_run: bool) -> None:
    """Write the page of the whole zoo, including the files of earlier runs."""
    from ckptfix.cli.output import facts_of_run
    from ckptfix.report.page import page_pieces

    outputs = {line["source"]: line["output"] for line in migration.records() if line["output"] is not None}
    renames = {source: output for source, output in outputs.items() if output != source}
    facts = {**facts_of_run(), "Command": command}
    lines = migration.records(), migration.weights()
    with file.writing() as out:
        out.writelines(page_pieces(migration.source, *lines, facts=facts, renames=renames, dry_run=dry_run))
