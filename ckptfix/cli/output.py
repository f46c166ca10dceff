"""Reports on their way to stdout, in the form that was asked for."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ckptfix.cli.console import FAILED, Console, write_output
from ckptfix.core.finding import Level, counted
from ckptfix.core.report import Report, envelope, error_to_json
from ckptfix.core.wording import typed
from ckptfix.errors import UsageError
from ckptfix.report.advice import Presentation, ReportFormat, suggested
from ckptfix.report.style import Line


class ReportWriter:
    """Writes the reports of a run in a form, and into a page, if one is asked for.

    ``exit_code`` is the worst so far."""

    def __init__(self, console: Console, form: str = "full", page: PageWriter | None = None) -> None:
        self.exit_code = 0
        self._console, self._page, self._name, self._form = console, page, form, _form(form)
        self._is_for_people = form in _FOR_PEOPLE
        self._counts: Counter[str] = Counter()

    def write_report(self, source: str, presentation: Presentation, make: Callable[[], Report]) -> None:
        """Make the report of one file and write it; an error takes its place and stops no other file."""
        failed_before = len(self._console.failures)
        beside = [
            str(presentation.choices[name])
            for name in ("like", "fill", "compare", "apply")
            if name in presentation.choices
        ]
        with self._console.surviving(source, *beside):
            begun = time.monotonic()
            with self._console.watching():
                report = make()
            if self._page is not None:
                self._page.add(report, presentation, time.monotonic() - begun)
            if not (self._is_for_people and self._console.quiet and report.exit_code == 0):
                self._console.write(self._form.add(report, presentation), plain=not self._is_for_people)
            self.exit_code = max(self.exit_code, report.exit_code)
            left = [finding for finding in report.remaining if finding.level > Level.NOTE]
            self._counts["with defects" if left else "without"] += 1
            self._counts["defects"] += len(left)
            self._counts["fixable"] += sum(map(report.is_fixable, left))
        for message, runs_code in self._console.failures[failed_before:]:
            if self._page is not None:
                self._page.add_error(source, message)
            self._console.write(self._form.add_error(source, message, runs_code), plain=True)
            self.exit_code = FAILED
            self._counts["failed"] += 1

    def close(self) -> None:
        """Write what was held back, and how many files had defects."""
        counts = self._counts
        files = counts["with defects"] + counts["without"] + counts["failed"]
        if files > 1 and self._is_for_people and not self._console.quiet:
            defects = f" ({counted(counts['defects'], 'defect')}, {counts['fixable']} fixable)"
            parts = [f"{counts['with defects']} with defects{defects if counts['defects'] else ''}"]
            parts += [f"{counts['failed']} could not be read"] if counts["failed"] else []
            line = f"{counted(files, 'file')}: {', '.join(parts)}"
            self._console.write(["", line]) if self._name == "full" else self._console.note(line)
        write_output(self._form.text())
        if self._page is not None:
            self._page.save()
            self._console.note(f"report: {self._page.file.path}")


_FOR_PEOPLE = ("full", "concise")


def _form(name: str) -> ReportFormat:
    """Return a new form of this name."""
    if name in _FOR_PEOPLE:
        return _Lines(name)
    if name == "json":
        return _JsonDocument()
    from ckptfix import __version__
    from ckptfix.report.ci import JUnitDocument, SarifLog, WorkflowCommands

    if name == "sarif":
        return SarifLog(__version__)
    return WorkflowCommands() if name == "github" else JUnitDocument()


class _Lines(ReportFormat):
    """The reports for people, who read errors on stderr: full ones are apart."""

    def __init__(self, name: str) -> None:
        self._is_full, self._is_begun = name == "full", False

    def add(self, report: Report, presentation: Presentation) -> Iterator[Line]:
        from ckptfix.report.terminal import concise_lines, full_lines

        if self._is_full and self._is_begun:
            yield ""
        self._is_begun = True
        yield from full_lines(report, presentation) if self._is_full else concise_lines(report, presentation)


class _JsonDocument(ReportFormat):
    """The reports in ckptfix's own form, with what only the command line knows."""

    def __init__(self) -> None:
        self._entries: list[Mapping[str, Any]] = []

    def add(self, report: Report, presentation: Presentation) -> Iterable[Line]:
        commands = [
            {"words": list(words), "text": typed(words), **({"price": price} if price else {})}
            for words, price in suggested(report, presentation)
        ]
        digest = _sha256(report.source) if presentation.choices.get("values", True) else None
        self._entries.append({**report.to_json(), "sha256": digest, "commands": commands})
        return ()

    def add_error(self, source: str, message: str, runs_code: bool = False) -> Iterable[Line]:
        self._entries.append(error_to_json(source, message))
        return ()

    def text(self) -> str:
        known = environment()
        torch = None if known["torch"] == NOT_INSTALLED else known["torch"]
        versions = {"ckptfix": known["ckptfix"], "torch": torch, "python": known["Python"]}
        return json.dumps(envelope(self._entries, versions), indent=2, allow_nan=False) + "\n"


