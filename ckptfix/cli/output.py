"""Writes reports to stdout in the requested format, and as an HTML page."""

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
from ckptfix.core.wording import shell_join
from ckptfix.errors import UsageError
from ckptfix.report.advice import Presentation, ReportFormat, suggested
from ckptfix.report.style import Line


class ReportWriter:
    """Writes the reports of a run in the format of ``--output-format``, and as a page for ``--report``.

    ``exit_code`` is the worst so far."""

    def __init__(self, console: Console, choices: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` if the page would overwrite something else."""
        self.exit_code = 0
        self._console = console
        self._forms = [_form(choices.get("output_format", "full"), console)]
        if "report" in choices:
            self._forms.append(_Page(choices))

    def write_report(self, source: str, presentation: Presentation, make: Callable[[], Report]) -> None:
        """Make the report on one file and write it; if that fails, write the error, so that other files can follow."""
        failed_before = len(self._console.failures)
        beside = [
            str(presentation.choices[name])
            for name in ("like", "fill", "compare", "apply")
            if name in presentation.choices
        ]
        with self._console.reporting_errors(source, *beside):
            with self._console.showing_progress():
                report = make()
            for form in self._forms:
                self._console.write(form.add(report, presentation), plain=form.is_for_programs)
            self.exit_code = max(self.exit_code, report.exit_code)
        for failure in self._console.failures[failed_before:]:
            for form in self._forms:
                lines = form.add_error(source, failure.message, failure.runs_code, failure.data)
                self._console.write(lines, plain=True)
            self.exit_code = FAILED

    def close(self) -> None:
        """Write what comes after the last report."""
        for form in self._forms:
            if form.file is None:
                write_output("".join(form.pieces()))
                continue
            with form.file.writing() as out:
                out.writelines(form.pieces())
            self._console.note(f"report: {form.file.path}")


def _form(name: str, console: Console) -> ReportFormat:
    if name in ("full", "concise"):
        return _Lines(name == "full", console)
    if name == "json":
        return _JsonDocument()
    from ckptfix import __version__
    from ckptfix.report.ci import JUnitDocument, SarifLog, WorkflowCommands

    if name == "sarif":
        return SarifLog(__version__)
    return WorkflowCommands() if name == "github" else JUnitDocument()


class _Lines(ReportFormat):
    """Reports for people, full or concise, and a summary after several files. Errors are already on stderr."""

    is_for_programs = False

    def __init__(self, is_full: bool, console: Console) -> None:
        self._is_full, self._is_begun, self._console = is_full, False, console
        self._counts: Counter[str] = Counter()

    def add(self, report: Report, presentation: Presentation) -> Iterator[Line]:
        from ckptfix.report.terminal import concise_lines, full_lines

        left = [finding for finding in report.remaining if finding.level > Level.NOTE]
        self._counts["with defects" if left else "without"] += 1
        self._counts["defects"] += len(left)
        self._counts["fixable"] += sum(map(report.is_fixable, left))
        if self._console.quiet and report.exit_code == 0:
            return
        if self._is_full and self._is_begun:
            yield ""
        self._is_begun = True
        yield from full_lines(report, presentation) if self._is_full else concise_lines(report, presentation)

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterable[Line]:
        self._counts["failed"] += 1
        return ()

    def pieces(self) -> Iterator[str]:
        counts = self._counts
        files = counts["with defects"] + counts["without"] + counts["failed"]
        if files < 2 or self._console.quiet:
            return
        defects = f" ({counted(counts['defects'], 'defect')}, {counts['fixable']} fixable)"
        parts = [f"{counts['with defects']} with defects{defects if counts['defects'] else ''}"]
        parts += [f"{counts['failed']} could not be read"] if counts["failed"] else []
        line = f"{counted(files, 'file')}: {', '.join(parts)}"
        if self._is_full:
            yield f"\n{line}\n"
        else:
            self._console.note(line)


class _JsonDocument(ReportFormat):
    """The reports as one JSON document, with the commands and checksums that only the command line adds."""

    def __init__(self) -> None:
        self._entries: list[Mapping[str, Any]] = []

    def add(self, report: Report, presentation: Presentation) -> Iterable[Line]:
        commands = [
            {"words": list(words), "text": shell_join(words), **({"price": price} if price else {})}
            for words, price in suggested(report, presentation)
        ]
        digest = _sha256(report.source) if presentation.choices.get("values", True) else None
        self._entries.append({**report.to_json(), "sha256": digest, "commands": commands})
        return ()

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterable[Line]:
        self._entries.append(error_to_json(source, message, data))
        return ()

    def pieces(self) -> Iterator[str]:
        known = environment()
        torch = None if known["torch"] == NOT_INSTALLED else known["torch"]
        versions = {"ckptfix": known["ckptfix"], "torch": torch, "python": known["Python"]}
        yield json.dumps(envelope(self._entries, versions), indent=2, allow_nan=False) + "\n"


def _sha256(source: str) -> str | None:
    """Return the SHA-256 of a file as hex digits; None for a folder, a URL or a missing file."""
    from ckptfix.bytes.checksums import sha256_of_file

    try:
        return sha256_of_file(Path(source))
    except OSError:
        return None


class _Page(ReportFormat):
    """The reports as an HTML page. Until it is written, records are kept on disk, not in memory."""

    def __init__(self, choices: Mapping[str, Any]) -> None:
        from ckptfix.report.page import page_file

        self.file = page_file(choices["report"])
        self.file.refuse()
        for name in ("output", "plan"):
            if name in choices and Path(choices[name]).resolve() == self.file.path.resolve():
                raise UsageError(f"{choices['report']}: is also the file of --{name}; name another file for the report")
        self._title, self._count, self._began = "", 0, time.monotonic()
        self._records, self._weights = _spool(), _spool()

    def add(self, report: Report, presentation: Presentation) -> Iterable[Line]:
        from ckptfix.report.page import record_of
        from ckptfix.report.page.data import weights_to_json

        self._add(report.source, record_of(report, presentation, time.monotonic() - self._began))
        self._weights.write(json.dumps(weights_to_json(report), allow_nan=False) + "\n")
        return ()

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterable[Line]:
        from ckptfix.report.page import record_of_error

        self._add(source, record_of_error(source, message))
        return ()

    def pieces(self) -> Iterator[str]:
        from ckptfix.report.page import page_pieces

        title = self._title if self._count == 1 else f"{self._count} checkpoints"
        return page_pieces(title, _lines(self._records), _lines(self._weights), facts=facts_of_run())

    def _add(self, source: str, record: Mapping[str, Any]) -> None:
        self._title = Path(source).name or source
        self._count += 1
        self._records.write(json.dumps(record, allow_nan=False) + "\n")
        self._began = time.monotonic()


def _spool() -> IO[str]:
    import tempfile

    return tempfile.TemporaryFile("w+", encoding="ascii", prefix="ckptfix-")


def _lines(spool: IO[str]) -> Iterator[dict[str, Any]]:
    spool.seek(0)
    return map(json.loads, spool)


NOT_INSTALLED = "not installed"


def facts_of_run() -> dict[str, str]:
    """Return the date, the command and the versions that a page shows, by title."""
    return {
        "Made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "Command": shell_join(["ckptfix", *sys.argv[1:]]),
        **environment(),
    }


def environment() -> dict[str, str]:
    """Return the versions of ckptfix and of what it runs on, by title."""
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
