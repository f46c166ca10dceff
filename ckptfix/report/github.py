"""Findings as workflow commands of GitHub Actions, which shows them beside the file.

Syntax: https://docs.github.com/actions/reference/workflow-commands-for-github-actions. Escapes: ``escapeData`` and
``escapeProperty`` in https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.core.finding import Finding, Level
from ckptfix.core.report import Report
from ckptfix.report.commands import remedies_text
from ckptfix.report.telling import message_with_count

_COMMANDS = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "notice"}


def github_lines(report: Report) -> Iterator[str]:
    """One workflow command for each finding; what was fixed is a notice. A failed forward test has its own finding."""
    for finding in report.findings:
        fixed = finding in report.applied
        command = "notice" if fixed else _COMMANDS[finding.level]
        yield _command(command, report.source, f"{finding.code} {finding.name}", _message(finding, fixed))


def github_error(source: str, message: str) -> str:
    """The workflow command for a file that could not be checked."""
    return _command("error", source, "ckptfix", message)


def _message(finding: Finding, fixed: bool) -> str:
    remedy = f"\n{remedies_text(finding.remedies)}" if finding.remedies and not fixed else ""
    return f"{message_with_count(finding)}{' [fixed]' if fixed else ''}{remedy}"


def _command(command: str, file: str, title: str, message: str) -> str:
    return f"::{command} file={_property(file)},title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
