"""Findings as SARIF 2.1.0, which code scanning shows as alerts.

Format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. What GitHub makes of it:
https://docs.github.com/code-security/code-scanning/integrating-with-code-scanning/sarif-support-for-code-scanning
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckptfix.core.finding import Blocks, Finding, Level
from ckptfix.core.report import Report
from ckptfix.report.commands import remedies_text
from ckptfix.report.telling import Telling, message_with_count
from ckptfix.rules import RULES

_MANUALS = {rule.code: rule for rule in RULES}

_MOST_KEYS = 100
"""Keys that a result names one by one: an upload to GitHub may have 10 MB. The message has their number."""


@dataclass
class SarifLog:
    """One run of ckptfix over any number of files. ``version`` is that of ckptfix."""

    version: str
    _results: list[dict[str, Any]] = field(default_factory=list)
    _unreadable: list[dict[str, Any]] = field(default_factory=list)
    _rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    _levels: dict[str, Level] = field(default_factory=dict)

    def add(self, report: Report, _telling: Telling) -> None:
        """Add the findings of one file."""
        for finding in report.findings:
            self._rules.setdefault(finding.code, _rule(finding))
            self._levels[finding.code] = max(finding.level, self._levels.get(finding.code, Level.NOTE))
            self._results.append(_result(report.source, finding, finding in report.applied))

    def add_error(self, source: str, message: str) -> None:
        """Add a file that could not be checked."""
        self._unreadable.append({"level": "error", "message": {"text": message}, "locations": [_location(source)]})

    def text(self) -> str:
        """Return the log as JSON."""
        for code, level in self._levels.items():  # the worst that the rule found in this run
            self._rules[code]["defaultConfiguration"] = {"level": level.name.lower()}
        run = {
            "tool": {"driver": {"name": "ckptfix", "version": self.version, "rules": list(self._rules.values())}},
            "invocations": [
                {"executionSuccessful": not self._unreadable, "toolExecutionNotifications": self._unreadable}
            ],
            "results": self._results,
        }
        log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
        return json.dumps(log, indent=2, allow_nan=False) + "\n"


def _rule(finding: Finding) -> dict[str, Any]:
    """The description of the rule that made a finding, from its manual."""
    headline, _, manual = _MANUALS[finding.code].manual.partition("\n")
    summary = headline.partition(": ")[2]
    source = re.search(r"https://[^\s,)]+", manual.partition("## Sources")[2])
    described = {
        "id": finding.code,
        "name": finding.name,
        "shortDescription": {"text": summary},
        "help": {"text": manual.strip(), "markdown": manual.strip()},
    }
    if source is not None:
        described["helpUri"] = source[0].rstrip(".")
    if Blocks.LOADING in finding.blocks:  # GitHub then shows it as a vulnerability; 9 and above is critical
        described["properties"] = {"tags": ["security"], "security-severity": "9.8"}
    return described


def _result(source: str, finding: Finding, fixed: bool) -> dict[str, Any]:
    remedy = f"\n{remedies_text(finding.remedies)}" if finding.remedies and not fixed else ""
    keys = [{"fullyQualifiedName": key, "kind": "member"} for key in finding.keys[:_MOST_KEYS]]
    identity = "\0".join((source, finding.code, *finding.keys)).encode("utf-8", "surrogatepass")
    return {
        "ruleId": finding.code,
        "level": "note" if fixed else finding.level.name.lower(),
        "message": {"text": f"{message_with_count(finding)}{' [fixed]' if fixed else ''}{remedy}"},
        "locations": [{**_location(source), **({"logicalLocations": keys} if keys else {})}],
        # GitHub makes it from the lines of a text file otherwise; a checkpoint has none.
        "partialFingerprints": {"primaryLocationLineHash": hashlib.sha256(identity).hexdigest()[:16]},
    }


def _location(source: str) -> dict[str, Any]:
    # GitHub shows no result without a line, whatever the file is.
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(source)}, "region": {"startLine": 1}}}


def _uri(source: str) -> str:
    """A path as a URI: one below the working directory stays relative, which GitHub maps to the repository."""
    if "://" in source:
        return source
    path = Path(os.path.normpath(source))
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return path.as_uri()
    return quote(os.fsencode(path.as_posix()))
