"""Reports on their way to stdout, in the form that was asked for."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Protocol

from msgspec import Struct, field

from ckptfix.cli.console import FAILED, Console, write_output
from ckptfix.core.finding import Level, counted
from ckptfix.core.report import Report, envelope, error_to_json
from ckptfix.core.wording import typed
from ckptfix.errors import UsageError
from ckptfix.report.advice import Presentation, suggested


class _Document(Protocol):
    """A form that is written when all files have been checked."""

    def add(self, report: Report, presentation: Presentation) -> None: ...
    def add_error(self, source: str, message: str, runs_code: bool) -> None: ...
    def text(self) -> str: ...


class ReportWriter(Struct):
    """Writes reports one after another; documents come at the end, and a page too, where one is asked for.

    ``exit_code`` is the worst so far."""

    console: Console
    form: str = "full"
    page: PageWriter | None = None
    exit_code: int = 0
    _document: _Document | None = None
    _counts: Counter[str] = field(default_factory=Counter)
    _written: int = 0

    def __post_init__(self) -> None:
        self._document = _document(self.form)

    def report(self, report: Report, presentation: Presentation) -> None:
        """Write the report of one file."""
        if self._document is not None:
            self._document.add(report, presentation)
        elif self.form == "github":
            from ckptfix.report.ci import github_lines

            self.console.write_plain(github_lines(report))
        elif not (self.console.quiet and report.exit_code == 0):
            from ckptfix.report.terminal import concise_lines, full_lines

            lines = concise_lines(report, presentation) if self.form == "concise" else full_lines(report, presentation)
            separator = [""] if self._written and self.form == "full" else []
            self.console.write([*separator, *lines])
            self._written += 1

    def write_report(self, source: str, presentation: Presentation, make: Callable[[], Report]) -> None:
        """Make the report of one file and write it; an error takes its place and stops no other file."""
        failed_before = len(self.console.failures)
        beside = [
            str(presentation.choices[name])
            for name in ("like", "fill", "compare", "apply")
            if name in presentation.choices
        ]
        with self.console.surviving(source, *beside):
            begun = time.monotonic()
            with self.console.watching():
                report = make()
            if self.page is not None:
                self.page.add(report, presentation, time.monotonic() - begun)
            self.report(report, presentation)
            self.exit_code = max(self.exit_code, report.exit_code)
            left = [finding for finding in report.remaining if finding.level > Level.NOTE]
            self._counts["with defects" if left else "without"] += 1
            self._counts["defects"] += len(left)
            self._counts["fixable"] += sum(map(report.is_fixable, left))
        for message, runs_code in self.console.failures[failed_before:]:
            if self.page is not None:
                self.page.add_error(source, message)
            self.error(source, message, runs_code)
            self.exit_code = FAILED
            self._counts["failed"] += 1

    def error(self, source: str, message: str, runs_code: bool = False) -> None:
        """Write what programs should know of a file that could not be checked; people read the line on stderr."""
        if self._document is not None:
            self._document.add_error(source, message, runs_code)
        elif self.form == "github":
            from ckptfix.report.ci import github_error

            self.console.write_plain([github_error(source, message, runs_code)])

    def close(self) -> None:
        """Write what was held back, and how many files had defects."""
        counts = self._counts
        files = counts["with defects"] + counts["without"] + counts["failed"]
        if files > 1 and self.form in ("full", "concise") and not self.console.quiet:
            defects = f" ({counted(counts['defects'], 'defect')}, {counts['fixable']} fixable)"
            parts = [f"{counts['with defects']} with defects{defects if counts['defects'] else ''}"]
            parts += [f"{counts['failed']} could not be read"] if counts["failed"] else []
            line = f"{counted(files, 'file')}: {', '.join(parts)}"
            self.console.write(["", line]) if self.form == "full" else self.console.note(line)
        if self._document is not None:
            write_output(self._document.text())
        if self.page is not None:
            self.page.save()
            self.console.note(f"report: {self.page.file.path}")


def _document(form: str) -> _Document | None:
    """Return the document of an output format; None for one that is written file by file."""
    if form == "json":
        return _JsonDocument()
    if form == "sarif":
        from ckptfix import __version__
        from ckptfix.report.ci import SarifLog

        return SarifLog(__version__)
    if form == "junit":
        from ckptfix.report.ci import JUnitDocument

        return JUnitDocument()
    return None


class _JsonDocument:
    """The reports in ckptfix's own form, with what only the command line knows."""

    def __init__(self) -> None:
        self._entries: list[Mapping[str, Any]] = []

    def add(self, report: Report, presentation: Presentation) -> None:
        commands = [
            {"words": list(words), "text": typed(words), **({"price": price} if price else {})}
            for words, price in suggested(report, presentation)
        ]
        digest = _sha256(report.source) if presentation.choices.get("values", True) else None
        self._entries.append({**report.to_json(), "sha256": digest, "commands": commands})

    def add_error(self, source: str, message: str, runs_code: bool) -> None:
        self._entries.append(error_to_json(source, message))

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
