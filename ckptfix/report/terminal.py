"""The report for people: what was wrong in one line, each finding, what was done, and what is left to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.report import Report, plain
from ckptfix.report.advice import advice_lines
from ckptfix.report.edits import edit_lines
from ckptfix.report.evidence import cut, evidence_items
from ckptfix.report.figures import elements, percent, quantity
from ckptfix.report.folding import folded_lines
from ckptfix.report.style import Line, Span
from ckptfix.report.telling import Mode, Telling, mark, message_with_count

if TYPE_CHECKING:
    from ckptfix.core.coverage import Coverage
    from ckptfix.core.smoke_result import SmokeResult

_HEADLINE_ITEMS = 3
_HEADLINE_LENGTH = 100
_EVIDENCE_ITEMS = 8
_EVIDENCE_LENGTH = 120


def full_lines(report: Report, telling: Telling) -> Iterator[Line]:
    """The whole account of one file."""
    yield headline(report)
    yield (Span(f"  {_what_it_is(report)}", "faint"),)
    for finding in report.findings:
        yield ""
        yield from _finding_lines(finding, report, telling)
    yield ""
    if report.edits:
        yield (Span("would do:" if telling.mode is Mode.DRY_RUN else "done:", "strong"),)
        yield from (f"  {line}" for line in edit_lines(report.edits, telling.limit))
    yield _coverage_line(report.coverage, telling.mode)
    if report.smoke is not None:
        yield _smoke_line(report.smoke)
        yield from (f"  {check}" for check in report.smoke.checks)
    if report.output is not None:
        yield ("written: ", Span(report.output, "strong"))
    elif telling.mode is Mode.DRY_RUN:
        yield "written: nothing (dry run)"
    elif telling.mode is Mode.REPAIR:
        is_clean = report.exit_code == 0 and not report.edits
        yield f"written: nothing{', as there is nothing to repair' if is_clean else ''}"
    yield from (f"note: {remark}" for remark in report.remarks)
    yield from advice_lines(report, telling)


def concise_lines(report: Report, telling: Telling) -> Iterator[Line]:
    """One line for each finding: ``path: CODE name: message (n keys) [fixable]``."""
    for finding in report.findings:
        yield (
            f"{report.source}: ",
            Span(finding.code, finding.level.name.lower()),
            f" {finding.name}: {message_with_count(finding)}",
            *_marked(finding, report, telling),
        )


def headline(report: Report) -> Line:
    """What was wrong, in one line."""
    defects = [finding for finding in report.findings if finding.level > Level.NOTE]
    notes = len(report.findings) - len(defects)
    if not defects and report.edits and not report.fixed and report.exit_code == 0:
        done = [line for line in edit_lines(report.edits) if not line.startswith(" ")]
        named = [cut(line, _HEADLINE_LENGTH) for line in done[:_HEADLINE_ITEMS]]
        more = [f"and {len(done) - _HEADLINE_ITEMS} more"] if len(done) > _HEADLINE_ITEMS else []
        return (Span(f"{report.source}: ", "strong"), Span("a saved plan", "good"), f": {'; '.join([*named, *more])}")
    if not defects:
        failed = "a strict load would fail" if report.obstacles else "the forward test failed"
        clean = "clean" if report.exit_code == 0 else failed
        return (
            Span(f"{report.source}: ", "strong"),
            Span(clean, "good" if report.exit_code == 0 else "error"),
            f", {counted(notes, 'note')}" if notes else "",
        )
    # The first clause says what is wrong; the rest of the message stands below.
    named = [
        cut(message_with_count(finding).partition("; ")[0].rstrip("."), _HEADLINE_LENGTH)
        for finding in defects[:_HEADLINE_ITEMS]
    ]
    if len(defects) > _HEADLINE_ITEMS:
        named.append(f"and {len(defects) - _HEADLINE_ITEMS} more")
    worst = max(finding.level for finding in defects)
    return (
        Span(f"{report.source}: ", "strong"),
        Span(counted(len(defects), "defect"), worst.name.lower()),
        f": {'; '.join(named)}",
    )


def _what_it_is(report: Report) -> str:
    place = "" if report.container == "." else f", state_dict at {report.container}"
    target = f"target {report.target}" if report.target else "no target to compare with (--model or --like)"
    return f"{report.format}{place}: {counted(report.tensors, 'tensor')}, {elements(report.numel)}; {target}"


def _finding_lines(finding: Finding, report: Report, telling: Telling) -> Iterator[Line]:
    level = finding.level.name.lower()
    yield (
        Span(finding.code, level),
        " ",
        Span(finding.name, "strong"),
        " ",
        Span(level, level),
        *_marked(finding, report, telling),
    )
    yield f"  {finding.message}"
    yield from (f"    {line}" for line in folded_lines(finding.keys, telling.limit))
    if finding.evidence:
        yield (Span(f"  evidence: {_evidence_text(plain(finding.evidence), telling.verbose)}", "faint"),)


def _marked(finding: Finding, report: Report, telling: Telling) -> tuple[str | Span, ...]:
    text = mark(finding, report, telling.mode)
    return (" ", Span(text, "good")) if text else ()


def _evidence_text(evidence: dict[str, Any], verbose: bool) -> str:
    items = list(evidence_items(evidence, None if verbose else _EVIDENCE_LENGTH))
    if not verbose and len(items) > _EVIDENCE_ITEMS:
        items = [*items[:_EVIDENCE_ITEMS], f"… and {len(items) - _EVIDENCE_ITEMS} more (-v)"]
    return "; ".join(items)


def _coverage_line(coverage: Coverage | None, mode: Mode) -> Line:
    if coverage is None:
        return "coverage: unknown without a target (--model or --like)"
    share = percent(coverage.parameters_from_file, coverage.parameters)
    buffers = percent(coverage.buffers_from_file, coverage.buffers) if coverage.buffers else "none"
    parameters = f"{quantity(coverage.parameters)} parameters (by number of elements)"
    verb = "came" if mode is Mode.REPAIR else "would come"
    filled = "".join(f"; {elements(numel)} filled from {origin}" for origin, numel in coverage.filled.items())
    return (
        "coverage: ",
        Span(share, "good" if coverage.parameters_from_file >= coverage.parameters else "warning"),
        f" of {parameters} {verb} from the file; buffers {buffers}",
        Span(filled, "warning"),
    )


def _smoke_line(smoke: SmokeResult) -> Line:
    if smoke.passed is None:
        return f"forward test: no verdict{f': {smoke.note}' if smoke.note else ''}"
    verdict = Span("passed", "good") if smoke.passed else Span("failed", "error")
    note = f" ({smoke.note})" if smoke.note else ""
    tensors = " → ".join(", ".join(side) for side in (smoke.inputs, smoke.outputs) if side)
    seconds = f", {smoke.seconds:.2g} s" if smoke.seconds else ""
    place = f" on {smoke.device}" if smoke.device else ""
    return ("forward test: ", verdict, f"{place}{note}{f': {tensors}' if tensors else ''}{seconds}")
