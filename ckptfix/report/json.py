"""The report as JSON, complete, for programs.

The form is stable within a version: fields are added, never changed. A NaN or an infinity is the text ``"NaN"``,
``"Infinity"`` or ``"-Infinity"``, because JSON (RFC 8259) has no such numbers and strict parsers refuse Python's bare
words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptfix.finding import Edit, Finding, Fix
from ckptfix.report.model import REPORT_VERSION, Coverage, Report

if TYPE_CHECKING:
    from ckptfix.smoke.result import SmokeResult


def report_to_json(report: Report, *, fixes: bool = True) -> dict[str, Any]:
    """The report as a JSON object of plain data. Without ``fixes`` the findings are told without theirs."""
    fixed = set(map(id, report.fixed))
    return {
        "version": REPORT_VERSION,
        "source": report.source,
        "format": report.format,
        "container": report.container,
        "tensors": report.tensors,
        "numel": report.numel,
        "target": report.target,
        "exit_code": report.exit_code,
        "findings": [
            _finding(finding, id(finding) in fixed or finding in report.fixed, fixes) for finding in report.findings
        ],
        "edits": _edits(report.edits),
        "coverage": None if report.coverage is None else _coverage(report.coverage),
        "obstacles": list(report.obstacles),
        "smoke": None if report.smoke is None else _smoke(report.smoke),
        "output": report.output,
        "remarks": list(report.remarks),
    }


def envelope(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the command line prints: the reports of all paths, each from ``report_to_json`` or ``error_to_json``."""
    return {"version": REPORT_VERSION, "reports": list(reports)}


def error_to_json(source: str, message: str, exit_code: int = 2) -> dict[str, Any]:
    """The entry of a file that could not be checked."""
    return {"version": REPORT_VERSION, "source": source, "exit_code": exit_code, "error": message}


def _finding(finding: Finding, fixed: bool, fixes: bool) -> dict[str, Any]:
    fix = {"fix": None if finding.fix is None else _fix(finding.fix)} if fixes else {}
    return {
        "code": finding.code,
        "name": finding.name,
        "level": finding.level.name.lower(),
        "message": finding.message,
        "keys": list(finding.keys),
        "evidence": plain(finding.evidence),
        **fix,
        "fixed": fixed,
        "remedy": finding.remedy,
    }


def _fix(fix: Fix) -> dict[str, Any]:
    return {
        "applicability": fix.applicability.name.lower().replace("_", "-"),
        "asked": fix.asked,
        "edits": _edits(fix.edits),
    }


def _edits(edits: Iterable[Edit]) -> list[Any]:
    return [plain(edit.to_json()) for edit in edits]


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "parameters": coverage.parameters,
        "parameters_from_file": coverage.parameters_from_file,
        "buffers": coverage.buffers,
        "buffers_from_file": coverage.buffers_from_file,
        "filled": dict(coverage.filled),
        "share": coverage.share,
    }


def _smoke(smoke: SmokeResult) -> dict[str, Any]:
    return {
        "passed": smoke.passed,
        "device": smoke.device,
        "note": smoke.note,
        "inputs": list(smoke.inputs),
        "outputs": list(smoke.outputs),
        "seconds": plain(smoke.seconds),
        "checks": list(smoke.checks),
        "compared": None if smoke.compared is None else plain(asdict(smoke.compared)),
    }


_PLAIN = (str, bool)
_MAPPINGS = (dict, Mapping)  # the first without a look at what is registered for the last
_LISTS = (list, tuple, set, frozenset, Sequence)


def plain(value: object) -> Any:
    """The value as data that any JSON parser reads; what JSON has no form for becomes text."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum too
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, _MAPPINGS):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, _LISTS) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return str(value)
