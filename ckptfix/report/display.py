"""How results are displayed at a Python prompt and in a notebook, and what the library logs and refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.display import Form, Row, show_as
from ckptfix.core.edits import Edit
from ckptfix.core.finding import Blocks, Level, Subject, counted
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.plan import Plan
from ckptfix.core.rename_map import RenameMap
from ckptfix.core.report import Call, Repair, Report
from ckptfix.errors import HostileError, TargetError, UnreadableError
from ckptfix.report.style import Line, TextFormat, percent

if TYPE_CHECKING:
    from ckptfix.report.advice import Presentation

# Modules that word results are imported inside the functions: most programs never display one.


def text_lines(lines: Iterable[Line]) -> list[str]:
    return TextFormat().write(lines).splitlines()


def report_lines(report: Report) -> list[str]:
    """Return what the terminal shows of a report."""
    from ckptfix.report.terminal import full_lines

    return text_lines(full_lines(report, _presentation_of(report)))


def _presentation_of(report: Report) -> Presentation:
    from ckptfix.report.advice import Presentation

    call = report.call
    if call is None:
        return Presentation(REPAIR if report.edits or report.output else CHECK)
    return Presentation(CHECK if call.function == CHECK else REPAIR, choices=call.given, call=call)


def report_rows(report: Report) -> Iterator[Row]:
    """Yield a row for each finding."""
    from ckptfix.report.advice import mark, message_with_count

    for finding in report.findings:
        done = mark(finding, report, _presentation_of(report)).strip("[]")
        yield (finding.code, finding.level.name.lower(), message_with_count(finding), done)


def log_edits(source: str, edits: Sequence[Edit]) -> None:
    """Log what is renamed, filled or otherwise changed, so that a training run does not change keys silently.

    Does not import ``logging``: in a process that has not imported it, no handler listens."""
    logging = sys.modules.get("logging")
    if logging is None or not edits or not (logger := logging.getLogger("ckptfix")).isEnabledFor(logging.INFO):
        return
    from ckptfix.report.edits import edit_lines

    for line in edit_lines(edits):
        if not line.startswith(" "):
            logger.info("%s: %s", source, line)


def log_doubts(report: Report) -> None:
    """Log which of several sets of weights is loaded, and a warning for each defect that is left of their values or of
    the merged ranks, for scripts that do not print the report."""
    import logging

    from ckptfix.rules import VALUES, named

    logger = logging.getLogger("ckptfix")
    for finding in report.findings:
        if finding.code == named("several-state-dicts").code:
            level = logging.INFO if finding.level is Level.NOTE else logging.WARNING
            logger.log(level, "%s: %s", report.source, finding.message)
    of_ranks = named("shard-of-weights").code
    for finding in report.left:
        is_of_ranks = finding.code == of_ranks and finding.level is not Level.NOTE
        if is_of_ranks or finding.code.startswith(tuple(VALUES)):
            logger.warning("%s: %s %s: %s", report.source, finding.code, finding.name, finding.message)


def refuse_misfit(report: Report) -> None:
    """Raise ``TargetError`` if a strict load of the result would fail or leave most of the model untrained,
    ``UnreadableError`` if its weights are wrong, and ``HostileError`` for an attack."""
    from ckptfix.report.advice import remedies_text

    if any(Blocks.LOADING in finding.blocks for finding in report.remaining):
        raise HostileError(f"{report.source}: the file is built to run code; do not use it (`ckptfix check` shows why)")
    if wrong := next((finding for finding in report.remaining if Blocks.USING in finding.blocks), None):
        raise UnreadableError(f"{report.source}: {wrong.message}; {remedies_text(wrong.remedies, as_arguments=True)}")
    if left := report.obstacles:
        found = [finding for finding in report.remaining if finding.subject in (Subject.NAMES, Subject.FIT)]
        reasons = "; ".join(f"{finding.code} {finding.message}" for finding in found)
        remedies = (finding.remedies for finding in found if finding.remedies and finding.subject is Subject.FIT)
        hint = next((remedies_text(each, as_arguments=True) for each in remedies), "see ckptfix.check")
        raise TargetError(
            f"{report.source}: does not fit {report.target} ({counted(len(left), 'key')}, {left[0]} among them): "
            f"{reasons or 'the rules with details were not selected'}; {hint}"
        )
    coverage = report.coverage
    if report.is_refused and coverage is not None and coverage.untrained:
        share = percent(coverage.parameters - coverage.untrained, coverage.parameters)
        raise TargetError(
            f"{report.source}: only {share} of the parameters of {report.target} come from the file; load the model"
            " that it belongs to, or pass allow_untrained=True"
        )


def _lines(shown: Checkpoint | Plan | RenameMap) -> list[str]:
    if isinstance(shown, Checkpoint):
        from ckptfix.report.advice import Presentation
        from ckptfix.report.inspection import inspection_lines

        return text_lines(inspection_lines(shown, presentation=Presentation(call=Call(CHECK, (shown.path,)))))
    from ckptfix.report.edits import edit_lines, map_lines

    return [repr(shown), *(edit_lines(shown.edits) if isinstance(shown, Plan) else map_lines(shown))]


show_as(Report, Form(report_lines, report_rows))
show_as(Repair, Form(lambda repair: report_lines(repair.report), lambda repair: report_rows(repair.report)))
for kind in (Checkpoint, Plan, RenameMap):
    show_as(kind, Form(_lines))
