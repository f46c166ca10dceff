"""Findings in the formats of CI servers.

SARIF 2.1.0, which code scanning shows as alerts: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
What GitHub makes of it:
https://docs.github.com/code-security/code-scanning/integrating-with-code-scanning/sarif-support-for-code-scanning
JUnit XML, a suite for each file and a failed test for each defect: https://github.com/testmoapp/junitxml
Workflow commands, which GitHub Actions shows beside the file:
https://docs.github.com/actions/reference/workflow-commands-for-github-actions. Escapes: ``escapeData`` and
``escapeProperty`` in https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from msgspec import Struct, field

from ckptfix.core.finding import Blocks, Finding, Level
from ckptfix.core.report import Report
from ckptfix.errors import printable
from ckptfix.report.advice import Presentation, ReportFormat, message_with_count, remedies_text
from ckptfix.report.key_lists import fold_keys
from ckptfix.report.style import Line, TextFormat
from ckptfix.report.terminal import headline
from ckptfix.rules import RULES, named

_MANUALS = {rule.code: rule for rule in RULES}
_ATTACK = named("executable-payload")

# Keys listed in one result: GitHub accepts uploads of up to 10 MB. The message has their full number.
_MOST_KEYS = 100


class SarifLog(ReportFormat, Struct):
    """The SARIF log of one run. ``version`` is that of ckptfix."""

    version: str
    _results: list[dict[str, Any]] = field(default_factory=list)
    _unreadable: list[dict[str, Any]] = field(default_factory=list)
    _rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    _levels: dict[str, Level] = field(default_factory=dict)

    def add(self, report: Report, presentation: Presentation) -> Iterable[Line]:
        """Add the findings of one file."""
        for finding in report.findings:
            self._add(report.source, finding, finding in report.applied)
        return ()

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterable[Line]:
        """Add a file that could not be checked; one that is built to run code is an alert too."""
        if runs_code:
            self._add(source, _ATTACK.finding(Level.ERROR, message, blocks=Blocks.LOADING), False)
        self._unreadable.append({"level": "error", "message": {"text": message}, "locations": [_location(source)]})
        return ()

    def _add(self, source: str, finding: Finding, fixed: bool) -> None:
        self._rules.setdefault(finding.code, _rule(finding))
        self._levels[finding.code] = max(finding.level, self._levels.get(finding.code, Level.NOTE))
        self._results.append(_result(source, finding, fixed))

    def pieces(self) -> Iterator[str]:
        """Yield the log as JSON."""
        for code, level in self._levels.items():  # the worst level of the rule in this run
            self._rules[code]["defaultConfiguration"] = {"level": level.name.lower()}
        run = {
            "tool": {"driver": {"name": "ckptfix", "version": self.version, "rules": list(self._rules.values())}},
            "invocations": [
                {"executionSuccessful": not self._unreadable, "toolExecutionNotifications": self._unreadable}
            ],
            "results": self._results,
        }
        log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
        yield json.dumps(log, indent=2, allow_nan=False) + "\n"


def _rule(finding: Finding) -> dict[str, Any]:
    """Return the description of the rule that made a finding, from its manual."""
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
    keys = [{"fullyQualifiedName": key, "kind": "member"} for key in finding.keys[:_MOST_KEYS]]
    identity = "\0".join((source, finding.code, *finding.keys)).encode("utf-8", "surrogatepass")
    return {
        "ruleId": finding.code,
        "level": "note" if fixed else finding.level.name.lower(),
        "message": {"text": _message(finding, fixed)},
        "locations": [{**_location(source), **({"logicalLocations": keys} if keys else {})}],
        # Without it, GitHub hashes lines of the file, and a checkpoint has none.
        "partialFingerprints": {"primaryLocationLineHash": hashlib.sha256(identity).hexdigest()[:16]},
    }


def _location(source: str) -> dict[str, Any]:
    # GitHub shows no result without a line, whatever the file is.
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(source)}, "region": {"startLine": 1}}}


def _uri(source: str) -> str:
    """Return a path as a URI: one below the working directory stays relative, which GitHub maps to the repository."""
    if "://" in source:
        return source
    path = Path(os.path.normpath(source))
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return path.as_uri()
    return quote(os.fsencode(path.as_posix()))


_COMMANDS = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "notice"}


class WorkflowCommands(ReportFormat):
    """Workflow commands: one for each finding, and one for each file that could not be checked."""

    def add(self, report: Report, presentation: Presentation) -> Iterator[str]:
        """Yield one workflow command for each finding; what was fixed is a notice."""
        for finding in report.findings:
            fixed = finding in report.applied
            command = "notice" if fixed else _COMMANDS[finding.level]
            yield _command(command, report.source, f"{finding.code} {finding.name}", _message(finding, fixed))

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """Yield the workflow command for a file that could not be checked."""
        yield _command("error", source, _title(runs_code), message)


def _title(runs_code: bool) -> str:
    return f"{_ATTACK.code} {_ATTACK.name}" if runs_code else "ckptfix"


def _message(finding: Finding, fixed: bool) -> str:
    remedy = f"\n{remedies_text(finding.remedies)}" if finding.remedies and not fixed else ""
    return f"{message_with_count(finding)}{' [fixed]' if fixed else ''}{remedy}"


def _command(command: str, file: str, title: str, message: str) -> str:
    return f"::{command} file={_property(file)},title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


class JUnitDocument(ReportFormat):
    """The JUnit document of one run."""

    def __init__(self) -> None:
        self._root = Element("testsuites", name="ckptfix")

    def add(self, report: Report, presentation: Presentation) -> Iterable[Line]:
        """Add the suite of one file: a test for each finding, and one for the file as a whole."""
        suite = self._suite(report.source)
        for finding in report.findings:
            test = _test(suite, f"{finding.code} {finding.name}")
            if finding.level > Level.NOTE and finding not in report.applied:
                remedy = [remedies_text(finding.remedies)] if finding.remedies else []
                details = [*map(str, fold_keys(finding.keys)), *remedy]
                _fail(test, "failure", finding.code, message_with_count(finding), details)
        whole = _test(suite, "ckptfix")
        if report.exit_code and suite.find("*/failure") is None:  # no selected rule says why
            _fail(whole, "failure", "ckptfix", TextFormat().write([headline(report, presentation)]).rstrip("\n"))
        return ()

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterable[Line]:
        """Add a file that could not be checked."""
        _fail(_test(self._suite(source), _title(runs_code)), "error", "ckptfix", message)
        return ()

    def pieces(self) -> Iterator[str]:
        """Yield the document."""
        for element in (self._root, *self._root):
            for count, path in (("tests", ".//testcase"), ("failures", ".//failure"), ("errors", ".//error")):
                element.set(count, str(len(element.findall(path))))
        indent(self._root)
        yield f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(self._root, encoding="unicode")}\n'

    def _suite(self, source: str) -> Element:
        return SubElement(self._root, "testsuite", name=printable(source))


def _test(suite: Element, name: str) -> Element:
    return SubElement(suite, "testcase", classname=str(suite.get("name")), name=name)


def _fail(test: Element, kind: str, code: str, message: str, details: list[str] | tuple[str, ...] = ()) -> None:
    # XML cannot represent control characters, not even escaped.
    failure = SubElement(test, kind, type=code, message=printable(message))
    failure.text = "\n".join(map(printable, details))