def _sha256(source: str) -> str | None:
    """Return the SHA-256 of a file; None for a checkpoint in several files, and for one that is gone by now."""
    from ckptfix.bytes.checksums import sha256_of_file

    try:
        return sha256_of_file(Path(source))
    except OSError:
        return None


def page_writer(choices: Mapping[str, Any]) -> PageWriter | None:
    """Return what ``--report`` asks for. Raises ``UsageError`` if no page can go there."""
    if "report" not in choices:
        return None
    return PageWriter(choices["report"], {f"--{name}": choices.get(name) for name in ("output", "plan")})


class PageWriter:
    """Gathers the reports of a command for a page; what a file comes to waits on the disk, not in memory."""

    def __init__(self, file: str, taken: Mapping[str, str | None]) -> None:
        """``taken`` are other files of the command by the option that names them; the page is none of them."""
        from ckptfix.report.page import page_file

        self.file = page_file(file)
        self.file.refuse()
        for option, other in taken.items():
            if other is not None and Path(other).resolve() == Path(file).resolve():
                raise UsageError(f"{file}: is the file of {option}; name another file for the report")
        self._title, self._count = "", 0
        self._records, self._weights = _spool(), _spool()

    def add(self, report: Report, presentation: Presentation, seconds: float) -> None:
        """Take in the report of one file."""
        from ckptfix.report.page import record_of
        from ckptfix.report.page.data import weights_to_json

        self._add(report.source, record_of(report, presentation, seconds))
        self._weights.write(json.dumps(weights_to_json(report), allow_nan=False) + "\n")

    def add_error(self, source: str, message: str) -> None:
        """Take in what hindered the work on a file."""
        from ckptfix.report.page import record_of_error

        self._add(source, record_of_error(source, message))

    def save(self) -> None:
        """Write the page. Raises ``CkptfixError`` if that cannot be."""
        from ckptfix.report.page import write_page

        title = self._title if self._count == 1 else f"{self._count} checkpoints"
        with self.file.writing() as out:
            write_page(out, title, _lines(self._records), _lines(self._weights), facts=facts_of_run())

    def _add(self, source: str, record: Mapping[str, Any]) -> None:
        self._title = Path(source).name or source
        self._count += 1
        self._records.write(json.dumps(record, allow_nan=False) + "\n")


def _spool() -> IO[str]:
    import tempfile

    return tempfile.TemporaryFile("w+", encoding="ascii", prefix="ckptfix-")


def _lines(spool: IO[str]) -> Iterator[dict[str, Any]]:
    spool.seek(0)
    return map(json.loads, spool)


NOT_INSTALLED = "not installed"


def facts_of_run() -> dict[str, str]:
    """Return how, when and with what the page was made."""
    return {
        "Made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "Command": typed(["ckptfix", *sys.argv[1:]]),
        **environment(),
    }


def environment() -> dict[str, str]:
    """Return the versions of what ckptfix runs with."""
    from importlib.metadata import PackageNotFoundError, version

    from ckptfix import __version__
    from ckptfix.known.table import table
    from ckptfix.values.scan import kernel

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = NOT_INSTALLED
    return {
        "ckptfix": __version__,
        "torch": torch,
        "Kernel": "compiled" if kernel() is not None else "none: pure Python, slower",
        "Known models": ", ".join(f"{library} {release}" for library, release in table().versions.items()),
        "Python": platform.python_version(),
        "Platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
