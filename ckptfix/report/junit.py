"""Findings as JUnit XML, which CI servers show as tests: a suite for each file, a failed test for each defect.

Form: https://github.com/testmoapp/junitxml
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ckptfix.core.finding import Level
from ckptfix.core.report import Report
from ckptfix.report.commands import remedies_text
from ckptfix.report.folding import fold_keys
from ckptfix.report.style import Paper, printable
from ckptfix.report.telling import Telling, message_with_count
from ckptfix.report.terminal import headline


class JUnitDocument:
    """One run of ckptfix over any number of files."""

    def __init__(self) -> None:
        self._root = Element("testsuites", name="ckptfix")

    def add(self, report: Report, telling: Telling) -> None:
        """Add the suite of one file: a test for each finding, and one for the file as a whole."""
        suite = self._suite(report.source)
        for finding in report.findings:
            test = _test(suite, f"{finding.code} {finding.name}")
            if finding.level > Level.NOTE and finding not in report.applied:
                remedy = [remedies_text(finding.remedies)] if finding.remedies else []
                details = [*map(str, fold_keys(finding.keys)), *remedy]
                _fail(test, "failure", finding.code, message_with_count(finding), details)
        whole = _test(suite, "ckptfix")
        if report.exit_code and suite.find("*/failure") is None:  # no rule that was selected says why
            _fail(whole, "failure", "ckptfix", Paper().write([headline(report, telling)]).rstrip("\n"))

    def add_error(self, source: str, message: str) -> None:
        """Add a file that could not be checked."""
        _fail(_test(self._suite(source), "ckptfix"), "error", "ckptfix", message)

    def text(self) -> str:
        """Return the document."""
        for element in (self._root, *self._root):
            for count, path in (("tests", ".//testcase"), ("failures", ".//failure"), ("errors", ".//error")):
                element.set(count, str(len(element.findall(path))))
        indent(self._root)
        return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(self._root, encoding="unicode")}\n'

    def _suite(self, source: str) -> Element:
        return SubElement(self._root, "testsuite", name=printable(source))


def _test(suite: Element, name: str) -> Element:
    return SubElement(suite, "testcase", classname=str(suite.get("name")), name=name)


def _fail(test: Element, kind: str, code: str, message: str, details: list[str] | tuple[str, ...] = ()) -> None:
    # XML has no form for control characters, not even an escaped one.
    failure = SubElement(test, kind, type=code, message=printable(message))
    failure.text = "\n".join(map(printable, details))
