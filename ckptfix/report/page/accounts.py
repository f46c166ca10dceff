"""The report of a check or a repair as a record of a manifest, for the page of single files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptfix.core.finding import Level
from ckptfix.core.report import Report
from ckptfix.report.advice import next_command
from ckptfix.report.telling import Mode, Telling


def account_of(report: Report, telling: Telling, seconds: float = 0.0) -> dict[str, Any]:
    """The record of one report: the same form as a line of ``manifest.jsonl``."""
    data = report.to_json(fixes=False)
    findings = [
        {**finding, "fixable": original.is_fixable and not original.needs_unsafe}
        for finding, original in zip(data["findings"], report.findings, strict=True)
    ]
    return {
        **data,
        "findings": findings,
        "size": _size(report.source),
        "outcome": _outcome(report, telling),
        "command": next_command(report, telling) or None,
        "error": None,
        "seconds": seconds,
    }


def account_of_error(source: str, message: str, outcome: str = "unreadable") -> dict[str, Any]:
    """The record of a file that could not be checked."""
    return {"source": source, "outcome": outcome, "error": message, "size": _size(source)}


def _outcome(report: Report, telling: Telling) -> str:
    if telling.mode is Mode.REPAIR:
        return "needs a decision" if report.exit_code else "repaired" if report.edits else "already fine"
    if report.exit_code == 0:
        return "can be repaired" if report.edits else "already fine"
    failed = report.smoke is not None and report.smoke.passed is False
    left = [finding for finding in report.remaining if finding.level > Level.NOTE]
    is_mendable = left and all(finding.is_fixable and not finding.needs_unsafe for finding in left)
    return "can be repaired" if is_mendable and not report.obstacles and not failed else "needs a decision"


def _size(source: str) -> int | None:
    """The bytes of a file, or of all files of a folder; None where it is gone, or never was one."""
    path = Path(source)
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    except (OSError, ValueError):
        return None
